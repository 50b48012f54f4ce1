"""Functions that make and activate scopes: ``portable``, ``simulate``, ``enable`` and others."""

from __future__ import annotations

import json
import os
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

from torchdevice.calls import wrap
from torchdevice.errors import ScopeError
from torchdevice.kernel import thread_state
from torchdevice.kernel.patching import do_all
from torchdevice.kernel.python import run_folder
from torchdevice.kernel.python.environment import REPORT
from torchdevice.kernel.python.uncaught_errors import Hooks, ipython
from torchdevice.kernel.thread_state import Entry, state, undo
from torchdevice.scope import collected_options as _options
from torchdevice.scope import target_selection
from torchdevice.scope.collected_options import Options
from torchdevice.scope.scope import Joining, Scope, leave, left_too_early

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

    Use as ``with torchdevice.portable():``, as ``@torchdevice.portable`` or as
    ``@torchdevice.portable(...)``. An option that is left out is taken from its environment
    variable; ``torchdevice run --help`` lists both.

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


@_options.takes_options(without=("target", "devices"))
def simulate(
    profile: str | Mapping[str, Any] = "cuda", devices: int | None = None, **options: Any
) -> Scope:
    """Run programs on simulated accelerators: real values in CPU memory, on devices of their own.

    Equivalent to ``portable(f"simulated:{profile}:{devices}", ...)``. The device stays registered
    with torch for the life of the process.

    Args:
        profile: ``"cuda"``; ``"mps"``, with the dtypes and operators that Metal has; ``"strict"``,
            which lacks what either of the two lacks; a model such as ``"t4"`` or ``"a100"``, with
            its memory and compute capability; a TOML or JSON file, or a dict, that describes a
            model (docs/simulation.md). A number of devices may follow: ``"a100:2"``.
        devices: How many devices there are, where the profile names no number. Default: 1.
            ``count`` is its old name.
        **options: See below.

    Returns:
        A :class:`Scope`, for ``with`` and as a decorator.

    Raises:
        UnknownTargetError: On entry, if there is no such profile.
        BackendTakenError: On entry, if another out-of-tree backend is registered with torch in this
            process.
        ValueError: If an option has an unknown value.
        TypeError: If an option does not exist, or has a value of a wrong type.
    """
    if isinstance(profile, Mapping):
        profile = json.dumps(profile)
    if "target" in options:
        raise TypeError(
            "simulate() takes no target. Use profile and devices, or portable(target=...)."
        )
    if "count" in options:
        devices = _renamed_count(devices, options.pop("count"))
    from torchdevice.simulation import targets

    name = targets.named(profile)
    if name is None:
        raise ValueError(
            f"profile={profile!r} is not the name of a profile. Use 'cuda', 'mps', 'strict' or a "
            "model such as 'a100', and devices= for the number of devices."
        )
    if devices is not None and target_selection.names_count(name):
        raise ValueError(
            f"devices={devices!r} contradicts profile={profile!r}, which contains the number. "
            "Leave one out."
        )
    if devices is not None and _options.checked_count("devices", devices) > 1:
        name = f"{name}:{devices}"
    return Scope(_options.chosen({"target": name, **options}))


def _renamed_count(devices: int | None, count: Any) -> Any:
    if devices is not None:
        raise TypeError(
            f"simulate() got devices={devices!r} and count={count!r}, its old name. Use devices "
            "alone."
        )
    warnings.warn(
        f"simulate(count={count!r}) is now simulate(devices={count!r})",
        DeprecationWarning,
        stacklevel=3,
    )
    return count


@_options.takes_options()
def enable(
    target: str | torch.device | None = None, *, propagate: bool = False, **options: Any
) -> Scope:
    """Activate a scope in this thread and those it starts, until :func:`disable` or the end.

    The last call counts: it replaces the program's earlier calls in this thread, with their
    options.

    Args:
        propagate: Also set ``TORCHDEVICE=1`` and the variables of all options in the environment
            until then, so that Python processes started meanwhile activate themselves when they
            import torch.
        **options: See below.

    Returns:
        The scope.
    """
    thread_state.settle()  # an interrupt may have lost the mode of the scope in force
    before = enabled_by_program()
    # Without the variables that the scopes in force have set for child processes.
    variables = ChainMap(*(entry.environment for entry in before), os.environ)  # type: ignore[arg-type]
    chosen = _options.chosen(
        {"target": target, **options}, variables=_options.from_environment(variables)
    )
    if before and before[-1] is state.entries[-1]:
        scope: Scope = before[-1].owner
        if scope.options == chosen and bool(before[-1].environment) is propagate:
            return scope
    target_selection.resolve(chosen)  # raises, if it does, before the scope in force is left
    _end(before)
    return enable_chosen(chosen, propagate=propagate, enabled_by="program")


