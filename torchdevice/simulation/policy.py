"""Checks before a scope's kernels: recorders, and dtypes and operators missing on the device.

Kernels are registered for the whole process, and the policy of the thread's context decides their
checks.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchdevice.calls.lacking import missing_operators
from torchdevice.calls.lacking.cpu_fallback import counted
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.devices.runtime import MEMORY_FRACTION
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal.callers import program_line, site_of
from torchdevice.kernel.python import forks
from torchdevice.kernel.python.byte_sizes import written
from torchdevice.kernel.python.per_thread import PerThread, having
from torchdevice.kernel.stand_ins import tensors
from torchdevice.simulation.machine import Machine
from torchdevice.simulation.profiles import Profile, missing_on_cuda
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, INITIALIZATION, cuda_error

DEVICE_TYPE = "simulated"
"""The name of the device type."""


_thread = PerThread(lifted=False, holds_doubles=False, falling_back=False, recorded=False)
"""The present work of a thread's kernels.

``lifted``: they refuse nothing, because this package itself calls operators. ``holds_doubles``:
they refuse no dtype, because torch composes the operator differently on the real device.
``falling_back``: they run an operator that the device lacks. ``recorded``: recorders look at the
operator within which they run.
"""


def being(name: str) -> AbstractContextManager[None]:
    """Set a flag of :data:`_thread` in this thread."""
    return having(_thread, **{name: True})


class Policy:
    """The checks before the kernels of one context, resolved when the context is entered.

    A kernel of a policy that asks nothing does no more than read :attr:`asks`.

    Args:
        context: The context.
        runtime: The simulated devices: the context's target, or the machine around it.

    Attributes:
        profile: The kind of device that is simulated.
        asks: Whether there is anything to check before each kernel.
        native: The context as kernels in C++ know it; None where they serve no call of it.
    """

    def __init__(self, context: Context, runtime: Any):
        self.asks = False
        self.profile: Profile = runtime.profile
        self.memory_of: Callable[[int], int | None] = runtime.limit_of
        self._observers = context.observers.kernels
        self.native: Any = None
        self._context = weakref.proxy(context)

    def settle(self) -> None:
        """Set :attr:`asks` again."""
        context = self._context
        lost = context.devices.machine.lost is not None or context.driver.is_in_bad_fork
        self.asks = bool(self._observers) or lost or bool(self.profile.lacks_anything)
        if self.native is not None:
            self.native.serves = not self.asks
            self.native.is_initialized = context.driver.is_initialized

    def check_new(self, tensor: torch.Tensor) -> None:
        """Raise the real device's error for a tensor that it cannot hold.

        Raises:
            TypeError: The profile does not support the dtype.
            RuntimeError: The tensor has more dimensions than the profile's tensors may have.
        """
        is_unsupported = tensor.dtype in self.profile.unsupported_dtypes
        if is_unsupported and not (_thread.lifted or _thread.holds_doubles):
            raise TypeError(self.profile.dtype_message(tensor.dtype))
        most = self.profile.most_dimensions
        if most is not None and tensor.dim() > most and not _thread.lifted:
            raise RuntimeError(
                f"MPS supports tensors with dimensions <= {most}, but got {tensor.dim()}."
            )

    def observers(self) -> Sequence[Observer]:
        """Return the runners of this thread's kernels; an empty tuple inside a kernel of one."""
        return () if _thread.recorded else self._observers

    def falls_back(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a call needs :meth:`run`: for a recorder, or if the device lacks ``op``.

        Args:
            op: The operator; None for one that every device has.
            args, kwargs: The arguments of the call.

        Raises:
            NotImplementedError: The device lacks the operator, and the variable is ``0``, the scope
                is strict, the profile allows no fallback, or the program is written for the device,
                where this package does nothing.
            torch.AcceleratorError: The device is lost.
        """
        # A kernel that makes tensors of nothing on the device checks that by itself.
        if lost() is not None and any(each.get_device() >= 0 for each in tensors((args, kwargs))):
            check_alive()
        return bool(self.observers()) or (op is not None and self._missing(op) is not None)

    def _missing(self, op: Any) -> str | None:
        """Return the operator's name if the device lacks it and it runs on the CPU."""
        missing = None if _thread.lifted or _thread.falling_back else self.profile.missing(op)
        if missing is None:
            return None
        context = _simulating(self._context)
        native = context.program == self.profile.accelerator
        asked = os.environ.get(missing_operators.VARIABLE, "0" if native else "")
        if self.profile.refuses or context.options.strict or asked == "0":
            context.report(missing, "NotImplementedError", Fidelity.UNSUPPORTED)
            text = missing_operators.error_text if self.profile.backends else missing_on_cuda
            raise NotImplementedError(text(missing))
        return missing

    def run(self, op: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator through the recorders, or one that the profile's device lacks.

        The latter runs on the CPU, by ``calls/lacking/missing_operators.py`` as on a Mac, or by the
        real device's own fallback where ``PYTORCH_ENABLE_MPS_FALLBACK`` asks for that. It is
        counted, with its time and bytes.
        """
        looking = self.observers()
        if looking:
            return _record(looking, op, kernel, args, kwargs)
        context, missing = thread_state.state.context, self.profile.missing(op)
        assert context is not None and missing is not None
        context.devices.machine.fallbacks[missing] += 1
        with being("falling_back"):
            if missing_operators.VARIABLE in os.environ:  # the real device's own fallback
                return counted(context, missing, lambda: kernel(*args, **kwargs), (args, kwargs))
            return missing_operators.run_on_cpu(context, missing, op, args, kwargs)


def asking() -> Policy | None:
    """Return the policy of this thread's scope if its kernels must ask anything."""
    context = thread_state.state.context
    policy = None if context is None else context.policy
    return policy if policy is not None and policy.asks else None


def _simulating(context: Context) -> Context:
    """Return the simulated machine's context around a context that targets its device."""
    return context.names.answered_by or context


def _active() -> Context | None:
    """Return the context whose devices may refuse this thread's calls; None where lifted."""
    context = thread_state.state.context
    return None if context is None or context.policy is None or _thread.lifted else context


def _after_fork() -> None:
    """Look at every call in a child process that cannot use the device of its parent."""
    context = thread_state.state.context
    if context is not None and context.policy is not None:
        context.policy.settle()


forks.in_child(_after_fork)


def stands_for_cuda() -> bool:
    """Return whether the device of this thread's scope raises CUDA's errors."""
    context = _active()
    return context is not None and context.policy.profile.stands_for_cuda


def capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the compute capability of a tensor's device; None outside simulated scopes."""
    context = thread_state.state.context
    if context is None or context.device_type != DEVICE_TYPE:
        return None
    index = tensor.get_device()
    found: tuple[int, int] = context.devices.figure(
        "capability", index if index >= 0 else context.thread.device_index
    )
    return found


def stands_for_mps() -> bool:
    """Return whether the kernels of this thread's scope raise MPS's errors."""
    context = _active()
    return (
        context is not None
        and "MPS" in context.policy.profile.backends
        and not _thread.falling_back
    )


def lose(cause: str, kind: tuple[str, str] = DEVICE_ASSERT) -> Exception:
    """Let all later calls on this thread's machine fail, as after an error of a CUDA kernel.

    Returns:
        The error of the call itself, to be raised.
    """
    context = thread_state.state.context
    assert context is not None
    why = (
        f"An earlier call failed at {site_of(program_line())}, and CUDA runs nothing after that. "
        f"{cause}"
    )
    _set_lost(context.devices.machine, (kind, why))
    return cuda_error(kind, cause)


def replace_lost() -> None:
    """Replace the failed devices of this thread's scope by working ones."""
    context = thread_state.state.context
    if (
        context is not None
        and context.devices.machine is not None
        and context.devices.machine.lost is not None
    ):
        _set_lost(context.devices.machine, None)


def _set_lost(machine: Machine, lost: tuple[tuple[str, str], str] | None) -> None:
    machine.lost = lost
    for each in machine.contexts:
        each.policy.settle()


def lost() -> Exception | None:
    """Return CUDA's error if this thread's devices are lost, or it is a fork of their user."""
    context = thread_state.state.context
    if context is None or context.devices.machine is None:
        return None
    if context.devices.machine.lost is not None:
        return cuda_error(*context.devices.machine.lost)
    if context.driver.is_in_bad_fork:
        return cuda_error(
            INITIALIZATION, "This process was forked from one that had used CUDA. Use 'spawn'."
        )
    return None


def check_alive() -> None:
    """Raise the error of :func:`lost`, if there is one.

    Raises:
        torch.AcceleratorError: The devices are lost.
    """
    error = lost()
    try:
        if error is not None:
            raise error
    finally:
        del error  # or its traceback would hold this frame, and this frame the error


def check_scope() -> None:
    """Raise RuntimeError unless this thread is in a scope on the device, needed for new tensors.

    The scope's accelerator counts as initialised from here on.
    """
    state = thread_state.state
    if state.context is not None and state.context.device_type == DEVICE_TYPE:
        state.context.driver.initialize()
        if asking() is not None:
            check_alive()
        return
    away = state.context is None and not state.compiling
    if away or all(
        entry.context is None or entry.context.device_type != DEVICE_TYPE for entry in state.entries
    ):
        raise RuntimeError(
            f"no scope on a {DEVICE_TYPE} device is active in this thread, so no tensor can be "
            "made on one. Enter torchdevice.simulate(), or copy the remaining tensors to the CPU. "
            "Threads that Python has not started, such as those of torch.distributed.autograd, are "
            "in no scope."
        )


def spelled(index: int) -> str:
    """Return a device's name for messages: ``tensor.device`` in the scope, such as ``cuda:0``."""
    context = thread_state.state.context
    return f"{(context and context.shown_as) or DEVICE_TYPE}:{index}"


def memory_limits(index: int) -> tuple[int | None, int | None, int]:
    """Return the fields of :class:`Limits` for a device."""
    inner = _active()
    if inner is None:
        return None, None, 0
    context = _simulating(inner)
    fraction = context.settings.get((MEMORY_FRACTION, index))
    total, taken = context.runtime.total_memory(index), context.runtime.taken  # type: ignore[attr-defined]
    if fraction is not None:
        return total, int(total * fraction), taken
    return (total if _errs_as_mps(context) else inner.policy.memory_of(index)), None, taken


def _errs_as_mps(context: Context) -> bool:
    """Return whether a program sees MPS's allocator errors: it is for MPS, on MPS's profile."""
    return context.program == context.runtime.profile.accelerator and stands_for_mps()  # type: ignore[attr-defined]


_OUT_OF_MEMORY_ON_MPS = (
    "MPS backend out of memory (MPS allocated: {allocated}, other allocations: 0 bytes, max "
    "allowed: {allowed}). Tried to allocate {wanted} on private pool. Use "
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause "
    "system failure)."
)


def error_of_mps(wanted: int, allocated: int, total: int, allowed: int) -> RuntimeError | None:
    """Return MPS's allocator error (mps/MPSAllocator.mm) if the program sees such, else None.

    Args:
        wanted: The bytes that were asked for.
        allocated: The bytes in use.
        total: The bytes of the device's memory.
        allowed: Those that the program may use.
    """
    inner = _active()
    if inner is None or not _errs_as_mps(_simulating(inner)):
        return None
    if wanted > total:
        return RuntimeError(f"Invalid buffer size: {written(wanted)}")
    figures = {
        "allocated": written(allocated),
        "allowed": written(allowed),
        "wanted": written(wanted),
    }
    return RuntimeError(_OUT_OF_MEMORY_ON_MPS.format(**figures))


def provides(op: Any) -> bool:
    """Return whether the active scope's device has an operator."""
    context = _active()
    return context is None or context.policy.profile.missing(op) is None


def _record(looking: Sequence[Any], op: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
    """Run a kernel under recorders. Kernels that it calls belong to it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with being("recorded"):
            return kernel(*args, **kwargs)

    for each in looking:
        run = functools.partial(
            lambda each, run, *args, **kwargs: each.run(op, run, args, kwargs), each, run
        )
    return run(*args, **kwargs)
