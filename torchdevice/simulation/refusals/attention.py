"""Which CUDA kernels can compute ``scaled_dot_product_attention``, and why others cannot.

The checks, their order and their texts follow aten/src/ATen/native/transformers of torch 2.13:
``cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``. Strided nested tensors take no part: here no kernel
computes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend

from torchdevice.kernel.devices.scalar_types import scalar_type
from torchdevice.simulation import policy
from torchdevice.simulation.refusals.cuda_errors import INVALID_VALUE, cuda_error

_OPERATORS = {
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "flash": "_scaled_dot_product_flash_attention",
    "mem_efficient": "_scaled_dot_product_efficient_attention",
}
"""Kernel of a library -> its operator."""

_ORDER = {
    "mem_efficient": (
        "mem_efficient_off",
        "devices",
        "mem_efficient_gpu",
        "dimensions",
        "mem_efficient_size",
        "lengths",
        "mem_efficient_strides",
        "batches",
        "groups",
        "heads",
        "mem_efficient_dtypes",
    ),
    "flash": (
        "flash_off",
        "devices",
        "dimensions",
        "flash_mask",
        "flash_size",
        "flash_gpu",
        "flash_training",
        "flash_causal",
        "dtypes",
        "batches",
        "groups",
        "heads",
        "lengths",
        "strides",
    ),
    "cudnn": (
        "cudnn_off",
        "devices",
        "dimensions",
        "cudnn_determinism",
        "dtypes",
        "cudnn_mask",
        "cudnn_gpu",
        "cudnn_dropout",
        "lengths",
        "strides",
        "batches",
        "groups",
        "heads",
        "cudnn_size",
        "cudnn_multiple",
        "cudnn_length",
    ),
}
"""Kernel -> its checks, in torch's order."""

