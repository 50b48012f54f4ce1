"""``mmcv._ext`` and ``detectron2._C``: the compiled part of libraries of detection.

Their Python is installed without it, as mmcv-lite is. Kernels write to tensors that the library has
made, and gradients are computed by differentiating the mathematics again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.deformable_attention import of_maps, of_maps_backward
from torchdevice.packages.extension_refusals import (
    Convolution,
    check_deformed,
    check_kernel,
    check_modulated,
    check_on_cpu,
    check_whole_memory,
)
from torchdevice.packages.registry import (
    has,
    on_simulated_gpu,
    stands_in,
    widened,
    without_autocast,
)

_EXT = "mmcv._ext"


def _both(name: str, other: str = "") -> str:
    return f"{_EXT}.{name} detectron2._C.{other or name}"


def _of_mmcv(
    name: str, check: Callable[[dict[str, Any]], None]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a kernel of detectron2 as mmcv's too, which checks its arguments first.

    Args:
        name: Its name in mmcv.
        check: Checks the arguments, by their names.
    """

    def register(function: Any) -> Any:
        kernel = function.__wrapped__
        signature = inspect.signature(kernel)

        @functools.wraps(kernel)
        def checked(*args: Any, **kwargs: Any) -> None:
            if on_simulated_gpu() and not torch.compiler.is_compiling():
                check(signature.bind(*args, **kwargs).arguments)
            kernel(*args, **kwargs)

        stands_in(f"{_EXT}.{name}")(checked)
        return function

    return register


def _check_deformed(given: dict[str, Any]) -> None:
    check_whole_memory(
        {name: each for name, each in given.items() if isinstance(each, torch.Tensor)}
    )
    pairs: Any = [(given[f"{name}H"], given[f"{name}W"]) for name in ("k", "d", "pad", "dilation")]
    how = Convolution(*pairs, groups=given["group"], deform_groups=given["deformable_group"])
    weight = given["weight"] if "weight" in given else given["gradWeight"]
    check_deformed(given["input"], weight, given["offset"], how)


def _check_modulated(given: dict[str, Any]) -> None:
    pairs: Any = [
        (given[f"{name}_h"], given[f"{name}_w"]) for name in ("kernel", "stride", "pad", "dilation")
    ]
    how = Convolution(*pairs, groups=given["group"], deform_groups=given["deformable_group"])
    check_modulated(given["input"], given["weight"], given["offset"], given["mask"], how)


def _gradients(
    function: Callable[..., torch.Tensor], given: list[torch.Tensor], towards: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of a function's tensors, from that of its result."""
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in given]
        out = function(*leaves)
        if not out.requires_grad:  # of no regions, for example
            return [torch.zeros_like(each) for each in given]
        found = torch.autograd.grad(out, leaves, towards.to(out.dtype), materialize_grads=True)
    return list(found)


# ---- deformable convolutions ---------------------------------------------------------------------


