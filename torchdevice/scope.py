"""Entering and leaving: ``portable``, ``simulate``, ``enable`` and ``disable``.

Entering a scope resolves its target, puts the patches in place (if this is the first active scope of the process),
puts a mode on this thread's stack (if this is the first of the thread) and makes the scope's context the thread's
innermost. Leaving undoes exactly that.

Both are atomic. An interrupt at any line leaves the thread wholly in the scope or wholly out of it: each step can be
repeated, so whoever is interrupted does all of them again. A ``with`` statement whose ``__exit__`` is interrupted
before it could begin is left by the destructor of what the statement holds, see :class:`_Leaving`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from torchdevice import choosing, thread_state
from torchdevice import options as _options
from torchdevice.context import Context
from torchdevice.decorating import decorated
from torchdevice.devices.runtime import Runtime
from torchdevice.engines import wrap
from torchdevice.engines.mode import DeviceMode, of_this_thread
from torchdevice.errors import PATCHERS, AnotherPatcherError, ScopeError
from torchdevice.installed import INSTALLATION
from torchdevice.journal import Journal
from torchdevice.logs import configure_logging
from torchdevice.options import Options
from torchdevice.patching import do_all
from torchdevice.report import Report
from torchdevice.thread_state import Entry, state, undo
from torchdevice.tracebacks import trim

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class _Leaving:
    """What a ``with`` statement holds to leave a scope: the ``__exit__`` of one use of it.

    A ``with`` statement looks ``__exit__`` up before it enters, holds the result, and drops it when it ends, however it
    ends. So the destructor leaves a scope whose ``__exit__`` an interrupt kept from beginning or from finishing.
    """

    _done = True  # until the object is complete
    _entry: Entry | None = None

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._thread = threading.get_ident()
        self._depth = len(state.entries)
        self._done = False

    def __call__(self, *exc_info: object) -> None:
        self._entry = self._scope._entry_to_leave()
        innermost = self._entry is state.entries[-1]
        undo(_leave, self._entry)
        self._done = True  # not in a finally clause: an interrupt before the line above would run it too
        if exc_info and exc_info[1] is not None:
            trim(exc_info[1])  # type: ignore[arg-type]
        if not innermost:
            raise ScopeError(
                f"{self._scope!r} was left before a scope entered after it. Leave scopes in the reverse order of "
                f"entry; it has been left, and the later one is still active."
            )

    def __del__(self) -> None:
        if self._done or self._thread != threading.get_ident():
            return
        if self._entry is None:
            mine = (entry for entry in state.entries[self._depth :] if entry.owner is self._scope)
            self._entry = next(mine, None)
        if self._entry is not None:
            undo(_leave, self._entry)


class _Exit:
    """The descriptor of ``__exit__``: each use of a scope by ``with`` gets a :class:`_Leaving` of its own."""

    def __get__(self, scope: Scope | None, owner: type) -> Any:
        return _exit_of if scope is None else _Leaving(scope)


def _exit_of(scope: Scope, *exc_info: object) -> None:
    _Leaving(scope)(*exc_info)


class Scope(AbstractContextManager["Scope"]):
    """Programs written for one accelerator run on another while this is active. Made by :func:`portable`.

    Usable with ``with``, as a decorator, again and again, and inside itself.

    Attributes:
        options: What was asked for.
        journal: What was rewritten and supplied, by call site.
    """

    __exit__ = _Exit()  # type: ignore[assignment]

    def __init__(self, options: Options):
        self.options = options
        self.journal = Journal()
        self._context: Context | None = None

    @property
    def runtime(self) -> Runtime:
        """The target's :class:`Runtime`. The target is resolved at the first entry."""
        return self._resolved().runtime

    def report(self) -> Report:
        """Return what the program asked for in this process so far and what was done instead, by line."""
        return Report.of(self.journal, self._resolved().options, self.runtime.target)

    @property
    def target(self) -> torch.device:
        """The device that stands in for the program's current accelerator."""
        return self._resolved().target

    def _resolved(self) -> Context:
        return self._context if self._context is not None else self._resolve()

    def _resolve(self) -> Context:
        """Resolve the target, unless the scope is active: what runs keeps its target.

        A target that the options name is resolved once. Without a name it is the best there is at each entry.
        """
        context = self._context
        if context is not None and (context.entries or self.options.target is not None):
            if not context.entries:
                context.count_devices_again()
            return context
        runtime, fitting = choosing.resolve(self.options)
        if context is not None and context.runtime is runtime:
            context.count_devices_again()
            return context
        self._context = Context(fitting, runtime, self.journal, self._join)
        return self._context

    def _join(self, context: Context, forced_cpu: bool) -> _Joining:
        return _Joining(self, context, forced_cpu)

    def __enter__(self) -> Scope:
        if not state.entries:
            _refuse_other_patchers()
            configure_logging()
        _enter(self._resolve(), self)
        return self

    def _entry_to_leave(self) -> Entry:
        """Return this thread's last entry of the scope.

        Raises:
            ScopeError: The scope was not entered in this thread.
        """
        for entry in reversed(state.entries):
            if entry.owner is self:
                return entry
        raise ScopeError(f"{self!r} was left in a thread where it was not entered. Enter it with 'with' or enable().")

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, function: Any) -> Any: ...
    def __call__(self, function: Any) -> Any:
        """Decorate a function, method, generator, coroutine or asynchronous generator."""
        return decorated(self, function)

    def __repr__(self) -> str:
        target = self._context.runtime.target if self._context else self.options.target or "to be chosen"
        return f"<torchdevice.Scope target={str(target)!r}>"


