"""``SyncBatchNorm`` in one process, and its operators; test_distributed.py has two."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import plain_torch
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("cuda")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batch_norm_in_parts_is_batch_norm(
    kind: str, float64: torch.dtype, dtype: torch.dtype, affine: bool
) -> None:
    """Two processes with parts of a batch, as torch's ``SyncBatchNorm`` computes them."""
    dtype = float64 if dtype is torch.float64 else dtype
    torch.manual_seed(0)
    eps, momentum = 1e-5, 0.1
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    statistics = torch.float32 if dtype is torch.bfloat16 else dtype
    whole = torch.randn(6, 3, 4, device="cuda", dtype=dtype)
    parts = list(whole.split([2, 4]))
    weight = torch.rand(3, device="cuda", dtype=statistics) if affine else None
    bias = torch.rand(3, device="cuda", dtype=statistics) if affine else None
    grad = torch.randn_like(whole)

    expected_mean, expected_var = torch.zeros(3, dtype=statistics), torch.ones(3, dtype=statistics)
    x = whole.cpu().to(statistics).requires_grad_()
    on_cpu = [None if each is None else each.cpu().requires_grad_() for each in (weight, bias)]
    expected = F.batch_norm(
        x, expected_mean, expected_var, *on_cpu, training=True, momentum=momentum, eps=eps
    )
    expected.backward(grad.cpu().to(statistics))

    means, invstds = map(
        torch.stack, zip(*(torch.batch_norm_stats(part, eps) for part in parts), strict=True)
    )
    counts = torch.tensor([part.numel() / 3 for part in parts], device="cuda", dtype=statistics)
    running_mean = torch.zeros(3, device="cuda", dtype=statistics)
    running_var = torch.ones(3, device="cuda", dtype=statistics)
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
            torch.batch_norm_backward_elemt(
                each, part, mean, invstd, weight, of_grad, of_product, counts.int()
            )
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
        assert one.device.type == kind
        torch.testing.assert_close(one.cpu().to(statistics), other, **tolerance)


def test_equal_counts() -> None:
    x = torch.randn(4, 3, 5, device="cuda")
    means, invstds = map(
        torch.stack, zip(*(torch.batch_norm_stats(part, 1e-5) for part in x.split(2)), strict=True)
    )
    counts = torch.full((2,), 10.0, device="cuda")
    one = torch.batch_norm_gather_stats(x, means, invstds, None, None, 0.1, 1e-5, 10)
    other = torch.batch_norm_gather_stats_with_counts(
        x, means, invstds, None, None, 0.1, 1e-5, counts
    )
    assert all(map(torch.equal, one, other))


def test_operators_called_by_keyword_and_by_overload() -> None:
    x = torch.randn(4, 3, 5, device="cuda")
    expected = torch.batch_norm_stats(x, 1e-5)
    for stats in (torch.ops.aten.batch_norm_stats, torch.ops.aten.batch_norm_stats.default):
        assert all(map(torch.equal, stats(x, 1e-5), expected))
    assert all(map(torch.equal, torch.batch_norm_stats(x, eps=1e-5), expected))


def test_plain_torch_have_torchs_own() -> None:
    x = torch.randn(4, 3, 5)
    with plain_torch(), pytest.raises(NotImplementedError, match="batch_norm_stats"):
        torch.batch_norm_stats(x, 1e-5)


EMPTY = [torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, affine=False), torch.nn.InstanceNorm1d(3)]
"""Layers that take an empty batch on the CPU."""


@pytest.mark.parametrize("target", ["simulated:mps", "simulated:strict"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", EMPTY, ids=str)
def test_an_empty_batch_has_no_statistics_in_float64(
    target: str, layer: torch.nn.Module, training: bool
) -> None:
    layer = copy.deepcopy(layer).cuda().train(training)
    x = torch.zeros(0, 3, 4, device="cuda", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, y.dtype, x.grad.shape) == (x.shape, torch.float32, x.shape)
