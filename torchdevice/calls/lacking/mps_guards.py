"""Guards: what runs instead of calls that MPS's kernels are known to compute wrongly.

A guard gets the kernel, the operator and the arguments of a call. It returns :data:`HARMLESS` to
let MPS's kernel run, else the corrected result.

:data:`FAULTS` lists the operators. Numbers are those of issues of
https://github.com/pytorch/pytorch. A version is given where the issue, or a comment on it, names
one with the fault. Everywhere else the guard is always on.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from torchdevice.calls.lacking.cpu_fallback import run
from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.registered_kernels import overload
from torchdevice.kernel.stand_ins import Converted, given_to, tensors, written

Kernel = Callable[..., Any]

Guard = Callable[[Kernel, Any, tuple[Any, ...], dict[str, Any]], Any]

HARMLESS: Any = object()


def contiguous_output(
    kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the kernel write to contiguous copies of its outputs, and copy them back."""
    are_contiguous = all(tensor.is_contiguous() for tensor in written(op, args, kwargs))
    return HARMLESS if are_contiguous else _Contiguous(kernel, op).call(args, kwargs)


class _Contiguous(Converted):
    """A call with contiguous tensors."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous()


def contiguous_arguments(
    kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the tensors among the arguments contiguous."""
    are_contiguous = all(tensor.is_contiguous() for tensor in tensors((args, kwargs)))
    return HARMLESS if are_contiguous else _Contiguous(kernel, op).call(args, kwargs)


def contiguous_weight(
    kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the weight contiguous."""
    given = given_to(op, args, kwargs)
    if given["weight"].is_contiguous():
        return HARMLESS
    return kernel(*{**given, "weight": given["weight"].contiguous()}.values())


def expanded_groups(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat keys and values for the query heads of each group; make all arguments contiguous."""
    query, key, value, *rest = args
    if query.dim() < 3 or query.size(-3) in (1, key.size(-3)) or query.size(-3) % key.size(-3):
        return contiguous_arguments(kernel, op, args, kwargs)
    key, value = (
        each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value)
    )
    return _Contiguous(kernel, op).call((query, key, value, *rest), kwargs)


