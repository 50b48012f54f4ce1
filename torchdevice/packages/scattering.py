"""``torch_scatter``: reductions of the elements that have the same index, or that stand in one
segment.

An index of one dimension counts the elements along ``dim``; others have the shape of the elements,
or one that expands to it. Segments are either sorted indices (``coo``) or the places at which each
segment begins, and the end of the last (``csr``).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from torchdevice.packages.extension_refusals import check_scattered
from torchdevice.packages.registry import stands_in, unseen

_SCATTER, _COO, _CSR = (
    f"torch_scatter.{name}" for name in ("scatter", "segment_coo", "segment_csr")
)

_REDUCTIONS = {
    "sum": "sum",
    "add": "sum",
    "mul": "prod",
    "mean": "sum",
    "min": "amin",
    "max": "amax",
}
"""Name of a reduction -> that of ``Tensor.scatter_reduce_`` which it is made of."""


def _names(module: str, name: str) -> str:
    return f"{module}.{name} torch_scatter.{name}"


def _composite(file: str, name: str) -> str:
    package = "torch_scatter.composite"
    return f"{package}.{name} {package}.{file}.{name} torch_scatter.{name}"


@stands_in("torch_scatter.utils.broadcast")
def broadcast(src: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    """Return src expanded to the shape of other. One dimension of src is that of ``dim``."""
    with unseen():
        dim = other.dim() + dim if dim < 0 else dim
        before = dim if src.dim() == 1 else 0
        after = other.dim() - src.dim() - before
    for _ in range(before):
        src = src.unsqueeze(0)
    for _ in range(after):
        src = src.unsqueeze(-1)
    return src.expand(other.size())


def _size(index: torch.Tensor, given: int | None) -> int:
    """Return how many results there are: one more than the largest index, if nothing is given."""
    if given is not None:
        return given
    return int(index.max()) + 1 if index.numel() else 0


def _empty_like(src: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(src.shape)
    shape[dim] = size
    return src.new_zeros(shape)


def _reduced(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int,
    out: torch.Tensor | None,
    size: int | None,
    reduction: str,
) -> torch.Tensor:
    """Return a reduction of the elements that have the same index: 0, or 1 of products, where there
    are none.

    With ``out`` it is that of the elements and of what ``out`` has, and it is written there.
    """
    index = broadcast(index, src, dim)
    if out is None:
        out = _empty_like(src, dim, _size(index, size))
        out = out + 1 if reduction == "mul" else out
    if reduction in ("sum", "add", "mean"):
        return out.scatter_add_(dim, index, src)
    return out.scatter_reduce_(dim, index, src, _REDUCTIONS[reduction])


def _extremes(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int,
    out: torch.Tensor | None,
    size: int | None,
    reduction: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest or largest of the elements that have the same index, and the place of the
    first such along ``dim``: the number of places where there is none.

    The gradient is that of the element at the place.
    """
    index = broadcast(index, src, dim)
    places = src.shape[dim]
    found = _empty_like(src, dim, _size(index, size)).detach() if out is None else out.detach()
    with torch.no_grad():
        values = src.detach()
        found = found.scatter_reduce(
            dim, index, values, _REDUCTIONS[reduction], include_self=out is not None
        )
        along = torch.arange(places, device=src.device)
        along = broadcast(along, src, dim) if src.numel() else index
        matches = values == found.gather(dim, index)
        where = torch.full_like(found, places, dtype=torch.long)
        where = where.scatter_reduce(
            dim, index, along.masked_fill(~matches, places), "amin", include_self=True
        )
    if out is not None:
        out.copy_(found)
        return out, where
    if torch.is_grad_enabled() and src.requires_grad:
        none = src.new_zeros(()).expand(*src.shape[:dim], 1, *src.shape[dim + 1 :])
        found = torch.cat([src, none], dim).gather(dim, where)
    return found, where


def _positive(src: torch.Tensor, dim: int) -> int:
    with unseen():
        return src.dim() + dim if dim < 0 else dim


# ---- by index ------------------------------------------------------------------------------------


