"""Entering and leaving a scope. The functions that make scopes are in ``scope/activation.py``.

Entering a scope resolves its target, puts the patches in place (if this is the first active scope
of the process), puts a mode on this thread's stack (if this is the first of the thread) and makes
the scope's context the thread's innermost. Leaving undoes exactly that.

Both are atomic. An interrupt at any line leaves the thread wholly in the scope or wholly out of it:
each step can be repeated, so after an interrupt all of them run again. If Ctrl-C keeps the
``__exit__`` of a ``with`` statement from starting, the scope is left when Python drops the bound
method, see ``kernel/python/interrupt_safe_exit.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.overrides import TorchFunctionMode

from torchdevice.calls import error_texts, interruptions, kept_functions, wrap
from torchdevice.calls.lacking import missing_operators, mps_guards
from torchdevice.calls.mode import DeviceMode, of_this_thread
from torchdevice.errors import PATCHERS, AnotherPatcherError, ScopeError, SecondCopyError
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.journal.journal import Journal
from torchdevice.kernel.patching import do_all
from torchdevice.kernel.python.decorating import decorated
from torchdevice.kernel.python.interrupt_safe_exit import Exit, Leaving
from torchdevice.kernel.python.logs import configure_logging
from torchdevice.kernel.python.uncaught_errors import trim
from torchdevice.kernel.thread_state import ContextMode, Entry, state, undo
from torchdevice.scope import features, target_selection
from torchdevice.scope.collected_options import Options
from torchdevice.scope.installed import INSTALLATION
from torchdevice.torch_modules.apis import dispatch

if TYPE_CHECKING:
    from torchdevice.report import Report

F = TypeVar("F", bound=Callable[..., Any])


def left_too_early(scope: Scope, how: str) -> ScopeError:
    """Return the error of a scope that was not the innermost one."""
    return ScopeError(
        f"{scope!r} was {how} before a scope entered after it was left. Leave scopes in the "
        "reverse order of entry; it has been left, and the later one is still active."
    )


class _Leaving(Leaving):
    """One use of a scope by a ``with`` statement."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        # Entries of this statement are at this depth or deeper.
        self._depth = len(state.entries)
        self._entry: Entry | None = None

    def exit(self, *exc_info: Any) -> None:
        self._entry = self._scope._entry_to_leave()
        # Asked before leaving, which takes the entry out of the list.
        innermost = self._entry is state.entries[-1]
        undo(leave, self._entry)
        self.done()
        if exc_info and exc_info[1] is not None:
            kept_functions.explain(self._entry.context, exc_info[1])
            error_texts.name_types(self._entry.context, exc_info[1])
            trim(exc_info[1])
        if not innermost:
            raise left_too_early(self._scope, "left")

    def late(self) -> None:
        if self._entry is None:
            # The first one of this scope above the depth: the entry that an interrupted `__exit__`
            # did not get.
            mine = (entry for entry in state.entries[self._depth :] if entry.owner is self._scope)
            self._entry = next(mine, None)
        if self._entry is not None:
            undo(leave, self._entry)


def _memory(runtime: Runtime) -> dict[str, tuple[int, int]]:
    """Return the highest allocated and reserved bytes of this process on each simulated GPU."""
    count = runtime.device_count() if runtime.supplied.is_gpu else 0
    found = {str(index): runtime.supplied.highest_memory(index) for index in range(count)}
    return {
        index: (allocated, reserved) for index, (allocated, reserved) in found.items() if reserved
    }


