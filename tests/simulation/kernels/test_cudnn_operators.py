"""cuDNN's operators called by name, compared with the CPU's under another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import torchdevice

CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "convolution": (
        lambda x, w: torch.cudnn_convolution(x, w, (1, 1), (2, 2), (1, 1), 2, False, False, True),
        lambda x, w: functional.conv2d(x, w, None, 2, 1, 1, 2),
        [(2, 4, 5, 6), (6, 2, 3, 3)],
    ),
    "transposed convolution": (
        lambda x, w: torch.cudnn_convolution_transpose(
            x, w, (1, 1), (1, 0), (2, 2), (1, 2), 2, False, False, True
        ),
        lambda x, w: functional.conv_transpose2d(x, w, None, 2, 1, (1, 0), 2, (1, 2)),
        [(2, 4, 5, 6), (4, 3, 3, 3)],
    ),
    "grid of an affine map": (
        lambda theta: torch.cudnn_affine_grid_generator(theta, 2, 4, 5, 6),
        lambda theta: functional.affine_grid(theta, (2, 4, 5, 6), align_corners=True),
        [(2, 2, 3)],
    ),
    "samples of a grid": (
        torch.cudnn_grid_sampler,
        lambda x, grid: functional.grid_sample(x, grid, align_corners=True),
        [(2, 4, 5, 6), (2, 3, 3, 2)],
    ),
}
"""The call of cuDNN's operator, the call on the CPU, and the shapes of the arguments."""


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_the_cpus(case: str) -> None:
    call, on_cpu, shapes = CASES[case]
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    expected = results(on_cpu, given)
    with torchdevice.simulate("cuda"):
        found = [each.cpu() for each in results(call, [each.cuda() for each in given])]
    torch.testing.assert_close(found, expected)


def results(call: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = [each.detach().requires_grad_() for each in given]
    result = call(*inputs)
    result.square().sum().backward()
    return [result.detach(), *(each.grad for each in inputs)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_converts_the_arguments_of_a_convolution(dtype: torch.dtype) -> None:
    with torchdevice.simulate("cuda"), torch.autocast("cuda", dtype):
        x, w = torch.ones(1, 1, 3, 3, device="cuda"), torch.ones(1, 1, 3, 3, device="cuda")
        assert (
            torch.cudnn_convolution(x, w, (0, 0), (1, 1), (1, 1), 1, False, False, True).dtype
            is dtype
        )
