"""The functions that make and activate scopes: ``portable``, ``simulate``, ``enable``, ``disable`` and ``current``."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from torchdevice import options as _options
from torchdevice import target_selection
from torchdevice.core.thread_state import state, undo
from torchdevice.engines import held_functions
from torchdevice.errors import ScopeError
from torchdevice.options import Options
from torchdevice.scope import Joining, Scope, leave

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")


class _Portable(Protocol[P]):
    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Scope: ...


def _as_portable(record: Callable[P, Any]) -> Callable[[Any], _Portable[P]]:
    """Let type checkers see the fields of the record of options as the function's parameters."""
    return _options.takes_options()  # type: ignore[return-value]


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


_PROFILE = inspect.Parameter(
    "profile", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="cuda", annotation="str | Mapping[str, Any]"
)
_COUNT = inspect.Parameter("count", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1, annotation="int")


@_options.takes_options(leading=(_PROFILE, _COUNT), without=("target", "devices"))
def simulate(profile: str | Mapping[str, Any] = "cuda", count: int = 1, **options: Any) -> Scope:
    """Run programs on simulated accelerators: real values in CPU memory, on devices of their own.

    Equivalent to ``portable(f"simulated:{profile}:{count}", identity="program", ...)``. The device stays registered
    with torch for the life of the process.

    Args:
        profile: ``"cuda"``; ``"mps"``, with the dtypes and operators that Metal has; ``"strict"``, which lacks what
            either of the two lacks; a model such as ``"t4"`` or ``"a100"``, with its memory and compute capability; a
            TOML or JSON file, or a dict, that describes a model (docs/simulation.md).
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
    if isinstance(profile, Mapping):
        profile = json.dumps(profile)
    name = f"{target_selection.SIMULATED}:{profile}"
    if not isinstance(profile, str) or not target_selection.is_simulated(name) or target_selection.names_count(name):
        raise ValueError(
            f"profile={profile!r} is not the name of a profile. Use 'cuda', 'mps' or 'strict', and count= for the "
            f"number of devices."
        )
    if not _options.is_number(count, least=1):
        raise ValueError(f"count={count!r} is not a number of devices. Use an int of 1 or more.")
    for without in ("target", "devices"):
        if without in options:
            raise TypeError(f"simulate() takes no {without}. Use profile and count, or portable(target=...).")
    target = name + (f":{count}" if count > 1 else "")
    return Scope(_options.chosen({"target": target, **options}, identity="program"))


_PROPAGATE = inspect.Parameter("propagate", inspect.Parameter.KEYWORD_ONLY, default=False, annotation="bool")


@_options.takes_options(leading=(_PROPAGATE,))
def enable(target: str | torch.device | None = None, *, propagate: bool = False, **options: Any) -> Scope:
    """Activate a scope for the rest of the process: this thread and the ones it starts, until :func:`disable`.

    In IPython and in notebooks, where a cell may run again, the last call counts: it takes the place of one before.

    Args:
        propagate: Also set ``TORCHDEVICE=1`` and the variables of all options in the environment until then, so that
            Python processes started meanwhile activate themselves when they import torch.
        **options: See below.

    Returns:
        The scope.
    """
    chosen = _options.chosen({"target": target, **options})
    return (enable_again if _in_ipython() else enable_chosen)(chosen, propagate=propagate)


def _in_ipython() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def enable_again(options: Options, *, propagate: bool) -> Scope:
    """Activate a scope as :func:`enable` does, in place of one that :func:`enable` has activated last."""
    if is_enabled():
        last = state.entries[-1]
        scope: Scope = last.owner
        if scope.options == options and bool(last.environment) is propagate:
            return scope
        target_selection.resolve(options)  # raises, if it does, before the scope in force is left
        disable()
    return enable_chosen(options, propagate=propagate)


def is_enabled() -> bool:
    """Return whether the innermost scope of this thread was activated by :func:`enable`."""
    return bool(state.entries) and state.entries[-1].environment is not None


def enable_chosen(options: Options, *, propagate: bool) -> Scope:
    """Activate a scope with a complete record of options, as :func:`enable` does."""
    whole_process = options.engine == "auto" and not state.entries
    scope = Scope(options, auto=held_functions.engine() if whole_process else "mode")
    scope.__enter__()
    entry = scope._entry_to_leave()
    try:
        entry.environment = _options.set_environment(variables_of(scope)) if propagate else {}
    except BaseException:
        undo(leave, entry)
        raise
    return scope


def variables_of(scope: Scope) -> dict[str, str | None]:
    """Return the variables by which a child process activates a scope like this one."""
    context = scope._resolved()
    found = _options.to_environment(context.options)
    found[_options.variable_of("target")] = context.runtime.target
    found[_options.variable_of("engine")] = scope.options.engine
    if target_selection.names_count(context.runtime.target):
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
    undo(leave, entry)
    if not innermost:
        raise ScopeError(
            f"{entry.owner!r} was disabled before a scope entered after it was left. Leave scopes in the reverse order "
            f"of entry; it has been left, and the later one is still active."
        )


def current() -> Scope | None:
    """Return the innermost active scope of this thread, or None."""
    owners = [entry.owner for entry in state.entries if entry.owner is not None]
    owner = owners[-1] if owners else None
    return owner._scope if isinstance(owner, Joining) else owner