class Scope(AbstractContextManager["Scope"]):
    """Runs programs written for one accelerator on another while active (:func:`portable`).

    Usable with ``with``, as a decorator, again and again, and inside itself.

    Args:
        options: What was asked for.
        auto: The engine that ``engine="auto"`` means on a target where a function of torch that was
            kept before the scope could do harm; "wrap" on the others.

    Attributes:
        options: What was asked for.
        journal: The rewritten and supplied calls, by call site.
    """

    __exit__ = Exit(_Leaving)  # type: ignore[assignment]

    def __init__(self, options: Options, *, auto: Literal["mode", "wrap"] = "mode"):
        self.options = options
        self._auto = auto
        self.journal = Journal()
        self._context: Context | None = None

    @property
    def runtime(self) -> Runtime:
        """The target's :class:`Runtime`. The target is resolved at the first entry."""
        return self._resolved().runtime

    def report(self) -> Report:
        """Return, by line, what the program asked for so far and what was done instead."""
        from torchdevice.report import Report  # here, because most programs ask for none

        options = self._resolved().options
        kernels = self.runtime.supplied.kernels(options.native)
        return Report.of(
            self.journal,
            options,
            self.runtime.target,
            kernels=kernels,
            memory=_memory(self.runtime),
        )

    @property
    def target(self) -> torch.device:
        """The device that stands in for the program's current accelerator."""
        context = self._resolved()
        current = context.devices.current
        return context.devices.shown(current) if context.options.identity != "program" else current

    def _resolved(self) -> Context:
        return self._context if self._context is not None else self._resolve()

    def _resolve(self) -> Context:
        """Resolve the target, unless the scope is active: what runs keeps its target.

        A target that the options name is resolved once. Without a name it is the best there is at
        each entry.
        """
        context = self._context
        named = self.options.target is not None
        if context is not None and (
            context.entries.active
            or (named and context.names.answered_by is target_selection.machine_of(self.options))
        ):
            # Nobody is in the scope, so a new value of `CUDA_VISIBLE_DEVICES` may count.
            if not context.entries.active:
                context.devices.count_again()
            return context
        runtime, fitting = target_selection.resolve(self.options)
        if fitting.engine == "auto":
            # Functions that were kept before this scope do no harm on such a target.
            loud = kept_functions.are_loud(runtime, fitting)
            fitting = dataclasses.replace(fitting, engine="wrap" if loud else self._auto)
        # The best target is the same as before, and keeps its context with streams and settings.
        if context is not None and context.runtime is runtime:
            context.devices.count_again()
            return context
        context = self._context = Context(
            fitting, runtime, self.journal, functools.partial(Joining, self)
        )
        context.entries.features = features.wanted(fitting)
        return context

    def __enter__(self, enabled_by: str = "") -> Scope:
        # Once per thread: nested entries need not look for other tools again.
        if not state.entries:
            for kind in TorchFunctionMode.__subclasses__():  # in the order of definition
                if kind is ContextMode:
                    break
                names = kind.__module__, kind.__name__
                if names == (ContextMode.__module__, ContextMode.__name__):
                    raise SecondCopyError()  # whose class has the same name
            for name in PATCHERS:
                if name in sys.modules:
                    raise AnotherPatcherError(name)
            configure_logging()
        context = self._resolve()
        entry = Entry(context, owner=self)
        entry.enabled_by = enabled_by
        context.entries.way = context.entries.way or enabled_by
        _enter(entry, context)
        return self

    def _entry_to_leave(self) -> Entry:
        """Return this thread's last entry of the scope.

        Raises:
            ScopeError: The scope was not entered in this thread.
        """
        # The innermost entry of this scope: a scope may be entered inside itself.
        for entry in reversed(state.entries):
            if entry.owner is self:
                return entry
        raise ScopeError(
            f"{self!r} was left in a thread where it was not entered. Enter it with 'with' or "
            "enable()."
        )

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, function: Any) -> Any: ...
    def __call__(self, function: Any) -> Any:
        """Decorate a function, method, generator, coroutine or asynchronous generator."""
        return decorated(self, function)

    def __repr__(self) -> str:
        target = (
            self._context.runtime.target if self._context else self.options.target or "to be chosen"
        )
        return f"<torchdevice.Scope target={str(target)!r}>"

    def _described(self) -> str:
        """Return for a person on which device programs run, and how a notebook ends it."""
        context = self._resolved()
        count = context.devices.count
        devices = f"{count} {'device' if count == 1 else 'devices'}"
        what = (
            f"{context.program.upper()} is {target_selection.shown(context.runtime)} in this "
            f"session, with {devices}"
        )
        return f"torchdevice: {what}. `%torchdevice off` ends it."

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the result of ``%torchdevice`` for IPython."""
        printer.text(self._described() if self._context is not None and not cycle else repr(self))


class Joining(Scope):
    """The scope of a thread that joins the context of the thread that started it."""

    def __init__(self, scope: Scope, context: Context, forced_cpu: bool):
        super().__init__(scope.options)
        self.journal = scope.journal
        self._scope = scope
        self._context: Context = context
        self._forced_cpu = forced_cpu

    def __enter__(self, enabled_by: str = "") -> Scope:
        super().__enter__(enabled_by)
        # After entering: leaving undoes it with the thread's other state.
        if self._forced_cpu:
            self._context.thread.force_cpu()
        return self

    def _resolve(self) -> Context:
        return self._context


def _enter(entry: Entry, context: Context) -> None:
    """Enter a context in this thread. If that fails or is interrupted, undo it and raise."""
    try:
        _fill(entry, context)
        # Noted first: `leave` takes out whatever was begun.
        context.entries.active.add(entry)
        for installation in entry.parts:
            installation.hold(entry)
        context.runtime.supplied.enter_thread(entry)
        for feature in context.entries.features:
            feature.call("enter_thread", entry)
        thread_state.enter(entry)
        # Without parts (a native target) handlers need not wait.
        if entry.parts:
            interruptions.settle(in_a_scope=True)
        if context.thread.at_return:
            context.thread.begin()
    except BaseException:
        # Everything, whichever step failed: a step of leaving needs no counterpart.
        undo(leave, entry)
        raise


def _fill(entry: Entry, context: Context) -> None:
    """Decide which mode serves an entry, and what must be in place for it.

    This thread's mode serves the entry, switched to its context. A thread has no mode in its
    outermost entry, and while a mode handles a torch function such as ``backward``; a new mode
    serves the entry then.
    """
    if context.names.is_native and state.context is None:
        return
    mode = of_this_thread()
    # A nested scope takes the engine of the scope around it.
    wraps = context.options.engine == "wrap" if mode is None else mode is state.mode
    entry.mode = mode if mode is not None else DeviceMode(context)
    entry.unstacked = entry.mode if wraps else state.mode
    if (
        mode is not None
        and (outer := state.entries[-1]).context is context
        and outer.unstacked is entry.unstacked
    ):
        entry.parts = outer.parts  # the usual nested entry, which needs the same
        return
    for put in _PUTTING:
        put(context)
    entry.parts = [INSTALLATION]
    if wraps:
        entry.parts += wrap.needed(context)


_PUTTING = mps_guards.put, missing_operators.put, dispatch.put, kept_functions.put
"""The functions that put kernels in front of torch's. The kernels stay, and ask the context of
their thread.
"""


def _leave_signals(entry: Entry) -> None:
    # Handlers may stop waiting when no entry has patches in place.
    if not state.entries or (entry.parts and not any(each.parts for each in state.entries)):
        interruptions.settle(in_a_scope=False)


def _finish_thread(entry: Any) -> None:
    for other in state.entries:  # without a generator, whose steps are frames
        if other.context is entry.context:
            return
    context = entry.context
    context.thread.finish()
    # Other threads may still be in the context, and read these values.
    if not context.entries.active:
        context.supplied.written.clear()
        context.driver.forget()


def _drop_installations(entry: Entry) -> None:
    for installation in reversed(entry.parts):
        installation.drop(entry)


def _leave_features(entry: Any) -> None:
    for feature in entry.context.entries.features:
        feature.call("leave_thread", entry)


_LEAVING: tuple[Callable[[Any], None], ...] = (
    thread_state.leave,
    _leave_signals,
    lambda entry: entry.context.entries.active.discard(entry),
    _finish_thread,
    _drop_installations,
    _leave_features,
    lambda entry: entry.context.runtime.supplied.leave_thread(entry),
)
"""The steps of leaving, in order. Each can be repeated, and is done even if another step failed."""

leave: Callable[[Entry], None] = functools.partial(do_all, _LEAVING)
"""Undo an entry, complete or not. May be called again."""