@stands_in(_names(_SCATTER, "scatter_sum"))
def scatter_sum(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the sum of the elements that have the same index.

    Args:
        src: The elements.
        index: The place of each in the result.
        dim: The dimension along which elements are reduced.
        out: A tensor to which the elements are added, and which is returned.
        dim_size: The size of the result along ``dim``. Default: the largest index, plus 1.
    """
    return _reduced(src, index, _positive(src, dim), out, dim_size, "sum")


@stands_in(_names(_SCATTER, "scatter_add"))
def scatter_add(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the sum of the elements that have the same index."""
    return _reduced(src, index, _positive(src, dim), out, dim_size, "sum")


@stands_in(_names(_SCATTER, "scatter_mul"))
def scatter_mul(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the product of the elements that have the same index; 1 where there are none."""
    dim = _positive(src, dim)
    check_scattered("scatter", src, index, out, dim)
    return _reduced(src, index, dim, out, dim_size, "mul")


@stands_in(_names(_SCATTER, "scatter_mean"))
def scatter_mean(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the mean of the elements that have the same index; of integers rounded down."""
    dim = _positive(src, dim)
    index = broadcast(index, src, dim)
    total = _reduced(src, index, dim, out, dim_size, "sum")
    counts = _reduced(torch.ones_like(src), index, dim, None, total.shape[dim], "sum").clamp(min=1)
    found: torch.Tensor = _written(_quotient(total, counts), out)
    return found


def _quotient(total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if total.is_floating_point():
        return total / counts
    return torch.div(total, counts, rounding_mode="floor")


@stands_in(_names(_SCATTER, "scatter_min"))
def scatter_min(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest of the elements that have the same index, and its place in ``src``.

    Where there are none, the value is 0 and the place the size of ``src`` along ``dim``.
    """
    dim = _positive(src, dim)
    check_scattered("scatter", src, index, out, dim)
    return _extremes(src, index, dim, out, dim_size, "min")


@stands_in(_names(_SCATTER, "scatter_max"))
def scatter_max(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of the elements that have the same index, and its place in ``src``.

    Where there are none, the value is 0 and the place the size of ``src`` along ``dim``.
    """
    dim = _positive(src, dim)
    check_scattered("scatter", src, index, out, dim)
    return _extremes(src, index, dim, out, dim_size, "max")


@stands_in(_names(_SCATTER, "scatter"))
def scatter(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> torch.Tensor:
    """Return a reduction of the elements that have the same index: ``"sum"``, ``"add"``, ``"mul"``,
    ``"mean"``, ``"min"`` or ``"max"``.

    Raises:
        ValueError: It is another one.
    """
    if reduce not in _BY_INDEX:
        raise ValueError(f"reduce={reduce!r} is not known. Use one of {', '.join(_BY_INDEX)}.")
    found = _BY_INDEX[reduce](src, index, dim, out, dim_size)
    return found[0] if isinstance(found, tuple) else found


# Without their reports: a program that calls `scatter` has called nothing else.
_BY_INDEX: dict[str, Any] = {
    name: function.__wrapped__  # type: ignore[union-attr]
    for name, function in (
        ("sum", scatter_sum),
        ("add", scatter_add),
        ("mul", scatter_mul),
        ("mean", scatter_mean),
        ("min", scatter_min),
        ("max", scatter_max),
    )
}


# ---- by segments ---------------------------------------------------------------------------------


def _of_segments(indptr: torch.Tensor, places: int) -> torch.Tensor:
    """Return the number of the segment of each place; the number of segments where it is in none.

    Args:
        indptr: (..., segments + 1).
        places: The number of places.
    """
    along = torch.arange(places, device=indptr.device).expand(*indptr.shape[:-1], places)
    number = torch.searchsorted(indptr.contiguous(), along.contiguous(), right=True) - 1
    outside = (number < 0) | (along >= indptr[..., -1:])
    return number.masked_fill(outside, indptr.shape[-1] - 1)


def _by_pointers(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None, reduction: str
) -> Any:
    """Return a reduction of segments that ``indptr`` bounds, and the places of extremes."""
    indptr = _with_an_end(indptr)
    dim, segments = indptr.dim() - 1, indptr.shape[-1] - 1
    check_scattered("segment_csr", src, indptr, out, dim)
    places = src.shape[dim]
    starts = indptr.expand(*src.shape[:dim], segments + 1)
    # One more result takes the elements in no segment.
    found = _BY_INDEX[reduction](src, _of_segments(starts, places), dim, None, segments + 1)
    return _written(_narrowed(found, dim, segments), out)


def _with_an_end(indptr: torch.Tensor) -> torch.Tensor:
    """Return pointers that have an end: 0 where there are none at all."""
    return indptr if indptr.shape[-1] else indptr.new_zeros(*indptr.shape[:-1], 1)


def _narrowed(found: Any, dim: int, size: int) -> Any:
    if isinstance(found, tuple):
        return tuple(each.narrow(dim, 0, size) for each in found)
    return found.narrow(dim, 0, size)


def _written(found: Any, out: torch.Tensor | None) -> Any:
    if out is None:
        return found
    if isinstance(found, tuple):
        return out.copy_(found[0]), *found[1:]
    return out.copy_(found)


@stands_in(_names(_CSR, "segment_sum_csr"))
def segment_sum_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of each segment.

    Args:
        src: The elements. The last dimension of ``indptr`` is the one of the segments.
        indptr: Where each segment begins, and the end of the last: (..., segments + 1).
        out: Where to write the result.
    """
    found: torch.Tensor = _by_pointers(src, indptr, out, "sum")
    return found


@stands_in(_names(_CSR, "segment_add_csr"))
def segment_add_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of each segment."""
    found: torch.Tensor = _by_pointers(src, indptr, out, "sum")
    return found


@stands_in(_names(_CSR, "segment_mean_csr"))
def segment_mean_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean of each segment."""
    found: torch.Tensor = _by_pointers(src, indptr, out, "mean")
    return found


@stands_in(_names(_CSR, "segment_min_csr"))
def segment_min_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest element of each segment, and its place."""
    found: tuple[torch.Tensor, torch.Tensor] = _by_pointers(src, indptr, out, "min")
    return found


@stands_in(_names(_CSR, "segment_max_csr"))
def segment_max_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest element of each segment, and its place."""
    found: tuple[torch.Tensor, torch.Tensor] = _by_pointers(src, indptr, out, "max")
    return found


@stands_in(_names(_CSR, "segment_csr"))
def segment_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None, reduce: str = "sum"
) -> torch.Tensor:
    """Return a reduction of each segment: ``"sum"``, ``"add"``, ``"mean"``, ``"min"`` or ``"max"``.

    Raises:
        ValueError: It is another one.
    """
    _check_segments(reduce)
    found = _by_pointers(src, indptr, out, reduce)
    return found[0] if isinstance(found, tuple) else found


def _check_segments(reduce: str) -> None:
    known = [name for name in _BY_INDEX if name != "mul"]
    if reduce not in known:
        raise ValueError(f"reduce={reduce!r} is not known. Use one of {', '.join(known)}.")


@stands_in(_names(_CSR, "gather_csr"))
def gather_csr(
    src: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the element of each segment as often as the segment is long."""
    indptr = _with_an_end(indptr)
    dim, segments = indptr.dim() - 1, indptr.shape[-1] - 1
    check_scattered("gather_csr", src, indptr, out, dim)
    length = int(indptr[..., -1].max()) if indptr.numel() else 0
    starts = indptr.expand(*src.shape[:dim], segments + 1)
    return _written(_gathered(src, _of_segments(starts, length), dim), out)  # type: ignore[no-any-return]


def _gathered(src: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the elements of src at an index along ``dim``, which is the last one of the index."""
    shape = (*src.shape[:dim], index.shape[-1], *src.shape[dim + 1 :])
    index = index.expand(*src.shape[:dim], index.shape[-1])
    for _ in range(src.dim() - index.dim()):
        index = index.unsqueeze(-1)
    return src.gather(dim, index.expand(shape))


def _by_sorted(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None,
    size: int | None,
    reduction: str,
) -> Any:
    """Return a reduction of segments whose elements have one index."""
    dim = index.dim() - 1
    check_scattered("segment_coo", src, index, out, dim)
    whole = index.expand(*src.shape[:dim], index.shape[-1])
    return _BY_INDEX[reduction](src, whole, dim, out, size)


@stands_in(_names(_COO, "segment_sum_coo"))
def segment_sum_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the sum of the elements that have the same index.

    Args:
        src: The elements. The last dimension of ``index`` is the one along which they are reduced.
        index: Sorted along its last dimension.
        out: A tensor to which the elements are added, and which is returned.
        dim_size: The number of results. Default: the largest index, plus 1.
    """
    found: torch.Tensor = _by_sorted(src, index, out, dim_size, "sum")
    return found


@stands_in(_names(_COO, "segment_add_coo"))
def segment_add_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the sum of the elements that have the same index."""
    found: torch.Tensor = _by_sorted(src, index, out, dim_size, "sum")
    return found


@stands_in(_names(_COO, "segment_mean_coo"))
def segment_mean_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the mean of the elements that have the same index."""
    found: torch.Tensor = _by_sorted(src, index, out, dim_size, "mean")
    return found


@stands_in(_names(_COO, "segment_min_coo"))
def segment_min_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest of the elements that have the same index, and its place."""
    found: tuple[torch.Tensor, torch.Tensor] = _by_sorted(src, index, out, dim_size, "min")
    return found


@stands_in(_names(_COO, "segment_max_coo"))
def segment_max_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest of the elements that have the same index, and its place."""
    found: tuple[torch.Tensor, torch.Tensor] = _by_sorted(src, index, out, dim_size, "max")
    return found


@stands_in(_names(_COO, "segment_coo"))
def segment_coo(
    src: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> torch.Tensor:
    """Return a reduction of the elements that have the same index: ``"sum"``, ``"add"``,
    ``"mean"``, ``"min"`` or ``"max"``.

    Raises:
        ValueError: It is another one.
    """
    _check_segments(reduce)
    found = _by_sorted(src, index, out, dim_size, reduce)
    return found[0] if isinstance(found, tuple) else found


@stands_in(_names(_COO, "gather_coo"))
def gather_coo(
    src: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the elements at an index along its last dimension."""
    check_scattered("gather_coo", src, index, out, index.dim() - 1)
    return _written(_gathered(src, index, index.dim() - 1), out)  # type: ignore[no-any-return]


# ---- compositions --------------------------------------------------------------------------------


@stands_in(_composite("std", "scatter_std"))
def scatter_std(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> torch.Tensor:
    """Return the standard deviation of the elements that have the same index."""
    dim = _positive(src, dim)
    if out is not None:
        dim_size = out.shape[dim]
    index = broadcast(index, src, dim)
    sums = _BY_INDEX["sum"]
    counts = sums(torch.ones_like(src), index, dim, None, dim_size)
    mean = sums(src, index, dim, None, dim_size) / counts.clamp(min=1)
    squares = sums((src - mean.gather(dim, index)).square(), index, dim, out, dim_size)
    freedom = counts - 1 if unbiased else counts
    divisor = freedom.clamp(min=1)
    found = (squares / (divisor + 1e-6)).sqrt()
    return _written(found, out)  # type: ignore[no-any-return]


@stands_in(_composite("logsumexp", "scatter_logsumexp"))
def scatter_logsumexp(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    out: torch.Tensor | None = None,
    dim_size: int | None = None,
    eps: float = 1e-12,
) -> torch.Tensor:
    """Return the logarithm of the sum of the exponentials of the elements that have the same index;
    0 where there are none.

    Args:
        src: The elements, of a floating-point dtype.
        index: The place of each in the result.
        dim: The dimension along which elements are reduced.
        out: Another element of each result, which is written to and returned.
        dim_size: The size of the result along ``dim``. Default: the largest index, plus 1.
        eps: Added to the sums.
    """
    _check_floating(src, "scatter_logsumexp")
    dim = _positive(src, dim)
    index = broadcast(index, src, dim)
    size = _size(index, out.shape[dim] if out is not None else dim_size)
    largest = _empty_like(src, dim, size).fill_(-math.inf) if out is None else out.detach().clone()
    largest = largest.scatter_reduce(dim, index, src.detach(), "amax")
    centred = src - largest.gather(dim, index)
    sums = None if out is None else (out - largest).nan_to_num(nan=-math.inf).exp()
    total = _BY_INDEX["sum"](centred.exp(), index, dim, sums, size)
    found = ((total + eps).log() + largest).nan_to_num(neginf=0.0)
    return _written(found, out)  # type: ignore[no-any-return]


@stands_in(_composite("softmax", "scatter_softmax"))
def scatter_softmax(
    src: torch.Tensor, index: torch.Tensor, dim: int = -1, dim_size: int | None = None
) -> torch.Tensor:
    """Return the softmax among the elements that have the same index."""
    _check_floating(src, "scatter_softmax")
    exponentials, index, dim, size = _centred_exponentials(src, index, dim, dim_size)
    total = _BY_INDEX["sum"](exponentials, index, dim, None, size)
    return exponentials / total.gather(dim, index)


@stands_in(_composite("softmax", "scatter_log_softmax"))
def scatter_log_softmax(
    src: torch.Tensor,
    index: torch.Tensor,
    dim: int = -1,
    eps: float = 1e-12,
    dim_size: int | None = None,
) -> torch.Tensor:
    """Return the logarithm of the softmax among the elements that have the same index."""
    _check_floating(src, "scatter_log_softmax")
    dim = _positive(src, dim)
    index = broadcast(index, src, dim)
    largest = _BY_INDEX["max"](src.detach(), index, dim, None, dim_size)[0]
    centred = src - largest.gather(dim, index)
    total = _BY_INDEX["sum"](centred.exp(), index, dim, None, largest.shape[dim])
    return centred - (total + eps).log().gather(dim, index)


def _centred_exponentials(
    src: torch.Tensor, index: torch.Tensor, dim: int, size: int | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the exponentials, of which the largest of each index is 1, the expanded index, the
    dimension and the number of results.
    """
    dim = _positive(src, dim)
    index = broadcast(index, src, dim)
    largest = _BY_INDEX["max"](src.detach(), index, dim, None, size)[0]
    return (src - largest.gather(dim, index)).exp(), index, dim, largest.shape[dim]


def _check_floating(src: torch.Tensor, name: str) -> None:
    if not torch.is_floating_point(src):
        raise ValueError(
            f"`{name}` can only be computed over tensors with floating point data types."
        )