_TEXTS = {
    "mem_efficient_off": "Memory Efficient attention has been runtime disabled.",
    "flash_off": "Flash attention has been runtime disabled.",
    "cudnn_off": "cuDNN attention has been runtime disabled.",
    "devices": (
        "All tensors need to be on cuda device. Got query on device: {0.q.device}, key on device: "
        "{0.k.device}, value on device: {0.v.device}"
    ),
    "dimensions": (
        "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: "
        "{0.q.ndim}, Key dim: {0.k.ndim}, Value dim: {0.v.ndim} instead."
    ),
    "batches": (
        "For dense inputs, both fused kernels require query, key and value to have the same "
        "batch_size. Query.sizes(): {0.sizes[0]}, Key.sizes(): {0.sizes[1]}, Value.sizes(): "
        "{0.sizes[2]} instead. To broadcast dense inputs, try using unsqueeze and expand_to before "
        "passing them into the kernel."
    ),
    "groups": (
        "FlashAttentionV2 only supports grouped query attention, where the number of heads in "
        "key/value must divide number of heads in query.Got input Key sizes(): {0.k.shape[1]}, "
        "Value sizes(): {0.v.shape[1]}, Query sizes(): {0.q.shape[1]} instead."
    ),
    "heads": (
        "For dense input, both fused kernels require query, key and value to have the same "
        "num_heads. Query.sizes(): {0.sizes[0]}, Key sizes(): {0.sizes[1]}, Value sizes(): "
        "{0.sizes[2]} instead. To broadcast dense inputs, try using unsqueeze and expand_to before "
        "passing them into the kernel."
    ),
    "lengths": "All fused kernels do not support zero seq_len_q or seq_len_kv.",
    "strides": (
        "All fused kernels require the last dimension of the input to have stride 1. Got "
        "Query.stride(-1): {0.strides[0]}, Key.stride(-1): {0.strides[1]}, Value.stride(-1): "
        "{0.strides[2]} instead."
    ),
    "mem_efficient_strides": (
        "All fused kernels require the last dimension of the input to have stride 1. Got "
        "Query.stride(-1): {0.strides[0]}, Key.stride(-1): {0.strides[1]}, Value.stride(-1): "
        "{0.strides[2]} instead."
    ),
    "dtypes": (
        "Expected query, key and value to all be of dtype: {{{0.allowed}}}. Got Query dtype: "
        "{0.types[0]}, Key dtype: {0.types[1]}, and Value dtype: {0.types[2]} instead."
    ),
    "mem_efficient_dtypes": (
        "Expected query, key and value to all be of dtype: {{{0.allowed}}}. Got Query dtype: "
        "{0.types[0]}, Key dtype: {0.types[1]}, and Value dtype: {0.types[2]} instead."
    ),
    "mem_efficient_gpu": (
        "Mem Efficient Attention only supports gpu architectures in the range [sm50, sm121]. "
        "Attempting to run on a sm {0.gpu[0]}.{0.gpu[1]} gpu."
    ),
    "flash_gpu": (
        "Flash attention only supports gpu architectures in the range [sm80, sm121]. Attempting to "
        "run on a sm {0.gpu[0]}.{0.gpu[1]} gpu."
    ),
    "cudnn_gpu": (
        "cuDNN MHA only supports gpu architectures in the range [sm80, sm121]. Attempting to run "
        "on a sm {0.gpu[0]}.{0.gpu[1]} gpu."
    ),
    "mem_efficient_size": (
        "Mem efficient attention requires last dimension of inputs to be divisible by "
        "{0.alignment}. Got Query.size(-1): {0.q.shape[3]}, Key.size(-1): {0.k.shape[3]}, "
        "Value.size(-1): {0.v.shape[3]} instead."
    ),
    "flash_size": (
        "Flash attention requires q,k,v to have the same last dimension and to be less than or "
        "equal to 256. Got Query.size(-1): {0.q.shape[3]}, Key.size(-1): {0.k.shape[3]}, "
        "Value.size(-1): {0.v.shape[3]} instead."
    ),
    "flash_mask": "Flash Attention does not support non-null attn_mask.",
    "flash_training": (
        "Flash attention currently doesn't support training with head_dim ∈ (192, 224] or "
        "(head_dim ∈ (224, 256] and dropout > 0.0) on gpu architectures in the range[sm86, "
        "sm89].Attempting to run with dropout set to: {0.dropout:g}and head_dim: {0.q.shape[3]} on "
        "a sm {0.gpu[0]}.{0.gpu[1]} gpu."
    ),
    "flash_causal": (
        "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got "
        "seqlen_q: {0.q.shape[2]} seqlen_k: {0.k.shape[2]}. If you would like to use causal "
        "attention with non-square masks, please see CausalAttnMask."
    ),
    "cudnn_determinism": "cuDNN SDPA is not deterministic.",
    "cudnn_mask": (
        "Please use the following attn mask shapes: 2d - ({{Q_seq_len, 1}}  x {{KV_seq_len, 1}}); "
        "4d - ({{Batch, 1}} x {{Num_heads, 1}} x {{Q_seq_len, 1}}  x {{KV_seq_len, 1}})"
    ),
    "cudnn_dropout": (
        "cuDNN dropout probability resolution is limited to 1/16.Use a dropout probability that is "
        "a multiple of 1/16 to select the cuDNN backend"
    ),
    "cudnn_size": "head_dim should be no more than {0.widest}",
    "cudnn_multiple": "head_dim should be a multiple of 8",
    "cudnn_length": "cudnn SDPA does not support key/value sequence length 1.",
}
"""Check -> torch's text, about :class:`_Facts`."""

_SPOKEN = {
    "mem_efficient": "Memory efficient",
    "flash": "Flash attention",
    "cudnn": "cuDNN attention",
}
"""Kernel -> its name in torch's texts."""

MOST_ROWS = 65_535
"""CUDA's limit of blocks along the second axis of a grid (mem_eff_attention/kernel_forward.h:
getBlocksGrid).
"""

_HALVES = (torch.float16, torch.bfloat16)

_MEM_EFFICIENT = (torch.float16, torch.float32, torch.bfloat16)

_TYPES = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
}


