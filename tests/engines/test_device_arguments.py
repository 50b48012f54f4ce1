"""Device arguments in every place where torch takes one, and arguments that must be left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.calls import rewriters
from torchdevice.errors import FidelityError, PortabilityWarning

# The device reads "meta" where the spelling was understood, so nothing here can pass by accident.
pytestmark = pytest.mark.usefixtures("distinct")

SPELLINGS: list[Any] = ["cuda", "cuda:0", 0, "mps", "mps:0", "xpu", "xpu:0"]

OTHER = torch.empty(2, dtype=torch.float16)


@pytest.fixture
def any_family(distinct: torchdevice.Scope) -> Iterator[None]:
    with torchdevice.portable("meta", written_for="any"):
        yield


@pytest.mark.usefixtures("any_family")
@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
class TestSpellings:
    def test_keyword(self, spelling: Any) -> None:
        assert torch.zeros(2, device=spelling).is_meta

    def test_torch_device(self, spelling: Any) -> None:
        device = torch.device(spelling)
        assert torch.zeros(2, device=device).is_meta
        assert torch.ones(2).to(device).is_meta and torch.nn.Linear(2, 2).to(device).weight.is_meta
        with device:
            assert torch.zeros(2).is_meta
        names_the_programs = isinstance(spelling, int) or spelling.startswith("cuda")
        assert device.type == ("meta" if names_the_programs else spelling.partition(":")[0])
        assert (torch.ones(2, device="cuda").device == device) is names_the_programs

    def test_tensor_to(self, spelling: Any) -> None:
        x = torch.ones(2)
        assert x.to(spelling).is_meta
        assert x.to(device=spelling).is_meta
        assert x.to(spelling, torch.float16).dtype is torch.float16
        assert x.to(spelling, torch.float16, True, True).is_meta
        assert x.to(spelling, non_blocking=True, copy=True).is_meta

    def test_module_to(self, spelling: Any) -> None:
        module = torch.nn.Linear(2, 2)
        assert module.to(spelling).weight.is_meta
        assert torch.nn.Linear(2, 2).to(device=spelling, dtype=torch.float16).bias.is_meta
        assert torch.nn.Linear(2, 2).to_empty(device=spelling).weight.is_meta
        assert torch.nn.Linear(2, 2, device=spelling).weight.is_meta


def test_another_family_is_redirected_only_where_it_is_used() -> None:
    with torchdevice.portable("meta", written_for="any") as scope:
        for spelling in ("mps", "mps:0", "xpu:1"):
            assert str(torch.device(spelling)) == spelling
        assert torch.device("mps", 3) == torch.device(torch.device("mps:3"))
        reported = {entry.requested for entry in scope.journal.entries}
        assert not any(text.startswith(("mps", "xpu")) for text in reported), reported
        torch.zeros(1, device=torch.device("mps"))
        assert "mps" in {entry.requested for entry in scope.journal.entries}


def test_torch_device_by_keyword_and_index() -> None:
    assert torch.device(type="cuda", index=0).type == "meta"
    assert torch.device("cuda", 0).type == "meta"
    assert torch.device(type="cuda").type == "meta"
    assert torch.device(torch.device("cuda")).type == "meta"


def test_numbers_are_reported_as_they_were_written(distinct: torchdevice.Scope) -> None:
    torch.device(0)
    torch.zeros(1, device=0)
    assert [(entry.requested, entry.done) for entry in distinct.journal.entries] == [
        ("0", "meta")
    ] * 2


def test_context_manager_and_default_device() -> None:
    with torch.device("cuda"):
        assert torch.zeros(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
        with torch.device("cpu"):
            assert not torch.zeros(2).is_meta
    torch.set_default_device("cuda:0")
    try:
        assert torch.rand(3).is_meta
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


def test_default_device_that_was_set_before_the_scope(meta_target: None) -> None:
    with plain_torch():
        device = torch.device("cuda")
        torch.set_default_device(device)
    try:
        with torchdevice.portable("meta"):
            assert torch.zeros(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
            assert torch.zeros(2, device="cpu").device.type == "cpu"
    finally:
        with plain_torch():
            torch.set_default_device(None)


FACTORIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "empty": lambda d: torch.empty(2, device=d),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d),
    "empty_strided": lambda d: torch.empty_strided((2,), (1,), device=d),
    "ones": lambda d: torch.ones(2, device=d),
    "arange": lambda d: torch.arange(3, device=d),
    "range": lambda d: torch.range(0, 3, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "full": lambda d: torch.full((2,), 1.0, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 3, device=d),
    "logspace": lambda d: torch.logspace(0, 1, 3, device=d),
    "bartlett_window": lambda d: torch.bartlett_window(4, device=d),
    "blackman_window": lambda d: torch.blackman_window(4, device=d),
    "hamming_window": lambda d: torch.hamming_window(4, device=d),
    "hann_window": lambda d: torch.hann_window(4, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(4, device=d),
    "rand": lambda d: torch.rand(2, device=d),
    "randn": lambda d: torch.randn(2, device=d),
    "randint": lambda d: torch.randint(3, (2,), device=d),
    "randperm": lambda d: torch.randperm(3, device=d),
    "tril_indices": lambda d: torch.tril_indices(2, 2, device=d),
    "triu_indices": lambda d: torch.triu_indices(2, 2, device=d),
    "tensor": lambda d: torch.tensor([1.0, 2.0], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0], device=d),
    "as_tensor of numpy": lambda d: torch.as_tensor(np.ones(3, np.float32), device=d),
    "asarray": lambda d: torch.asarray([1.0], device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(1.0, device=d),
    "fft.fftfreq": lambda d: torch.fft.fftfreq(4, device=d),
    "fft.rfftfreq": lambda d: torch.fft.rfftfreq(4, device=d),
    "sparse_coo_tensor": lambda d: torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (2,), device=d
    ),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2), device=d),
    "ones_like": lambda d: torch.ones_like(torch.ones(2), device=d),
    "empty_like": lambda d: torch.empty_like(torch.ones(2), device=d),
    "full_like": lambda d: torch.full_like(torch.ones(2), 3.0, device=d),
    "rand_like": lambda d: torch.rand_like(torch.ones(2), device=d),
    "randn_like": lambda d: torch.randn_like(torch.ones(2), device=d),
    "randint_like": lambda d: torch.randint_like(torch.ones(2), 3, device=d),
    "new_tensor": lambda d: torch.ones(2).new_tensor([1.0], device=d),
    "new_zeros": lambda d: torch.ones(2).new_zeros(2, device=d),
    "new_ones": lambda d: torch.ones(2).new_ones((2,), device=d),
    "new_empty": lambda d: torch.ones(2).new_empty((2,), device=d),
    "new_full": lambda d: torch.ones(2).new_full((2,), 1.0, device=d),
    "new_empty_strided": lambda d: torch.ones(2).new_empty_strided((2,), (1,), device=d),
    "signal.windows.cosine": lambda d: torch.signal.windows.cosine(4, device=d),
    "ops.aten.zeros": lambda d: torch.ops.aten.zeros([2], device=d),
    "ops.aten.zeros.default": lambda d: torch.ops.aten.zeros.default([2], device=d),
    "ops.aten.to.device": lambda d: torch.ops.aten.to.device(torch.ones(2), d, torch.float32),
    "ops.aten._to_copy": lambda d: torch.ops.aten._to_copy(torch.ones(2), device=d),
    "ops.prims.device_put": lambda d: torch.ops.prims.device_put(torch.ones(2), d),
    "Tensor.cuda": lambda d: torch.ones(2).cuda(d),
    "Tensor.type": lambda d: torch.ones(2).type("torch.cuda.FloatTensor"),
    "nn.Parameter": lambda d: torch.nn.Parameter(torch.ones(2, device=d)),
    "nested_tensor": lambda d: torch.nested.nested_tensor(
        [torch.ones(2)], layout=torch.jagged, device=d
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("spelling", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str, spelling: Any) -> None:
    assert FACTORIES[name](spelling).device.type == "meta"


DRAWN = ("empty", "rand", "new_empty")
"""What the names of factories without fixed values begin with."""


@pytest.mark.one_engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_of_the_simulated_device(name: str) -> None:
    with torchdevice.simulate("cuda"):
        made = FACTORIES[name]("cuda")
        assert made.device.type == "cuda"
        if not name.startswith(DRAWN) and name not in (
            "Tensor.cuda",
            "Tensor.type",
            "nested_tensor",
        ):
            expected = FACTORIES[name]("cpu")
            assert (
                torch.equal(made.cpu().to_dense(), expected.to_dense())
                and made.dtype is expected.dtype
            )


@pytest.mark.one_engine
@pytest.mark.parametrize("arguments", [(5,), (5, False), (5, True, 4.0)], ids=str)
def test_every_overload_of_kaiser_windows_on_the_simulated_device(
    arguments: tuple[Any, ...],
) -> None:
    with torchdevice.simulate("cuda"):
        assert torch.equal(
            torch.kaiser_window(*arguments, device="cuda").cpu(), torch.kaiser_window(*arguments)
        )


def test_every_device_constructor_of_torch_is_covered() -> None:
    """Each function of torch's list of constructors is in the table or has its own test."""
    from torch.utils._device import _device_constructors

    def name(function: Any) -> str:
        return function.__name__.replace("fft_", "fft.")

    elsewhere = {
        "empty_quantized",
        "sparse_compressed_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
    }
    elsewhere |= {"sparse_bsr_tensor", "sparse_bsc_tensor", "zeros"}
    assert {name(function) for function in _device_constructors()} <= FACTORIES.keys() | elsewhere


