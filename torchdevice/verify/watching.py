"""Looks at the operators of a thread while it is in a scope with ``verify=``."""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torch imports Dynamo at a mode's first call. A process that another thread forks meanwhile could
# never import it.
import torch._dynamo  # noqa: F401

from torchdevice.calls.rewriters import native_device
from torchdevice.errors import DivergenceError, DivergenceWarning
from torchdevice.kernel import dispatch_modes, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.python import run_folder
from torchdevice.kernel.python.logs import logger
from torchdevice.kernel.python.per_thread import readable_early
from torchdevice.kernel.stand_ins import tensors
from torchdevice.report import Report
from torchdevice.report.discrepancies import Finding, findings_of
from torchdevice.verify import operator_facts, script
from torchdevice.verify.call import Call
from torchdevice.verify.lines import BackwardCalls, Lines
from torchdevice.verify.reference import unseen


class Watcher(Observer):
    """Compares operators with the CPU's.

    Args:
        context: The context whose options choose the calls to check.
    """

    def __init__(self, context: Context):
        options = context.options
        self.context = context
        self._only = options.verify_only if isinstance(options.verify_only, tuple) else None
        # A fraction as a step: 0.1 looks at every tenth call.
        self._every = max(1, round(1 / options.verify_sample))
        self._known: dict[Any, operator_facts.Operator | str | None] = {}
        self._left_out: Counter[Any] = Counter()
        self._lines = Lines(_backward_calls(context))

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator, and compare its effects."""
        call = self._begun(op, args, kwargs)
        result = kernel(*args, **kwargs)
        if call is not None:
            for each in unseen(call.findings, result):
                self._tell(call, each)
        return result

    def _begun(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """Return a call with copies of its inputs; None if it is not looked at."""
        entries = thread_state.state.entries
        # Another scope's entry is inside, whose own observer looks.
        if entries and entries[-1].context is not self.context:
            return None
        self._lines.note()
        try:  # which asks for the hash once
            operator = self._known[func]
        except KeyError:
            operator = self._known[func] = operator_facts.looked_at(
                func, self._only, self.context.runtime
            )
        if not isinstance(operator, operator_facts.Operator):
            kinds = (
                {native_device(each).type for each in tensors((args, kwargs))} if operator else ()
            )
            if operator and self.context.device_type in kinds:
                findings_of(self.context.journal).left_out[operator][func.name()] += 1
            return None
        if self._left_out[operator]:
            self._left_out[operator] -= 1
            return None
        call = unseen(Call.of, self.context, operator, self._lines, args, kwargs)
        # A call that cannot be compared does not use up the sample.
        if call is not None:
            self._left_out[operator] = self._every - 1
        return call

    def _tell(self, call: Call, finding: Finding) -> None:
        """Count a finding. The first time, write a program that shows it alone, and warn of it.

        Raises:
            DivergenceError: The scope is strict.
        """
        kept = findings_of(self.context.journal).add(finding)
        is_strict = self.context.options.strict
        if kept.count == 1:
            # One program for each operator and line; findings by range have nothing to show.
            if not call.is_by_range:
                kept.script = unseen(script.write, self.context, call.operator, call.inputs, kept)
            # At once, so that a program that ends by a signal leaves its findings.
            _write(self.context)
            if not is_strict:  # there the error says the same
                warnings.warn_explicit(
                    DivergenceWarning(str(kept)), DivergenceWarning, kept.site.file, kept.site.line
                )
        if is_strict:
            raise DivergenceError(kept)


@readable_early
class _Threads(threading.local):
    """This thread's entries with ``verify=``, and the mode with which watchers run operators."""

    def __init__(self) -> None:
        self.entries: set[Any] = set()
        self.modes: dict[Context, dispatch_modes.Operators] = {}


_threads = _Threads()


def _backward_calls(context: Context) -> BackwardCalls:
    if not any(isinstance(each, BackwardCalls) for each in context.observers.order):
        context.observers.add(BackwardCalls())
    return next(each for each in context.observers.order if isinstance(each, BackwardCalls))


def enter_thread(entry: Any) -> None:
    """Look at this thread's operators from now on. May be called again for an entry.

    Raises:
        ValueError: ``verify_only`` names no operator of torch, or copies go on after their calls,
            so that there is no moment at which the inputs of an operator could be copied.
    """
    options = entry.context.options
    name = operator_facts.unknown(options.verify_only)
    if name is not None:
        raise ValueError(
            f"verify_only={name!r} is no operator. Use a name such as 'mm', 'add.Tensor' or "
            "'my::op'."
        )
    if getattr(options, "asynchronous", False):  # of simulated devices, where there are any
        raise ValueError("verify and asynchronous=True exclude each other. Leave one of them out.")
    _threads.entries.add(entry)
    _settle()


def leave_thread(entry: Any) -> None:
    """Undo :func:`enter_thread`. May be called again."""
    _threads.entries.discard(entry)
    _settle()
    if not entry.context.entries.active:
        _write(entry.context)
        entry.context.observers.end(BackwardCalls)


def _write(context: Context) -> None:
    """Write the findings to the file of ``verify=``. The first process of a run does that."""
    file = context.options.verify
    if not isinstance(file, str) or not (run_folder.path() is None or run_folder.leads()):
        return
    report = Report.of(context.journal, context.options, context.runtime.target)
    try:
        Path(file).write_text(json.dumps(report.verification, indent=1), encoding="utf-8")
    except OSError as error:  # must not keep a scope from being left
        logger.warning("what was verified could not be written: %s", error)


def _settle() -> None:
    """Bring the modes of this thread in line with its entries."""
    wanted = {entry.context for entry in _threads.entries}
    # A mode of this thread whose context has no entry left.
    for context in list(_threads.modes.keys() - wanted):
        dispatch_modes.leave(_threads.modes[context])
        _threads.modes.pop(context, None)
    for context in wanted - _threads.modes.keys():
        mode = _threads.modes[context] = dispatch_modes.Operators(Watcher(context))
        dispatch_modes.enter(mode)
