"""``amp_C`` and ``apex.multi_tensor_apply``: operations of apex on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchdevice.packages.extension_refusals import check_lists
from torchdevice.packages.registry import has, refuses, stands_in, widened

Lists = Sequence[Sequence[torch.Tensor]]

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes of most operations. ``axpby`` has no bfloat16."""


def _note(noop_flag: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write 1 to a flag if an element is infinite or NaN. Only the device knows whether one is."""
    for each in tensors:
        flawed = ~each.isfinite().all()
        noop_flag.copy_(torch.where(flawed.to(noop_flag.device), 1, noop_flag))


@stands_in("amp_C.multi_tensor_scale")
def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write the tensors of the first list, times a factor, to those of the second.

    Args:
        chunk_size: Means nothing here.
        noop_flag: Becomes 1 if an element of the first list is infinite or NaN.
        tensor_lists: Two lists.
        scale: The factor.
    """
    check_lists("multi_tensor_scale_cuda", noop_flag, tensor_lists, 2, _TAKEN)
    for given, out in zip(*tensor_lists, strict=True):
        out.copy_(widened(given)[0] * scale)
    _note(noop_flag, tensor_lists[0])


@stands_in("amp_C.multi_tensor_axpby")
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """Write ``a * x + b * y`` of the tensors of two lists to those of the third.

    Args:
        chunk_size: Means nothing here.
        noop_flag: Becomes 1 if a checked element is infinite or NaN.
        tensor_lists: x, y, and the tensors that are written.
        a: The factor of x.
        b: The factor of y.
        arg_to_check: 0 for x, 1 for y, -1 for both.
    """
    check_lists("multi_tensor_axpby_cuda", noop_flag, tensor_lists, 3, _TAKEN[:2])
    for x, y, out in zip(*tensor_lists, strict=True):
        out.copy_(a * widened(x)[0] + b * widened(y)[0])
    for place in (0, 1):
        if arg_to_check in (-1, place):
            _note(noop_flag, tensor_lists[place])


@stands_in("amp_C.multi_tensor_l2norm")
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors of a list together (1,), and of each (tensors,), in float32.

    Args:
        chunk_size: Means nothing here.
        noop_flag: Becomes 1 if a sum of squares is infinite or NaN.
        tensor_lists: One list.
        per_tensor: Whether there are norms of each tensor. The second result is empty otherwise.
    """
    check_lists("multi_tensor_l2norm_cuda", noop_flag, tensor_lists, 1, _TAKEN)
    squares = torch.stack([widened(each)[0].square().sum() for each in tensor_lists[0]])
    _note(noop_flag, [squares])
    whole = squares.sum().sqrt().reshape(1).float()
    return whole, squares.sqrt().float() if per_tensor else whole.new_empty(0)


refuses(
    "amp_C.multi_tensor_sgd amp_C.multi_tensor_adam amp_C.multi_tensor_adagrad "
    "amp_C.multi_tensor_novograd amp_C.multi_tensor_lamb amp_C.multi_tensor_lamb_mp "
    "amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda",
    "Use apex.optimizers, which is stood in for, or torch.optim.",
)
refuses(
    "amp_C.multi_tensor_l2norm_mp amp_C.multi_tensor_l2norm_scale", "Use amp_C.multi_tensor_l2norm."
)


class MultiTensorApply:
    """Calls an operation of ``amp_C`` on lists of tensors.

    Args:
        chunk_size: How many elements a block of a GPU takes at a time. It means nothing here.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the operations are there."""

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: torch.Tensor,
        tensor_lists: Lists,
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


# Made before the class is registered, whose constructor then reports uses by programs.
has("apex.multi_tensor_apply.multi_tensor_applier", MultiTensorApply(2048 * 32))
stands_in(
    "apex.multi_tensor_apply.MultiTensorApply "
    "apex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply"
)(MultiTensorApply)
