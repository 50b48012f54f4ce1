"""float64 and complex128 on a target that lacks them, by every road that they arrive by."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from processes import run_program, run_python
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import torchdevice
from torchdevice.calls.lacking.doubles import HostDouble
from torchdevice.errors import FidelityError, NotSupportedError, PortabilityWarning
from torchdevice.kernel.fidelity import Fidelity

F64 = torch.float64
C128 = torch.complex128

TARGETS = ("simulated:mps",)

Road = Callable[[], torch.Tensor]


def with_default_dtype(make: Road) -> torch.Tensor:
    torch.set_default_dtype(F64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def on_default_device(make: Road) -> torch.Tensor:
    with torch.device("cuda"):
        return make()


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def host(*values: float) -> torch.Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=F64)


def card(*values: float) -> torch.Tensor:
    return torch.tensor(values or (1.0, 2.0), device="cuda")


def packed(dtype: torch.dtype) -> PackedSequence:
    return pack_padded_sequence(torch.ones(2, 2, 1, dtype=dtype), torch.tensor([2, 1]))


ROADS: dict[str, Road] = {
    "zeros": lambda: torch.zeros(2, dtype=F64, device="cuda"),
    "a factory, positional dtype": lambda: torch.ops.aten.zeros.default(
        [2], dtype=F64, device="cuda"
    ),
    "empty_strided": lambda: torch.empty_strided((2,), (1,), dtype=F64, device="cuda").fill_(1),
    "full": lambda: torch.full((2,), 1.5, dtype=F64, device="cuda"),
    "linspace": lambda: torch.linspace(0, 1, 3, dtype=F64, device="cuda"),
    "arange": lambda: torch.arange(0, 1, 0.25, dtype=F64, device="cuda"),
    "eye": lambda: torch.eye(2, dtype=F64, device="cuda"),
    "randn": lambda: torch.randn(2, dtype=F64, device="cuda"),
    "normal": lambda: torch.normal(0.0, 1.0, (2,), dtype=F64, device="cuda"),
    "randperm": lambda: torch.randperm(3, dtype=F64, device="cuda"),
    "hann_window": lambda: torch.hann_window(3, dtype=F64, device="cuda"),
    "fftfreq": lambda: torch.fft.fftfreq(3, dtype=F64, device="cuda"),
    "requires_grad": lambda: torch.ones(2, dtype=F64, device="cuda", requires_grad=True),
    "complex128": lambda: torch.zeros(2, dtype=torch.complex128, device="cuda"),
    "legacy constructor": lambda: torch.cuda.DoubleTensor([1.0, 2.0]),
    "legacy type": lambda: card().type("torch.cuda.DoubleTensor"),
    "zeros_like, dtype": lambda: torch.zeros_like(card(), dtype=F64),
    "zeros_like of a CPU tensor": lambda: torch.zeros_like(host(), device="cuda"),
    "full_like of a CPU tensor": lambda: torch.full_like(host(), 3.0, device="cuda"),
    "new_zeros, dtype": lambda: card().new_zeros(2, dtype=F64),
    "new_zeros of a CPU tensor": lambda: host().new_zeros(2, device="cuda"),
    "new_tensor of a CPU tensor": lambda: host().new_tensor([3.0], device="cuda"),
    "tensor of NumPy": lambda: torch.tensor(np.ones(2), device="cuda"),
    "tensor of a NumPy scalar": lambda: torch.tensor(np.float64(2), device="cuda"),
    "tensor of complex NumPy": lambda: torch.tensor(np.ones(2) * 1j, device="cuda"),
    "tensor of a leaf": lambda: torch.tensor(np.ones(2), device="cuda", requires_grad=True),
    "as_tensor": lambda: torch.as_tensor(np.ones(2), device="cuda"),
    "asarray": lambda: torch.asarray(np.ones(2), device="cuda"),
    "scalar_tensor": lambda: torch.scalar_tensor(1.0, dtype=F64, device="cuda"),
    "from_numpy, to": lambda: torch.from_numpy(np.ones(2)).to("cuda"),
    "from_numpy, cuda": lambda: torch.from_numpy(np.ones(2)).cuda(),
    "pinned": lambda: host().pin_memory().cuda(non_blocking=True),
    "to, device and dtype": lambda: host().to("cuda", F64),
    "to, device and None": lambda: host().to("cuda", None, True),
    "double": lambda: card().double(),
    "cdouble": lambda: card().cdouble(),
    "to dtype": lambda: card().to(F64),
    "to, keyword": lambda: card().to(dtype=F64),
    "type": lambda: card().type(F64),
    "an operator's conversion": lambda: torch.ops.aten._to_copy.default(card(), dtype=F64),
    "sum": lambda: card().sum(dtype=F64),
    "mean": lambda: torch.mean(card(), dtype=F64),
    "cumsum": lambda: card().cumsum(0, dtype=F64),
    "softmax": lambda: torch.nn.functional.softmax(card(), 0, dtype=F64),
    "linalg.norm": lambda: torch.linalg.norm(card(), dtype=F64),
    "module, double": lambda: torch.nn.Linear(1, 1).cuda().double().weight,
    "module, to": lambda: torch.nn.Linear(1, 1).double().to("cuda").weight,
    "module, keywords": lambda: torch.nn.Linear(1, 1, dtype=F64, device="cuda").weight,
    "sparse": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), dtype=F64, device="cuda"),
    "load": lambda: torch.load(saved(host()), map_location="cuda"),
    "load, pickle": lambda: torch.load(saved(host()), map_location="cuda", weights_only=False),
    "load, a parameter": lambda: torch.load(saved(torch.nn.Parameter(host())), map_location="cuda"),
    "logspace": lambda: torch.logspace(0, 1, 3, dtype=F64, device="cuda"),
    "windows": lambda: torch.signal.windows.hann(3, dtype=F64, device="cuda"),
    "new_tensor, dtype": lambda: card().new_tensor([1.0], dtype=F64),
    "as_tensor of a tensor there": lambda: torch.as_tensor(card(), dtype=F64),
    "asarray of a tensor there": lambda: torch.asarray(card(), dtype=F64),
    "tensor of NumPy scalars": lambda: torch.tensor([np.float64(1)], dtype=F64, device="cuda"),
    "from half precision": lambda: card().half().double(),
    "from integers": lambda: card().long().double(),
    "to complex128": lambda: card().to(torch.complex128),
    "from complex numbers on the CPU": lambda: torch.polar(host(), host()).to("cuda"),
    "from a buffer": lambda: torch.frombuffer(bytearray(16), dtype=F64).to("cuda"),
    "from DLPack": lambda: torch.from_dlpack(np.ones(2)).to("cuda"),
    "a batch of NumPy scalars": lambda: torch.utils.data.default_collate(
        [np.float64(1), np.float64(2)]
    ).to("cuda"),
    "a packed sequence": lambda: packed(F64).to("cuda").data,
    "a packed sequence, double": lambda: packed(torch.float32).cuda().double().data,
    "prod": lambda: card().prod(dtype=F64),
    "nansum": lambda: card().nansum(dtype=F64),
    "cumprod": lambda: card().cumprod(0, dtype=F64),
    "log_softmax": lambda: torch.log_softmax(card(), 0, dtype=F64),
    "vector_norm": lambda: torch.linalg.vector_norm(card(), dtype=F64),
    "module, type": lambda: torch.nn.Linear(1, 1).cuda().type(F64).weight,
    "module, to_empty": lambda: (
        torch.nn.Linear(1, 1, dtype=F64, device="meta").to_empty(device="cuda").weight
    ),
    "sparse, to": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,), dtype=F64).to("cuda"),
    "default device": lambda: on_default_device(lambda: torch.zeros(2, dtype=F64)),
    "default device, tensor": lambda: on_default_device(lambda: torch.tensor(np.ones(2))),
    "default device, as_tensor": lambda: on_default_device(lambda: torch.as_tensor(np.ones(2))),
    "default dtype": lambda: with_default_dtype(lambda: torch.zeros(2, device="cuda")),
    "default dtype, rand": lambda: with_default_dtype(lambda: torch.rand(2, device="cuda")),
    "default dtype, arange": lambda: with_default_dtype(
        lambda: torch.arange(0, 1, 0.5, device="cuda")
    ),
    "default dtype, full": lambda: with_default_dtype(lambda: torch.full((2,), 1.5, device="cuda")),
    "default dtype, tensor": lambda: with_default_dtype(
        lambda: torch.tensor([1.0, 2.0], device="cuda")
    ),
    "default dtype, module": lambda: with_default_dtype(
        lambda: torch.nn.Linear(2, 2, device="cuda").weight
    ),
}


RANDOM = [
    ROADS[name]
    for name in ROADS
    if name.startswith(("rand", "normal", "module", "default dtype, "))
]
"""Roads whose values depend on the dtype, or on a module's random weights."""


