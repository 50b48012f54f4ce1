"""Which kernels of CUDA's can compute a call of ``scaled_dot_product_attention``, and why the others cannot.

The checks, their order and their texts (``attention.json``) follow aten/src/ATen/native/transformers of torch 2.13:
``cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``. Strided nested tensors take no part: here no kernel computes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.backends.cuda import SDPAParams

from torchdevice.kernel.python import data_files
from torchdevice.simulation import policy
from torchdevice.simulation.refusals.cuda_errors import INVALID_VALUE, cuda_error

_TABLE = data_files.read(__file__, "attention.json")
"""Kernels and their checks in torch's order, and the text of each check."""

MOST_ROWS = 65_535
"""CUDA's limit of blocks along the second axis of a grid (mem_eff_attention/kernel_forward.h: getBlocksGrid)."""

_HALVES = (torch.float16, torch.bfloat16)

_NAMES = {torch.float16: "Half", torch.float32: "Float", torch.bfloat16: "BFloat16"}

_TYPES = {torch.float16: "c10::Half", torch.bfloat16: "c10::BFloat16", torch.float32: "float", torch.float64: "double"}


class _Facts:
    """A call and the scope's GPU, as the checks ask for them and the texts show them."""

    def __init__(self, call: SDPAParams):
        self.q, self.k, self.v = three = call.query, call.key, call.value
        self.mask, self.dropout = call.attn_mask, call.dropout
        self.causal, self.grouped = call.is_causal, call.enable_gqa
        self.gpu = policy.capability() or (8, 0)
        self.sizes = [list(each.shape) for each in three]
        self.strides = [each.stride(-1) for each in three]
        self.dtypes = [each.dtype for each in three]
        self.types = [_TYPES.get(each, str(each).removeprefix("torch.")) for each in self.dtypes]
        self.trains = torch.is_grad_enabled() and any(each.requires_grad for each in three)
        self.allowed = ""  # the dtypes of the kernel that was asked last

    @property
    def alignment(self) -> int:
        """Of how many elements the rows of matrices must be a multiple."""
        half, major = self.dtypes[0] in _HALVES, self.gpu[0]
        if major >= 8:
            return 8 if half else 4
        return 8 if major == 7 and half else 1

    @property
    def widest(self) -> int:
        """The largest heads of cuDNN's kernels."""
        return 256 if self.gpu == (9, 0) or self.gpu[0] == 10 else 128

    def lacks_dtypes(self, *allowed: torch.dtype) -> bool:
        older = self.gpu < (8, 0)
        taken = [each for each in allowed if not (older and each is torch.bfloat16)]
        self.allowed = ", ".join(_NAMES[each] for each in taken)
        return len(set(self.dtypes)) > 1 or self.dtypes[0] not in taken

    def has_gaps(self, singles: bool) -> bool:
        """Whether the last dimension of a tensor has gaps. A kernel may take any stride of a dimension of size 1."""
        dense = self.strides == [1, 1, 1] or (singles and self.q.size(-1) == 1)
        return not dense or (self.mask is not None and self.mask.stride(-1) != 1 and self.mask.size(-1) != 1)

    def heads(self) -> list[int]:
        return [size[1] for size in self.sizes]

    def cudnn_takes_mask(self) -> bool:
        if self.mask is None:
            return True
        batch, heads, rows, _ = self.sizes[0]
        full = (batch, heads, rows, self.k.size(2))[-self.mask.dim() :]
        fits = all(size in (1, whole) for size, whole in zip(self.mask.shape, full, strict=False))
        return fits and self.mask.dim() in (2, 4) and not self.mask.requires_grad

    def beyond_training(self) -> bool:
        size, narrow = self.q.size(-1), (8, 6) <= self.gpu <= (8, 9) or (12, 0) <= self.gpu <= (12, 1)
        return self.trains and narrow and size > 192 and not (size > 224 and not self.dropout)


