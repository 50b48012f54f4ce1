"""Functions of torch that a program kept before a block with ``simulate()``, whose engine is
"wrap": they work, or raise.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from processes import run_python
from torch.overrides import _get_current_function_mode_stack

import torchdevice
from torchdevice.calls import kept_functions
from torchdevice.kernel import registered_kernels
from torchdevice.scope import collected_options as scope_options
from torchdevice.scope import target_selection

pytestmark = [
    pytest.mark.one_engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a kept function reaches the real GPU"),
]

FACTORIES: dict[str, tuple[Any, ...]] = {
    "zeros": (2,),
    "empty": (2,),
    "ones": (2, 3),
    "randn": (2,),
    "rand": (2,),
    "arange": (3,),
    "eye": (2,),
    "full": ((2,), 1.5),
    "linspace": (0, 1, 3),
    "randperm": (4,),
    "randint": (5, (2,)),
    "tril_indices": (2, 2),
    "triu_indices": (2, 2),
    "empty_strided": ((2,), (1,)),
    "_efficientzerotensor": ([2],),
    "zeros_like": (torch.ones(2),),
    "ones_like": (torch.ones(2),),
    "randn_like": (torch.ones(2),),
    "hann_window": (4,),
}
"""Factory -> the arguments beside a device. Each makes its tensor by a kernel of the device."""

KEPT = {name: getattr(torch, name) for name in FACTORIES}

HELD = {
    "functools.partial": functools.partial(torch.zeros, 2, device="cuda"),
    "a closure": (lambda zeros: lambda: zeros(2, device="cuda"))(torch.zeros),
    "a default argument": lambda make=torch.zeros: make(2, device="cuda"),
    "an object": functools.partial(
        lambda held: held.make(2, device="cuda"), types.SimpleNamespace(make=torch.zeros)
    ),
    "a list": functools.partial(lambda held: held[0](2, device="cuda"), [torch.zeros]),
    "a device in text": functools.partial(torch.zeros, 2, device="cuda:0"),
}

BEFORE_A_KERNEL: dict[str, Callable[[], torch.Tensor]] = {
    "tensor": functools.partial(torch.tensor, [1.0], device="cuda"),
    "as_tensor": functools.partial(torch.as_tensor, [1.0], device="cuda"),
    "asarray": functools.partial(torch.asarray, [1.0], device="cuda"),
    "Tensor.to": functools.partial(torch.ones(2).to, "cuda"),
    "Tensor.cuda": torch.ones(2).cuda,
}
"""Functions that choose the device before torch looks for a kernel."""


@pytest.fixture(autouse=True)
def auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDEVICE_ENGINE")


def engine_of(scope: torchdevice.Scope) -> str:
    return scope._resolved().options.engine


@pytest.fixture
def block() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate() as scope:
        assert engine_of(scope) == "wrap" and not _get_current_function_mode_stack()
        yield scope


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_what_it_makes_under_a_mode(name: str) -> None:
    made = []
    for engine in ("mode", "wrap"):
        with torchdevice.simulate(engine=engine, random="cuda"):  # type: ignore[arg-type]
            torch.manual_seed(3)
            x = KEPT[name](*FACTORIES[name], device="cuda")
            assert x.is_cuda and str(x.device) == "cuda:0"
            values = torch.zeros(2) if name.startswith("empty") else x.cpu()
            made.append((x.dtype, x.shape, x.stride(), x.requires_grad, values))
    assert made[0][:4] == made[1][:4]
    torch.testing.assert_close(made[0][4], made[1][4], rtol=0, atol=0)


@pytest.mark.parametrize("holder", HELD)
def test_whatever_holds_it(block: torchdevice.Scope, holder: str) -> None:
    x = HELD[holder]()
    assert str(x.device) == "cuda:0"
    assert torch.equal((x + torch.ones(2, device="cuda")).cpu(), torch.ones(2))


def test_names_of_modules(block: torchdevice.Scope) -> None:
    library = types.ModuleType("a_library_with_names")
    exec("from torch import zeros, tensor\nfrom torch import Tensor as T", vars(library))
    vars(library)["zeros"], vars(library)["tensor"] = KEPT["zeros"], KEPT_TENSOR
    sys.modules[library.__name__] = library
    try:
        with torchdevice.simulate("cuda"):
            assert library.zeros(2, device="cuda").is_cuda
            assert library.tensor([1.0], device="cuda").is_cuda
    finally:
        del sys.modules[library.__name__]


KEPT_TENSOR = torch.tensor


def test_the_current_device_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchdevice.simulate(devices=2), torch.cuda.device(1):
        assert str(KEPT["zeros"](2, device="cuda").device) == "cuda:1"
        assert str(KEPT["zeros"](2, device="cuda:0").device) == "cuda:0"
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            KEPT["zeros"](2, device="cuda:2")


def test_gradients_of_a_kept_factory(block: torchdevice.Scope) -> None:
    x = KEPT["ones"](2, device="cuda", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None and x.grad.is_cuda and x.grad.tolist() == [2, 2]


def test_the_journal_has_its_line(block: torchdevice.Scope) -> None:
    KEPT["zeros"](2, device="cuda")
    assert any(entry.requested == "cuda" for entry in block.journal.entries)


def test_modes_of_the_program_see_the_operator_once(block: torchdevice.Scope) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seeing():
        KEPT["empty"](2, device="cuda")
    assert seen == ["aten.empty.memory_format"]


@pytest.mark.parametrize("name", BEFORE_A_KERNEL)
def test_what_chooses_the_device_first_works_or_raises_with_a_remedy(name: str) -> None:
    """Builds with CUDA choose it without a question, once the process has asked for it before."""
    has_cuda = torch.version.cuda is not None
    try:
        with torchdevice.simulate():
            assert BEFORE_A_KERNEL[name]().is_cuda and has_cuda
    except (RuntimeError, torch.AcceleratorError) as error:
        (note,) = error.__notes__  # type: ignore[attr-defined]
        assert "kept from before the scope" in note and 'engine="mode"' in note
    with torchdevice.simulate(engine="mode"):
        assert BEFORE_A_KERNEL[name]().is_cuda


def test_other_errors_get_no_note() -> None:
    with pytest.raises(RuntimeError) as caught, torchdevice.simulate():
        torch.ones(2, device="cuda") + torch.ones(3, device="cuda")
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        # The program is written for a Mac, and CUDA is absent there.
        with torchdevice.simulate("mps", written_for="mps", engine="wrap"):
            torch.zeros(1, device="cuda")
    assert not hasattr(caught.value, "__notes__")


def test_every_factory_of_torch_with_a_kernel_of_the_device_is_served() -> None:
    """All operators that take a device and no tensor, and that torch does not compose of others."""
    composite = (
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        if not name.startswith("aten::") or not torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CPU"
        ):
            continue
        arguments = torch._C._get_schema(packet, overload).arguments
        kinds = {str(argument.type) for argument in arguments}
        if "Optional[Device]" not in kinds or any("Tensor" in kind for kind in kinds):
            continue
        if not any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, each) for each in composite
        ):
            found.add(name)
    # Of files on the CPU, and of quantized tensors, which CUDA keeps under another key.
    elsewhere = {"aten::from_file", "aten::_empty_affine_quantized", "aten::_make_dep_token"}
    assert found - elsewhere == set(kept_functions.FACTORIES)


OUTSIDE = """
import sys, torch, torchdevice

