"""Attention of distributed tensors, in one process: as rank 0 of two, or alone in its group."""

# Tests import torch.distributed.tensor themselves: it takes a second, which would delay the
# collecting of all tests.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torchdevice

Mesh = Callable[[int], Any]


@pytest.fixture
def mesh(cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mesh]:
    """Make a mesh of so many ranks, this process the first; others do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # torch keeps the name of the last group's backend after the group has ended.
    monkeypatch.setattr(dist.distributed_c10d, "_backend", dist.distributed_c10d._backend)

    def make(size: int) -> Any:
        if size == 1:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return dist.device_mesh.init_device_mesh("cuda", (size,))

    yield make
    dist.destroy_process_group()


def distributed(part: torch.Tensor, mesh: Any, dim: int | None) -> Any:
    """Return a distributed tensor with this rank's part, divided by a dimension or whole."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(part.cuda(), mesh, [placement], run_check=False)


def in_ring(mesh: Any) -> AbstractContextManager[Any]:
    """Divide sequences among the ranks of a mesh, as torch does with at least one buffer."""
    from torch.distributed.tensor.experimental import context_parallel

    return context_parallel(mesh, buffers=[torch.zeros(8).cuda()], buffer_seq_dims=[0])


def inputs(rows: int = 8) -> list[torch.Tensor]:
    """Return a query of 2 batches, 3 heads, 8 rows, and keys and values of any length."""
    numbers = torch.Generator().manual_seed(6)
    return [
        torch.randn(2, 3, each, 4, generator=numbers, requires_grad=True)
        for each in (8, rows, rows)
    ]


def attention(
    tensors: list[torch.Tensor], gradient: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """Return the result of attention and the gradients of query, key and value."""
    found = F.scaled_dot_product_attention(*tensors, **options)
    return [found.detach(), *torch.autograd.grad(found, tensors, gradient)]


@pytest.mark.parametrize(("dim", "of_gradient"), [(0, 0), (1, 1), (0, None)])
def test_a_rank_computes_with_its_batches_or_its_heads(
    mesh: Mesh, dim: int, of_gradient: int | None
) -> None:
    of_two, options = mesh(2), {"is_causal": dim == 0, "scale": 0.3}
    parts, gradient = inputs(8 if dim == 0 else 10), torch.randn(2, 3, 8, 4)
    whole_gradient = (
        gradient
        if of_gradient is not None
        else torch.cat([gradient, torch.zeros_like(gradient)], dim)
    )
    divided = [distributed(each, of_two, dim) for each in parts]
    found = attention(divided, distributed(whole_gradient, of_two, of_gradient), **options)
    for one, other in zip(found, attention(parts, gradient, **options), strict=True):
        shape = list(other.shape)
        shape[dim] *= 2
        assert list(one.shape) == shape and one.placements[0].is_shard(dim)
        assert torch.allclose(one.to_local().cpu(), other, atol=1e-6)


@pytest.mark.parametrize("target", ["cpu"])
@pytest.mark.parametrize(("dim", "masks"), [(2, False), (0, True)])
def test_what_a_rank_cannot_compute_alone_is_refused_in_torchs_words(
    mesh: Mesh, dim: int, masks: bool
) -> None:
    of_two = mesh(2)
    divided = [distributed(each, of_two, dim) for each in inputs()]
    mask = distributed(torch.zeros(8, 8), of_two, None) if masks else None
    with pytest.raises(
        NotImplementedError,
        match=r"flash_attention_for_cpu\.default does not have a sharding strategy",
    ):
        F.scaled_dot_product_attention(*divided, attn_mask=mask)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_ring_of_one_rank_computes_as_no_ring(
    mesh: Mesh, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor.experimental import _attention as ring

    # Torch balances causal attention only.
    monkeypatch.setattr(ring._cp_options, "enable_load_balance", is_causal)
    gradient = torch.randn(2, 3, 8, 4)
    parts = [each.detach().cuda().requires_grad_() for each in inputs()]
    expected = attention(parts, gradient.cuda(), is_causal=is_causal)
    with in_ring(mesh(1)):
        found = attention(parts, gradient.cuda(), is_causal=is_causal)
    assert all(
        torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("target", ["cpu"])
def test_a_ring_refuses_a_mask(mesh: Mesh) -> None:
    parts = [each.detach().cuda() for each in inputs()]
    with (
        in_ring(mesh(1)),
        pytest.raises(NotImplementedError, match=r"context_parallel does not divide attn_mask"),
    ):
        F.scaled_dot_product_attention(*parts, attn_mask=torch.zeros(2, 1, 8, 8).cuda())
