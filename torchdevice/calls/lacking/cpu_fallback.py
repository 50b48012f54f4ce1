"""Runs an operator on the CPU, and counts its time and bytes at the program's line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.stand_ins import Converted, mapped, tensors
from torchdevice.kernel.thread_state import state

CPU = torch.device("cpu")

Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""Returns a CPU tensor as a tensor of a device of the target."""

DONE = "the operator on the CPU"
"""The result in the journal."""


def run(name: str, op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """Run an operator on the CPU and count the call.

    Args:
        name: Its name in the journal.
        op: The operator, called with CPU tensors.
        args: The arguments of the call on the target.
        kwargs: The keyword arguments.
        device_type: The target's device type.

    Returns:
        The results on the target; an argument itself where the operator returns it.

    Raises:
        FidelityError: The scope is strict.
    """
    return counted(
        state.context,
        name,
        lambda: CpuFallback(op, device_type, op).call(args, kwargs),
        (args, kwargs),
    )


def counted(context: Context | None, name: str, call: Callable[[], Any], given: Any) -> Any:
    """Make a call, and count its time and the bytes it reads and writes in the journal."""
    # Noted before the call: a strict scope refuses here.
    entry = context.report(name, DONE, Fidelity.FELL_BACK) if context is not None else None
    start = time.perf_counter_ns()
    result = call()
    if entry is not None:
        entry.seconds += (time.perf_counter_ns() - start) / 1e9
        dense = (torch.strided, torch.jagged)
        entry.bytes += sum(each.nbytes for each in tensors((given, result)) if each.layout in dense)
    return result


class CpuFallback(Converted):
    """One call with CPU tensors instead of the target's.

    Args:
        func: The function to call.
        device_type: The target's device type.
        op: The operator, for a call below autograd; None for a call above it.

    Attributes:
        views_targets_memory: Whether views are made of the target's memory, not of that of the CPU
            tensors.
        to_target: Returns a result as a tensor of a device of the target.
        default: The device of the results where neither arguments nor the call name one; None for
            the CPU.
        device: The device of the results: that of the arguments, or the one that the call names.
    """

    views_targets_memory = True
    to_target: Any = staticmethod(torch.Tensor.to)
    default: torch.device | None = None
    device: torch.device | None = None
    _stays = False

    def __init__(self, func: Any, device_type: str, op: Any = None):
        super().__init__(func, op)
        self._device_type = device_type

    def call(self, args: Any, kwargs: Any) -> Any:
        """Make the call, copy written values back to the arguments, and return its results."""
        with torch._C.DisableTorchFunction():
            if self._op is not None and self._op.is_view and self.views_targets_memory:
                return self._view(args, kwargs)
            return super().call(args, kwargs)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != self._device_type:
            return tensor
        self.device = self.device or tensor.device
        return self.copy(tensor)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the target as a CPU tensor."""
        return tensor.to(CPU)

    def other(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            self._stays = value.type == CPU.type
            if value.type == self._device_type:
                self.device = value
                return CPU
        elif isinstance(value, torch.Generator):
            return generator_on_cpu(value)
        return value

    def returned(self, result: Any) -> Any:
        """Return the results of the call; those of the CPU where the call names it."""
        return result if self._stays else super().returned(result)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        device = self.device or self.default
        if device is None or result.device.type != CPU.type:
            return result
        return self.to_target(result, device)

    def _view(self, args: Any, kwargs: Any) -> Any:
        """Return views of the target's memory that lie there as the CPU's views lie in theirs."""
        base = args[0]
        # As large as the storage, so that every offset of the view exists.
        like = torch.empty(base.untyped_storage().nbytes() // base.itemsize, dtype=base.dtype)
        like = like.as_strided(base.shape, base.stride(), base.storage_offset())
        views = self.func(like, *self.take(args[1:]), **self.take(kwargs))

        def own(view: torch.Tensor) -> torch.Tensor:
            whole = torch.empty(0, dtype=view.dtype, device=base.device)
            return whole.set_(
                base.untyped_storage(), view.storage_offset(), view.shape, view.stride()
            )

        return mapped(views, own)


def generator_on_cpu(generator: torch.Generator) -> torch.Generator:
    """Return a CPU generator for one of the target; other generators are returned as given."""
    context = state.context
    # A simulated device's generator reports the program's device; kernels get torch's own.
    own: Any = generator if context is None else context.runtime.supplied.numbers_of(generator)
    if context is None or own is generator:
        device = generator.device
    else:
        device = context.runtime.device(own.index)
    if device.type == CPU.type:
        return generator
    # A seed from the target's generator, so that the CPU's numbers depend on the program's seed.
    return torch.Generator().manual_seed(
        int(torch.randint(1 << 62, (), generator=own, device=device))
    )


def call_on_cpu(func: Any, args: Any, kwargs: Any, to_target: Move = torch.Tensor.to) -> Any:
    """Call a torch function with the arguments moved to the CPU. Autograd differentiates the moves.

    An argument that the function writes to gets what was written.

    Args:
        func: The function.
        args: Its arguments on the target.
        kwargs: Its keyword arguments.
        to_target: Returns a result as a tensor of the target.
    """
    context = state.context
    assert context is not None
    fallback = CpuFallback(func, context.device_type)
    fallback.to_target, fallback.default = to_target, context.devices.current
    return fallback.call(args, kwargs)