def on_mps(target: str, **options: Any) -> torchdevice.Scope:
    """Return a CUDA program's scope on MPS, simulated or as a runtime on a simulated Mac.

    In both the program sees ``cuda``.
    """
    return torchdevice.portable(target, identity="program", **options)


@pytest.fixture(params=TARGETS)
def mps(request: pytest.FixtureRequest) -> Iterator[torchdevice.Scope]:
    with on_mps(request.param) as scope:
        yield scope


@pytest.fixture(params=TARGETS)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[torchdevice.Scope]:
    with on_mps(request.param, float64="cpu") as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore", PortabilityWarning)
        yield scope


def _on_plain_cpu(road: Road) -> torch.Tensor:
    """Return what a road gives without MPS's limits, on a target that has float64."""
    torch.manual_seed(0)
    with torchdevice.simulate("cuda"):
        return road().detach().cpu()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor.to_dense() if tensor.is_sparse else tensor


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
class TestEachRoad:
    def test_float32_with_the_values_and_one_warning_here(self, target: str, road: Road) -> None:
        expected = _on_plain_cpu(road)
        torch.manual_seed(0)
        with on_mps(target):
            with pytest.warns(PortabilityWarning, match=r"has no torch\.\w+; .* is used") as caught:
                made = road()
            assert [warning.filename for warning in caught] == [__file__]
            assert (
                made.dtype is (torch.complex64 if expected.is_complex() else torch.float32)
                and made.is_cuda
            )
            assert expected.dtype in (F64, torch.complex128) and made.is_leaf
            if road not in RANDOM:
                torch.testing.assert_close(_values(made), _values(expected), check_dtype=False)

    def test_on_the_cpu_in_full(self, target: str, road: Road) -> None:
        expected = _on_plain_cpu(road)
        torch.manual_seed(0)
        with on_mps(target, float64="cpu") as scope:
            with pytest.warns(PortabilityWarning, match="kept on the CPU") as caught:
                made = road()
            assert {warning.filename for warning in caught} == {__file__} and len(caught) == 1
            assert made.is_cuda and made.is_leaf
            assert made.dtype is expected.dtype and isinstance(made, HostDouble)
            if road not in RANDOM:
                assert torch.equal(_values(made), _values(expected))
            assert any(entry.fidelity is Fidelity.FELL_BACK for entry in scope.journal.entries)

    def test_torchs_own_error(self, target: str, road: Road) -> None:
        with (
            on_mps(target, float64="error"),
            pytest.raises(
                TypeError,
                match=r"Cannot convert a MPS Tensor to float64|Trying to convert ComplexDouble to",
            ),
        ):
            road()

    @pytest.mark.parametrize("policy", ["float32", "cpu"])
    def test_a_strict_scope_refuses(self, target: str, road: Road, policy: str) -> None:
        with on_mps(target, strict=True, float64=policy), pytest.raises(FidelityError):
            road()