def text(device="cuda"):
    try:
        torch.ops.aten.empty([2], device=device)
    except Exception as error:
        return type(error).__name__, str(error).partition("for this backend")[0]

torch.cuda._initialized = True  # so that the call comes to the dispatcher
before = text()
with torchdevice.simulate():
    assert torch.ops.aten.empty([2], device="cuda").is_cuda
assert text() == before, (before, text())
print(before)
"""


def test_outside_a_scope_torch_raises_its_own_error() -> None:
    ran = run_python("-c", OUTSIDE, TORCHDEVICE_ENGINE="auto")
    assert ran.returncode == 0, ran.stderr
    assert "CUDA" in ran.stdout or "NVIDIA" in ran.stdout


@pytest.mark.parametrize(
    ("target", "options", "engine"),
    [
        ("simulated:cuda", {}, "wrap"),
        ("simulated:t4", {}, "wrap"),
        ("simulated:cuda", {"written_for": "xpu"}, "wrap"),
        ("simulated:mps", {}, "mode"),
        ("simulated:strict", {}, "mode"),
        ("cpu", {}, "mode"),
        ("simulated:cuda", {"engine": "mode"}, "mode"),
    ],
)
def test_which_engine_a_block_takes(target: str, options: Any, engine: str) -> None:
    with torchdevice.portable(target, **options) as scope:
        assert engine_of(scope) == engine
    assert torchdevice.portable(target, **options)(lambda: engine_of(torchdevice.current()))() == (  # type: ignore[arg-type]
        engine
    )


def test_where_the_accelerator_is_there_a_mode_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept function would make a tensor on the real GPU."""
    chosen = scope_options.chosen({"target": "simulated:cuda"})
    runtime, fitting = target_selection.resolve(chosen)
    assert kept_functions.are_loud(runtime, fitting)
    monkeypatch.setattr(kept_functions, "_is_absent", lambda family: False)
    assert not kept_functions.are_loud(runtime, fitting)
    with torchdevice.simulate() as scope:
        assert engine_of(scope) == "mode"


def test_a_block_inside_another_takes_the_engine_around_it() -> None:
    with torchdevice.portable("cpu"), torchdevice.simulate():
        assert len(_get_current_function_mode_stack()) == 1
        assert KEPT["zeros"](2, device="cuda").is_cuda
        assert BEFORE_A_KERNEL["tensor"]().is_cuda


def test_threads_outside_a_scope_are_not_served(block: torchdevice.Scope) -> None:
    name = kept_functions.FACTORIES[1]
    from torchdevice.kernel import thread_state

    with thread_state.suspended(), pytest.raises((RuntimeError, AssertionError)):
        registered_kernels.overload(name)([2], device=torch.device("cuda"))