def enabled_by_program() -> list[Entry]:
    """Return the entries made by :func:`enable` in this thread and not yet disabled."""
    return [entry for entry in state.entries if entry.enabled_by == "program"]


def chosen_in_rank(given: Mapping[str, Any], variables: Mapping[str, Any] | None = None) -> Options:
    """Return the options of a program that is not edited, and may be one of several ranks.

    Args:
        given, variables: As for :func:`torchdevice.scope.collected_options.chosen`.
    """
    variables = _options.from_environment() if variables is None else variables
    said = {name: value for name, value in given.items() if value is not None}
    asked = {**variables, **said}
    ranks = target_selection.devices_of_ranks(asked.get("target"), asked.get("written_for"))
    return _options.chosen(given, variables, **ranks)


def enable_chosen(
    options: Options, *, propagate: bool, enabled_by: str = "run", shows_errors: bool = True
) -> Scope:
    """Activate a scope with a complete record of options until :func:`disable`.

    Args:
        options: What was asked for.
        propagate: As for :func:`enable`.
        enabled_by: See :class:`Entry`.
        shows_errors: Whether errors of the main thread are shown without the package's frames.
    """
    scope = Scope(
        options, auto=wrap.automatic() if options.engine == "auto" and not state.entries else "mode"
    )
    try:
        scope.__enter__(enabled_by)
        entry = scope._entry_to_leave()
        if propagate:
            _options.set_environment(variables_of(scope), entry.environment)
        entry.hooks = Hooks(shows_errors)
        entry.hooks.begin()
        if session := ipython():
            session.events.register("pre_run_cell", _before_cell)
        return scope
    except BaseException:
        _end([entry for entry in state.entries if entry.owner is scope])
        raise


def take_part(scope: Scope) -> None:
    """Let this process report to the run that it belongs to; where there is none, it begins one."""
    if run_folder.path() is None:
        os.environ.pop(REPORT, None)
        run_folder.begin()
    elif REPORT in os.environ:
        from torchdevice.report import processes

        processes.follow(scope.journal, scope.report)


def _end(entries: Sequence[Entry]) -> None:
    """Undo what :func:`enable_chosen` has made, the last first."""
    for entry in reversed(entries):
        undo(_undo_all, entry)
    session = ipython()
    if session and _before_cell in session.events.callbacks["pre_run_cell"]:
        session.events.unregister("pre_run_cell", _before_cell)


def _undo_all(entry: Entry) -> None:
    # All steps, also after a failure or an interrupt: only this entry restores the variables.
    hooks = () if entry.hooks is None else (lambda entry: entry.hooks.end(),)
    do_all((lambda entry: _options.set_environment(entry.environment), *hooks, leave), entry)


def _before_cell(_: Any) -> None:
    """Repair the state after an interrupt of an earlier cell."""
    thread_state.settle()


def variables_of(scope: Scope) -> dict[str, str | None]:
    """Return the variables that make a child process activate a scope like this one."""
    context = scope._resolved()
    found = _options.to_environment(context.options)
    target = context.runtime.target
    asked = scope.options.target
    # A child process may be one of several ranks, where the number is still to be decided.
    if context.options.devices is None and not target_selection.names_count(asked):
        target = target_selection.without_count(target)
    found[_options.variable_of("target")] = target
    found[_options.variable_of("engine")] = scope.options.engine
    if target_selection.names_count(context.runtime.target):
        found[_options.variable_of("devices")] = None
    return found


def disable() -> None:
    """Undo :func:`enable` in this thread; without one, ``torchdevice run`` or ``TORCHDEVICE=1``.

    Raises:
        ScopeError: No :func:`enable` is in force in this thread, or a scope entered after it is
            still active.
    """
    enabled = enabled_by_program() or [entry for entry in state.entries if entry.enabled_by][-1:]
    if not enabled:
        raise ScopeError(
            "disable() was called without enable() in this thread. Call enable() first, and "
            "disable() in the same thread."
        )
    last = enabled[-1]
    innermost = last is state.entries[-1]
    _end(enabled)
    if not innermost:
        raise left_too_early(last.owner, "disabled")


def current() -> Scope | None:
    """Return the innermost active scope of this thread, or None."""
    owner = next(
        (entry.owner for entry in reversed(state.entries) if entry.owner is not None), None
    )
    return owner._scope if isinstance(owner, Joining) else owner
