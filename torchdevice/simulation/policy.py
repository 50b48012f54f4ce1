"""What the active scope refuses: memory beyond a limit, and dtypes and operators that the profile's device lacks.

Kernels are registered for the whole process, and the thread's scope decides what they refuse. ``watching`` is the
number of entries that refuse anything: while it is 0, a kernel does no more than read it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.devices.runtime import MEMORY_FRACTION
from torchdevice.fallback import missing_operators
from torchdevice.fallback.cpu_fallback import counted
from torchdevice.foundation.fidelity import Fidelity
from torchdevice.foundation.interrupt_safe_exit import block
from torchdevice.simulation.allocator.out_of_memory import written
from torchdevice.simulation.profiles import Profile
from torchdevice.simulation.refusals.cuda_errors import DEVICE_ASSERT, INITIALIZATION, cuda_error

KIND = "simulated"
"""The name of the device type."""


watching = 0
_watchers: set[object] = set()


class _Thread(threading.local):
    lifted = False
    holds_doubles = False
    falling_back = False
    recorded = False


_thread = _Thread()


def watch(watcher: object) -> None:
    """Count a watcher, for whom kernels ask whether they must refuse. May be called again."""
    _watchers.add(watcher)
    _count_watchers()


def unwatch(watcher: object) -> None:
    """Count a watcher no more. May be called again."""
    _watchers.discard(watcher)
    _count_watchers()


def _count_watchers() -> None:
    global watching
    watching = len(_watchers)


def watch_from_now_on() -> None:
    """Let kernels ask whether they must refuse for the rest of the process."""
    watch("for good")


@block
def lifted() -> Iterator[None]:
    """Refuse nothing in this thread, for operators that this package itself calls."""
    before, _thread.lifted = _thread.lifted, True
    try:
        yield
    finally:
        _thread.lifted = before


@block
def holding_doubles() -> Iterator[None]:
    """Refuse no dtype in this thread, for operators that torch composes otherwise on the real device."""
    before, _thread.holds_doubles = _thread.holds_doubles, True
    try:
        yield
    finally:
        _thread.holds_doubles = before


class Limits(NamedTuple):
    """What the devices of one runtime refuse.

    Attributes:
        profile: The kind of device that is simulated.
        memory: The memory of each device in bytes, or None for no limit.
        fallbacks: Operators that the profile's device lacks and that ran on the CPU: name -> number of calls.
    """

    profile: Profile
    memory: int | None
    fallbacks: Counter[str]


def machine() -> Context | None:
    """Return the context of this thread's simulated machine; None outside scopes on the device.

    It is that of the scope, or that of the machine around it, where the scope's device is one of a simulated machine.
    """
    context = thread_state.state.context
    if context is None or context.device_type != KIND:
        return None
    return context.machine or context


def _limits() -> Limits | None:
    """Return the limits of this thread's scope; None outside scopes on the device, and inside :func:`lifted`."""
    context = machine()
    return None if context is None or _thread.lifted else context.runtime.limits


def _after_fork() -> None:
    """Look at every call in a child process that cannot use the device of its parent."""
    context = thread_state.state.context
    if context is not None and context.device_type == KIND and context.is_in_bad_fork:
        watch(context)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def stands_for_cuda() -> bool:
    """Return whether the device of this thread's scope refuses what CUDA refuses."""
    limits = _limits()
    return limits is not None and limits.profile.stands_for_cuda


def capability() -> tuple[int, int] | None:
    """Return the compute capability of this thread's scope; None outside scopes on the device."""
    context = thread_state.state.context
    return None if context is None or context.device_type != KIND else context.options.capability


def stands_for_mps() -> bool:
    """Return whether the kernels of this thread's scope refuse what those of MPS refuse."""
    limits = _limits()
    return limits is not None and "MPS" in limits.profile.backends and not _thread.falling_back


_lost: dict[Context, tuple[tuple[str, str], str]] = {}
"""The contexts whose devices CUDA could not use any more -> the kind of CUDA's error, and what happened."""


def lose(why: str, kind: tuple[str, str] = DEVICE_ASSERT) -> None:
    """Let every later call on the devices of this thread's scope fail, as after an error of a kernel of CUDA's."""
    context = thread_state.state.context
    assert context is not None
    _lost[context] = kind, why
    watch(context)


def find(context: Context) -> None:
    """Give a context its devices back, when nobody is in its scope any more. May be called again."""
    _lost.pop(context, None)
    unwatch(context)


def check_alive() -> None:
    """Raise CUDA's error if the devices of this thread's scope are lost, or if the process is a fork of their user's.

    Raises:
        torch.AcceleratorError: They are.
    """
    context = thread_state.state.context
    if context is None or context.device_type != KIND:
        return
    if context in _lost:
        kind, why = _lost[context]
        raise cuda_error(kind, f"An earlier call failed, and CUDA runs nothing after that. {why}")
    if context.is_in_bad_fork:
        raise cuda_error(INITIALIZATION, "This process was forked from one that had used CUDA. Use 'spawn'.")


def check_scope() -> None:
    """Raise RuntimeError unless this thread is in a scope on the device: only there may new tensors be made on it.

    The scope's accelerator counts as initialised from here on.
    """
    state = thread_state.state
    if state.context is not None and state.context.device_type == KIND:
        state.context.initialize()
        if watching:
            check_alive()
        return
    away = state.context is None and not state.compiling
    if away or all(entry.context is None or entry.context.device_type != KIND for entry in state.entries):
        raise RuntimeError(
            f"no scope on a {KIND} device is active in this thread, so no tensor can be made on one. Enter "
            f"torchdevice.simulate(), or copy the remaining tensors to the CPU."
        )