class Window(NamedTuple):
    """How a deformable convolution moves over its input, each of height and width.

    Attributes:
        stride: How far apart results are.
        padding: How many zeros are around the input.
        dilation: How far apart the elements of the kernel are.
        groups: In how many groups input and output channels are.
        deform_groups: How many groups of input channels have offsets of their own.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    deform_groups: int


def deformed(
    x: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    window: Window,
) -> torch.Tensor:
    """Return the deformable convolution (arXiv 1703.06211), with a mask that of arXiv 1811.11168.

    Args:
        x: (batch, channels, height, width).
        weight: (results, channels of a group, kernel height, kernel width).
        offset: Down and right, of each element of the kernel: (batch, groups * elements * 2, rows,
            columns).
        mask: The factor of each element: (batch, groups * elements, rows, columns).
        bias: (results,).
        window: How it moves.
    """
    wide_x, wide_weight, wide_offset, wide_mask, wide_bias = widened(x, weight, offset, mask, bias)
    batch, channels, height, width = x.shape
    results, _, *kernel = weight.shape
    elements = kernel[0] * kernel[1]
    rows, columns = offset.shape[-2:]
    apart = window.deform_groups
    moved = wide_offset.reshape(batch, apart, elements, 2, rows, columns)
    down = moved[:, :, :, 0] + _places(rows, columns, kernel, window, 0, wide_offset)
    right = moved[:, :, :, 1] + _places(rows, columns, kernel, window, 1, wide_offset)
    planes = wide_x.reshape(batch * apart, channels // apart, height, width)
    with without_autocast(x):
        read = _between(planes, down.reshape(len(planes), -1), right.reshape(len(planes), -1))
        read = read.reshape(batch, apart, channels // apart, elements, rows * columns)
        if wide_mask is not None:
            read = read * wide_mask.reshape(batch, apart, 1, elements, rows * columns)
        patches = read.reshape(batch, window.groups, -1, rows * columns)
        kernels = wide_weight.reshape(window.groups, results // window.groups, -1)
        out = (kernels @ patches).reshape(batch, results, rows, columns)
        if wide_bias is not None:
            out = out + wide_bias[:, None, None]
    return out.to(x.dtype)


def _between(planes: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return values between pixels (planes, channels, points), of which those beyond are 0.

    torch's ``grid_sample`` has a place only nearly: one on a pixel, as all are with offsets of 0,
    may be before it, where the gradient is another one.

    Args:
        planes: (planes, channels, height, width).
        y: How far down each point is: (planes, points).
        x: How far to the right.
    """
    height, width = planes.shape[-2:]
    is_inside = (y > -1) & (y < height) & (x > -1) & (x < width)
    top, left = y.detach().floor(), x.detach().floor()
    pixels, total = planes.flatten(2), None
    for row, of_row in ((top, 1 - (y - top)), (top + 1, y - top)):
        for column, of_column in ((left, 1 - (x - left)), (left + 1, x - left)):
            is_pixel = is_inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            weight = torch.where(is_pixel, of_row * of_column, torch.zeros_like(of_row))
            place = torch.where(is_pixel, row * width + column, torch.zeros_like(row)).long()
            read = pixels.gather(2, place[:, None].expand(-1, pixels.shape[1], -1))
            part = read * weight[:, None]
            total = part if total is None else total + part
    assert total is not None
    return total


def _places(
    rows: int, columns: int, kernel: list[int], window: Window, along: int, like: torch.Tensor
) -> torch.Tensor:
    """Return where each element of the kernel reads without offsets: (elements, rows, columns)."""
    results = torch.arange((rows, columns)[along], device=like.device, dtype=like.dtype)
    taps = torch.arange(kernel[along], device=like.device, dtype=like.dtype)
    starts = results * window.stride[along] - window.padding[along]
    found = taps[:, None] * window.dilation[along] + starts
    if along == 0:
        whole = found[:, None, :, None].expand(kernel[0], kernel[1], rows, columns)
    else:
        whole = found[None, :, None, :].expand(kernel[0], kernel[1], rows, columns)
    return whole.reshape(-1, rows, columns)


@_of_mmcv("deform_conv_forward", _check_deformed)
@stands_in("detectron2._C.deform_conv_forward")
def deform_conv_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    output: torch.Tensor,
    columns: torch.Tensor,
    ones: torch.Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Write a deformable convolution to ``output``."""
    window = Window((dH, dW), (padH, padW), (dilationH, dilationW), group, deformable_group)
    output.copy_(deformed(input, weight, offset, None, None, window))


@_of_mmcv("deform_conv_backward_input", _check_deformed)
@stands_in("detectron2._C.deform_conv_backward_input")
def deform_conv_backward_input(
    input: torch.Tensor,
    offset: torch.Tensor,
    gradOutput: torch.Tensor,
    gradInput: torch.Tensor,
    gradOffset: torch.Tensor,
    weight: torch.Tensor,
    columns: torch.Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Write the gradients of a deformable convolution's input and offsets."""
    window = Window((dH, dW), (padH, padW), (dilationH, dilationW), group, deformable_group)
    of_input, of_offset = _gradients(
        lambda x, moved: deformed(x, weight, moved, None, None, window), [input, offset], gradOutput
    )
    gradInput.copy_(of_input)
    gradOffset.copy_(of_offset)