class _Facts:
    """A call and the scope's GPU, as the checks ask for them and the texts show them."""

    def __init__(self, call: SDPAParams):
        three = call.query, call.key, call.value
        self.q, self.k, self.v = three
        self.mask, self.dropout = call.attn_mask, call.dropout
        self.causal, self.grouped = call.is_causal, call.enable_gqa
        self.gpu = policy.capability(call.query) or (8, 0)
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
        self.allowed = ", ".join(scalar_type(each) for each in taken)
        return len(set(self.dtypes)) > 1 or self.dtypes[0] not in taken

    def has_gaps(self, singles: bool) -> bool:
        """Whether a tensor's last dimension has gaps. If its size is 1, kernels take any stride."""
        dense = self.strides == [1, 1, 1] or (singles and self.q.size(-1) == 1)
        return not dense or (
            self.mask is not None and self.mask.stride(-1) != 1 and self.mask.size(-1) != 1
        )

    def heads(self) -> list[int]:
        return [size[1] for size in self.sizes]

    def heads_differ(self) -> bool:
        """Return whether keys and values differ in heads, or cannot be divided among queries."""
        queries, keys, values = self.heads()
        return keys != values or queries % keys != 0

    def has_unaligned_sizes(self) -> bool:
        if self.q.size(-1) != self.k.size(-1):
            return True
        sizes = self.q.size(-1), self.v.size(-1)
        return any(size == 0 or size % self.alignment for size in sizes)

    def cudnn_takes_mask(self) -> bool:
        if self.mask is None:
            return True
        batch, heads, rows, _ = self.sizes[0]
        full = (batch, heads, rows, self.k.size(2))[-self.mask.dim() :]
        fits = all(size in (1, whole) for size, whole in zip(self.mask.shape, full, strict=False))
        return fits and self.mask.dim() in (2, 4) and not self.mask.requires_grad

    def beyond_training(self) -> bool:
        size = self.q.size(-1)
        narrow = (8, 6) <= self.gpu <= (8, 9) or (12, 0) <= self.gpu <= (12, 1)
        return self.trains and narrow and size > 192 and not (size > 224 and not self.dropout)


_CHECKS: dict[str, Callable[[_Facts], Any]] = {
    "mem_efficient_off": lambda _: not torch._C._get_mem_efficient_sdp_enabled(),
    "flash_off": lambda _: not torch._C._get_flash_sdp_enabled(),
    "cudnn_off": lambda _: not torch._C._get_cudnn_sdp_enabled(),
    "devices": lambda call: call.q.is_cpu,
    "dimensions": lambda call: {len(each) for each in call.sizes} != {4},
    "batches": lambda call: len({size[0] for size in call.sizes}) > 1,
    "groups": lambda call: call.grouped and call.heads_differ(),
    "heads": lambda call: not call.grouped and len(set(call.heads())) > 1,
    "lengths": lambda call: 0 in (call.q.size(-2), call.k.size(-2)),
    "strides": lambda call: call.has_gaps(singles=True),
    "mem_efficient_strides": lambda call: call.has_gaps(singles=False),
    "dtypes": lambda call: call.lacks_dtypes(*_HALVES),
    "mem_efficient_dtypes": lambda call: call.lacks_dtypes(*_MEM_EFFICIENT),
    "mem_efficient_gpu": lambda call: not (5, 0) <= call.gpu <= (12, 1),
    "flash_gpu": lambda call: not (8, 0) <= call.gpu <= (12, 1),
    "cudnn_gpu": lambda call: not (8, 0) <= call.gpu <= (12, 1),
    "mem_efficient_size": lambda call: call.has_unaligned_sizes(),
    "flash_size": lambda call: len({size[3] for size in call.sizes}) > 1 or call.q.size(3) > 256,
    "flash_mask": lambda call: call.mask is not None,
    "flash_training": lambda call: call.beyond_training(),
    "flash_causal": lambda call: call.causal and call.q.size(-2) != call.k.size(-2),
    # The program asked for deterministic algorithms, by more than a warning.
    "cudnn_determinism": lambda _: torch.get_deterministic_debug_mode() == 2,
    "cudnn_mask": lambda call: not call.cudnn_takes_mask(),
    "cudnn_dropout": lambda call: call.dropout * 16 % 1,
    "cudnn_size": lambda call: max(call.q.size(3), call.v.size(3)) > call.widest,
    "cudnn_multiple": lambda call: call.q.size(3) % 8 or call.v.size(3) % 8,
    "cudnn_length": lambda call: call.k.size(2) == 1,
}
"""Check -> whether it refuses a call."""