class TestWarnings:
    def test_a_line_is_warned_of_once(self, mps: torchdevice.Scope) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                card().double(), card().sum(dtype=F64), card().to(torch.complex128)
            card().double()
        lines = [warning.lineno for warning in caught if warning.category is PortabilityWarning]
        assert len(lines) == 2 and lines[1] == lines[0] + 1

    def test_every_call_is_counted(self, mps: torchdevice.Scope) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                card().double()
        counted = [
            entry.count for entry in mps.journal.degraded if entry.requested == "torch.float64"
        ]
        assert counted == [3]


class TestTypePromotion:
    """Python's operators reach the mode only: with ``engine="wrap"`` they raise torch's error."""

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("policy", ["float32", "cpu"])
    def test_integers_and_float64_scalars(self, target: str, policy: str) -> None:
        with on_mps(target, float64=policy, engine="mode"), pytest.warns(PortabilityWarning):
            made = torch.ones(2, device="cuda", dtype=torch.int64) * torch.tensor(2.5, dtype=F64)
            assert made.dtype is (torch.float32 if policy == "float32" else F64) and made.is_cuda
            assert made.tolist() == [2.5, 2.5]

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("policy", ["float32", "cpu"])
    def test_integers_under_a_default_of_float64(self, target: str, policy: str) -> None:
        with on_mps(target, float64=policy, engine="mode"), pytest.warns(PortabilityWarning):
            made = with_default_dtype(lambda: torch.ones(2, device="cuda", dtype=torch.int64) / 2)
            assert made.tolist() == [0.5, 0.5] and made.is_cuda

    def test_float64_scalars_that_promote_nothing_stay_unreported(
        self, mps: torchdevice.Scope
    ) -> None:
        assert (card() * torch.tensor(2.0, dtype=F64)).dtype is torch.float32
        assert (np.float64(2) * card() * np.float64(3)).tolist() == [6.0, 12.0]
        assert torch.full((2,), np.float64(2), device="cuda").dtype is torch.float32
        assert not mps.journal.degraded


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("policy", ["float32", "cpu", "error"])
class TestTorchsOwnFloat64:
    """What torch computes in float64 on CUDA but not on MPS is not the program's float64."""

    def test_gradient_scaling(self, target: str, policy: str) -> None:
        with on_mps(target, float64=policy, strict=True):
            model = torch.nn.Linear(2, 2).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda", init_scale=3.0)
            before = model.weight.detach().clone()
            scaler.scale(model(card()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.allclose(before - model.weight, 0.1 * card().expand(2, 2), atol=1e-6)

    @pytest.mark.parametrize(
        "options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}], ids=str
    )
    def test_adam(self, target: str, policy: str, options: dict[str, bool]) -> None:
        with on_mps(target, float64=policy, strict=True):
            weight = card().requires_grad_()
            optimizer = torch.optim.Adam([weight], **options)
            for _ in range(2):
                weight.square().sum().backward()
                optimizer.step()
            assert weight.tolist() < [1.0, 2.0]

    @pytest.mark.parametrize("options", [{}, {"rtol": 1e-3}, {"atol": 1e-3, "rtol": 1e-3}], ids=str)
    def test_tolerances_of_linear_algebra(
        self, target: str, policy: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # the singular values
        matrix = torch.randn(4, 3)
        matrix[:, 2] = matrix[:, 0]
        with on_mps(target, float64=policy):
            there = matrix.cuda().requires_grad_()
            assert torch.linalg.matrix_rank(there, **options).item() == 2
            inverse = torch.linalg.pinv(there, **options)
            inverse.sum().backward()
            torch.testing.assert_close(inverse.detach().cpu(), torch.linalg.pinv(matrix, **options))
            assert inverse.dtype is torch.float32 and there.grad is not None and there.grad.is_cuda


class TestLoading:
    def test_tensors_of_one_storage_share_it(self, mps: torchdevice.Scope) -> None:
        whole = torch.arange(6, dtype=F64).reshape(2, 3)
        file = saved({"whole": whole, "row": whole[1], "columns": whole.T, "other": torch.ones(2)})
        with pytest.warns(PortabilityWarning):
            found = torch.load(file, map_location="cuda")
        assert found["row"].tolist() == [3, 4, 5] and found["columns"].tolist() == whole.T.tolist()
        found["row"].zero_()
        assert (
            found["whole"].tolist() == [[0, 1, 2], [0, 0, 0]]
            and found["other"].dtype is torch.float32
        )

    def test_a_state_of_float64_fills_a_module(self, mps: torchdevice.Scope) -> None:
        source = torch.nn.Linear(2, 2).double()
        model = torch.nn.Linear(2, 2).cuda()
        with pytest.warns(PortabilityWarning):
            model.load_state_dict(torch.load(saved(source.state_dict()), map_location="cuda"))
        assert torch.equal(model.weight.cpu(), source.weight.float())

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_a_nested_tensor(self, mps: torchdevice.Scope) -> None:
        with pytest.warns(PortabilityWarning, match="is used"):
            made = torch.nested.nested_tensor([host(), host(3.0)], device="cuda")
        assert made.dtype is torch.float32 and made.is_cuda and made.is_nested


class TestOnTheCpu:
    def test_operators_compute_in_full_and_are_counted(self, on_cpu: torchdevice.Scope) -> None:
        x = torch.tensor([1.0, 1e-12], dtype=F64, device="cuda")
        assert (x.sum() - 1).item() == (host(1.0, 1e-12).sum() - 1).item() != 0
        counted = {entry.requested: entry for entry in on_cpu.journal.degraded}
        assert (
            counted["aten::sum in float64"].bytes == 24
            and counted["aten::sum in float64"].seconds > 0
        )

    def test_mixed_operands_and_their_gradients(self, on_cpu: torchdevice.Scope) -> None:
        single, double = card().requires_grad_(), host().cuda().requires_grad_()
        product = single * double
        assert product.dtype is F64 and product.is_cuda
        product.sum().float().backward()
        assert (
            single.grad is not None and single.grad.dtype is torch.float32 and single.grad.is_cuda
        )
        assert (
            double.grad is not None
            and double.grad.dtype is F64
            and double.grad.tolist() == [1.0, 2.0]
        )

    def test_gradients_reach_the_cpu_and_the_device(self, on_cpu: torchdevice.Scope) -> None:
        there, here = card().requires_grad_(), host().requires_grad_()
        (there.double().square() * here.cuda()).sum().backward()
        assert (
            there.grad is not None
            and there.grad.tolist() == [2.0, 8.0]
            and not isinstance(there.grad, HostDouble)
        )
        assert (
            here.grad is not None
            and here.grad.tolist() == [1.0, 4.0]
            and here.grad.device.type == "cpu"
        )

    def test_casts_leave_the_cpu(self, on_cpu: torchdevice.Scope) -> None:
        x = host(1.5, 2.5).cuda()
        casts = [
            x.float(),
            x.half(),
            x.long(),
            x.to(torch.bfloat16),
            x.type(torch.int32),
            x.to(card()),
            x > 2,
        ]
        assert all(cast.is_cuda and not isinstance(cast, HostDouble) for cast in casts)
        assert x.to("cpu").dtype is x.cpu().dtype is F64 and not x.cpu().is_cuda
        x.cpu().zero_()
        assert x.tolist() == x.numpy(force=True).tolist() == [1.5, 2.5]

    def test_writes_reach_what_they_are_meant_for(self, on_cpu: torchdevice.Scope) -> None:
        x, single = host(1.0, 2.0, 3.0).cuda(), card(1.0, 1.0, 1.0)
        x[1:].mul_(2)
        x[0] = 7
        single.add_(x)
        assert (
            x.tolist() == [7.0, 4.0, 6.0]
            and single.tolist() == [8.0, 5.0, 7.0]
            and single.dtype is torch.float32
        )
        x[2] = torch.tensor(6.0, dtype=F64)
        x[x > 6] = 7.0
        out = torch.empty(3, dtype=F64, device="cuda")
        assert torch.add(x, 1, out=out) is out and out.tolist() == [8.0, 5.0, 7.0]

    def test_a_model_trains_as_on_the_cpu(self, on_cpu: torchdevice.Scope) -> None:
        def train(device: str) -> torch.Tensor:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
            ).double()
            x = torch.randn(8, 3, dtype=F64)
            model, x = model.to(device), x.to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(
                    model(x), torch.ones(8, 1, dtype=F64, device=device)
                ).backward()
                optimizer.step()
            return torch.cat([each.detach().cpu().flatten() for each in model.parameters()])

        assert torch.equal(train("cuda"), train("cpu"))

    def test_copies_files_and_text(self, on_cpu: torchdevice.Scope, tmp_path: Path) -> None:
        x = host().cuda().requires_grad_()
        assert isinstance(copy.deepcopy(x), HostDouble) and copy.deepcopy(x).is_leaf
        torch.save(x, tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt").tolist() == [1.0, 2.0]
        assert (
            repr(x) == "tensor([1., 2.], device='cuda:0', dtype=torch.float64, requires_grad=True)"
        )
        assert isinstance(torch.load(tmp_path / "x.pt", map_location="cuda"), HostDouble)

    def test_a_module_moves_there_and_back(self, on_cpu: torchdevice.Scope) -> None:
        model = torch.nn.Linear(2, 1).double()
        weight = model.weight.detach().clone()
        assert isinstance(model.cuda().weight, HostDouble) and model.weight.requires_grad
        assert torch.equal(model.cpu().weight, weight) and not isinstance(model.weight, HostDouble)
        assert model.cuda().float().weight.dtype is torch.float32

    def test_generators_of_the_device_determine_numbers(self, on_cpu: torchdevice.Scope) -> None:
        def draw() -> torch.Tensor:
            generator = torch.Generator("cuda").manual_seed(3)
            first = torch.randn(2, dtype=F64, device="cuda", generator=generator)
            return torch.cat([first, torch.empty_like(first).uniform_(generator=generator)])

        assert torch.equal(draw(), draw()) and draw().unique().numel() == 4

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    @pytest.mark.parametrize("identity", ["program", "target"])
    def test_another_seed_gives_other_numbers(self, identity: str) -> None:
        def draw(seed: int) -> list[float]:
            generator = torch.Generator("cuda").manual_seed(seed)
            return torch.rand(2, dtype=F64, device="cuda", generator=generator).tolist()

        with torchdevice.simulate("mps", float64="cpu", identity=identity):
            assert draw(1) == draw(1) != draw(2)

    @pytest.mark.filterwarnings("ignore:Sparse")
    @pytest.mark.parametrize("convert", ["to_sparse_csr", "to_sparse_csc"])
    def test_a_compressed_layout_is_refused(self, on_cpu: torchdevice.Scope, convert: str) -> None:
        matrix = torch.eye(2, dtype=F64)
        with pytest.raises(
            NotSupportedError, match=r"float64 in the layout torch\.sparse_cs[rc] .* float32"
        ):
            getattr(matrix, convert)().to("cuda")
        with pytest.raises(NotSupportedError, match="in the layout"):
            getattr(matrix.cuda(), convert)()
        assert matrix.to_sparse().to("cuda").to_dense().tolist() == matrix.tolist()

    def test_a_target_with_float64_keeps_it(self) -> None:
        with torchdevice.simulate("cuda", float64="cpu") as scope:
            assert not isinstance(host().cuda(), HostDouble) and not scope.journal.degraded


@pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
class TestCompiledCode:
    CONVERSIONS: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "double": lambda x: x.double() + 1,
        "to": lambda x: x.to(F64) + 1,
        "a factory": lambda x: x + torch.ones(2, dtype=F64, device="cuda"),
    }

    @pytest.mark.parametrize("function", CONVERSIONS.values(), ids=CONVERSIONS)
    def test_a_whole_graph_has_float32(
        self, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        torch._dynamo.reset()
        with torchdevice.simulate("mps"):
            made = torch.compile(function, backend="eager", fullgraph=True)(card())
            assert made.dtype is torch.float32 and made.is_mps and made.tolist() == [2.0, 3.0]

    @pytest.mark.parametrize("function", CONVERSIONS.values(), ids=CONVERSIONS)
    def test_what_is_kept_on_the_cpu_is_run_by_python(
        self, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        torch._dynamo.reset()
        with torchdevice.simulate("mps", float64="cpu"):
            made = torch.compile(function, backend="eager")(card())
            assert made.dtype is F64 and made.is_mps and made.tolist() == [2.0, 3.0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["float32", "cpu", "error"])
class TestWaysIn:
    """The flags of the command line and of pytest."""

    EXPECTED: ClassVar[dict[str, str]] = {
        "float32": "torch.float32",
        "cpu": "torch.float64",
        "error": "TypeError",
    }

    def test_the_command(self, policy: str, tmp_path: Path) -> None:
        program = """
            import numpy, torch
            try:
                print(torch.tensor(numpy.ones(2), device="cuda").dtype)
            except TypeError as error:
                print(type(error).__name__)
        """
        options = ("--target", "simulated:mps", "--float64", policy)
        result = run_program(tmp_path, program, options=options)
        assert result.returncode == 0 and result.stdout.strip() == self.EXPECTED[policy], (
            result.stderr
        )
        warned = [line for line in result.stderr.splitlines() if "PortabilityWarning" in line]
        assert len(warned) == (policy != "error") and all(
            "program.py:4:" in line for line in warned
        )

    def test_pytest(self, policy: str, tmp_path: Path) -> None:
        (tmp_path / "test_program.py").write_text(
            "import numpy, torch\n"
            "def test():\n"
            "    dtype = torch.tensor(numpy.ones(2), device='cuda').dtype\n"
            "    assert str(dtype) == 'told'\n"
        )
        flags = ("--torchdevice=simulated:mps", f"--torchdevice-float64={policy}")
        result = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, cwd=tmp_path)
        assert result.returncode == 1 and self.EXPECTED[policy] in result.stdout, (
            result.stdout + result.stderr
        )
