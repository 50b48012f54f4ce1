"""The plain tensors of which a sparse tensor consists, whatever device it is on."""

from __future__ import annotations

import torch

BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)

_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the values and indices of a sparse tensor: COO's, or compressed and plain ones."""
    if tensor.is_sparse:
        return tensor._indices(), tensor._values()
    if tensor.layout in BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def plain_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the parts of a sparse tensor, a strided tensor itself, and nothing of others."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return (tensor,)
    if tensor.is_sparse or tensor.layout in (*BY_ROWS, *_BY_COLUMNS):
        return parts_of(tensor)
    return ()