class _Joining(Scope):
    """The scope by which a thread joins the context of the thread that started it."""

    def __init__(self, scope: Scope, context: Context, forced_cpu: bool):
        super().__init__(scope.options)
        self.journal = scope.journal
        self._scope = scope
        self._context: Context = context
        self._forced_cpu = forced_cpu

    def __enter__(self) -> Scope:
        super().__enter__()
        if self._forced_cpu:
            self._context.force_cpu()
        return self

    def _resolve(self) -> Context:
        return self._context


def _enter(context: Context, owner: Scope) -> None:
    """Enter a context in this thread. If that fails or is interrupted, undo it and raise."""
    entry = Entry(context, owner=owner)
    try:
        _fill(entry, context)
        context.entries.add(entry)
        for installation in entry.parts:
            installation.hold(entry)
        context.runtime.enter_thread(entry)
        thread_state.enter(entry)
        if context.thread.at_return:
            context.start_thread()
    except BaseException:
        undo(_leave, entry)
        raise


def _fill(entry: Entry, context: Context) -> None:
    """Decide which mode serves an entry, and what must be in place for it.

    This thread's mode serves the entry, switched to its context. A thread has no mode in its outermost entry, and while
    a mode handles a torch function such as ``backward``; a new mode serves the entry then.
    """
    if context.is_native and state.context is None:
        return
    mode = of_this_thread()
    wraps = context.options.engine == "wrap" if mode is None else mode is state.mode
    entry.mode = mode if mode is not None else DeviceMode(context)
    entry.unstacked = entry.mode if wraps else state.mode
    entry.parts = [INSTALLATION, *(wrap.needed(context) if wraps else ())]


def _leave(entry: Entry) -> None:
    """Undo an entry, complete or not. May be called again."""
    do_all(_LEAVING, entry)


def _forget(entry: Entry) -> None:
    _context_of(entry).entries.discard(entry)


def _finish_thread(entry: Entry) -> None:
    context = _context_of(entry)
    for other in state.entries:
        if other.context is context:
            return
    context.finish_thread()


def _drop_installations(entry: Entry) -> None:
    for installation in reversed(entry.parts):
        installation.drop(entry)


def _leave_runtime(entry: Entry) -> None:
    _context_of(entry).runtime.leave_thread(entry)


def _context_of(entry: Entry) -> Context:
    assert entry.context is not None
    return entry.context


_LEAVING = (thread_state.leave, _forget, _finish_thread, _drop_installations, _leave_runtime)
"""The steps of leaving, in order. Each can be repeated, and is done even if another step failed."""


def _refuse_other_patchers() -> None:
    for name in PATCHERS:
        if name in sys.modules:
            raise AnotherPatcherError(name)


# ---- the ways in -----------------------------------------------------------------------------------------------------


class _Portable(Protocol[P]):
    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Scope: ...


def _as_portable(record: Callable[P, Any]) -> Callable[[Any], _Portable[P]]:
    """Let type checkers see the fields of the record of options as the function's parameters."""
    return _options.takes_options()


@_as_portable(Options)
def portable(target: Any = None, **options: Any) -> Scope:
    """Run programs written for one accelerator on another.

    Use as ``with torchdevice.portable():``, as ``@torchdevice.portable`` or as ``@torchdevice.portable(...)``. An
    option that is left out is taken from its environment variable, see docs/options.md.

    Args:
        **options: See below.

    Returns:
        A :class:`Scope`, or the decorated function.

    Raises:
        UnknownTargetError: On entry, if the target is no device type.
        TargetUnavailableError: On entry, if the target is not available here.
        EngineUnavailableError: On entry, if ``engine="wrap"`` cannot be had in this Python.
        ValueError: If an option has an unknown value; on entry, if it contradicts the target.
        TypeError: If an option does not exist, or has a value of a wrong type.
    """
    if callable(target) or isinstance(target, (staticmethod, classmethod)):
        return Scope(_options.chosen(options))(target)
    return Scope(_options.chosen({"target": target, **options}))