class TestCudaMethod:
    def test_forms_of_tensor_cuda(self) -> None:
        x = torch.ones(2)
        for moved in (
            x.cuda(),
            x.cuda(0),
            x.cuda("cuda:0"),
            x.cuda(device=0),
            x.cuda(non_blocking=True),
            x.cuda(0, True),
        ):
            assert moved.is_meta
        assert x.cuda(memory_format=torch.preserve_format).is_meta

    def test_module_cuda(self) -> None:
        assert torch.nn.Linear(2, 2).cuda().weight.is_meta
        assert torch.nn.Linear(2, 2).cuda(0).weight.is_meta

    def test_tensor_stays_itself_where_it_is_already(self) -> None:
        x = torch.ones(2, device="cuda", requires_grad=True)
        assert (
            x.cuda() is x and x.to("cuda") is x and x.to(torch.device("cuda:0")) is x and x.is_leaf
        )


class TestLeftAlone:
    def test_cpu_and_meta(self) -> None:
        assert torch.zeros(2, device="cpu").device.type == "cpu"
        assert torch.zeros(2).to("cpu").device.type == "cpu"
        assert torch.device("cpu").type == "cpu"
        assert torch.device("cpu", 0) == torch.device("cpu:0")

    def test_no_device_is_injected(self) -> None:
        assert torch.zeros(2).device.type == "cpu"
        assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
        assert torch.ones(2).new_zeros(2).device.type == "cpu"

    def test_strings_that_are_no_device(self, tmp_path: Any) -> None:
        folder = tmp_path / "cuda"
        folder.mkdir()
        path = folder / "cuda:0.pt"
        torch.save({"cuda": torch.ones(2), "device": "cuda:0"}, path)
        loaded = torch.load(path)
        assert set(loaded) == {"cuda", "device"} and loaded["device"] == "cuda:0"
        modules = torch.nn.ModuleDict({"cuda:0": torch.nn.Linear(1, 1)})
        assert list(modules.state_dict()) == ["cuda:0.weight", "cuda:0.bias"]
        assert torch.einsum("c,u->cu", torch.ones(2), torch.ones(2)).shape == (2, 2)

    @pytest.mark.parametrize("text", ["cuda:x", "cuda:-1", "CUDA", "cuda:", "cuda:01", "cuda 0"])
    def test_malformed_spellings_get_torchs_own_error(self, text: str) -> None:
        with plain_torch():
            with pytest.raises(RuntimeError) as plain:
                torch.device(text)
        with pytest.raises(RuntimeError) as scoped:
            torch.device(text)
        assert str(scoped.value) == str(plain.value)
        with pytest.raises(RuntimeError):
            torch.zeros(1, device=text)

    def test_negative_index_gets_torchs_own_error(self) -> None:
        with plain_torch():
            with pytest.raises(RuntimeError) as plain:
                torch.device(-1)
        with pytest.raises(RuntimeError) as scoped:
            torch.device(-1)
        assert str(scoped.value) == str(plain.value)
        with pytest.raises(RuntimeError, match="negative"):
            torch.device("cuda", -1)

    def test_no_argument_gets_torchs_own_error(self) -> None:
        with plain_torch():
            with pytest.raises(TypeError) as plain:
                torch.device()  # type: ignore[call-overload]
        with pytest.raises(TypeError) as scoped:
            torch.device()  # type: ignore[call-overload]
        assert str(scoped.value) == str(plain.value)

    def test_int_arguments_that_are_no_device(self) -> None:
        x = torch.ones(3, 4)
        assert x.sum(0).shape == (4,) and x.to(torch.int64).dtype is torch.int64
        assert torch.full((2,), 0).tolist() == [0, 0]

    def test_pickled_devices_and_annotations(self) -> None:
        import pickle

        assert pickle.loads(pickle.dumps(torch.device("cpu"))) == torch.device("cpu")
        assert isinstance(torch.device("cuda"), torch.device)
        assert torch.device | None
        assert torch.Generator | None