def spelled(index: int) -> str:
    """Return the device as messages name it: as ``tensor.device`` reads in the active scope, such as ``cuda:0``."""
    context = thread_state.state.context
    shown_as = context.shown_as if context is not None else None
    return f"{shown_as or KIND}:{index}"


def check_dtype(dtype: torch.dtype) -> None:
    """Raise the real device's TypeError if the profile does not support the dtype."""
    limits = _limits()
    if limits is not None and dtype in limits.profile.unsupported_dtypes and not _thread.holds_doubles:
        raise TypeError(limits.profile.dtype_message(dtype))


def memory_limits(index: int) -> tuple[int | None, int | None]:
    """Return the bytes of a device's memory, and those that the program allows itself; None for no limit."""
    limits = _limits()
    if limits is None:
        return None, None
    context = machine()
    assert context is not None
    fraction = context.settings.get((MEMORY_FRACTION, index))
    total = context.runtime.total_memory(index)
    if fraction is not None:
        return total, int(total * fraction)
    return (total if _errs_as_mps(context) else limits.memory), None


def _errs_as_mps(context: Context) -> bool:
    """Return whether a program sees the errors of MPS's allocator: it was written for MPS, and runs on its profile."""
    return context.options.written_for == context.runtime.limits.profile.accelerator and stands_for_mps()


def error_of_mps(wanted: int, allocated: int, total: int, allowed: int) -> RuntimeError | None:
    """Return the error of MPS's allocator (aten/src/ATen/mps/MPSAllocator.mm) where the program sees that, else None.

    Args:
        wanted: The bytes that were asked for.
        allocated: The bytes in use.
        total: The bytes of the device's memory.
        allowed: Those that the program may use.
    """
    context = machine()
    if context is None or not _errs_as_mps(context):
        return None
    if wanted > total:
        return RuntimeError(f"Invalid buffer size: {written(wanted)}")
    return RuntimeError(
        f"MPS backend out of memory (MPS allocated: {written(allocated)}, other allocations: 0 bytes, max allowed: "
        f"{written(allowed)}). Tried to allocate {written(wanted)} on private pool. Use "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations (may cause system failure)."
    )


def provides(op: Any) -> bool:
    """Return whether the active scope's device has an operator."""
    limits = _limits()
    return limits is None or limits.profile.missing(op) is None


recorders: dict[Context, Sequence[Any]] = {}
"""What looks at the kernels of a context, the innermost first: each has ``run(op, kernel, args, kwargs)``."""


def recorder() -> Sequence[Any] | None:
    """Return what looks at the kernels of this thread's scope; None in a kernel that is being looked at."""
    context = thread_state.state.context
    found: Sequence[Any] | None = None
    if context is not None and recorders and not _thread.recorded:
        found = recorders.get(context)
    return found


def record(looking: Sequence[Any], op: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
    """Run a kernel under recorders. Kernels that it calls belong to it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _thread.recorded = True
        try:
            return kernel(*args, **kwargs)
        finally:
            _thread.recorded = False

    for each in looking:
        run = _under(each, op, run)
    return run(*args, **kwargs)


def _under(recorder: Any, op: Any, run: Any) -> Any:
    return lambda *args, **kwargs: recorder.run(op, run, args, kwargs)


def falls_back(op: Any) -> bool:
    """Return whether an operator is to be run by :func:`run_fallback`: somebody looks, or the device lacks it.

    It runs on the CPU then, by :mod:`torchdevice.fallback.missing_operators` as on a Mac, or by the real device's own
    fallback where ``PYTORCH_ENABLE_MPS_FALLBACK`` asks for that.

    Raises:
        NotImplementedError: The device lacks the operator, and the variable is ``0``, the scope is strict, the profile
            allows no fallback, or the program is written for the device, where this package does nothing.
        torch.AcceleratorError: The device is lost.
    """
    check_alive()
    if recorder() is not None:
        return True
    limits = _limits()
    if limits is None or _thread.falling_back:
        return False
    missing = limits.profile.missing(op)
    if missing is None:
        return False
    context = machine()
    assert context is not None
    native = context.options.written_for == limits.profile.accelerator
    asked = os.environ.get(missing_operators.VARIABLE, "0" if native else "")
    if limits.profile.refuses or context.options.strict or asked == "0":
        context.note(missing, "NotImplementedError", Fidelity.UNSUPPORTED)
        raise NotImplementedError(limits.profile.missing_message(missing))
    return True


def run_fallback(op: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator while somebody looks at it, or one that the profile's device lacks.

    The latter is counted, with its time and the bytes it reads and writes.
    """
    looking = recorder()
    if looking is not None:
        return record(looking, op, kernel, args, kwargs)
    limits, context = _limits(), thread_state.state.context
    assert limits is not None and context is not None
    missing = limits.profile.missing(op)
    assert missing is not None
    limits.fallbacks[missing] += 1
    _thread.falling_back = True
    try:
        if missing_operators.VARIABLE in os.environ:  # the real device's own fallback
            return counted(context, missing, lambda: kernel(*args, **kwargs), (args, kwargs))
        return missing_operators.run_on_cpu(context, missing, op, args, kwargs)
    finally:
        _thread.falling_back = False
