"""``torch.cuda.jiterator``: elementwise functions in C++, compiled for the CPU.

torch compiles such a function with NVRTC and calls it for each element
(ATen/native/cuda/jiterator.cu and jit_utils.cpp). Here a compiler of this machine does, and the
loop runs as any other operator that the target runs by a kernel of the CPU.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchdevice.calls import host_functions
from torchdevice.calls.rewriters import native_device
from torchdevice.kernel.bindings import supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.lowlevel.compiled_loop import Loop, compiled
from torchdevice.kernel.thread_state import refuse
from torchdevice.kernel.torch_internals import data_ptr

_TYPES = {
    torch.bool: "bool",
    torch.uint8: "uint8_t",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "std::complex<float>",
    torch.complex128: "std::complex<double>",
}
"""The dtypes in which a function computes -> the types of C++. Halves compute in float32."""

_SOURCE = """
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#define __device__
#define __host__
#define __forceinline__ inline
using namespace std;
template <typename T> T rsqrt(T x) {{ return T(1) / sqrt(x); }}
{code}
extern "C" void torchdevice_loop(int64_t count, void** data, const char* numbers) {{
  for (int64_t i = 0; i < count; ++i) {{
    {statement};
  }}
}}
"""


class _Kind(NamedTuple):
    """A kind of further arguments.

    Attributes:
        format: How :mod:`struct` packs one.
        given: How C++ reads one, for a type in which the function computes.
    """

    format: str
    given: str


_NUMBERS = {
    bool: _Kind("?", "*(const bool*)"),
    int: _Kind("q", "*(const int64_t*)"),
    float: _Kind("d", "*(const double*)"),
    complex: _Kind("dd", "({})*(const std::complex<double>*)"),
}
"""Python's type of a further argument -> its kind. A bool is an int too, so it comes first."""

_SLOT = 16
"""The bytes of a further argument."""


@supplied_function("_cuda_jiterator_compile_and_launch_kernel")
def compile_and_launch(
    context: Context,
    code_string: str,
    kernel_name: str,
    return_by_ref: bool,
    num_outputs: int,
    tensors: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Apply a function of C++ to each element: return a tensor, or a tuple of tensors.

    Tensors are broadcast and get one dtype, as in torch's elementwise operators.

    Raises:
        NotSupportedError: This machine has no C++ compiler.
        RuntimeError: The compiler refuses the code, or the tensors are on different devices.
    """
    _check_devices(context, tensors)
    dtype = _common_dtype(tensors)
    computed = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if computed not in _TYPES:
        raise RuntimeError(f"torch.cuda.jiterator has no type of C++ for {dtype}.")
    numbers = [_number(each) for each in kwargs.values()]
    source = _SOURCE.format(
        code=code_string,
        statement=_statement(
            kernel_name, _TYPES[computed], len(tensors), num_outputs, numbers, return_by_ref
        ),
    )
    loop = _compiled(source)
    with torch.no_grad():
        given = [each.detach() for each in torch.broadcast_tensors(*tensors)]
        outputs = [torch.empty_like(given[0], dtype=dtype) for _ in range(num_outputs)]

    def run(memory: list[torch.Tensor]) -> None:
        inputs = [each.to(computed).contiguous() for each in memory[num_outputs:]]
        found = [torch.empty(inputs[0].shape, dtype=computed) for _ in range(num_outputs)]
        addresses = [data_ptr(each) for each in (*inputs, *found)]
        loop(inputs[0].numel(), addresses, b"".join(map(_packed, numbers)))
        for output, values in zip(memory, found, strict=False):
            output.copy_(values)

    host_functions.call(context, run, [*outputs, *given])
    return outputs[0] if num_outputs == 1 else tuple(outputs)


def _compiled(source: str) -> Loop:
    try:
        return compiled(source, "torchdevice_loop")
    except FileNotFoundError as error:
        refuse(
            "torch.cuda.jiterator without a C++ compiler",
            f"Install one, such as g++ or clang++, or name one by CXX=. {str(error.filename)!r} "
            "was not found.",
        )


def _check_devices(context: Context, tensors: Sequence[torch.Tensor]) -> None:
    """Check that there are tensors, and on one device, as a loop over elements on CUDA does."""
    if not tensors:
        raise RuntimeError(
            "torch.cuda.jiterator was called without a tensor. Give it at least one."
        )
    devices = [native_device(each) for each in tensors]
    for other in devices:
        if other != devices[0]:
            shown = [context.devices.shown(each) for each in (devices[0], other)]
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{shown[0]} and {shown[1]}!"
            )


def _common_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype to which tensors are promoted. Those without dimensions count less."""
    whole = [each.dtype for each in tensors if each.dim()]
    single = [each.dtype for each in tensors if not each.dim()]
    if not whole or not single:
        return functools.reduce(torch.promote_types, whole or single)
    of_whole, of_single = (functools.reduce(torch.promote_types, each) for each in (whole, single))
    # As meta tensors, which cost no memory.
    return torch.result_type(
        torch.empty(1, dtype=of_whole, device="meta"),
        torch.empty((), dtype=of_single, device="meta"),
    )


def _statement(
    name: str, type_: str, inputs: int, outputs: int, numbers: Sequence[Any], by_reference: bool
) -> str:
    """Return the statement of C++ that computes an element."""
    arguments = [f"(({type_}*)data[{at}])[i]" for at in range(inputs)]
    results = [f"(({type_}*)data[{inputs + at}])[i]" for at in range(outputs)]
    further = [
        f"{_kind_of(number).given.format(type_)}(numbers + {_SLOT * at})"
        for at, number in enumerate(numbers)
    ]
    if by_reference:
        return f"{name}<{type_}>({', '.join((*arguments, *further, *results))})"
    return f"{results[0]} = {name}<{type_}>({', '.join((*arguments, *further))})"


def _number(value: Any) -> Any:
    """Return a further argument as a number of Python."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, (bool, int, float, complex)) else float(value)


def _kind_of(number: Any) -> _Kind:
    return next(kind for python, kind in _NUMBERS.items() if isinstance(number, python))


def _packed(number: Any) -> bytes:
    """Return the bytes of a further argument."""
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    return struct.pack(_kind_of(number).format, *parts).ljust(_SLOT, b"\0")