@_of_mmcv("deform_conv_backward_parameters", _check_deformed)
@stands_in("detectron2._C.deform_conv_backward_filter")
def deform_conv_backward_parameters(
    input: torch.Tensor,
    offset: torch.Tensor,
    gradOutput: torch.Tensor,
    gradWeight: torch.Tensor,
    columns: torch.Tensor,
    ones: torch.Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Add the gradient of a deformable convolution's weight, times ``scale``."""
    window = Window((dH, dW), (padH, padW), (dilationH, dilationW), group, deformable_group)
    (found,) = _gradients(
        lambda weight: deformed(input, weight, offset, None, None, window),
        [torch.zeros_like(gradWeight)],
        gradOutput,
    )
    gradWeight.add_(found, alpha=scale)


@_of_mmcv("modulated_deform_conv_forward", _check_modulated)
@stands_in("detectron2._C.modulated_deform_conv_forward")
def modulated_deform_conv_forward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    ones: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    output: torch.Tensor,
    columns: torch.Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Write a deformable convolution with a mask to ``output``."""
    window = Window(
        (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group, deformable_group
    )
    added = bias if with_bias else None
    # The library gives a result of another shape, of as many numbers.
    output.copy_(deformed(input, weight, offset, mask, added, window).view_as(output))


@_of_mmcv("modulated_deform_conv_backward", _check_modulated)
@stands_in("detectron2._C.modulated_deform_conv_backward")
def modulated_deform_conv_backward(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    ones: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    columns: torch.Tensor,
    grad_input: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    grad_offset: torch.Tensor,
    grad_mask: torch.Tensor,
    grad_output: torch.Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Write the gradients of a deformable convolution with a mask."""
    window = Window(
        (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group, deformable_group
    )
    found = _gradients(
        lambda x, kernel, moved, factor: deformed(x, kernel, moved, factor, None, window),
        [input, weight, offset, mask],
        grad_output,
    )
    written = grad_input, grad_weight, grad_offset, grad_mask
    for target, gradient in zip(written, found, strict=True):
        target.copy_(gradient)
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3)))


# ---- regions of interest -------------------------------------------------------------------------


def _corners(place: torch.Tensor, size: int) -> tuple[Any, Any, Any]:
    """Return the cells before and after places, how far the place is, and which are beyond the map.

    Places up to a cell beyond the map are moved to its edge.
    """
    outside = (place < -1) | (place > size)
    place = place.clamp(0, size - 1)
    before = place.floor()
    after = (before + 1).clamp(max=size - 1)
    return (before.long(), after.long()), place - before, outside