_DENSE = frozenset({"batches", "groups", "heads", "lengths", "strides", "mem_efficient_strides"})
"""Torch's checks of dense tensors only. Jagged ones are checked further by
torch/nested/_internal/sdpa.py.
"""


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
    checks = (check for check in _ORDER[kernel] if not (nested and check in _DENSE))
    failed = next((check for check in checks if _CHECKS[check](facts)), None)
    return None if failed is None else _TEXTS[failed].format(facts)


def chosen(call: Any) -> str:
    """Return the kernel that torch would choose for a call, ``"math"`` if that of no library.

    cuDNN's is not the first on GPUs of capability 9.0 and 10.0: torch prefers it there from cuDNN
    9.15 on, and ``torch.backends.cudnn.version()`` reports an older one.
    """
    key = _key_of(call)
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= 1024:  # as many shapes as a program has; another's begin again
            _choices.clear()
        found = _choices[key] = _first_able(call)
    return found


_choices: dict[Any, str] = {}
"""The facts that decide about a call -> the kernel. The checks take longer than the node of
autograd that asks for it.
"""


def operator_of(call: Any) -> str | None:
    """Return the operator of the kernel that torch would choose; None if that of no library."""
    return _OPERATORS.get(chosen(call))


def _key_of(call: Any) -> Any:
    enabled = torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()
    settings = (
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch.is_grad_enabled(),
    )
    determinism = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    given = [
        call.query,
        call.key,
        call.value,
        *([] if call.attn_mask is None else [call.attn_mask]),
    ]
    alike = tuple(
        (each.shape, each.stride(), each.dtype, each.requires_grad, each.is_cpu) for each in given
    )
    rest = policy.capability(call.query), call.dropout, call.is_causal, call.enable_gqa
    return enabled, settings, determinism, tuple(torch._C._get_sdp_priority_order()), alike, rest


def _first_able(call: Any) -> str:
    for number in torch._C._get_sdp_priority_order():
        if number == SDPBackend.MATH.value and torch._C._get_math_sdp_enabled():
            return "math"
        kernel = _BY_NUMBER.get(number)
        if kernel is not None and refusal(kernel, call) is None:
            return kernel
    return "math"


_BY_NUMBER = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.EFFICIENT_ATTENTION.value: "mem_efficient",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
}
"""torch's number of a library's kernel -> its name."""


def can_use(kernel: str, call: SDPAParams, debug: bool) -> bool:
    """Return whether a kernel can compute a call, and warn of the reason if not and ``debug``."""
    why = refusal(kernel, call)
    if why is not None and debug:
        warnings.warn(why, UserWarning, stacklevel=3)
    return why is None


def check(call: SDPAParams) -> None:
    """Raise torch's error, with its warnings for each kernel, if none can compute a device call.

    To be asked of many heads or batches, each of which takes a row of a kernel's grid, and where
    the program has switched "math" off, which computes every call.
    """
    kernels = _SPOKEN
    able = [kernel for kernel in kernels if refusal(kernel, call) is None]
    if able:
        # Flash attention has batches along the second axis of its grid and heads along the third.
        if max(call.query.shape[0 if "flash" in able else 1 : 2]) > MOST_ROWS:
            raise cuda_error(
                INVALID_VALUE,
                f"A grid has at most {MOST_ROWS} blocks along its second and third axis.",
            )
        return
    if torch._C._get_math_sdp_enabled():
        return
    if all(_CHECKS[f"{kernel}_off"](None) for kernel in kernels):  # type: ignore[arg-type]
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    for kernel, name in kernels.items():
        warnings.warn(f"{name} kernel not used because:", UserWarning, stacklevel=3)
        can_use(kernel, call, debug=True)
    raise RuntimeError("No available kernel. Aborting execution.")
