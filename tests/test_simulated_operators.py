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


# ---- what SyncBatchNorm calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batch_norm_in_parts_is_batch_norm(dtype: torch.dtype, affine: bool) -> None:
    """Two processes with parts of a batch, as ``torch.nn.modules._functions.SyncBatchNorm`` computes them."""
    torch.manual_seed(0)
    eps, momentum = 1e-5, 0.1
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    statistics = torch.float32 if dtype is torch.bfloat16 else dtype
    whole = torch.randn(6, 3, 4, device="cuda:1", dtype=dtype)
    parts = list(whole.split([2, 4]))
    weight = torch.rand(3, device="cuda:1", dtype=statistics) if affine else None
    bias = torch.rand(3, device="cuda:1", dtype=statistics) if affine else None
    grad = torch.randn_like(whole)

    expected_mean, expected_var = torch.zeros(3, dtype=statistics), torch.ones(3, dtype=statistics)
    x = whole.cpu().to(statistics).requires_grad_()
    on_cpu = [None if each is None else each.cpu().requires_grad_() for each in (weight, bias)]
    expected = F.batch_norm(x, expected_mean, expected_var, *on_cpu, training=True, momentum=momentum, eps=eps)
    expected.backward(grad.cpu().to(statistics))

    means, invstds = map(torch.stack, zip(*(torch.batch_norm_stats(part, eps) for part in parts), strict=True))
    counts = torch.tensor([part.numel() / 3 for part in parts], device="cuda:1", dtype=statistics)
    running_mean = torch.zeros(3, device="cuda:1", dtype=statistics)
    running_var = torch.ones(3, device="cuda:1", dtype=statistics)
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        whole, means, invstds, running_mean, running_var, momentum, eps, counts
    )
    y = torch.cat([torch.batch_norm_elemt(part, weight, bias, mean, invstd, eps) for part in parts])
    reduced = [
        torch.batch_norm_backward_reduce(each, part, mean, invstd, weight, True, affine, affine)
        for each, part in zip(grad.split([2, 4]), parts, strict=True)
    ]
    of_grad, of_product = (sum(each[i] for each in reduced) for i in (0, 1))
    x_grad = torch.cat(
        [
            torch.batch_norm_backward_elemt(each, part, mean, invstd, weight, of_grad, of_product, counts.int())
            for each, part in zip(grad.split([2, 4]), parts, strict=True)
        ]
    )
    pairs: list[tuple[Any, Any]] = [
        (y, expected.detach()),
        (x_grad, x.grad),
        (running_mean, expected_mean),
        (running_var, expected_var),
    ]
    if affine:
        pairs += [(sum(each[2 + i] for each in reduced), on_cpu[i].grad) for i in (0, 1)]  # type: ignore[union-attr]
    assert y.dtype is dtype and mean.dtype is statistics
    for one, other in pairs:
        assert one.device == torch.device("cuda:1")
        torch.testing.assert_close(one.cpu().to(statistics), other, **tolerance)


def test_equal_counts() -> None:
    x = torch.randn(4, 3, 5, device="cuda")
    means, invstds = map(torch.stack, zip(*(torch.batch_norm_stats(part, 1e-5) for part in x.split(2)), strict=True))
    counts = torch.full((2,), 10.0, device="cuda")
    one = torch.batch_norm_gather_stats(x, means, invstds, None, None, 0.1, 1e-5, 10)
    other = torch.batch_norm_gather_stats_with_counts(x, means, invstds, None, None, 0.1, 1e-5, counts)
    assert all(map(torch.equal, one, other))


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
