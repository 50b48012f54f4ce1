"""Operators that the simulated device needs kernels of its own for, compared with the CPU."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchdevice
from torchdevice.errors import NotSupportedError, TorchVersionError
from torchdevice.kernel.lowlevel.object_fields import offset_of


@pytest.fixture(params=["mode", "wrap"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def scope(engine: str) -> Iterator[None]:
    with torchdevice.simulate(count=2, engine=engine):
        yield


# ---- traced convolutions -------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: torch.nn.Conv1d(2, 4, 3, padding=1), (2, 2, 8)),
    "2d": (lambda: torch.nn.Conv2d(2, 4, 3, stride=2, groups=2), (2, 2, 8, 8)),
    "2d without bias": (lambda: torch.nn.Conv2d(2, 4, 3, bias=False, dilation=2), (2, 2, 8, 8)),
    "3d": (lambda: torch.nn.Conv3d(2, 4, 3), (1, 2, 5, 5, 5)),
    "transposed": (
        lambda: torch.nn.ConvTranspose2d(2, 4, 3, output_padding=1, stride=2),
        (1, 2, 5, 5),
    ),
    "within others": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU()),
        (1, 2, 5, 5),
    ),
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
        found.append(
            [each.detach().cpu() for each in (y, given.grad, *parameters) if each is not None]
        )
        there.zero_grad()
    assert len(found[0]) >= 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


# ---- sparse tensors on any device ----------------------------------------------------------------

SPARSE: dict[str, Callable[[torch.Tensor], Any]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "constructor": lambda x: torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [1, 0]], device=x.device),
        x[0, :2],
        (3, 3),
        device=x.device,
        check_invariants=False,
    ),
    "empty": lambda x: torch.sparse_coo_tensor(
        size=(3, 3), device=x.device, check_invariants=False
    ),
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
    assert (
        found.device == torch.device(device)
        and found.layout is expected.layout
        and found.dtype is expected.dtype
    )
    if found.is_sparse:
        assert found._values().device == found._indices().device == found.device
    assert torch.equal(found.cpu().to_dense(), expected.to_dense())


# ---- DLPack --------------------------------------------------------------------------------------


def test_dlpack_hands_memory_over() -> None:
    x = torch.arange(4.0, device="cuda")
    for y in (
        torch.from_dlpack(x),
        torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
    ):
        assert y.device == x.device and torch.equal(x, y)
        y.add_(1)
        assert torch.equal(x, y)
    assert x.tolist() == [2.0, 3.0, 4.0, 5.0]


def test_numpy_takes_no_tensor_of_a_device() -> None:
    import numpy

    with pytest.raises((RuntimeError, BufferError)):
        numpy.from_dlpack(torch.ones(2, device="cuda"))
    assert torch.from_dlpack(numpy.ones(2)).device.type == "cpu"


# ---- numbers in the place of tensors -------------------------------------------------------------

NUMBERS = (2, -3, 0.5, True, 1 + 2j, 1e300)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "eq", "bitwise_and"]
)
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
                assert outcome("cuda", dtype, number, swapped) == outcome(
                    "cpu", dtype, number, swapped
                )


# ---- quantized tensors ---------------------------------------------------------------------------


def _quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x.cpu(), 0.1, 2, torch.quint8)


QUANTIZING: dict[str, Callable[[torch.Tensor], Any]] = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 2, torch.quint8),
    "parameters in tensors": lambda x: torch.quantize_per_tensor(
        x, x.sum(), x.sum().long(), torch.qint32
    ),
    "a list": lambda x: torch.quantize_per_tensor([x], x[0, :1], x[0, :1], torch.qint8),
    "dynamic": lambda x: torch.quantize_per_tensor_dynamic(x, torch.quint8, False),
    "per channel": lambda x: torch.quantize_per_channel(x, x[:, 0], x[:, 0].long(), 0, torch.qint8),
    "from integers": lambda x: torch._make_per_tensor_quantized_tensor(x.to(torch.uint8), 0.1, 2),
    "moved": lambda x: _quantized(x).to(x.device),
    "moved by cuda()": lambda x: _quantized(x).cuda(),
    "loaded": lambda x: _saved(_quantized(x), map_location=x.device),
    "copied into a plain one": lambda x: x.copy_(_quantized(x)),
    "copied from a plain one": lambda x: _quantized(x).copy_(x),
    "like another": lambda x: torch.empty_like(_quantized(x), device=x.device),
    "with parameters": lambda x: torch._empty_affine_quantized(
        [3], scale=0.5, zero_point=1, dtype=torch.quint8, device=x.device
    ),
    "with those of another": lambda x: torch.empty_quantized([3], _quantized(x), device=x.device),
    "by dtype": lambda x: torch.empty(3, dtype=torch.quint8, device=x.device),
    "zeros": lambda x: x.new_zeros(3, dtype=torch.qint8),
    "cast": lambda x: x.to(torch.quint4x2),
}


def _saved(q: torch.Tensor, **options: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, **options)
    return loaded


@pytest.mark.usefixtures("no_collections")
@pytest.mark.filterwarnings("ignore")  # torch calls quantized tensors deprecated
@pytest.mark.parametrize("options", [{}, {"profile": "mps"}], ids=["cuda", "mps"])
@pytest.mark.parametrize("make", QUANTIZING)
def test_each_way_to_a_quantized_tensor_is_refused_by_name(
    make: str, options: dict[str, Any]
) -> None:
    with torchdevice.simulate(**options):
        x = torch.ones(3, 4, device="cuda")
        before = torch.cuda.memory_allocated()
        with pytest.raises(
            NotSupportedError, match=r"^A quantized tensor is not supported .* Quantize on the CPU"
        ):
            QUANTIZING[make](x)
        gc.collect()
        assert torch.cuda.memory_allocated() == before and (x + 1).tolist() == [[2.0] * 4] * 3


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_of_the_cpu_work_in_a_scope() -> None:
    with torchdevice.simulate():
        q = _quantized(torch.ones(3, device="cuda"))
        assert (
            q.dequantize().cuda().tolist() == torch.ones(3).tolist()
            and q.int_repr().cuda().tolist() == [12] * 3
        )


def test_fields_of_unknown_objects_are_refused() -> None:
    host = torch.empty(1)
    for values in ([1 << 63], [0]):  # nowhere, and in several places
        with pytest.raises(TorchVersionError, match="a field"):
            offset_of("a field", [host._cdata], values, 24)


def test_fake_quantization_is_not_refused() -> None:
    x = torch.randn(3, 3)
    for make in (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: torch.ops.aten.dequantize.self(x.to(torch.float32)),
    ):
        assert torch.equal(make(x.cuda()).cpu(), make(x))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("statistics", FLOATS)
@pytest.mark.parametrize(
    ("input", "weights"),
    [(each, each) for each in FLOATS]
    + [(torch.float16, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_batch_norm_takes_statistics_in_any_dtype(
    input: torch.dtype, weights: torch.dtype, statistics: torch.dtype, training: bool
) -> None:
    """As an H200 does. The CPU's kernels take fewer pairs."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randn(8, 4, 3, 3, generator=generator), *torch.rand(3, 4, generator=generator)

    def normalized(device: str, *dtypes: torch.dtype) -> list[torch.Tensor]:
        kinds = (dtypes[0], dtypes[1], dtypes[1], dtypes[2])
        x, weight, bias, variance = (
            each.to(device, kind) for each, kind in zip(drawn, kinds, strict=True)
        )
        leaves = [each.requires_grad_() for each in (x, weight, bias)]
        mean = torch.zeros_like(variance)
        with torch.backends.cudnn.flags(enabled=False):
            out = F.batch_norm(x, mean, variance, weight, bias, training=training)
        (out * x.detach()).sum().backward()
        return [out.detach(), mean, variance, *(leaf.grad for leaf in leaves)]

    found = normalized("cuda", input, weights, statistics)
    wanted = normalized("cpu", *[torch.float64] * 3)
    assert [each.dtype for each in found] == [
        input,
        statistics,
        statistics,
        input,
        weights,
        weights,
    ]
    for each, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(each.cpu().double(), exact, rtol=0.03, atol=0.5)
