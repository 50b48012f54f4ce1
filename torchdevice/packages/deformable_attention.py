"""``MultiScaleDeformableAttention``: the kernel of Deformable DETR and of models made from it.

Each query reads a few points of feature maps of several sizes, between whose cells it interpolates,
and sums what it reads by weights (arXiv 2010.04159).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from torchdevice.packages.extension_refusals import dispatches, reads_as
from torchdevice.packages.kernel_refusals import is_on_gpu, require
from torchdevice.packages.registry import on_simulated_gpu, stands_in, without_autocast

_MODULE = "MultiScaleDeformableAttention"


def _attended(
    value: torch.Tensor, sizes: list[list[int]], points: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the attention (batch, queries, heads * size of a head).

    Args:
        value: The maps one after the other: (batch, cells, heads, size of a head).
        sizes: Height and width of each map.
        points: From 0 to 1, width first: (batch, queries, heads, maps, points, 2).
        weights: (batch, queries, heads, maps, points).
    """
    batch, _, heads, size = value.shape
    queries = points.shape[1]
    maps = value.split([height * width for height, width in sizes], 1)
    # From -1 to 1, as grid_sample counts: (batch * heads, queries, points, 2) of each map.
    places = (2 * points - 1).transpose(1, 2).flatten(0, 1).unbind(2)
    with without_autocast(value):
        read = [
            functional.grid_sample(
                cells.permute(0, 2, 3, 1).reshape(batch * heads, size, *shape),
                place,
                mode="bilinear",
                padding_mode="zeros",
                align_corners=False,
            )
            for cells, shape, place in zip(maps, sizes, places, strict=True)
        ]
        # (batch * heads, size of a head, queries, maps * points)
        every = torch.stack(read, -2).flatten(-2)
        of_points = weights.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
        found = (every * of_points).sum(-1).view(batch, heads * size, queries)
        return found.transpose(1, 2).contiguous()


def _check(im2col_step: int, **tensors: torch.Tensor) -> None:
    """Raise the errors of the package's kernel, on a simulated GPU.

    Raises:
        RuntimeError: The batch is no multiple of the step, or the memory is not contiguous.
    """
    if not on_simulated_gpu():
        return
    batch = len(tensors["value"])
    step = min(batch, im2col_step)
    for name, each in tensors.items():
        require(each.is_contiguous(), f"{name} tensor has to be contiguous")
    for name, each in tensors.items():
        require(is_on_gpu(each), f"{name} must be a CUDA tensor")
    require(batch % step == 0, f"batch({batch}) must divide im2col_step({step})")


def of_maps(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_loc: torch.Tensor,
    attn_weight: torch.Tensor,
    im2col_step: int,
) -> torch.Tensor:
    """:func:`ms_deform_attn_forward` for every dtype."""
    _check(
        im2col_step,
        value=value,
        spatial_shapes=spatial_shapes,
        level_start_index=level_start_index,
        sampling_loc=sampling_loc,
        attn_weight=attn_weight,
    )
    with torch.no_grad():
        return _attended(value, spatial_shapes.tolist(), sampling_loc, attn_weight)


def of_maps_backward(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_loc: torch.Tensor,
    attn_weight: torch.Tensor,
    grad_output: torch.Tensor,
    im2col_step: int,
) -> list[torch.Tensor]:
    """:func:`ms_deform_attn_backward` for every dtype."""
    _check(
        im2col_step,
        value=value,
        spatial_shapes=spatial_shapes,
        level_start_index=level_start_index,
        sampling_loc=sampling_loc,
        attn_weight=attn_weight,
        grad_output=grad_output,
    )
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (value, sampling_loc, attn_weight)]
        out = _attended(leaves[0], spatial_shapes.tolist(), leaves[1], leaves[2])
        return list(torch.autograd.grad(out, leaves, grad_output))


def _check_kind(kernel: str, value: torch.Tensor, *others: torch.Tensor) -> None:
    """Check the devices and dtypes that the package's kernel refuses, on a simulated GPU."""
    if on_simulated_gpu():
        require(is_on_gpu(value), "Not implemented on the CPU")
        dispatches(kernel, value.dtype, (torch.float32, torch.float64))
        reads_as(value.dtype, others)


@stands_in(f"{_MODULE}.ms_deform_attn_forward")
def ms_deform_attn_forward(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_loc: torch.Tensor,
    attn_weight: torch.Tensor,
    im2col_step: int,
) -> torch.Tensor:
    """Return the attention (batch, queries, heads * size of a head).

    Args:
        value: The maps one after the other: (batch, cells, heads, size of a head).
        spatial_shapes: Height and width of each map: (maps, 2).
        level_start_index: Where each map begins: (maps,).
        sampling_loc: The points, from 0 to 1: (batch, queries, heads, maps, points, 2).
        attn_weight: The weights: (batch, queries, heads, maps, points).
        im2col_step: How many of the batch a kernel computes at once. Not needed here.
    """
    _check_kind("ms_deform_attn_forward_cuda", value, sampling_loc, attn_weight)
    given = value, spatial_shapes, level_start_index, sampling_loc, attn_weight
    return of_maps(*given, im2col_step)


@stands_in(f"{_MODULE}.ms_deform_attn_backward")
def ms_deform_attn_backward(
    value: torch.Tensor,
    spatial_shapes: torch.Tensor,
    level_start_index: torch.Tensor,
    sampling_loc: torch.Tensor,
    attn_weight: torch.Tensor,
    grad_output: torch.Tensor,
    im2col_step: int,
) -> list[torch.Tensor]:
    """Return the gradients of the maps, of the points and of the weights.

    Args:
        value: As in :func:`ms_deform_attn_forward`, and so are the others.
        grad_output: The gradient of the attention.
    """
    _check_kind("ms_deform_attn_backward_cuda", value, sampling_loc, attn_weight, grad_output)
    given = value, spatial_shapes, level_start_index, sampling_loc, attn_weight
    return of_maps_backward(*given, grad_output, im2col_step)
