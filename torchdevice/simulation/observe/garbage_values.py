"""The contents of memory that a copy in flight has not reached yet.

Numbers are NaN, other values have bytes of their own, and bools are the opposite of what will come. The indices of a
sparse tensor are garbage too, but valid ones, because kernels of the CPU trust them and end the process otherwise.
"""

from __future__ import annotations

import torch

from torchdevice.devices.sparse_parts import BY_ROWS, parts_of

_BYTE = 0xA5
"""The byte of which garbage consists, except that of floating-point numbers, which is NaN: all bits are 1."""

_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)


def garbage_for(tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the plain tensors of which a CPU tensor consists, each with garbage in its shape and dtype."""
    if tensor.layout is torch.strided:
        return [(tensor, of_values(tensor))]
    *indices, values = parts_of(tensor)
    valid = _of_coo(tensor) if tensor.is_sparse else _of_compressed(tensor)
    return [*zip(indices, valid, strict=True), (values, of_values(values))]


def of_values(like: torch.Tensor) -> torch.Tensor:
    """Return garbage in the shape and dtype of a CPU tensor."""
    if like.dtype is torch.bool:
        return torch.logical_not(like)
    garbage = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    number = like.dtype.is_floating_point or like.dtype.is_complex
    garbage.reshape(-1).view(torch.uint8).fill_(0xFF if number else _BYTE)
    return garbage


def _of_coo(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return indices of the first places of a COO tensor, row by row, shape (sparse dimensions, elements)."""
    shape = tensor.shape[: tensor.sparse_dim()]
    places = torch.arange(tensor._nnz(), device="cpu") % max(1, shape.numel())
    return [torch.stack(torch.unravel_index(places, shape)) if shape else torch.empty(0, tensor._nnz()).long()]


def _of_compressed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the compressed and plain indices of the first places of a compressed tensor, row by row or by column."""
    compressed, plain, values = parts_of(tensor)
    batches = compressed.dim() - 1
    axis = 1 if tensor.layout in BY_ROWS else 0
    block = values.shape[batches + 1 + axis] if tensor.layout in _BLOCKED else 1
    width = max(1, tensor.shape[batches + axis] // block)
    count = plain.shape[-1]
    bounds = (torch.arange(compressed.shape[-1], device="cpu") * width).clamp(max=count)
    within = torch.arange(count, device="cpu") % width
    return [bounds.to(compressed.dtype).expand_as(compressed), within.to(plain.dtype).expand_as(plain)]