def aligned(
    maps: torch.Tensor,
    boxes: torch.Tensor,
    size: tuple[int, int],
    scale: float,
    samples: int,
    is_centred: bool,
    largest: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the means of parts of maps in the cells of a grid (arXiv 1703.06870, RoIAlign).

    Args:
        maps: (batch, channels, height, width).
        boxes: Which map, then left, top, right and bottom: (boxes, 5).
        size: Height and width of the grid.
        scale: The factor of the boxes' coordinates.
        samples: How many points of a cell are read in each direction; 0 for as many as it has
            pixels.
        is_centred: Whether a pixel's value is at its middle.
        largest: Where the rows and columns of each cell's largest value are written, which is then
            the result instead of the mean. None for the mean.
    """
    wide_maps, wide_boxes = widened(maps, boxes)
    edges = wide_boxes[:, 1:].to(wide_maps.dtype) * scale - (0.5 if is_centred else 0.0)
    start, extent = edges[:, :2], edges[:, 2:] - edges[:, :2]
    if not is_centred:
        extent = extent.clamp(min=1.0)
    cells = extent / torch.tensor([size[1], size[0]], device=edges.device, dtype=edges.dtype)
    counts = torch.full_like(cells, samples) if samples > 0 else cells.ceil()
    out = wide_maps.new_zeros(len(boxes), maps.shape[1], *size)
    if largest is not None:
        out.fill_(_LOWEST)
        for each in largest:
            each.fill_(-1)
    for across, down in {(int(x), int(y)) for x, y in counts.tolist()}:
        chosen = ((counts[:, 0] == across) & (counts[:, 1] == down)).nonzero()[:, 0]
        if across > 0 and down > 0:
            x = _points(start[chosen, 0], cells[chosen, 0], size[1], across)
            y = _points(start[chosen, 1], cells[chosen, 1], size[0], down)
            read = _interpolated(wide_maps, boxes[chosen, 0].long(), y, x)
            parts = read.unflatten(-1, (size[1], across)).unflatten(-3, (size[0], down))
            found = parts.mean((-3, -1))
            if largest is not None:
                places = [
                    each.unflatten(-1, (-1, count)) for each, count in ((y, down), (x, across))
                ]
                found = _largest(parts, places, chosen, largest)
            out = out.index_copy(0, chosen, found)
    return out.to(maps.dtype)


_LOWEST = -torch.finfo(torch.float32).max
"""The largest value of a cell without points."""


def _largest(
    parts: torch.Tensor,
    places: list[torch.Tensor],
    chosen: torch.Tensor,
    written: list[torch.Tensor],
) -> torch.Tensor:
    """Return the largest value of each cell, and write where it is. The first of equal ones counts.

    Args:
        parts: (boxes, channels, rows, points, columns, points).
        places: The rows of points (boxes, rows, points), and their columns.
        chosen: The numbers of the boxes.
        written: Rows and columns of the largest values: (all boxes, channels, rows, columns).
    """
    by_cell = parts.transpose(3, 4).flatten(4)
    found = by_cell.amax(-1)
    first = (by_cell == found[..., None]).to(torch.uint8).argmax(-1)
    rows, columns = places
    by_row = rows[:, None, :, None].expand(*found.shape, -1)
    by_column = columns[:, None, None].expand(*found.shape, -1)
    across = columns.shape[-1]
    for target, where, point in (
        (written[0], by_row, first // across),
        (written[1], by_column, first % across),
    ):
        target[chosen] = where.gather(-1, point[..., None])[..., 0].to(target.dtype)
    return found


def _at_largest(
    maps: torch.Tensor, boxes: torch.Tensor, y: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return values between pixels, one for each cell: (boxes, channels, rows, columns).

    Args:
        maps: (batch, channels, height, width).
        boxes: Which map comes first: (boxes, 5).
        y: The row of each value; -1 for a cell without points.
        x: Its column.
    """
    wide_maps, wide_y, wide_x = widened(maps, y, x)
    rows, down, is_above = _corners(wide_y, maps.shape[2])
    columns, right, is_beside = _corners(wide_x, maps.shape[3])
    pixels = wide_maps.flatten(2)[boxes[:, 0].long()]
    total: Any = 0.0
    for row, of_row in zip(rows, (1 - down, down), strict=True):
        for column, of_column in zip(columns, (1 - right, right), strict=True):
            places = (row * maps.shape[3] + column).flatten(2)
            total = total + pixels.gather(2, places).view_as(wide_y) * of_row * of_column
    return total.masked_fill(is_above | is_beside | (wide_y == -1), 0.0)


def _points(start: torch.Tensor, cell: torch.Tensor, cells: int, samples: int) -> torch.Tensor:
    """Return where the points of all cells are along one direction: (boxes, cells * samples)."""
    steps = torch.arange(cells * samples, device=start.device, dtype=start.dtype)
    return start[:, None] + (steps + 0.5) / samples * cell[:, None]


def _interpolated(
    maps: torch.Tensor, which: torch.Tensor, y: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Return values between pixels, at rows y and columns x: (boxes, channels, rows, columns)."""
    height, width = maps.shape[-2:]
    rows, down, is_above = _corners(y, height)
    columns, right, is_beside = _corners(x, width)
    by_cell = maps.permute(0, 2, 3, 1)
    total: Any = 0.0
    for row, of_row in zip(rows, (1 - down, down), strict=True):
        for column, of_column in zip(columns, (1 - right, right), strict=True):
            weight = of_row[:, :, None] * of_column[:, None, :]
            read = by_cell[which[:, None, None], row[:, :, None], column[:, None, :]]
            total = total + read * weight[..., None]
    outside = is_above[:, :, None] | is_beside[:, None, :]
    return total.masked_fill(outside[..., None], 0.0).permute(0, 3, 1, 2)


@stands_in(f"{_EXT}.roi_align_forward")
def roi_align_forward(
    input: torch.Tensor,
    rois: torch.Tensor,
    output: torch.Tensor,
    argmax_y: torch.Tensor,
    argmax_x: torch.Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write what regions of maps have in the cells of a grid: means, or the largest values."""
    check_kernel(
        "roi_align_forward_impl",
        "roi_align_forward_cuda_kernel",
        input,
        rois,
        output,
        argmax_y,
        argmax_x,
        same=(1, 2, 3, 4),
    )
    size = aligned_height, aligned_width
    more = spatial_scale, sampling_ratio, aligned
    largest = [argmax_y, argmax_x] if pool_mode == _OF_LARGEST else None
    output.copy_(_ALIGNED(input, rois, size, *more, largest))


_ALIGNED = aligned


_OF_LARGEST = 0
"""The mode in which a cell has its largest value."""


@stands_in(f"{_EXT}.roi_align_backward")
def roi_align_backward(
    grad_output: torch.Tensor,
    rois: torch.Tensor,
    argmax_y: torch.Tensor,
    argmax_x: torch.Tensor,
    grad_input: torch.Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    """Write the gradient of the maps."""
    check_kernel(
        "roi_align_backward_impl",
        "roi_align_backward_cuda_kernel",
        grad_output,
        rois,
        argmax_y,
        argmax_x,
        grad_input,
        same=(1, 2, 3, 4),
    )
    size = aligned_height, aligned_width
    more = spatial_scale, sampling_ratio, aligned

    def pool(maps: torch.Tensor) -> torch.Tensor:
        if pool_mode == _OF_LARGEST:
            return _at_largest(maps, rois, argmax_y, argmax_x)
        return _ALIGNED(maps, rois, size, *more)

    (found,) = _gradients(pool, [torch.zeros_like(grad_input)], grad_output)
    grad_input.copy_(found)


# ---- boxes ---------------------------------------------------------------------------------------


def overlaps(
    one: torch.Tensor, other: torch.Tensor, offset: int, *, of_first: bool = False
) -> torch.Tensor:
    """Return the areas that boxes have in common, by those that they have together.

    Args:
        one: Left, top, right and bottom: (..., 4).
        other: As ``one``.
        offset: Added to widths and heights.
        of_first: Whether the common area is divided by that of the first box.
    """
    first, last = (
        torch.maximum(one[..., :2], other[..., :2]),
        torch.minimum(one[..., 2:], other[..., 2:]),
    )
    common = (last - first + offset).clamp(min=0).prod(-1)
    areas = [(each[..., 2:] - each[..., :2] + offset).prod(-1) for each in (one, other)]
    return common / (areas[0] if of_first else areas[0] + areas[1] - common)


@stands_in(f"{_EXT}.nms")
def nms(
    boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, offset: int
) -> torch.Tensor:
    """Return the boxes that overlap none of a higher score by more than a threshold.

    Args:
        boxes: Left, top, right and bottom: (boxes, 4).
        scores: (boxes,).
        iou_threshold: The threshold.
        offset: Added to widths and heights.

    Returns:
        Their numbers, by falling scores.
    """
    read = (0,) if boxes.numel() else ()
    check_kernel("nms_impl", "", boxes, scores, same=read, dtype=torch.float32)
    order = scores.sort(descending=True).indices
    # The decisions follow each other, on the CPU.
    sorted_boxes = boxes[order].float().cpu()
    left = torch.ones(len(order), dtype=torch.bool)
    for place in range(len(order)):
        if left[place]:
            found = overlaps(sorted_boxes[place], sorted_boxes[place + 1 :], offset)
            left[place + 1 :] &= found <= iou_threshold
    return order[left.to(order.device)]


@stands_in(f"{_EXT}.nms_match")
def nms_match(dets: torch.Tensor, iou_threshold: float) -> list[list[int]]:
    """Return each box that :func:`nms` keeps, with those that it leaves out because of this one.

    Args:
        dets: Left, top, right, bottom and score: (boxes, 5).
        iou_threshold: The overlap from which on boxes are left out.
    """
    check_on_cpu("nms_match_impl", dets)
    left = dets[:, 4].sort(descending=True).indices.cpu()
    boxes = dets[:, :4].float().cpu()
    found = []
    while len(left):
        shared = overlaps(boxes[left[0]], boxes[left[1:]], 0) >= iou_threshold
        found.append([int(left[0]), *left[1:][shared].tolist()])
        left = left[1:][~shared]
    return found


@stands_in(f"{_EXT}.softnms")
def softnms(
    boxes: torch.Tensor,
    scores: torch.Tensor,
    dets: torch.Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> torch.Tensor:
    """Return boxes by falling scores, each of which lowers those of boxes that overlap it.

    Args:
        boxes: Left, top, right and bottom: (boxes, 4).
        scores: (boxes,).
        dets: Where boxes and their scores are written in that order: (boxes, 5).
        iou_threshold: The overlap from which on a score becomes lower.
        sigma: How fast scores fall with ``method=2``.
        min_score: The score below which a box is left out.
        method: 0 for leaving boxes out, 1 for a factor that falls linearly, 2 for a Gaussian.
        offset: Added to widths and heights.
    """
    check_on_cpu("softnms_impl", boxes)
    scores = scores.clone()
    left = torch.arange(len(boxes), device=boxes.device)
    kept: list[int] = []
    while len(left):
        best = int(scores[left].argmax())
        chosen = left[best]
        dets[len(kept), :4], dets[len(kept), 4] = boxes[chosen], scores[chosen]
        kept.append(int(chosen))
        left = torch.cat([left[:best], left[best + 1 :]])
        shared = overlaps(boxes[chosen], boxes[left], offset)
        scores[left] *= _factor(shared, method, iou_threshold, sigma)
        left = left[scores[left] >= min_score]
    return torch.tensor(kept, dtype=torch.long, device=boxes.device)


def _factor(shared: torch.Tensor, method: int, threshold: float, sigma: float) -> torch.Tensor:
    if method == 2:
        return (-shared.square() / sigma).exp()
    lower = torch.zeros_like(shared) if method == 0 else 1 - shared
    return torch.where(shared >= threshold, lower, torch.ones_like(shared))


@stands_in(f"{_EXT}.bbox_overlaps")
def bbox_overlaps(
    bboxes1: torch.Tensor,
    bboxes2: torch.Tensor,
    ious: torch.Tensor,
    mode: int,
    aligned: bool,
    offset: int,
) -> None:
    """Write how much boxes overlap: each two of a place, or each with each.

    Args:
        bboxes1: Left, top, right and bottom: (boxes, 4).
        bboxes2: As ``bboxes1``.
        ious: What is written to.
        mode: 0 for the common area by that of both, 1 by that of the first.
        aligned: Whether boxes of one place are compared.
        offset: Added to widths and heights.
    """
    check_kernel(
        "bbox_overlaps_impl", "bbox_overlaps_cuda_kernel", bboxes1, bboxes2, ious, same=(1, 2)
    )
    one = bboxes1 if aligned else bboxes1[:, None]
    ious.copy_(overlaps(one, bboxes2, offset, of_first=mode == 1))


# ---- losses --------------------------------------------------------------------------------------


def focal_loss(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, gamma: float, alpha: float
) -> torch.Tensor:
    """Return the focal loss (arXiv 1708.02002) of each class: (rows, classes).

    Args:
        logits: (rows, classes).
        target: The class of each row; the number of classes for none.
        weight: The weight of the target's class, (classes,), or an empty tensor.
        gamma: The exponent of the wrong probability.
        alpha: The weight of the right class.
    """
    (scores,) = widened(logits)
    is_right = functional.one_hot(target, logits.shape[1] + 1)[:, :-1].bool()
    right = -alpha * (-scores).sigmoid() ** gamma * functional.logsigmoid(scores)
    wrong = -(1 - alpha) * scores.sigmoid() ** gamma * functional.logsigmoid(-scores)
    loss = torch.where(is_right, right, wrong)
    if weight.numel():
        loss = loss * functional.pad(weight, (0, 1))[target][:, None]
    return loss.to(logits.dtype)


def _check_loss(
    name: str, kernel: str, scores: torch.Tensor, target: torch.Tensor, *others: torch.Tensor
) -> None:
    """Check a kernel of a focal loss, which reads all but the classes as the scores' dtype."""
    check_kernel(
        f"{name}_impl",
        kernel,
        scores,
        target,
        *others,
        same=range(2, 2 + len(others)),
        whole=(1,),
        has_cpu=False,
    )


@stands_in(f"{_EXT}.sigmoid_focal_loss_forward")
def sigmoid_focal_loss_forward(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the focal loss of each class."""
    _check_loss(
        "sigmoid_focal_loss_forward",
        "sigmoid_focal_loss_forward_cuda_kernel",
        input,
        target,
        weight,
        output,
    )
    output.copy_(focal_loss(input, target, weight, gamma, alpha))


@stands_in(f"{_EXT}.sigmoid_focal_loss_backward")
def sigmoid_focal_loss_backward(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    grad_input: torch.Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the gradient of the sum of the focal losses."""
    _check_loss(
        "sigmoid_focal_loss_backward",
        "sigmoid_focal_loss_backward_cuda_kernel",
        input,
        target,
        weight,
        grad_input,
    )
    (found,) = _gradients(
        lambda logits: focal_loss(logits, target, weight, gamma, alpha),
        [input],
        torch.ones_like(input),
    )
    grad_input.copy_(found)


def _of_targets(
    softmax: torch.Tensor, target: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each target's probability, and its weight: 0 where a row has no target."""
    label = target.clamp(min=0)
    (probability,) = widened(softmax.gather(1, label[:, None]).squeeze(1))
    factor = (target >= 0).to(probability.dtype)
    return probability, factor * weight[label] if weight.numel() else factor


_LEAST = torch.finfo(torch.float32).tiny
"""The least probability whose logarithm the kernel takes."""


@stands_in(f"{_EXT}.softmax_focal_loss_forward")
def softmax_focal_loss_forward(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the focal loss of each row, whose probabilities are given."""
    _check_loss(
        "softmax_focal_loss_forward",
        "softmax_focal_loss_forward_cuda_kernel",
        input,
        target,
        weight,
        output,
    )
    probability, factor = _of_targets(input, target, weight)
    loss = -alpha * (1 - probability) ** gamma * probability.clamp(min=_LEAST).log()
    output.copy_(loss * factor)


@stands_in(f"{_EXT}.softmax_focal_loss_backward")
def softmax_focal_loss_backward(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor,
    buff: torch.Tensor,
    grad_input: torch.Tensor,
    gamma: float,
    alpha: float,
) -> None:
    """Write the gradient of the sum of the focal losses, with respect to the scores."""
    _check_loss(
        "softmax_focal_loss_backward",
        "softmax_focal_loss_backward_cuda1_kernel",
        input,
        target,
        weight,
        buff,
        grad_input,
    )
    probability, factor = _of_targets(input, target, weight)
    # By the formula, not by autograd: a probability of 0 has a gradient too.
    rest = 1 - probability
    logarithm = probability.clamp(min=_LEAST).log()
    slope = gamma * rest ** (gamma - 1) * probability * logarithm - rest**gamma
    buff.copy_(alpha * slope * factor)
    is_target = functional.one_hot(target.clamp(min=0), input.shape[1])
    grad_input.copy_(buff[:, None] * (is_target - input))


# ---- attention to maps ---------------------------------------------------------------------------


@stands_in(f"{_EXT}.ms_deform_attn_forward")
def ms_deform_attn_forward(
    value: torch.Tensor,
    value_spatial_shapes: torch.Tensor,
    value_level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    im2col_step: int,
) -> torch.Tensor:
    """Return the attention to points of maps (batch, queries, heads * size of a head)."""
    check_kernel(
        "ms_deform_attn_impl_forward",
        "ms_deform_attn_forward_cuda",
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
        same=(3, 4),
        whole=(1, 2),
        has_cpu=False,
    )
    given = value, value_spatial_shapes, value_level_start_index, sampling_locations
    return of_maps(*given, attention_weights, im2col_step)


@stands_in(f"{_EXT}.ms_deform_attn_backward")
def ms_deform_attn_backward(
    value: torch.Tensor,
    value_spatial_shapes: torch.Tensor,
    value_level_start_index: torch.Tensor,
    sampling_locations: torch.Tensor,
    attention_weights: torch.Tensor,
    grad_output: torch.Tensor,
    grad_value: torch.Tensor,
    grad_sampling_loc: torch.Tensor,
    grad_attn_weight: torch.Tensor,
    im2col_step: int,
) -> None:
    """Write the gradients of the maps, of the points and of the weights."""
    check_kernel(
        "ms_deform_attn_impl_backward",
        "ms_deform_attn_backward_cuda",
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
        grad_output,
        grad_value,
        grad_sampling_loc,
        grad_attn_weight,
        same=(3, 4, 5, 6, 7, 8),
        whole=(1, 2),
        has_cpu=False,
    )
    given = value, value_spatial_shapes, value_level_start_index, sampling_locations
    found = of_maps_backward(*given, attention_weights, grad_output, im2col_step)
    written = grad_value, grad_sampling_loc, grad_attn_weight
    for target, gradient in zip(written, found, strict=True):
        target.copy_(gradient)


# ---- what else a library looks for ---------------------------------------------------------------


@stands_in(_both("get_compiler_version"))
def get_compiler_version() -> str:
    """Return the compiler that made the kernels: none."""
    return "none"


@stands_in(_both("get_compiling_cuda_version", "get_cuda_version"))
def get_compiling_cuda_version() -> str:
    """Return for which CUDA the kernels were made: none."""
    return "not available"


def _missing_kernel(name: str) -> Any:
    """Return a function that raises, for every kernel that a library looks for."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        instead = _OF_ROTATED if "rotated" in name else _INSTEAD
        refuse(f"the kernel {name!r} of mmcv or detectron2", instead)

    refusing.__name__ = name
    return refusing


_INSTEAD = "Build the library with its kernels for CPUs, or use an operator of torchvision.ops."

_OF_ROTATED = (
    "Build the library with its kernels for CPUs. torchvision.ops has none for rotated boxes."
)

has("mmcv._ext.__getattr__ detectron2._C.__getattr__", _missing_kernel)
