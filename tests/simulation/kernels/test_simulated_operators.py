"""Operators that the simulated device needs kernels of its own for, compared with the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchdevice
from torchdevice.errors import NotSupportedError, TorchVersionError
from torchdevice.lowlevel.object_fields import place_of


@pytest.fixture(params=["mode", "wrap"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def scope(engine: str) -> Iterator[None]:
    with torchdevice.simulate(count=2, engine=engine):
        yield


# ---- traced convolutions ---------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: torch.nn.Conv1d(2, 4, 3, padding=1), (2, 2, 8)),
    "2d": (lambda: torch.nn.Conv2d(2, 4, 3, stride=2, groups=2), (2, 2, 8, 8)),
    "2d without bias": (lambda: torch.nn.Conv2d(2, 4, 3, bias=False, dilation=2), (2, 2, 8, 8)),
    "3d": (lambda: torch.nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5)),
    "transposed": (lambda: torch.nn.ConvTranspose2d(2, 4, 3, output_padding=1, stride=2), (1, 2, 5, 5)),
    "within others": (lambda: torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU()), (1, 2, 5, 5)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_traced_convolution(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    found = []
    for device in ("cpu", "cuda:1"):
        there = module.to(device)
        traced = torch.jit.trace(there, x.to(device))
        assert "_convolution" in str(traced.inlined_graph)
        given = x.clone().to(device).requires_grad_()
        y = traced(given)
        y.square().sum().backward()
        assert y.device == torch.device(device)
        parameters = [parameter.grad for parameter in there.parameters()]
        found.append([each.detach().cpu() for each in (y, given.grad, *parameters) if each is not None])
        there.zero_grad()
    assert len(found[0]) >= 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# ---- sparse tensors on any device ------------------------------------------------------------------------------------

SPARSE: dict[str, Callable[[torch.Tensor], Any]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "constructor": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 0]], device=x.device), x[0, :2], (3, 3), device=x.device, check_invariants=False
    ),
    "empty": lambda x: torch.sparse_coo_tensor(size=(3, 3), device=x.device, check_invariants=False),
    "detach": lambda x: x.to_sparse().detach(),
    "clone": lambda x: x.to_sparse().clone(),
    "add": lambda x: x.to_sparse() + x.to_sparse(),
    "mm": lambda x: torch.sparse.mm(x.to_sparse(), x),
    "sum": lambda x: torch.sparse.sum(x.to_sparse(), 0),
    "transposed": lambda x: x.to_sparse().t(),
    "coalesced": lambda x: x.to_sparse().coalesce(),
    "dense": lambda x: x.to_sparse().to_dense(),
    "moved": lambda x: x.cpu().to_sparse().to(x.device),
    "moved by default": lambda x: x.to_sparse().to("cuda:0").to(x.device),
    "in place": lambda x: x.to_sparse().add_(x.to_sparse()).mul_(2),
    "converted": lambda x: x.to_sparse().double(),
    "like": lambda x: torch.zeros_like(x.to_sparse()),
    "embedding": lambda x: sparse_gradient(x),
}


def sparse_gradient(x: torch.Tensor) -> torch.Tensor:
    weight = x.clone().requires_grad_()
    F.embedding(torch.tensor([0, 2, 0], device=x.device), weight, sparse=True).sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse
    return weight.grad


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors(name: str, device: str) -> None:
    expected = SPARSE[name](torch.eye(3) * 2)
    found = SPARSE[name](torch.eye(3).to(device) * 2)
    assert found.device == torch.device(device) and found.layout is expected.layout and found.dtype is expected.dtype
    if found.is_sparse:
        assert found._values().device == found._indices().device == found.device
    assert torch.equal(found.cpu().to_dense(), expected.to_dense())


# ---- DLPack ----------------------------------------------------------------------------------------------------------


def test_dlpack_hands_memory_over() -> None:
    x = torch.arange(4.0, device="cuda")
    for y in (torch.from_dlpack(x), torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))):
        assert y.device == x.device and torch.equal(x, y)
        y.add_(1)
        assert torch.equal(x, y)
    assert x.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_numpy_takes_no_tensor_of_a_device() -> None:
    import numpy

    with pytest.raises((RuntimeError, BufferError)):
        numpy.from_dlpack(torch.ones(2, device="cuda"))
    assert torch.from_dlpack(numpy.ones(2)).device.type == "cpu"


# ---- numbers in the place of tensors ---------------------------------------------------------------------------------

NUMBERS = (2, -3, 0.5, True, 1 + 2j, 1e300)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "eq", "bitwise_and"])
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_numbers_in_the_place_of_tensors(name: str, shape: tuple[int, ...]) -> None:
    function = getattr(torch, name)

    def outcome(device: str, dtype: torch.dtype, number: Any, swapped: bool) -> Any:
        x = torch.full(shape, 3, dtype=dtype).to(device)
        try:
            y = function(number, x) if swapped else function(x, number)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            return type(error)
        assert y.device == x.device
        return y.dtype, str(y.tolist())

    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64):
        for number in NUMBERS:
            for swapped in (False, True):
                assert outcome("cuda", dtype, number, swapped) == outcome("cpu", dtype, number, swapped)


# ---- quantized tensors -----------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 2, torch.quint8),
    "parameters in tensors": lambda x: torch.quantize_per_tensor(
        x, torch.tensor(0.1, device=x.device), torch.tensor(2, device=x.device), torch.qint32
    ),
    "a list": lambda x: torch.quantize_per_tensor(
        [x], torch.ones(1, device=x.device), torch.zeros(1, device=x.device), torch.qint8
    )[0],
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
    "per channel": lambda x: torch.quantize_per_channel(
        x, torch.full((3,), 0.1, device=x.device), torch.ones(3, device=x.device).long(), 0, torch.qint8
    ),
    "per channel, zeros between": lambda x: torch.quantize_per_channel(
        x, torch.full((3,), 0.1, device=x.device), torch.full((3,), 0.5, device=x.device), 0, torch.quint8
    ),
    "from integers": lambda x: torch._make_per_tensor_quantized_tensor((x * 50).abs().to(torch.uint8), 0.1, 2),
    "moved": lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 2, torch.quint8).to(x.device),
    "moved, per channel": lambda x: torch.quantize_per_channel(
        x.cpu(), torch.full((3,), 0.1), torch.ones(3).long(), 0, torch.qint8
    ).to(x.device),
    "copied into": lambda x: torch._empty_affine_quantized(
        [3, 4], scale=0.5, zero_point=1, dtype=torch.quint8, device=x.device
    ).copy_(torch.quantize_per_tensor(x, 0.1, 2, torch.quint8)),
}

QUANTIZED_USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda q: q,
    "dequantize": lambda q: q.dequantize(),
    "int_repr": lambda q: q.int_repr(),
    "facts": lambda q: (q.qscheme(), q.dtype, q.shape, q.stride(), q.is_quantized, q.untyped_storage().nbytes()),
    "per tensor": lambda q: (q.q_scale(), q.q_zero_point()),
    "per channel": lambda q: (q.q_per_channel_scales(), q.q_per_channel_zero_points(), q.q_per_channel_axis()),
    "clone": lambda q: q.clone(),
    "deepcopy": copy.deepcopy,
    "saved": lambda q: _saved(q),
    "saved, loaded on the CPU": lambda q: _saved(q, map_location="cpu").int_repr(),
    "view": lambda q: q.view(2, 6),
    "element": lambda q: q[1, 2].item(),
    "row": lambda q: q[1],
    "part": lambda q: q[:, 1:3].dequantize(),
    "transposed": lambda q: q.t().dequantize(),
    "contiguous": lambda q: q.t().contiguous(),
    "expanded": lambda q: q[None].expand(2, 3, 4).int_repr(),
    "relu": torch.relu,
    "relu in place": lambda q: q.clone().relu_(),
    "gelu": torch.nn.functional.gelu,
    "filled": lambda q: q.clone().fill_(0.3),
    "flip": lambda q: q.flip(0),
    "index_select": lambda q: q.index_select(0, torch.tensor([1, 0], device=q.device)),
    "max of a dimension": lambda q: q.max(1),
    "max_pool2d": lambda q: torch.nn.functional.max_pool2d(q[None], 2),
    "written": lambda q: _written(q),
    "not blocking": lambda q: q.to("cpu", non_blocking=True).int_repr(),
    "to float": lambda q: q.float(),
    "printed": lambda q: "".join(str(q).split()).replace("device='cuda:0',", "").replace(",device='cuda:0'", ""),
}


def _saved(q: torch.Tensor, **options: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, **options)
    return loaded


def _written(q: torch.Tensor) -> torch.Tensor:
    """Views share the memory."""
    q = q.clone()
    q[0].copy_(q[1])
    return q


def _plain(result: Any) -> Any:
    """Return the values of a result, and of a quantized tensor what it is made of."""
    if isinstance(result, tuple):
        return [_plain(each) for each in result]
    if not isinstance(result, torch.Tensor):
        return result
    values = (result.int_repr() if result.is_quantized else result).tolist()
    return str(result.dtype), result.stride(), values, result.dequantize().tolist() if result.is_quantized else None


def _outcome(use: Callable[[torch.Tensor], Any], q: torch.Tensor) -> Any:
    try:
        return _plain(use(q))
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.filterwarnings("ignore")  # torch calls quantized tensors deprecated
@pytest.mark.parametrize("use", QUANTIZED_USES)
def test_a_use_of_quantized_tensors(use: str) -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    worked = 0
    for make in MADE.values():
        expected, quantized = _outcome(QUANTIZED_USES[use], make(x)), make(x.cuda())
        assert quantized.is_cuda and quantized.device.type == "cuda"
        assert _outcome(QUANTIZED_USES[use], quantized) == expected
        worked += not (isinstance(expected, tuple) and isinstance(expected[0], type))
    assert worked or use == "to float"


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_of_several_devices_and_their_memory() -> None:
    with torchdevice.simulate(count=2, races="error", asynchronous=True) as scope:
        before = torch.cuda.memory_allocated(1)
        there = torch.quantize_per_tensor(torch.ones(1 << 20), 0.1, 0, torch.qint8).to("cuda:1")
        assert there.get_device() == 1 and torch.cuda.memory_allocated(1) - before == 1 << 20
        scales = torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2).long(), 0, torch.qint8)
        assert scales.to("cuda:1").q_per_channel_scales().device == torch.device("cuda:1")
        scope.runtime.copies.clear()
        assert there.to("cuda:0").get_device() == 0 and there.cpu().get_device() == -1
        assert torch.empty_quantized([1 << 20], there.cpu()).copy_(there).dequantize().sum() == there.numel()
        assert scope.runtime.copies == {("simulated:1", "simulated:0"): 1, ("simulated:1", "cpu"): 3}
        with torch.inference_mode():
            assert there[:3].clone().dequantize().tolist() == there[:3].cpu().dequantize().tolist()
        with pytest.raises(RuntimeError, match="same device"):
            there.index_select(0, torch.tensor([0], device="cuda:0"))
        del there
        assert torch.cuda.memory_allocated(1) == before


@pytest.mark.filterwarnings("ignore")
def test_what_is_refused_of_quantized_tensors() -> None:
    q = MADE["per tensor"](torch.ones(3, 4, device="cuda"))
    for name, call in {
        "aten::cat": lambda: torch.cat([q, q]),
        "aten::equal": lambda: torch.equal(q, q),
        "aten::sigmoid": lambda: torch.sigmoid(q),
        "quantized::add": lambda: torch.ops.quantized.add(q, q, 0.1, 0),
    }.items():
        with pytest.raises(NotImplementedError, match=f"'{name}' with arguments from the 'QuantizedCUDA' backend"):
            call()
    with pytest.raises(NotSupportedError, match=r"without a scale is not supported .* Dequantize the operands"):
        q + 1
    with pytest.raises(NotSupportedError, match=r"a quantized tensor of torch.quint4x2 is not supported"):
        x, ones = torch.ones(2, 2, device="cuda"), torch.ones(2, device="cuda")
        torch.quantize_per_channel(x, ones, ones, 0, torch.quint4x2)
    for options in ({"profile": "mps"}, {"compute": "meta"}):
        with torchdevice.simulate(**options), pytest.raises(NotSupportedError, match="a quantized tensor is not supp"):
            torch.quantize_per_tensor(torch.ones(3, device="cuda"), 0.1, 2, torch.quint8)


def test_fields_of_unknown_objects_are_refused() -> None:
    host = torch.empty(1)
    for values in ([b"no such"], [b"\0"]):  # nowhere, and in several places
        with pytest.raises(TorchVersionError, match="a field"):
            place_of("a field", [host._cdata], values, 24)


def test_fake_quantization_is_not_refused() -> None:
    x = torch.randn(3, 3)
    for make in (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: torch.ops.aten.dequantize.self(x.to(torch.float32)),
    ):
        assert torch.equal(make(x.cuda()).cpu(), make(x))
