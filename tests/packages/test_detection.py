"""The compiled part of libraries of detection, against loops of the definition in float64."""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import drawn, same_with_gradients

import torchdevice
from torchdevice.packages import detection_kernels, registry
from torchdevice.packages.detection_kernels import Window, aligned, deformed, focal_loss, overlaps

pytestmark = pytest.mark.one_engine


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install a library of detection that has no compiled part, and loads it as mmcv does."""
    folder = tmp_path / "site-packages"
    for name, text in {
        "mmcv/__init__.py": "",
        "mmcv/ops.py": (
            "import importlib\next_module = importlib.import_module('mmcv._ext')\n"
            "assert hasattr(ext_module, 'nms_rotated')\n"
        ),
        "detectron2/__init__.py": "",
        "detectron2/layers/__init__.py": "",
        "detectron2/layers/deform_conv.py": (
            "try:\n    from detectron2 import _C\nexcept ImportError:\n    _C = None\n"
        ),
        "detectron2/other.py": (
            "try:\n    from detectron2 import _C\nexcept ImportError:\n    _C = None\n"
        ),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mmcv", "detectron2")]:
        del sys.modules[name]


def test_a_library_without_its_compiled_part_gets_it(library: Any) -> None:
    with torchdevice.portable(target="cpu") as scope:
        from detectron2.layers import deform_conv
        from mmcv import ops

        assert ops.ext_module.__name__ == "mmcv._ext"
        assert deform_conv._C.get_cuda_version() == "not available"
        with pytest.raises(
            torchdevice.errors.NotSupportedError, match=r"'nms_rotated'.*torchvision"
        ):
            ops.ext_module.nms_rotated()
        boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [5, 5, 8, 8]], device="cuda")
        scores = torch.tensor([0.5, 0.6, 0.7], device="cuda")
        kept = ops.ext_module.nms(boxes, scores, iou_threshold=0.5, offset=0)
        assert kept.tolist() == [2, 1]
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("mmcv")
    assert "mmcv._ext.nms" in str(scope.report())
    assert "mmcv._ext" not in sys.modules


def test_a_library_that_goes_on_without_it_does(library: Any) -> None:
    with torchdevice.portable(target="cpu"):
        from detectron2 import other

        assert other._C is None


def test_only_the_stand_in_has_kernels_of_any_name() -> None:
    with pytest.raises(AttributeError, match="nms_rotated"):
        detection_kernels.nms_rotated  # noqa: B018
    page = Path(__file__).parents[2] / "docs" / "packages.md"
    assert "__getattr__" not in page.read_text()


# ---- deformable convolutions ---------------------------------------------------------------------


def between(plane: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the value between four pixels; pixels beyond the plane are 0."""
    total = plane.new_zeros(())
    top, left = (math.floor(each.item()) for each in (y.detach(), x.detach()))
    for row in (top, top + 1):
        for column in (left, left + 1):
            if 0 <= row < plane.shape[0] and 0 <= column < plane.shape[1]:
                weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
                total = total + weight * plane[row, column]
    return total