_CHECKS: dict[str, Callable[[_Facts], Any]] = {
    "mem_efficient_off": lambda _: not torch._C._get_mem_efficient_sdp_enabled(),
    "flash_off": lambda _: not torch._C._get_flash_sdp_enabled(),
    "cudnn_off": lambda _: not torch._C._get_cudnn_sdp_enabled(),
    "devices": lambda call: call.q.is_cpu,
    "dimensions": lambda call: {len(each) for each in call.sizes} != {4},
    "batches": lambda call: len({size[0] for size in call.sizes}) > 1,
    "groups": lambda call: call.grouped and (call.heads()[0] % call.heads()[1] or call.heads()[1] != call.heads()[2]),
    "heads": lambda call: not call.grouped and len(set(call.heads())) > 1,
    "lengths": lambda call: 0 in (call.q.size(-2), call.k.size(-2)),
    "strides": lambda call: call.has_gaps(singles=True),
    "mem_efficient_strides": lambda call: call.has_gaps(singles=False),
    "dtypes": lambda call: call.lacks_dtypes(*_HALVES),
    "mem_efficient_dtypes": lambda call: call.lacks_dtypes(*_NAMES),
    "mem_efficient_gpu": lambda call: not (5, 0) <= call.gpu <= (12, 1),
    "flash_gpu": lambda call: not (8, 0) <= call.gpu <= (12, 1),
    "cudnn_gpu": lambda call: not (8, 0) <= call.gpu <= (12, 1),
    "mem_efficient_size": lambda call: (
        call.q.size(-1) != call.k.size(-1)
        or any(not each.size(-1) or each.size(-1) % call.alignment for each in (call.q, call.v))
    ),
    "flash_size": lambda call: len({size[3] for size in call.sizes}) > 1 or call.q.size(3) > 256,
    "flash_mask": lambda call: call.mask is not None,
    "flash_training": lambda call: call.beyond_training(),
    "flash_causal": lambda call: call.causal and call.q.size(-2) != call.k.size(-2),
    "cudnn_determinism": lambda _: (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    ),
    "cudnn_mask": lambda call: not call.cudnn_takes_mask(),
    "cudnn_dropout": lambda call: call.dropout * 16 % 1,
    "cudnn_size": lambda call: max(call.q.size(3), call.v.size(3)) > call.widest,
    "cudnn_multiple": lambda call: call.q.size(3) % 8 or call.v.size(3) % 8,
    "cudnn_length": lambda call: call.k.size(2) == 1,
}
"""Check -> whether it refuses a call."""

_DENSE = frozenset({"batches", "groups", "heads", "lengths", "strides", "mem_efficient_strides"})
"""What torch checks of dense tensors only. Jagged ones are checked further by torch/nested/_internal/sdpa.py."""


def refusal(kernel: str, call: SDPAParams) -> str | None:
    """Return why a kernel cannot compute a call; None if it can.

    Args:
        kernel: ``"flash"``, ``"mem_efficient"`` or ``"cudnn"``.
        call: The arguments of the call.
    """
    nested = call.query.is_nested or call.key.is_nested
    if nested and call.query.layout is torch.strided:
        return "A simulated device computes attention of nested tensors by products and a softmax."
    facts = _Facts(call)
    checks = (check for check in _TABLE["kernels"][kernel] if not (nested and check in _DENSE))
    failed = next((check for check in checks if _CHECKS[check](facts)), None)
    return None if failed is None else _TABLE["texts"][failed].format(facts)


def can_use(kernel: str, call: SDPAParams, debug: bool) -> bool:
    """Return whether a kernel can compute a call, and warn of the reason if not and ``debug``."""
    why = refusal(kernel, call)
    if why is not None and debug:
        warnings.warn(why, UserWarning, stacklevel=3)
    return why is None


def check(call: SDPAParams) -> None:
    """Raise torch's error if no kernel can compute a call of the device, with torch's warnings about each.

    To be asked of many heads or batches, each of which takes a row of a kernel's grid, and where the program has
    switched "math" off, which computes every call.
    """
    kernels = _TABLE["names"]
    able = [kernel for kernel in kernels if refusal(kernel, call) is None]
    if able:
        # Flash attention has batches along the second axis of its grid and heads along the third.
        if max(call.query.shape[0 if "flash" in able else 1 : 2]) > MOST_ROWS:
            raise cuda_error(INVALID_VALUE, f"A grid has at most {MOST_ROWS} blocks along its second and third axis.")
        return
    if torch._C._get_math_sdp_enabled():
        return
    if all(_CHECKS[f"{kernel}_off"](None) for kernel in kernels):  # type: ignore[arg-type]
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    for kernel, name in kernels.items():
        warnings.warn(f"{name} kernel not used because:", UserWarning, stacklevel=3)
        can_use(kernel, call, debug=True)
    raise RuntimeError("No available kernel. Aborting execution.")
