"""float64 and complex128 tensors of a target that lacks these dtypes, with values on the CPU.

Such a tensor reports the target as its device. torch dispatches each operator that gets one to it,
and the operator runs on the CPU: results in float64 are such tensors again, other results are the
target's own. Tensors of other dtypes never come here.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from torchdevice.calls.lacking.cpu_fallback import CPU, CpuFallback, call_on_cpu, counted
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.stand_ins import mapped, tensors
from torchdevice.kernel.thread_state import state

_REFUSED = re.compile(r"doesn't support (?:float64|complex128)\b")
"""The target's error for a dtype that it cannot hold (aten/src/ATen/mps/EmptyTensor.cpp)."""

DOUBLES = frozenset({torch.float64, torch.complex128})


class HostDouble(torch.Tensor):
    """A float64 or complex128 tensor of the target, whose values are in the CPU's memory.

    Args:
        host: The CPU tensor with the values, below autograd.
        device: The target's device.

    Raises:
        NotSupportedError: The values are in a compressed sparse layout, in which torch makes no
            such tensor.
    """

    _host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> HostDouble:
        if host.layout not in (torch.strided, torch.sparse_coo):
            raise NotSupportedError(
                f"a tensor of {host.dtype} in the layout {host.layout}",
                "Convert it to float32, or use to_sparse().",
            )
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=device,
        )
        made._host = host
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Convert by operators that the target can differentiate; leave other calls to torch."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _CONVERSIONS and isinstance(args[0], cls):
                return _convert(func, args, kwargs)
            if func is torch.Tensor.tolist or (func is torch.Tensor.numpy and kwargs.get("force")):
                return func(args[0].detach().cpu())
            # The call in torch itself first: most functions work on the wrapper by dispatch.
            try:
                return func(*args, **kwargs)
            except TypeError as error:
                # The target refused a float64 result of other tensors.
                if not says_double(error):
                    raise
            return call_on_cpu(func, args, kwargs, on_target)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on the CPU."""
        named = kwargs or {}
        with torch._C.DisableTorchFunction():
            kind = next(
                value.device.type
                for value in tensors((args, named))
                if isinstance(value, HostDouble)
            )
            fallback = _DoubleFallback(func, kind, func)
            name = f"{func._schema.name} in float64"
            return counted(state.context, name, lambda: fallback.call(args, named), (args, named))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # The program's device, before modes are off.
        device = f", device='{self.device}'"
        with torch._C.DisableTorchFunction():
            text, dtype = repr(self._host), f", dtype={self.dtype}"
            grad = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
            grad = grad or (", requires_grad=True" if self.requires_grad else "")
        values = text.removesuffix(")").removesuffix(dtype)
        kind = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{kind}{values}{device}{dtype}{grad})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the values as a CPU tensor, which any machine can load."""
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy


class _DoubleFallback(CpuFallback):
    """A call of an operator with a :class:`HostDouble` among its arguments."""

    views_targets_memory = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor._host if isinstance(tensor, HostDouble) else super().copy(tensor)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        if result.dtype in DOUBLES and self.device is not None:
            return HostDouble(result, self.device)
        return super().back(result)

    def store(self, given: torch.Tensor, own: torch.Tensor) -> None:
        if not isinstance(given, HostDouble):
            super().store(given, own)


# ---- moves between the target and the CPU, which autograd differentiates -------------------------


class _Show(torch.autograd.Function):
    """A CPU tensor -> the tensor of the target with its values."""

    @staticmethod
    def forward(ctx: Any, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return HostDouble(host, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return (grad._host if isinstance(grad, HostDouble) else grad.to(CPU)), None


class _Reveal(torch.autograd.Function):
    """A tensor of the target -> a CPU tensor in the memory of its values."""

    @staticmethod
    def forward(ctx: Any, double: HostDouble) -> torch.Tensor:
        ctx.device = double.device
        return double._host.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return HostDouble(grad, ctx.device) if grad.dtype in DOUBLES else grad.to(ctx.device)


def double_of(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a float64 or complex128 tensor with values of ``tensor`` that reports ``device``."""
    if isinstance(tensor, HostDouble) and tensor.dtype is dtype:
        return tensor
    # A copy where nothing else makes one, so that the memory is not the program's CPU tensor.
    is_on_cpu = tensor.device.type == CPU.type
    return on_target(tensor.to(CPU).to(dtype, copy=is_on_cpu), device)


def on_target(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor that nobody else has as a tensor of the target."""
    return _Show.apply(host, device) if host.dtype in DOUBLES else host.to(device)  # type: ignore[no-untyped-call]


_FLOATING = ("bfloat16", "cdouble", "cfloat", "double", "float", "half")
_INTEGRAL = ("bool", "byte", "char", "int", "long", "short")
_CONVERSIONS = {getattr(torch.Tensor, name) for name in (*_FLOATING, *_INTEGRAL, "to", "type")}
_CONVERSIONS.add(torch.Tensor.cpu)


def _convert(func: Any, args: Any, kwargs: Any) -> Any:
    """Convert a :class:`HostDouble` on the CPU, then move the result to the device it is for."""
    double, *rest = args
    if func is torch.Tensor.type and not (rest or kwargs):
        # `x.type()` only asks for the name of the type.
        return func(double)
    goes = CPU if func is torch.Tensor.cpu else double.device

    def there(value: Any) -> Any:
        nonlocal goes
        if isinstance(value, torch.Tensor):  # to(other)
            goes = value.device
            return value.dtype
        if isinstance(value, (str, torch.device)) and func is torch.Tensor.to:
            goes = torch.device(value)
            return CPU
        return value

    host = _Reveal.apply(double)  # type: ignore[no-untyped-call]
    rest, named = mapped((rest, kwargs), there)
    result = func(host, *rest, **named)
    if result is host:
        # A conversion that changes nothing returns the tensor itself, as torch does.
        return double if goes.type != CPU.type else host.clone()
    return result if goes.type == CPU.type else on_target(result, goes)


def says_double(error: BaseException) -> bool:
    """Return whether an error shows that the target cannot hold float64 or complex128."""
    return (
        bool(error.args)
        and isinstance(error.args[0], str)
        and _REFUSED.search(error.args[0]) is not None
    )