def one_dtype(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the kernel its floating-point arguments in their common dtype; results get the CPU's.

    That is the dtype of the input, for the statistics the widest, and for a gradient the dtype of
    what it belongs to.
    """
    given = {each.dtype for each in tensors(args)}
    widest = functools.reduce(torch.promote_types, given)
    if given == {widest}:
        return HARMLESS
    wide = [value.to(widest) if isinstance(value, torch.Tensor) else value for value in args]
    results = kernel(*wide, **kwargs)
    if op._schema.name.endswith("_backward"):
        dtypes = [args[1].dtype, *(None if value is None else value.dtype for value in args[5:7])]
    else:
        dtypes = [args[0].dtype, widest, widest]
    pairs = zip(results, dtypes, strict=True)
    return tuple(each if each is None or dtype is None else each.to(dtype) for each, dtype in pairs)


def on_the_cpu(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on the CPU."""
    return run(op._schema.name, op, args, kwargs, next(tensors((args, kwargs))).device.type)


def undivided_sizes(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pool on the CPU where a size is no multiple of the size of the result."""
    divides = all(
        wanted and size % wanted == 0
        for size, wanted in zip(args[0].shape[-2:], args[1], strict=True)
    )
    return HARMLESS if divides else on_the_cpu(kernel, op, args, kwargs)


MOST_COUNTED = 1 << 31
"""The number of elements beyond which a kernel counts wrongly in 32 bits."""


def many_elements(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Use the CPU for a first argument with more elements than the kernel can count."""
    return HARMLESS if args[0].numel() <= MOST_COUNTED else on_the_cpu(kernel, op, args, kwargs)


LONGEST = 32767
"""The number of elements from which on a kernel reads beyond the end of those that a product sums
over.
"""


def long_products(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Use the CPU for products that sum over many elements, unless one factor is a few vectors."""
    left, right = args[1:3] if "add" in op._schema.name else args[:2]  # what is added comes first
    summed = left.size(-1)
    is_right = summed < LONGEST or min(left.numel(), right.numel()) < 16 * summed
    return HARMLESS if is_right else on_the_cpu(kernel, op, args, kwargs)


MOST_ELEMENTS = 1 << 32
"""The number of elements beyond which a product is computed in parts."""


def in_parts(kernel: Kernel, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a batched product in parts, each with few enough elements for the kernel to count."""
    left, right = args
    if left.size(0):
        largest = max(left[0].numel(), right[0].numel(), left.size(1) * right.size(2))
    else:
        largest = 0
    if largest * left.size(0) < MOST_ELEMENTS or left.size(0) == 1:
        return HARMLESS
    step = max(1, (MOST_ELEMENTS - 1) // largest)
    whole = torch.cat(
        [torch.bmm(a, b) for a, b in zip(left.split(step), right.split(step), strict=True)]
    )
    return whole if not kwargs else kwargs["out"].resize_(whole.shape).copy_(whole)


Version = tuple[int, ...]


class Fault(NamedTuple):
    """A kernel that gives wrong results.

    Attributes:
        operators: The operators, with overload.
        issues: The issues that report it.
        what: The fault, for the report and the documentation.
        guard: What is done instead.
        macos_before: The first version of macOS without the fault; None where none is known.
        torch_before: The first version of torch without the fault; None where none is known.
    """

    operators: tuple[str, ...]
    issues: tuple[int, ...]
    what: str
    guard: Guard
    macos_before: Version | None = None
    torch_before: Version | None = None

    @property
    def done(self) -> str:
        """The report's text for a call that met it."""
        return (
            f"{self.guard.__name__.replace('_', ' ')} (pytorch issues "
            f"{', '.join(map(str, self.issues))})"
        )

    def is_in(self, torch_version: Version, macos_version: Version | None) -> bool:
        """Return whether these versions of torch and macOS may have the fault; unknown ones may."""
        if self.torch_before is not None and torch_version >= self.torch_before:
            return False
        return (
            self.macos_before is None or macos_version is None or macos_version < self.macos_before
        )


FAULTS = (
    Fault(
        operators=("mm", "mm.out", "addmm", "addmm.out", "addmm_", "linear", "linear.out"),
        issues=(193487, 195163),
        what="products that sum over 32,767 elements or more read memory beyond their arguments",
        guard=long_products,
        torch_before=(2, 14),
    ),
    Fault(
        operators=(
            "bmm",
            "bmm.out",
            "baddbmm",
            "baddbmm.out",
            "baddbmm_",
            "addbmm",
            "addbmm.out",
            "addbmm_",
        ),
        issues=(195163,),
        what="products that sum over 32,767 elements or more read memory beyond their arguments",
        guard=long_products,
    ),
    Fault(
        operators=(
            "addcmul_",
            "addcmul.out",
            "addcdiv_",
            "addcdiv.out",
            "random_",
            "random_.from",
            "random_.to",
        ),
        issues=(131736, 139006, 146085),
        what="in-place results are not written to tensors that are not contiguous",
        guard=contiguous_output,
        macos_before=(15,),
    ),
    Fault(
        operators=("_scaled_dot_product_attention_math_for_mps",),
        issues=(181133, 163597, 174861),
        what="attention of arguments that are not contiguous, or of grouped heads, is wrong",
        guard=expanded_groups,
    ),
    Fault(
        operators=("linear",),
        issues=(161641,),
        what="arguments that are not contiguous give wrong results",
        guard=contiguous_arguments,
    ),
    Fault(
        operators=("native_layer_norm", "native_layer_norm_backward"),
        issues=(190054,),
        what="arguments of several dtypes give wrong results, or end the process in backward",
        guard=one_dtype,
    ),
    Fault(
        operators=("_linalg_solve_ex", "_linalg_solve_ex.result"),
        issues=(175192,),
        what="gradients of linalg.solve are wrong",
        guard=on_the_cpu,
    ),
    Fault(
        operators=("bmm", "bmm.out"),
        issues=(197636,),
        what="products of 2^32 elements or more are wrong",
        guard=in_parts,
    ),
    Fault(
        operators=("adaptive_max_pool2d", "adaptive_max_pool2d.out"),
        issues=(190064, 189659),
        what="sizes that are no multiples of the result's give maxima of other windows",
        guard=undivided_sizes,
        torch_before=(2, 14),
    ),
    Fault(
        operators=("index_select", "index_select.out"),
        issues=(188756,),
        what="rows of a source of more than 2^31 elements are 0, as in an embedding",
        guard=many_elements,
        torch_before=(2, 14),
    ),
    Fault(
        operators=("_mps_convolution", "mps_convolution_backward"),
        issues=(192212,),
        what="a weight that is not contiguous gives wrong results",
        guard=contiguous_weight,
    ),
)
"""Every known fault with a guard."""


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def version(text: str) -> Version | None:
    """Return a version as numbers, None for a text without any."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else None


def here(faults: Iterable[Fault] = FAULTS) -> list[Fault]:
    """Return the faults that the installed torch and this machine's macOS may have."""
    installed = version(torch.__version__) or ()
    return [fault for fault in faults if fault.is_in(installed, version(platform.mac_ver()[0]))]


def guarded_on(key: str) -> set[str]:
    """Return the operators with a guard that have a kernel under a dispatch key, with namespace."""
    names = (f"aten::{name}" for fault in FAULTS for name in fault.operators)
    return {name for name in names if _has_kernel(name, key)}


def put(context: Context) -> None:
    """Put the guards that a context needs for its target. May be called again."""
    if context.runtime.corrected_key is not None:
        _put_here(context.runtime.corrected_key)


@functools.cache
def _put_here(key: str) -> None:
    put_for(key, here())


def put_for(key: str, faults: Iterable[Fault]) -> None:
    """Put a guard in front of each operator of some faults that has a kernel for a dispatch key."""
    for fault in faults:
        for name in (f"aten::{each}" for each in fault.operators):
            if _has_kernel(name, key):
                registered_kernels.put_in_front(name, key, _guarded(name, key, fault), fault.done)


def _guarded(name: str, key: str, fault: Fault) -> registered_kernels.Kernel:
    """Return a kernel that replaces torch's wrong one in a scope."""

    def kernel(keys: Any, own: Kernel, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None or context.runtime.corrected_key != key:
            return own(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = fault.guard(own, overload(name), args, kwargs)
            if result is HARMLESS:
                return own(*args, **kwargs)
        context.journal.record(name, fault.done, Fidelity.EXACT)
        return result

    return kernel
