"""The errors of the CUDA kernels of xformers, causal_conv1d and mamba_ssm, in their words.

The stand-ins use them on simulated GPUs only. Other targets have no such kernels, and take every
dtype and layout.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchdevice.kernel.thread_state import state
from torchdevice.packages.registry import on_simulated_gpu

_WIDE_AND_HALF = (torch.float32, torch.float16, torch.bfloat16)


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    context: Any = state.context
    return context.devices.figure("capability", max(0, tensor.get_device()))


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU of this thread's scope."""
    context: Any = state.context
    return tensor.is_cuda or tensor.device.type == context.device_type


# ---- checks of C++ -------------------------------------------------------------------------------


def expect(condition: str, holds: bool) -> None:
    """Repeat a TORCH_CHECK that has no text of its own."""
    if not holds:
        raise RuntimeError(
            f"Expected {condition} to be true, but got false.  (Could this error message be "
            "improved?  If so, please report an enhancement request to PyTorch.)"
        )


def require(holds: bool, words: str) -> None:
    """Repeat a TORCH_CHECK that has a text of its own."""
    if not holds:
        raise RuntimeError(words)


def _shape(name: str, tensor: torch.Tensor | None, sizes: dict[str, int]) -> None:
    if tensor is not None and tuple(tensor.shape) != tuple(sizes.values()):
        raise RuntimeError(f"{name} must have shape ({', '.join(sizes)})")


def _on_gpu(tensors: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in tensors.items():
        expect(f"{name}.is_cuda()", tensor is None or is_on_gpu(tensor))


def _of_dtype(tensors: dict[str, torch.Tensor | None], dtype: torch.dtype, words: str) -> None:
    for name, tensor in tensors.items():
        expect(f"{name}.scalar_type() == {words}", tensor is None or tensor.dtype == dtype)


def _is_wide_or_half(name: str, tensor: torch.Tensor) -> None:
    one_of = " || ".join(
        f"{name} == at::ScalarType::{kind}" for kind in ("Float", "Half", "BFloat16")
    )
    expect(one_of, tensor.dtype in _WIDE_AND_HALF)


# ---- causal_conv1d -------------------------------------------------------------------------------


def check_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    return_final_states: bool,
) -> None:
    """Raise the errors of ``causal_conv1d_fn``.

    Raises:
        RuntimeError: The kernel would refuse the inputs.
    """
    if not on_simulated_gpu():
        return
    _check_types_of_convolution(x, weight, bias)
    batch, dim, length = x.shape
    # The package copies a tensor of which neither dimension is contiguous.
    is_channel_last = x.stride(1) == 1 and x.stride(2) > 1
    if is_channel_last:
        require(
            dim % 8 == 0, "causal_conv1d only supports channel dimension divisible by 8 for now"
        )
        require(
            x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0,
            "causal_conv1d with channel last layout requires strides (x.stride(0) and x.stride(2)) "
            "to be multiples of 8",
        )
    _check_width(weight)
    for name, is_asked in (
        ("seq_idx", seq_idx is not None),
        ("initial_states", initial_states is not None),
        ("final_states", return_final_states),
    ):
        require(
            is_channel_last or not is_asked, f"{name} is only supported for channel last layout"
        )
    _of_dtype({"seq_idx": seq_idx}, torch.int32, "torch::kInt32")
    _of_dtype({"initial_states": initial_states}, x.dtype, "input_type")
    _on_gpu({"seq_idx": seq_idx, "initial_states": initial_states})
    _shape("seq_idx", seq_idx, {"batch_size": batch, "seqlen": length})
    _shape(
        "initial_states",
        initial_states,
        {"batch_size": batch, "dim": dim, "width - 1": weight.shape[1] - 1},
    )


def check_update_of_convolution(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
) -> None:
    """Raise the errors of ``causal_conv1d_update``.

    Raises:
        RuntimeError: The kernel would refuse the inputs.
    """
    if not on_simulated_gpu():
        return
    _check_types_of_convolution(x, weight, bias)
    _of_dtype({"conv_state": conv_state}, x.dtype, "input_type")
    _check_width(weight)
    expect("conv_state_len >= width - 1", conv_state.shape[2] >= weight.shape[1] - 1)
    of_int32 = {"conv_state_indices": conv_state_indices, "cache_seqlens": cache_seqlens}
    _of_dtype(of_int32, torch.int32, "torch::kInt32")
    _on_gpu({"conv_state": conv_state, **of_int32})


