"""Products of a matrix of halves with one vector, where torch's kernel is faster than float32's.

The kernel sums in float32 and rounds once. It reads halves, so it takes less time than their
conversion to float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel.devices import cpu

_LEAST_LENGTH = 128
"""The length of a float16 vector from which the kernel is faster than the conversion."""


@functools.cache
def sums_in_vectors() -> bool:
    """Return whether torch sums products of float16 numbers with the CPU's vector instructions.

    The kernels for other CPUs, and for ``ATEN_CPU_CAPABILITY=default``, take ten times as long.
    Those for ARM were not measured.
    """
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def multiplies_rows() -> bool:
    """Return whether a bfloat16 row times a matrix is faster than the matrix times a vector.

    oneDNN's kernel for a row is the one of linear layers. ``mv``, which torch makes of ``addmv_``,
    calls it with a single column, and takes four times as long.
    """
    return sums_in_vectors() and cpu.computes_in_bfloat16()


def _is_fast(matrix: torch.Tensor, vector: torch.Tensor) -> bool:
    """Return whether torch's kernel for a row is fast: for float16, if the matrix is row-major."""
    if vector.dtype is torch.bfloat16:
        return multiplies_rows()
    length = vector.shape[0]
    is_row_major = matrix.stride(1) == 1 and matrix.stride(0) >= length
    return length >= _LEAST_LENGTH and is_row_major and sums_in_vectors()


def _row(
    matrix: torch.Tensor, vector: torch.Tensor, added: torch.Tensor | None = None, **factors: Any
) -> torch.Tensor | None:
    """Return a matrix times a vector as a matrix of one row; None where float32 is faster."""
    if not _is_fast(matrix, vector):
        return None
    # `addmv` would round before it multiplies by `alpha` and `beta`. `[None]` gives the row the
    # stride of a row; with that of a column, torch's kernel is slow.
    if added is None:
        return torch.mm(vector[None], matrix.t())
    return torch.addmm(added, vector[None], matrix.t(), **factors)


def _have_shapes(a: torch.Tensor, b: torch.Tensor, dimensions: int) -> bool:
    return a.dim() == 2 and b.dim() == dimensions and a.shape[1] == b.shape[0]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    if not _have_shapes(a, b, 2):
        return None
    if a.shape[0] == 1:
        return _row(b.t(), a[0])
    if b.shape[1] == 1:
        row = _row(a, b[:, 0])
        return None if row is None else row.t()
    return None


def _addmm(
    added: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **factors: Any
) -> torch.Tensor | None:
    if not _have_shapes(a, b, 2):
        return None
    if a.shape[0] == 1:
        return _row(b.t(), a[0], added, **factors)
    if b.shape[1] == 1:
        row = _row(a, b[:, 0], added.expand(a.shape[0], 1).t(), **factors)
        return None if row is None else row.t()
    return None


def _addmv(
    added: torch.Tensor, matrix: torch.Tensor, vector: torch.Tensor, **factors: Any
) -> torch.Tensor | None:
    if not _have_shapes(matrix, vector, 1) or added.shape != matrix.shape[:1]:
        return None
    row = _row(matrix, vector, added, **factors)
    return None if row is None else row[0]


_PRODUCTS: dict[str, Callable[..., torch.Tensor | None]] = {
    "aten::addmm": _addmm,
    "aten::addmv": _addmv,
    "aten::mm": _mm,
}


def product_of(name: str) -> Callable[..., torch.Tensor | None]:
    """Return a function that computes an operator's products with one vector.

    It returns None for other products, for those that are faster in float32, and for arguments that
    torch refuses.
    """
    return _PRODUCTS.get(name, lambda *args, **kwargs: None)
