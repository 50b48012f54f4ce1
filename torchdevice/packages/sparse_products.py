"""``torch_sparse``: functions of sparse matrices that are given by the indices and the values of
their elements. The class SparseTensor is not stood in for.

An index is (2, elements): the rows and the columns. A matrix is m x n.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.packages.registry import refuses, stands_in

_REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "min": "amin", "max": "amax"}


@stands_in("torch_sparse.coalesce torch_sparse.coalesce.coalesce")
def coalesce(
    index: torch.Tensor, value: torch.Tensor | None, m: int, n: int, op: str = "add"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the elements sorted by row and column, with one for each place.

    Args:
        index: (2, elements).
        value: (elements, ...), or None.
        m: The number of rows.
        n: The number of columns.
        op: The reduction of several values of a place: ``"add"``, ``"mean"``, ``"min"``, ``"max"``.

    Raises:
        ValueError: ``op`` is another one.
    """
    if op not in _REDUCTIONS:
        raise ValueError(f"op={op!r} is not known. Use one of {', '.join(_REDUCTIONS)}.")
    places, number = torch.unique(index[0] * n + index[1], sorted=True, return_inverse=True)
    found = torch.stack([torch.div(places, n, rounding_mode="floor"), places % n])
    if value is None:
        return found, None
    shape = (len(places), *value.shape[1:])
    along = number.view(-1, *(1 for _ in value.shape[1:])).expand_as(value)
    summed = value.new_zeros(shape).scatter_reduce(
        0, along, value, _REDUCTIONS[op], include_self=False
    )
    return found, summed


@stands_in("torch_sparse.transpose torch_sparse.transpose.transpose")
def transpose(
    index: torch.Tensor, value: torch.Tensor | None, m: int, n: int, coalesced: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the elements of the transposed matrix, which is n x m.

    Args:
        index: (2, elements).
        value: (elements, ...), or None.
        m: The number of rows.
        n: The number of columns.
        coalesced: Whether the elements are sorted, with one for each place.
    """
    turned = torch.stack([index[1], index[0]])
    if not coalesced:
        return turned, value
    found: tuple[torch.Tensor, torch.Tensor | None] = _plain(coalesce)(turned, value, n, m)
    return found


@stands_in("torch_sparse.spmm torch_sparse.spmm.spmm")
def spmm(
    index: torch.Tensor, value: torch.Tensor, m: int, n: int, matrix: torch.Tensor
) -> torch.Tensor:
    """Return the product with a dense matrix.

    Args:
        index: (2, elements).
        value: (elements,).
        m: The number of rows.
        n: The number of columns, and of rows of ``matrix``.
        matrix: (n, k), or (n,), which counts as (n, 1).
    """
    matrix = matrix if matrix.dim() > 1 else matrix[:, None]
    rows, columns = index
    parts = matrix.index_select(-2, columns) * value[:, None]
    return parts.new_zeros(*parts.shape[:-2], m, parts.shape[-1]).index_add(-2, rows, parts)


@stands_in("torch_sparse.spspmm torch_sparse.spspmm.spspmm")
def spspmm(
    indexA: torch.Tensor,
    valueA: torch.Tensor,
    indexB: torch.Tensor,
    valueB: torch.Tensor,
    m: int,
    k: int,
    n: int,
    coalesced: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of the product of two sparse matrices, m x k and k x n.

    Args:
        indexA: (2, elements of the first).
        valueA: (elements of the first,).
        indexB: (2, elements of the second).
        valueB: (elements of the second,).
        m: The number of rows of the first.
        k: The number of columns of the first, and of rows of the second.
        n: The number of columns of the second.
        coalesced: Whether the elements are made to be sorted, with one for each place, before.
    """
    if coalesced:
        indexA, valueA = _plain(coalesce)(indexA, valueA, m, k)
        indexB, valueB = _plain(coalesce)(indexB, valueB, k, n)
    # Each element of the first meets those of the second in the row of its column.
    order = indexB[0].argsort(stable=True)
    lengths = torch.bincount(indexB[0], minlength=k)
    starts = lengths.cumsum(0) - lengths
    met = lengths[indexA[1]]
    first = torch.repeat_interleave(torch.arange(len(valueA), device=met.device), met)
    within = torch.arange(len(first), device=met.device) - (met.cumsum(0) - met)[first]
    second = order[starts[indexA[1]][first] + within]
    index = torch.stack([indexA[0][first], indexB[1][second]])
    found: tuple[torch.Tensor, torch.Tensor] = _plain(coalesce)(
        index, valueA[first] * valueB[second], m, n
    )
    return found


@stands_in("torch_sparse.eye torch_sparse.eye.eye")
def eye(
    m: int, dtype: torch.dtype | None = None, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of the unit matrix of m rows."""
    row = torch.arange(m, dtype=torch.long, device=device)
    return torch.stack([row, row]), torch.ones(m, dtype=dtype, device=device)


def _plain(function: Any) -> Any:
    """Return a function without its report: the program has not called it itself."""
    return function.__wrapped__


refuses(
    "torch_sparse.SparseTensor torch_sparse.tensor.SparseTensor torch_sparse.matmul "
    "torch_sparse.SparseStorage torch_sparse.storage.SparseStorage",
    "Use torch.sparse_csr_tensor or torch.sparse_coo_tensor.",
)