def _check_types_of_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    _is_wide_or_half("input_type", x)
    _is_wide_or_half("weight_type", weight)
    _on_gpu({"x": x, "weight": weight, "bias": bias})
    _shape("weight", weight, {"dim": x.shape[1], "width": weight.shape[-1]})
    _of_dtype({"bias": bias}, weight.dtype, "weight_type")
    _shape("bias", bias, {"dim": x.shape[1]})


def _check_width(weight: torch.Tensor) -> None:
    require(2 <= weight.shape[1] <= 4, "causal_conv1d only supports width between 2 and 4")


# ---- mamba_ssm -----------------------------------------------------------------------------------


def check_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
) -> None:
    """Raise the errors of ``selective_scan_fn``.

    Raises:
        RuntimeError: The kernel would refuse the inputs.
    """
    if not on_simulated_gpu():
        return
    _is_wide_or_half("input_type", u)
    expect(
        "weight_type == at::ScalarType::Float || weight_type == at::ScalarType::ComplexFloat",
        a.dtype in (torch.float32, torch.complex64),
    )
    _of_dtype({"delta": delta, "z": z}, u.dtype, "input_type")
    for name, each in (("B", b), ("C", c)):
        varies = each.dim() > 2
        _of_dtype(
            {name: each},
            u.dtype if varies else a.dtype,
            f"(!is_variable_{name} ? weight_type : input_type)",
        )
    _of_dtype({"D": d, "delta_bias": delta_bias}, torch.float32, "at::ScalarType::Float")
    _on_gpu(
        {"u": u, "delta": delta, "A": a, "B": b, "C": c, "D": d, "delta_bias": delta_bias, "z": z}
    )
    batch, dim, length = u.shape
    size = a.shape[1]
    require(size <= 256, "selective_scan only supports state dimension <= 256")
    whole = {"batch_size": batch, "dim": dim, "seqlen": length}
    _shape("delta", delta, whole)
    _shape("z", z, whole)
    _shape("A", a, {"dim": dim, "dstate": size})
    _shape("D", d, {"dim": dim})
    _shape("delta_bias", delta_bias, {"dim": dim})
    for name, each in (("B", b), ("C", c)):
        _check_choice(name, each, whole, size, 2 * length if a.is_complex() else length)


def _check_choice(
    name: str, given: torch.Tensor, whole: dict[str, int], size: int, length: int
) -> None:
    """Check the shape of B or C: of all steps, or of each."""
    if given.dim() == 2:
        _shape(name, given, {"dim": whole["dim"], "dstate": size})
        return
    given = given[:, None] if given.dim() == 3 else given
    sizes = {"batch_size": whole["batch_size"], "n_groups": given.shape[1], "dstate": size}
    _shape(name, given, {**sizes, "!is_complex ? seqlen : seqlen * 2": length})


