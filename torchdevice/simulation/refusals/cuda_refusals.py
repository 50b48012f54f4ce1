"""Calls that CUDA refuses and the CPU accepts: dtypes, operators, nondeterministic kernels, indices out of bounds.

:func:`guarded` wraps the kernels of the operators that CUDA refuses something of. The other kernels stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.foundation import data_files
from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import dtype_of
from torchdevice.simulation.profiles import cpu_only_operators, missing_on_cuda
from torchdevice.simulation.refusals import nondeterminism
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, cuda_error

Kernel = Callable[..., Any]

GAPS: Mapping[str, list[str]] = data_files.read(__file__, "cuda_dtypes.json")
"""Operator -> the dtypes in which the CPU has a kernel and CUDA none. ``docs/make_cuda_dtypes.py`` makes the table."""

_mode_enabled = torch._C._is_torch_function_mode_enabled

_TABLES: Mapping[str, Any] = data_files.read(__file__, "cuda_operators.json")

_KERNELS: Mapping[str, str] = _TABLES["kernels"]
"""The names that CUDA's kernels have in torch's errors (aten/src/ATen/native/cuda); another operator's is NAME_cuda.

They are in ``libtorch_cuda.so`` of torch 2.10 and 2.15."""

_ASSERTED = re.compile("|".join(_TABLES["asserted"]))
"""The CPU's texts for values that CUDA's kernels assert of. Values of a shape or an int are checked by the host."""

_ASSERTING = frozenset(_TABLES["asserting"])
"""The operators whose CUDA kernels assert of the values of a tensor (``CUDA_KERNEL_ASSERT``)."""


def guarded(op: Any, kernel: Kernel) -> Kernel:
    """Return a kernel that refuses what CUDA refuses of an operator; the kernel itself where that is nothing."""
    name = base_name(op)
    checks = _checks(op, name)
    if asserts(op):
        kernel = _asserting(kernel)
    if not checks:
        return kernel

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if _mode_enabled():
            with torch._C.DisableTorchFunction():
                return refusing(*args, **kwargs)
        for check in checks:
            check(args, kwargs)
        return kernel(*args, **kwargs)

    return refusing


def _checks(op: Any, name: str) -> list[Callable[[Any, Any], None]]:
    """Return the checks of the arguments of an operator's calls.

    Each check asks for the scope last, because most calls end at a cheaper test of the arguments.
    """
    checks: list[Callable[[Any, Any], None]] = []
    if _lacks(op):
        checks.append(lambda args, kwargs: _refuse_missing(op))
    if name in _FLOAT8_PRODUCTS:
        checks.append(lambda args, kwargs: _check_capability())
    if name in GAPS:
        dtypes = frozenset(getattr(torch, dtype) for dtype in GAPS[name])
        checks.append(lambda args, kwargs: _check_dtype(name, dtypes, args))
    found = nondeterminism.OPERATORS.get(name)
    if found is not None:
        checks.append(lambda args, kwargs: _check_determinism(found, op, args, kwargs))
    return checks


def _lacks(op: Any) -> bool:
    """Return whether CUDA has no kernel for an operator, in any dtype."""
    name = op._schema.name.removeprefix("aten::")
    overload = f"{name}.{op._overloadname}" if op._overloadname != "default" else name
    return overload in cpu_only_operators()


def _refuse_missing(op: Any) -> None:
    if policy.stands_for_cuda():
        raise NotImplementedError(missing_on_cuda(op.name()))


def _check_determinism(found: nondeterminism.Nondeterministic, op: Any, args: Any, kwargs: Any) -> None:
    if torch.are_deterministic_algorithms_enabled() and policy.stands_for_cuda():
        nondeterminism.check(found, op, args, kwargs)


_FLOAT8_PRODUCTS = frozenset({"_scaled_mm", "_scaled_mm_v2"})
"""Products of float8 tensors."""

_FLOAT8_CAPABILITY = (8, 9)


def _check_capability() -> None:
    """Raise torch's error on a device without units for float8 (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    capability = policy.capability() if policy.stands_for_cuda() else None
    if capability is not None and capability < _FLOAT8_CAPABILITY:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )


def _check_dtype(name: str, dtypes: frozenset[torch.dtype], args: Any) -> None:
    """Raise torch's NotImplementedError if CUDA has no kernel in the dtype of a call's first tensor."""
    first = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if first is None or dtype_of(first) not in dtypes or not first.numel() or not policy.stands_for_cuda():
        return
    kernel = _convolution(*args) if name == "convolution" else _KERNELS.get(name, f"{name}_cuda")
    raise NotImplementedError(f"\"{kernel}\" not implemented for '{scalar_type(dtype_of(first))}'")


def scalar_type(dtype: torch.dtype) -> str:
    """Return how torch's errors spell a dtype (c10/core/ScalarType.h), as in the name of its legacy type."""
    return torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> str:
    """Return the name of the kernel that torch chooses on CUDA without cuDNN (aten/src/ATen/native/Convolution.cpp)."""
    dims = 3 if input.dim() == 5 else 2
    if transposed:
        return f"slow_conv_transpose{dims}d_out_cuda"
    if groups > 1 and groups == input.size(1) and weight.size(0) % groups == 0:
        return "conv_depthwise2d_forward_cuda" if dims == 2 else "conv_depthwise3d"
    if dims == 3 or any(step != 1 for step in dilation):
        return "slow_conv_dilated<>"
    return "slow_conv2d_cuda"


def _asserting(kernel: Kernel) -> Kernel:
    """Return a kernel in whose place CUDA's would assert: the error is CUDA's, and the device is lost."""

    def asserting(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            asserted(str(error))
            raise

    return asserting


def asserted(message: str) -> None:
    """Raise CUDA's error, and lose the device, where CUDA's kernel would assert what an error of the CPU's says."""
    text = message.split("\n")[0]
    if policy.stands_for_cuda() and _ASSERTED.match(text):
        why = f"The kernel's assertion was: {text}"
        policy.lose(why)
        raise cuda_error(DEVICE_ASSERT, why) from None


# ---- what kernels in C++ must know of an operator --------------------------------------------------------------------


def base_name(op: Any) -> str:
    """Return the name of an operator, and that of ``add`` for ``add_``."""
    name: str = op._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def asserts(op: Any) -> bool:
    """Return whether CUDA's kernel asserts of the values of a tensor."""
    return base_name(op) in _ASSERTING


def may_refuse(op: Any) -> bool:
    """Return whether there is a check of an operator that depends neither on a dtype nor on determinism."""
    return _lacks(op) or base_name(op) in _FLOAT8_PRODUCTS


def refused_dtypes(op: Any) -> list[torch.dtype]:
    """Return the dtypes that CUDA refuses in the first tensor of a call."""
    return [getattr(torch, dtype) for dtype in GAPS.get(base_name(op), ())]