def convolved(
    x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor, window: Window
) -> torch.Tensor:
    """Return the deformable convolution, by element."""
    batch, channels, _, _ = x.shape
    results, part, height, width = weight.shape
    rows, columns = offset.shape[-2:]
    out = []
    for b, o, i, j in (
        (b, o, i, j)
        for b in range(batch)
        for o in range(results)
        for i in range(rows)
        for j in range(columns)
    ):
        total = x.new_zeros(())
        first = o // (results // window.groups) * part
        for c in range(part):
            group = (first + c) // (channels // window.deform_groups)
            for tap in range(height * width):
                place = group * height * width + tap
                y = i * window.stride[0] - window.padding[0] + tap // width * window.dilation[0]
                z = j * window.stride[1] - window.padding[1] + tap % width * window.dilation[1]
                moved = offset[b, 2 * place, i, j] + y, offset[b, 2 * place + 1, i, j] + z
                read = between(x[b, first + c], *moved) * mask[b, place, i, j]
                total = total + read * weight[o, c, tap // width, tap % width]
        out.append(total)
    return torch.stack(out).reshape(batch, results, rows, columns)


CONVOLUTIONS = [
    (Window((1, 1), (0, 0), (1, 1), 1, 1), (2, 2), (2, 3)),
    (Window((2, 1), (1, 2), (1, 2), 2, 1), (3, 2), (2, 6)),
    (Window((1, 2), (1, 1), (2, 1), 1, 2), (2, 3), (3, 2)),
]


@pytest.mark.parametrize(("window", "kernel", "size"), CONVOLUTIONS)
def test_deformable_convolutions(window: Window, kernel: Any, size: Any) -> None:
    x, weight = drawn(2, 4, 3, 4), drawn(2, 4 // window.groups, *kernel)
    count = window.deform_groups * kernel[0] * kernel[1]
    offset, mask = drawn(2, 2 * count, *size), drawn(2, count, *size)
    expected = convolved(x, weight, offset, mask, window)
    found = deformed(x, weight, offset, mask, None, window)
    same_with_gradients(found, expected, (x, weight, offset, mask))
    plain = convolved(x, weight, offset, torch.ones_like(mask), window)
    torch.testing.assert_close(deformed(x, weight, offset, None, None, window), plain)


def test_gradients_of_offsets_of_zero_are_those_after_a_pixel() -> None:
    """They are 0 at the first place beyond the plane, as are those of the kernels."""
    x = torch.tensor([[[[1.0, 2, 4], [7, 11, 16]]]])
    offset = torch.zeros(1, 2, 4, 5, requires_grad=True)
    window = Window((1, 1), (1, 1), (1, 1), 1, 1)
    out = deformed(x, torch.ones(1, 1, 1, 1), offset, None, None, window)
    (gradient,) = torch.autograd.grad(out.sum(), offset)
    down, right = gradient[0].tolist()
    assert down == [[0] * 5, [0, 6, 9, 12, 0], [0, -7, -11, -16, 0], [0] * 5]
    assert right == [[0] * 5, [0, 1, 2, -4, 0], [0, 4, 5, -16, 0], [0] * 5]


def test_kernels_of_convolutions_write_results_and_gradients() -> None:
    window, kernel, size = CONVOLUTIONS[1]
    x, weight, bias = drawn(2, 4, 3, 4), drawn(2, 2, *kernel), drawn(2)
    offset, mask = drawn(2, 12, *size), drawn(2, 6, *size)
    towards = torch.randn(2, 2, *size, dtype=torch.float64)
    sizes = (kernel[1], kernel[0], *window.stride[::-1], *window.padding[::-1])
    numbers = *sizes, *window.dilation[::-1], window.groups, window.deform_groups
    given = [each.detach() for each in (x, weight, offset, mask, bias)]
    buffers = torch.empty(0), torch.empty(0)
    with torch.no_grad():
        out = torch.empty_like(towards)
        detection_kernels.deform_conv_forward(
            given[0], given[1], given[2], out, *buffers, *numbers, im2col_step=2
        )
        of_x, of_offset, of_weight = (torch.zeros_like(each) for each in (x, offset, weight))
        detection_kernels.deform_conv_backward_input(
            given[0], given[2], towards, of_x, of_offset, given[1], buffers[0], *numbers, 2
        )
        detection_kernels.deform_conv_backward_parameters(
            given[0], given[2], towards, of_weight, *buffers, *numbers, 0.5, 2
        )
    expected = deformed(x, weight, offset, None, None, window)
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(expected, (x, offset, weight), towards)
    torch.testing.assert_close((of_x, of_offset, 2 * of_weight), gradients)

    options = kernel, window.stride, window.padding, window.dilation
    pairs = [number for pair in options for number in pair]
    more = *pairs, window.groups, window.deform_groups, True
    with torch.no_grad():
        detection_kernels.modulated_deform_conv_forward(
            given[0], given[1], given[4], buffers[0], given[2], given[3], out, buffers[1], *more
        )
        own = [torch.zeros_like(each) for each in (x, weight, bias, offset, mask)]
        detection_kernels.modulated_deform_conv_backward(
            given[0],
            given[1],
            given[4],
            buffers[0],
            given[2],
            given[3],
            buffers[1],
            *own,
            towards,
            *more,
        )
    expected = deformed(x, weight, offset, mask, bias, window)
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(expected, (x, weight, bias, offset, mask), towards)
    torch.testing.assert_close(tuple(own), gradients)


# ---- regions of interest -------------------------------------------------------------------------


def pooled(
    maps: torch.Tensor,
    box: list[float],
    size: tuple[int, int],
    samples: int,
    centred: bool,
    by_largest: bool = False,
) -> torch.Tensor:
    """Return the means of a region's cells, or the largest values, with a scale of 0.5."""
    left, top, right, bottom = (each * 0.5 - (0.5 if centred else 0.0) for each in box[1:])
    wide, high = right - left, bottom - top
    if not centred:
        wide, high = max(wide, 1.0), max(high, 1.0)
    down, across = samples or math.ceil(high / size[0]), samples or math.ceil(wide / size[1])
    plane = maps[int(box[0])]
    limits = plane.shape[-2], plane.shape[-1]
    out = []
    for c, i, j in (
        (c, i, j) for c in range(plane.shape[0]) for i in range(size[0]) for j in range(size[1])
    ):
        total = plane.new_zeros(())
        largest = plane.new_tensor(-torch.finfo(torch.float32).max)
        for k in range(down):
            for m in range(across):
                y = top + (i + (k + 0.5) / down) * high / size[0]
                x = left + (j + (m + 0.5) / across) * wide / size[1]
                value = plane.new_zeros(())
                if -1 <= y <= limits[0] and -1 <= x <= limits[1]:
                    y, x = min(max(y, 0), limits[0] - 1), min(max(x, 0), limits[1] - 1)
                    value = between(
                        plane[c], *(torch.tensor(each, dtype=plane.dtype) for each in (y, x))
                    )
                total = total + value
                largest = value if value > largest else largest
        out.append(largest if by_largest else total / max(down * across, 1))
    return torch.stack(out).reshape(plane.shape[0], *size)


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("centred", [False, True])
def test_regions_of_interest(samples: int, centred: bool) -> None:
    maps = drawn(2, 3, 5, 6)
    boxes = [[0, 1.0, 2, 7.5, 9], [1, -5, -4, 14, 11], [1, 3, 3, 3, 3], [0, 40, 40, 44, 44]]
    given = torch.tensor(boxes, dtype=torch.float64)
    found = aligned(maps, given, (2, 3), 0.5, samples, centred)
    expected = torch.stack([pooled(maps, box, (2, 3), samples, centred) for box in boxes])
    same_with_gradients(found, expected, (maps,))

    options = {
        "aligned_height": 2,
        "aligned_width": 3,
        "spatial_scale": 0.5,
        "sampling_ratio": samples,
        "pool_mode": 1,
        "aligned": centred,
    }
    out, towards, of_maps = torch.zeros_like(found), torch.randn_like(found), torch.zeros_like(maps)
    with torch.no_grad():
        none = maps.new_zeros(0), maps.new_zeros(0)
        detection_kernels.roi_align_forward(maps.detach(), given, out, *none, **options)
        detection_kernels.roi_align_backward(towards, given, *none, of_maps, **options)
    torch.testing.assert_close(out, found)
    torch.testing.assert_close(of_maps, torch.autograd.grad(expected, maps, towards)[0])


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("centred", [False, True])
def test_regions_of_interest_by_their_largest_values(samples: int, centred: bool) -> None:
    maps = drawn(2, 3, 5, 6)
    boxes = [[0, 1.0, 2, 7.5, 9], [1, -5, -4, 14, 11], [1, 3, 3, 3, 3], [0, 40, 40, 44, 44]]
    given = torch.tensor(boxes, dtype=torch.float64)
    options = {
        "aligned_height": 2,
        "aligned_width": 3,
        "spatial_scale": 0.5,
        "sampling_ratio": samples,
        "pool_mode": 0,
        "aligned": centred,
    }
    expected = torch.stack([pooled(maps, box, (2, 3), samples, centred, True) for box in boxes])
    out, rows, columns = (torch.zeros(4, 3, 2, 3, dtype=torch.float64) for _ in range(3))
    towards, of_maps = torch.randn_like(out), torch.zeros_like(maps)
    with torch.no_grad():
        where = rows, columns
        detection_kernels.roi_align_forward(maps.detach(), given, out, *where, **options)
        detection_kernels.roi_align_backward(towards, given, *where, of_maps, **options)
    torch.testing.assert_close(out, expected)
    (gradient,) = torch.autograd.grad(expected, maps, towards)
    torch.testing.assert_close(of_maps, gradient)
    # A cell without points, of a box without a height, has the lowest number.
    assert (out[2] == -torch.finfo(torch.float32).max).all() == (centred and not samples)


@pytest.mark.parametrize("name", ["box_iou_rotated", "nms_rotated", "roi_align_rotated_forward"])
def test_kernels_for_rotated_boxes_are_refused_by_name(name: str) -> None:
    kernel = registry.MODULES["mmcv._ext"]["__getattr__"].value(name)
    with torchdevice.portable(target="cpu"):
        with pytest.raises(torchdevice.errors.NotSupportedError, match=f"'{name}'.*rotated boxes"):
            kernel(torch.rand(3, 5))


def test_no_regions_of_interest_have_no_gradient() -> None:
    maps = torch.randn(1, 2, 5, 6, requires_grad=True)
    options = {"aligned_height": 2, "aligned_width": 3, "spatial_scale": 0.5, "sampling_ratio": 0}
    of_maps, none, towards = torch.ones_like(maps), maps.new_zeros(0), maps.new_zeros(0, 2, 2, 3)
    with torch.no_grad():
        detection_kernels.roi_align_backward(
            towards, maps.new_zeros(0, 5), none, none, of_maps, **options, pool_mode=1, aligned=True
        )
    assert not of_maps.any()


def common(one: list[float], other: list[float], offset: int) -> tuple[float, float, float]:
    """Return the areas of two boxes, and the one that they have in common."""
    sides = [min(one[2 + i], other[2 + i]) - max(one[i], other[i]) + offset for i in (0, 1)]
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (one, other)]
    return areas[0], areas[1], max(sides[0], 0) * max(sides[1], 0)


@pytest.mark.parametrize("offset", [0, 1])
def test_overlapping_boxes(offset: int) -> None:
    corners = torch.rand(2, 12, 4).mul(4)
    one, other = (torch.cat([each[:, :2], each[:, :2] + each[:, 2:] + 0.1], 1) for each in corners)
    areas = [[common(a, b, offset) for b in other.tolist()] for a in one.tolist()]
    of_both = torch.tensor([[c / (a + b - c) for a, b, c in row] for row in areas])
    of_first = torch.tensor([[c / a for a, _, c in row] for row in areas])
    out = torch.empty(12, 12)
    for mode, expected in enumerate((of_both, of_first)):
        detection_kernels.bbox_overlaps(one, other, out, mode, False, offset)
        torch.testing.assert_close(out, expected)
    diagonal = torch.empty(12)
    detection_kernels.bbox_overlaps(one, other, diagonal, 0, True, offset)
    torch.testing.assert_close(diagonal, of_both.diagonal())
    torch.testing.assert_close(overlaps(one, one, offset), torch.ones(12))

    scores = torch.rand(12)
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        others = [common(one[index].tolist(), one[each].tolist(), offset) for each in kept]
        if all(c / (a + b - c) <= 0.3 for a, b, c in others):
            kept.append(index)
    assert detection_kernels.nms(one, scores, 0.3, offset).tolist() == kept
    assert detection_kernels.nms(one[:0], scores[:0], 0.3, offset).tolist() == []


@pytest.mark.parametrize("method", [0, 1, 2])
def test_boxes_that_lower_the_scores_of_others(method: int) -> None:
    corners = torch.rand(8, 4).mul(3)
    boxes = torch.cat([corners[:, :2], corners[:, :2] + corners[:, 2:] + 0.5], 1)
    scores, dets = torch.rand(8), torch.zeros(8, 5)
    found = detection_kernels.softnms(boxes, scores, dets, 0.3, 0.5, 0.2, method, 0)
    left, expected = dict(enumerate(scores.tolist())), []
    while left:
        best = max(left, key=lambda index: left[index])
        expected.append((best, left.pop(best)))
        for index in list(left):
            one, other, both = common(boxes[best].tolist(), boxes[index].tolist(), 0)
            share = both / (one + other - both)
            if method == 2:
                left[index] *= math.exp(-(share**2) / 0.5)
            elif share >= 0.3:
                left[index] *= 0 if method == 0 else 1 - share
            if left[index] < 0.2:
                del left[index]
    assert found.tolist() == [index for index, _ in expected]
    torch.testing.assert_close(dets[: len(found), :4], boxes[found])
    torch.testing.assert_close(dets[: len(found), 4], torch.tensor([each for _, each in expected]))

    matches = detection_kernels.nms_match(torch.cat([boxes, scores[:, None]], 1), 0.3)
    kept = [match[0] for match in matches]
    assert kept == detection_kernels.nms(boxes, scores, 0.3, 0).tolist()
    assert sorted(index for match in matches for index in match) == list(range(8))
    for first, *others in matches:
        for index in others:
            one, other, both = common(boxes[first].tolist(), boxes[index].tolist(), 0)
            assert both / (one + other - both) >= 0.3 and scores[index] <= scores[first]


# ---- losses and attention ------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_focal_loss(weighted: bool) -> None:
    logits, target = drawn(4, 3), torch.tensor([0, 2, 3, 1])
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else torch.empty(0)
    rows = []
    for row, right in zip(logits, target.tolist(), strict=True):
        factors = [*weight.tolist(), 0.0][right] if weighted else 1.0
        for label, score in enumerate(row):
            p = 1 / (1 + torch.exp(-score))
            of_right = -0.25 * (1 - p) ** 2 * torch.log(p)
            of_wrong = -0.75 * p**2 * torch.log(1 - p)
            rows.append(factors * (of_right if label == right else of_wrong))
    expected = torch.stack(rows).reshape(4, 3)
    same_with_gradients(focal_loss(logits, target, weight, 2.0, 0.25), expected, (logits,))
    out, gradient = torch.zeros_like(logits), torch.zeros_like(logits)
    with torch.no_grad():
        detection_kernels.sigmoid_focal_loss_forward(
            logits.detach(), target, weight, out, gamma=2.0, alpha=0.25
        )
        detection_kernels.sigmoid_focal_loss_backward(
            logits.detach(), target, weight, gradient, gamma=2.0, alpha=0.25
        )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), logits)[0])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gamma", [2.0, 0.5])
