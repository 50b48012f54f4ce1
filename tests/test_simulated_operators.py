"""Operators that the simulated device needs kernels of its own for, compared with the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torchdevice


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