def check_step(
    states: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> None:
    """Repeat the assertions of ``selective_state_update``.

    Raises:
        AssertionError: The shapes do not fit.
    """
    if not on_simulated_gpu():
        return
    has_heads = states.dim() > 3
    heads = states.shape[1] if has_heads else 1
    groups = b.shape[1] if b.dim() == 3 else 1
    fitting = (
        x.shape[1:] == states.shape[1:-1] and dt.shape == x.shape and a.shape == states.shape[1:]
    )
    chosen = (x.shape[0], *b.shape[1:-1], states.shape[-1])
    if not fitting or b.shape != chosen or c.shape != b.shape:
        shapes = ", ".join(str(tuple(each.shape)) for each in (states, x, dt, a, b, c))
        raise AssertionError(
            f"state, x, dt, A, B and C have the shapes {shapes}, which do not fit."
        )
    if heads % groups:
        raise AssertionError("nheads must be divisible by ngroups")


# ---- xformers ------------------------------------------------------------------------------------

_HINT = (
    "HINT: We don't support broadcasting, please use `expand` yourself before calling "
    "`memory_efficient_attention` if you need to"
)


def check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: Any,
    p: float,
    *,
    chosen: bool,
) -> None:
    """Raise the errors of ``xformers.ops.memory_efficient_attention``.

    Args:
        query: (batch, rows, heads, size), or (batch, rows, size), or (batch, rows, groups, heads,
            size).
        key: As the queries.
        value: As the keys; its size may differ.
        bias: The bias of the scores.
        p: The probability with which a weight is left out.
        chosen: Whether the program chose the kernel.

    Raises:
        ValueError: The tensors do not fit each other, or the chosen kernel.
        RuntimeError: The bias has another dtype.
        NotImplementedError: No kernel takes them.
    """
    if not on_simulated_gpu():
        return
    given = {"query": query, "key": key, "value": value}
    if any(each.device != query.device for each in given.values()):
        raise ValueError("Query/Key/Value should all be on the same device")
    if any(each.dtype != query.dtype for each in given.values()):
        dtypes = _lines(given, "dtype", lambda each: each.dtype)
        raise ValueError(f"Query/Key/Value should all have the same dtype\n{dtypes}")
    shapes = _lines(given, "shape", lambda each: each.shape)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"Invalid dropout probability: p={p}")
    inner = query.shape[2:-1]
    fits = (
        key.shape[0] == query.shape[0]
        and key.shape[2:] == query.shape[2:]
        and value.shape[2:-1] == inner
    )
    if not fits or value.shape[:2] != key.shape[:2]:
        raise ValueError(f"Incompatible shapes for attention inputs:\n{shapes}\n{_HINT}")
    _check_tensor_bias(query, key, bias, shapes)
    reasons = list(_reasons(query, value))
    if reasons:
        why = (
            f"inputs:\n{_described(given, bias, p)}\n`cutlassF-pt` is not supported because:\n"
            f"{textwrap.indent(chr(10).join(reasons), '    ')}"
        )
        if chosen:
            raise ValueError(f"Operator `memory_efficient_attention` does not support {why}")
        raise NotImplementedError(
            f"No operator found for `memory_efficient_attention_forward` with {why}"
        )
    tensor = _tensor_of(bias)
    if tensor is not None and tensor.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


def _tensor_of(bias: Any) -> torch.Tensor | None:
    return bias if isinstance(bias, torch.Tensor) else getattr(bias, "_bias", None)


def _check_tensor_bias(query: torch.Tensor, key: torch.Tensor, bias: Any, shapes: str) -> None:
    tensor = _tensor_of(bias)
    if tensor is None or query.dim() != 4:
        return
    expected = query.shape[0], query.shape[2], query.shape[1], key.shape[1]
    if tuple(tensor.shape) != expected:
        raise ValueError(
            f"Invalid shape for attention bias: {tensor.shape} (expected {expected})\n{shapes}"
        )


def _reasons(query: torch.Tensor, value: torch.Tensor) -> Iterator[str]:
    """Yield why the kernel that takes most inputs does not take these."""
    if not is_on_gpu(query):
        yield f"device={query.device.type} (supported: {{'cuda'}})"
        return
    if query.dtype not in _WIDE_AND_HALF:
        yield f"dtype={query.dtype} (supported: {set(_WIDE_AND_HALF)})"
        return
    capability = _capability(query)
    if query.dtype == torch.bfloat16 and capability < (8, 0):
        yield "bf16 is only supported on A100+ GPUs"
    alignment = _alignment(query.dtype, capability)
    for name, each in (("query", query), ("value", value)):
        if each.shape[-1] % alignment:
            yield f"{name}.shape[-1] % {alignment} != 0"
        elif each.stride(-2) % alignment:
            yield f"{name}.stride(-2) % {alignment} != 0 ({name}.stride() = {each.stride()})"
        if each.stride(-1) > 1:
            stride = f"({name}.stride() = {each.stride()})"
            yield f"{name}.stride(-1) > 1 {stride} - you should call `.contiguous()` on the input"


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the divisor of sizes: elements in 16 bytes where tensor cores compute."""
    if capability >= (8, 0):
        return max(4, 16 // dtype.itemsize)
    return 16 // dtype.itemsize if capability >= (7, 0) and dtype == torch.float16 else 1


def _lines(given: dict[str, torch.Tensor], what: str, of: Callable[[torch.Tensor], Any]) -> str:
    return "\n".join(f"  {name}.{what}: {of(each)}" for name, each in given.items())


def _described(given: dict[str, torch.Tensor], bias: Any, p: float) -> str:
    lines = [
        f"{name:<12}: shape={tuple(each.shape)} ({each.dtype})" for name, each in given.items()
    ]
    lines += [f"attn_bias   : {type(bias)}", f"p           : {p}"]
    return textwrap.indent("\n".join(lines), "     ")