class TestPinning:
    """A target without page-locked memory of its own that can be told from the CPU."""

    def test_only_the_hosts_memory_can_be_pinned(self) -> None:
        for make in (
            lambda **where: torch.empty(2, **where),
            lambda **where: torch.zeros(1).new_empty(2, **where),
        ):
            assert (
                make(pin_memory=True).is_pinned()
                and make(device="cpu", pin_memory=True).is_pinned()
            )
            assert not make(device="cuda", pin_memory=False).is_pinned()
            with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
                make(device="cuda", pin_memory=True)

    def test_in_a_scope_that_was_sent_to_the_cpu(self) -> None:
        torch.device("cpu:-1")
        assert torch.empty(2, device="cuda", pin_memory=True).is_pinned()

    @pytest.mark.usefixtures("no_collections")
    def test_a_target_with_page_locked_memory_is_asked_without_the_device(
        self, distinct: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        context, x = distinct._resolved(), torch.ones(2)
        monkeypatch.setattr(context.runtime, "pins_memory", True)
        for function in (torch.Tensor.pin_memory, torch._pin_memory, torch.Tensor.is_pinned):
            rewriter = rewriters.REGISTERED[function]
            assert rewriter is not None
            for given in ((x,), (x, "cuda")):
                called = rewriter(context, lambda *given: given, given, {})
                assert len(called) == 1 and called[0] is x


class TestOrdinals:
    def test_folded_by_default(self) -> None:
        scope = torchdevice.current()
        assert scope is not None
        for _ in range(3):
            assert torch.zeros(1, device="cuda:3").is_meta
        entries = [e for e in scope.journal.degraded if e.requested == "cuda:3"]
        assert [(e.done, e.count) for e in entries] == [("meta", 3)]

    def test_advertised_devices(self, meta_target: None) -> None:
        with torchdevice.portable("meta", devices=2):
            assert torch.zeros(1, device="cuda:1").is_meta and torch.ones(1).cuda(1).is_meta
            with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
                torch.zeros(1, device="cuda:2")
            with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
                torch.cuda.set_device(2)

    def test_strict(self, meta_target: None) -> None:
        with torchdevice.portable("meta", strict=True):
            assert torch.zeros(1, device="cuda:0").is_meta
            with pytest.raises(FidelityError, match="cuda:1"):
                torch.zeros(1, device="cuda:1")


class TestNestedTargets:
    def test_the_innermost_decides(self, target: str, kind: str) -> None:
        with torchdevice.portable(target):
            assert torch.zeros(1, device="cuda").device.type == kind
            with torchdevice.portable("meta"):
                assert torch.zeros(1, device="cuda").is_meta
            assert torch.zeros(1, device="cuda").device.type == kind
        assert torch.zeros(1, device="cuda").is_meta


class TestDtypeLimits:
    """A target without float64, such as MPS."""

    def test_float64_becomes_float32_with_one_warning_per_line(self) -> None:
        with pytest.warns(PortabilityWarning, match="has no torch.float64") as caught:
            for _ in range(3):
                x = torch.zeros(2, dtype=torch.float64, device="cuda")
        assert x.dtype is torch.float32 and len(caught) == 1

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    def test_every_conversion_to_float64_is_replaced(self) -> None:
        x = torch.ones(2, device="cuda")
        double = torch.ones(2, dtype=torch.float64)
        results = (
            x.double(),
            x.to(torch.float64),
            x.to(dtype=torch.float64),
            x.type(torch.float64),
            double.cuda(),
            double.to("cuda"),
            double.to("cuda", torch.float64),
            torch.tensor(np.ones(2), device="cuda"),
            torch.as_tensor(np.ones(2), device="cuda"),
            torch.nn.Linear(1, 1).to("cuda", torch.float64).weight,
        )
        assert [(r.dtype, r.device.type) for r in results] == [(torch.float32, "meta")] * len(
            results
        )
        assert torch.zeros(1, dtype=torch.complex128, device="cuda").dtype is torch.complex64

    def test_the_cpu_keeps_float64(self) -> None:
        assert torch.ones(2).double().dtype is torch.float64
        assert torch.zeros(2, dtype=torch.float64, device="cpu").dtype is torch.float64
        for words in (
            (torch.float64,),
            ("cpu", torch.float64),
            (torch.ones(1, dtype=torch.float64),),
        ):
            assert torch.nn.Linear(2, 2).to(*words).weight.dtype is torch.float64

    def test_only_grad_scaler_gets_what_it_has_in_place_of_float64(self) -> None:
        """GradScaler calls ``double`` on accelerators other than MPS, for better rounding only."""
        x, names = torch.ones(2, device="cuda"), {"__name__": "torch.amp.grad_scaler"}
        exec("def double(x): return x.double()", names)
        double: Any = names["double"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert double(x) is x and double(torch.ones(2)).dtype is torch.float64
        with pytest.warns(PortabilityWarning):
            assert x.double().dtype is torch.float32
        with torchdevice.portable("cpu"):
            assert double(torch.ones(2, device="cuda")).dtype is torch.float64

    def test_float64_error_leaves_the_dtype_to_torch(self, meta_target: None) -> None:
        with torchdevice.portable("meta", float64="error"):
            # A real target would raise here; the meta device holds any dtype.
            assert torch.zeros(1, dtype=torch.float64, device="cuda").dtype is torch.float64

    def test_strict_refuses_float64(self, meta_target: None) -> None:
        with (
            torchdevice.portable("meta", strict=True),
            pytest.raises(FidelityError, match="float64"),
        ):
            torch.zeros(1, dtype=torch.float64, device="cuda")

    @pytest.mark.parametrize(
        ("given", "called"),
        [
            ((("meta",), {"non_blocking": True}), (("meta",), {"non_blocking": False})),
            ((("meta",), {"non_blocking": False}), (("meta",), {"non_blocking": False})),
            ((("meta",), {}), (("meta",), {})),
            ((("meta", torch.float16, True), {}), (("meta", torch.float16, False), {})),
            ((("meta", None, True), {}), (("meta", None, False), {})),
            ((("meta", None, True, True), {}), (("meta", None, False, True), {})),
            ((("meta", None, False, True), {}), (("meta", None, False, True), {})),
            (((None, torch.float16, True), {}), ((None, torch.float16, False), {})),
            (((torch.float16, True), {}), ((torch.float16, False), {})),
            (((torch.float16, True, True), {}), ((torch.float16, False, True), {})),
            (((torch.float16, False, True), {}), ((torch.float16, False, True), {})),
            (((torch.float16,), {}), ((torch.float16,), {})),
            (((OTHER, True, True), {}), ((OTHER, False, True), {})),
        ],
    )
    def test_copies_are_blocking_where_they_must_be(self, given: Any, called: Any) -> None:
        scope = torchdevice.current()
        assert scope is not None
        seen: list[Any] = []

        def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((args[1:], kwargs))
            return args[0]

        arguments, named = given
        torch.ones(2).to(*arguments, **named)  # torch takes these arguments
        rewriters.convert(scope._resolved(), spy, (torch.ones(2), *arguments), named)
        assert repr(seen) == repr([called])

    @pytest.mark.parametrize(
        "words", [((True,), {}), ((), {"non_blocking": True}), ((False,), {}), ((), {})]
    )
    def test_copies_into_tensors_are_blocking_too(self, words: Any) -> None:
        arguments, named = words
        seen = []

        class Spy(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append((func, *args[2:], *(kwargs or {}).values()))
                return func(*args, **(kwargs or {}))

        x, y = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
        with Spy():
            assert x.copy_(y, *arguments, **named) is x
            torch._foreach_copy_([x], [y], *arguments, **named)
        assert [func.overloadpacket for func, *_ in seen] == [
            torch.ops.aten.copy_,
            torch.ops.aten._foreach_copy_,
        ]
        assert not any(True in rest for _, *rest in seen)

    def test_modules_are_copied_as_tensors_are(self) -> None:
        assert torch._C._nn._parse_to("cuda", non_blocking=True)[2] is False


class TestIdentity:
    def test_reads_say_cuda(self, meta_target: None) -> None:
        with torchdevice.portable("meta", identity="program"):
            x = torch.zeros(2, device="cuda")
            assert x.device == torch.device("cuda:0") and x.device.type == "cuda" and x.is_cuda
            assert torch.ones(1).device.type == "cpu" and not torch.ones(1).is_cuda
            assert torch.zeros(2, device=x.device).is_cuda
        assert x.device.type == "meta"

    def test_a_device_that_is_only_made_stays_what_it_is(self, meta_target: None) -> None:
        with torchdevice.portable("meta", identity="program", strict=True):
            assert (
                torch.device("cuda:3") == torch.device("cuda", 3)
                and torch.device("cuda:3").index == 3
            )

    @pytest.mark.parametrize("written_for", ["cuda", "mps", "xpu"])
    def test_reads_of_every_accelerator(self, meta_target: None, written_for: Any) -> None:
        with torchdevice.portable("meta", identity="program", written_for=written_for):
            there, here = torch.zeros(2, device=written_for), torch.zeros(2)
            kinds = ("cuda", "mps", "xpu")
            assert [getattr(there, f"is_{kind}") for kind in kinds] == [
                kind == written_for for kind in kinds
            ]
            assert not any(getattr(here, f"is_{kind}") for kind in kinds)

    def test_reads_where_the_target_is_another_accelerator(self, meta_target: None) -> None:
        with torchdevice.portable("meta", identity="program") as scope:
            read = rewriters.READS[torch.Tensor.is_mps.__get__]
            assert read is not None
            of_target, of_another = torch.zeros(2, device="cuda"), torch.zeros(2)
            for tensor, expected in ((of_target, False), (of_another, True)):
                assert read(scope._resolved(), lambda tensor: True, (tensor,), {}) is expected

    def test_refused_where_a_tensor_cannot_be_told_from_a_cpu_tensor(self) -> None:
        with pytest.raises(ValueError, match="simulated"):
            torchdevice.portable("cpu", identity="program").__enter__()