_PROFILE = inspect.Parameter("profile", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="cuda", annotation="str")
_COUNT = inspect.Parameter("count", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1, annotation="int")


@_options.takes_options(leading=(_PROFILE, _COUNT), without=("target", "devices"))
def simulate(profile: str = "cuda", count: int = 1, **options: Any) -> Scope:
    """Run programs on simulated accelerators: real values in CPU memory, on devices of their own.

    Equivalent to ``portable(f"simulated:{profile}:{count}", identity="program", ...)``. The device stays registered
    with torch for the life of the process.

    Args:
        profile: ``"cuda"``; ``"mps"``, with the dtypes and operators that Metal has; or ``"strict"``, which lacks
            what either of the two lacks.
        count: How many devices there are.
        **options: See below.

    Returns:
        A :class:`Scope`, for ``with`` and as a decorator.

    Raises:
        UnknownTargetError: On entry, if there is no such profile.
        BackendTakenError: On entry, if another out-of-tree backend is registered with torch in this process.
        ValueError: If an option has an unknown value.
        TypeError: If an option does not exist, or has a value of a wrong type.
    """
    if not isinstance(profile, str) or not profile.isalpha():
        raise ValueError(
            f"profile={profile!r} is not the name of a profile. Use 'cuda', 'mps' or 'strict', and count= for the "
            f"number of devices."
        )
    if not _options.is_number(count, least=1):
        raise ValueError(f"count={count!r} is not a number of devices. Use an int of 1 or more.")
    for name in ("target", "devices"):
        if name in options:
            raise TypeError(f"simulate() takes no {name}. Use profile and count, or portable(target=...).")
    target = f"{choosing.SIMULATED}:{profile}" + (f":{count}" if count > 1 else "")
    return Scope(_options.chosen({"target": target, **options}, identity="program"))


_PROPAGATE = inspect.Parameter("propagate", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")


@_options.takes_options(leading=(_PROPAGATE,))
def enable(target: str | torch.device | None = None, *, propagate: bool = False, **options: Any) -> Scope:
    """Activate a scope for the rest of the process: this thread and the ones it starts, until :func:`disable`.

    Args:
        propagate: Also set ``TORCHDEVICE=1`` and the variables of all options in the environment until then, so that
            Python processes started meanwhile activate themselves when they import torch.
        **options: See below.

    Returns:
        The scope.
    """
    return enable_chosen(_options.chosen({"target": target, **options}), propagate=propagate)


def enable_chosen(options: Options, *, propagate: bool) -> Scope:
    """Activate a scope with a complete record of options, as :func:`enable` does."""
    scope = Scope(options)
    scope.__enter__()
    entry = scope._entry_to_leave()
    try:
        entry.environment = _options.set_environment(variables_of(scope)) if propagate else {}
    except BaseException:
        undo(_leave, entry)
        raise
    return scope


def variables_of(scope: Scope) -> dict[str, str | None]:
    """Return the variables by which a child process activates a scope like this one."""
    context = scope._resolved()
    found = _options.to_environment(context.options)
    found[_options.variable_of("target")] = context.runtime.target
    if choosing.names_count(context.runtime.target):
        found[_options.variable_of("devices")] = None
    return found


def disable() -> None:
    """Undo the last :func:`enable` of this thread.

    Raises:
        ScopeError: No :func:`enable` is in force in this thread, or a scope entered after it is still active.
    """
    enabled = [entry for entry in state.entries if entry.environment is not None]
    if not enabled:
        raise ScopeError(
            "disable() was called without enable() in this thread. Call enable() first, and disable() in the same "
            "thread."
        )
    entry = enabled[-1]
    innermost = entry is state.entries[-1]
    _options.set_environment(entry.environment or {})
    undo(_leave, entry)
    if not innermost:
        raise ScopeError(
            f"{entry.owner!r} was disabled before a scope entered after it was left. Leave scopes in the reverse order "
            f"of entry; it has been left, and the later one is still active."
        )


def current() -> Scope | None:
    """Return the innermost active scope of this thread, or None."""
    owners = [entry.owner for entry in state.entries if entry.owner is not None]
    owner = owners[-1] if owners else None
    return owner._scope if isinstance(owner, _Joining) else owner