def test_focal_loss_of_a_softmax(weighted: bool, gamma: float) -> None:
    logits, target = drawn(4, 3), torch.tensor([0, 2, -1, 1])
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if weighted else torch.empty(0)
    softmax = logits.exp() / logits.exp().sum(1, keepdim=True)
    rows = []
    for row, label in zip(softmax, target.tolist(), strict=True):
        factor = weight[label] if weighted else 1.0
        loss = -0.25 * (1 - row[label]) ** gamma * torch.log(row[label]) * factor
        rows.append(loss if label >= 0 else 0 * row.sum())
    expected = torch.stack(rows)
    (slopes,) = torch.autograd.grad(expected.sum(), logits)
    out, buff, gradient = (
        torch.zeros(4).double(),
        torch.zeros(4).double(),
        torch.zeros(4, 3).double(),
    )
    given = softmax.detach(), target, weight
    detection_kernels.softmax_focal_loss_forward(*given, out, gamma=gamma, alpha=0.25)
    detection_kernels.softmax_focal_loss_backward(*given, buff, gradient, gamma=gamma, alpha=0.25)
    torch.testing.assert_close((out, gradient), (expected.detach(), slopes))


def test_focal_loss_of_probabilities_at_the_ends() -> None:
    """A target that is certainly wrong has the largest gradient, and one that is right none."""
    softmax = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    given = softmax, torch.tensor([0, 1]), torch.empty(0)
    buff, gradient = torch.zeros(2), torch.zeros(2, 2)
    detection_kernels.softmax_focal_loss_backward(*given, buff, gradient, gamma=2.0, alpha=0.25)
    assert buff.tolist() == [-0.25, 0.0]
    assert gradient.tolist() == [[-0.25, 0.25], [0.0, 0.0]]


def test_attention_to_maps_is_that_of_deformable_detr() -> None:
    from torchdevice.packages import deformable_attention as other

    value, shapes = torch.randn(1, 6, 2, 4), torch.tensor([[2, 2], [1, 2]])
    points, weights = torch.rand(1, 3, 2, 2, 2, 2), torch.rand(1, 3, 2, 2, 2)
    given = value, shapes, torch.tensor([0, 4]), points, weights
    out = detection_kernels.ms_deform_attn_forward(*given, im2col_step=64)
    torch.testing.assert_close(out, other.ms_deform_attn_forward(*given, 64))
    halves = value.half(), shapes, torch.tensor([0, 4]), points.half(), weights.half()
    with torch.autocast("cpu", torch.bfloat16):
        assert detection_kernels.ms_deform_attn_forward(*halves, 64).dtype is torch.float16
    found = [torch.empty_like(each) for each in (value, points, weights)]
    towards = torch.randn_like(out)
    detection_kernels.ms_deform_attn_backward(*given, towards, *found, im2col_step=64)
    torch.testing.assert_close(found, other.ms_deform_attn_backward(*given, towards, 64))
