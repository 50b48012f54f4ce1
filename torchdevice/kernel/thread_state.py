"""Which context is active in this thread.

A thread has a list of entries. Everything that torch and this package read during a call must agree
with the list. :func:`settle` brings these values in line. It may be interrupted, or entered again,
at any of its lines, and is then called again.

A thread's state is plain data of that thread, not a ContextVar: torch keeps its stack of function
modes per thread too, and the two must agree, also when an asyncio task is suspended inside a
``with`` block.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain, islice
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from torchdevice.errors import NotSupportedError
from torchdevice.kernel import registered_kernels
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import conventional_modules, of_module
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python import forks
from torchdevice.kernel.python.interrupt_safe_exit import Exit, LeavingBy
from torchdevice.kernel.python.per_thread import readable_early
from torchdevice.kernel.python.uncaught_errors import Hooks

T = TypeVar("T")

_stack_length = torch._C._len_torch_function_stack
_stack_at = torch._C._get_function_stack_at

_LENGTHS = iter(_stack_length, None)
"""The length of this thread's stack, again and again. A signal handler may take a mode off between
two calls of Python, and torch crashes for a negative index. So the length and what is there are
asked for within one call in C.
"""

_push = torch._C._push_on_torch_function_stack
_pop = torch._C._pop_torch_function_stack

_mode_of = operator.attrgetter("mode")

# Torch's `_tls` objects are per thread, so they can say "initialising" of one thread alone.
_initializing = {str(of_module(module)): module._tls for module in conventional_modules()}


class ContextMode(TorchFunctionMode):
    """A function mode that serves a context. Its subclass in ``calls/mode.py`` handles the calls.

    Attributes:
        context: The context of the innermost entry that the mode serves; None where it serves none
            any more.
        is_pushed: Whether the mode is on torch's stack, or was taken off by torch itself for the
            time of a call. False while this package puts it there or takes it off.
        index: Where on torch's stack it was put.
    """

    context: Context | None
    is_pushed = False
    index = 0

    def serve(self, context: Context | None) -> None:
        """Serve a context from now on."""
        raise NotImplementedError


class Entry:
    """One entry of this thread, into a context, or into :func:`suspended` for torch's answers.

    Args:
        context: The context; None where torch answers for itself.
        compiling: Whether a compiler of torch works for a program in a scope, while torch answers
            for itself.
        owner: The scope that was entered.

    Attributes:
        mode: The mode that serves the entry, if one is needed.
        unstacked: The value of ``state.mode`` inside the entry.
        during_call: Whether a mode beside the stack handles a call outside the entry, so that
            ``state.mode`` is None.
        restores: Whether ``state.mode`` is still to be restored: the entry was left as the
            innermost one.
        parts: The installations that this entry holds. The caller of :func:`enter` sets and drops
            them.
        enabled_by: Who made an entry that lasts until :func:`disable`: ``"program"``, whose next
            call of :func:`enable` takes its place, or ``"run"``, ``"pytest"`` or ``"variable"`` for
            the activation of a whole run; empty for other entries.
        environment: The environment variables to restore by :func:`disable`.
        hooks: The hooks for uncaught errors, in force until :func:`disable`.
    """

    def __init__(
        self, context: Context | None, *, compiling: bool = False, owner: Any = None
    ) -> None:
        self.context = context
        self.mode: ContextMode | None = None
        self.unstacked: ContextMode | None = None
        self.compiling = compiling
        self.owner = owner
        # `state.mode` is None with a mode in the innermost entry only while that handles a call.
        self.during_call = (
            state.mode is None and bool(state.entries) and state.entries[-1].unstacked is not None
        )
        self.restores = False
        self.parts: list[Any] = []
        self.enabled_by = ""
        self.environment: dict[str, str | None] = {}
        self.hooks: Hooks | None = None


@readable_early
class ThreadState(threading.local):
    """This thread's entries, and the values that follow from them.

    Attributes:
        entries: The entries that have not been left, outermost first.
        context: The innermost context; None where torch answers for itself.
        for_cuda: ``context`` where the target stands in for CUDA; None where the target is CUDA
            itself, and in a program that is written for another accelerator.
        mode: The mode beside torch's stack, which wrapped entry points call; None where torch's
            stack has the mode, and while the mode handles a call.
        traced: The mode beside the stack, while Dynamo traces a program.
        compiling: Whether a compiler of torch works for a program in a scope, while torch answers
            for itself.
        answers: False while ``context``, ``for_cuda``, ``compiling`` and torch's own flags are
            being set, and after an interrupt in between.
        stacked: The modes that this thread has put on torch's stack; a dictionary, because one call
            takes a key out, whether or not it is there.
        lent: The modes that serve a call and no entry, with their contexts.
        lifted: Modes of other packages that were taken off torch's stack to reach a mode below, and
            must be put back.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.context: Context | None = None
        self.for_cuda: Context | None = None
        self.mode: ContextMode | None = None
        self.traced: ContextMode | None = None
        self.compiling = False
        self.answers = True
        self.stacked: dict[ContextMode, None] = {}
        self.lent: dict[ContextMode, Context] = {}
        self.lifted: list[_Lifted] = []


state = ThreadState()


class _Lifted(NamedTuple):
    """A mode of another package that was taken off torch's stack to reach a mode below.

    Attributes:
        position: The mode's index on the stack.
        mode: The mode.
        to_reach: The mode below.
    """

    position: int
    mode: Any
    to_reach: ContextMode


def answering() -> Context | None:
    """Return this thread's answering context, also that of a program being compiled."""
    return innermost() if state.compiling else state.context


def innermost() -> Any:
    """Return the context of this thread's innermost entry with one, also if suspended."""
    return next(
        (entry.context for entry in reversed(state.entries) if entry.context is not None), None
    )


def refuse(name: str, remedy: str) -> NoReturn:
    """Note a program's call to something without an honest equivalent in the context, and raise.

    Args:
        name: The torch name that was called.
        remedy: What to do instead.

    Raises:
        NotSupportedError: Always.
    """
    if state.context is not None:
        state.context.report(name, "NotSupportedError", Fidelity.UNSUPPORTED)
    raise NotSupportedError(name, remedy)


def enter(entry: Entry) -> None:
    """Make an entry this thread's innermost. If this is interrupted, call :func:`leave`."""
    mode, entries = entry.mode, state.entries
    # First the list, from which everything else can be derived after an interrupt.
    entries.append(entry)
    # A mode beside the stack (`engine="wrap"`) must not be on it too.
    if mode is not None and mode is not entry.unstacked:
        _stack(mode, entry.context)
    # A destructor may have entered another scope since the append.
    if entries[-1] is entry:
        state.mode = entry.unstacked
    settle()


def _stack(mode: ContextMode, context: Context | None) -> None:
    """Put a mode on torch's stack, unless it is there."""
    if mode not in state.stacked:
        mode.serve(context)
        # Noted before the push: after an interrupt in between, leaving the entry retires the mode,
        # on the stack or not.
        state.stacked[mode] = None
        mode.index = _stack_length()  # where to put it back after an interrupt lost it
        _push(mode)
        mode.is_pushed = True


def leave(entry: Entry) -> None:
    """Take an entry out, innermost or not. May be repeated, and is a no-op if it is not listed."""
    entries = state.entries
    if entry in entries:
        entry.restores = entries[-1] is entry
        # By identity, since entries define no equality.
        entries.remove(entry)
    if entry.restores:
        state.mode = None if entry.during_call or not entries else entries[-1].unstacked
        # Once: a destructor may come here late, when another entry is the innermost.
        entry.restores = False
    # Another entry may share the mode: nested scopes of a thread have one.
    if entry.mode is not None and entry.mode not in map(_mode_of, entries):
        entry.mode.serve(None)
    settle()


def undo(leaving: Callable[[T], None], entered: T) -> None:
    """Leave the entries, once more after an interrupt."""
    try:
        leaving(entered)
    except BaseException:
        # Every step of leaving may be repeated.
        leaving(entered)
        raise


def settle() -> None:
    """Bring this thread's state, and torch's, in line with the entries.

    An interrupt may come between any two lines, and so may a destructor or a signal handler that
    enters or leaves a scope. Therefore nothing here depends on earlier calls, and the entries are
    looked at again at the end.
    """
    while True:
        # A copy, to compare with at the end.
        entries = list(state.entries)
        _answer_for(entries[-1] if entries else None)
        # Also while torch answers for itself, so that code that is compiled meanwhile finds the
        # keys it runs with.
        registered_kernels.include(any(map(_has_scope, entries)))
        put_back_lost()
        if (mode := state.mode) is not None:
            mode.serve(_served_by(mode))
        # By content: a handler that entered and left a scope meanwhile has settled by itself.
        if entries == state.entries:
            return


def _has_scope(entry: Entry) -> bool:
    return entry.context is not None and not entry.context.names.is_native


def _serve_or_retire(mode: ContextMode) -> None:
    context = _served_by(mode)
    mode.serve(context)
    # A new entry never takes a mode that serves nothing, so this condition stays true.
    if context is None:
        _retire(mode)
    elif mode.is_pushed and stacked_modes().count(mode) != 1:
        _put_back(mode)


def _served_by(mode: ContextMode) -> Context | None:
    """Return the context of the innermost entry or call that a mode serves, or None."""
    for entry in reversed(state.entries):
        if entry.mode is mode:
            return entry.context
    return state.lent.get(mode)


def _answer_for(entry: Entry | None) -> None:
    """Set this thread's values, read by supplied names and torch, for its innermost entry."""
    context = entry.context if entry is not None else None
    # On the native device torch's own code answers, so to torch this thread has no scope.
    if context is not None and context.names.is_native:
        context = None
    compiling = entry is not None and entry.compiling
    # Nothing to set: the usual case of a nested scope of the same options.
    if state.answers and state.context is context and state.compiling is compiling:
        return
    # Until the last line the values disagree; an interrupt leaves this False, and the next call
    # sets all of them.
    state.answers = False
    state.context = context
    state.compiling = compiling
    stood_for = context.names.stood_for if context is not None else frozenset()
    state.for_cuda = context if "cuda" in stood_for else None
    forked = context is not None and context.driver.is_in_bad_fork
    _seem_initializing(frozenset() if forked else stood_for)
    if on_context is not None:
        on_context(context)
    state.answers = True


def _seem_initializing(families: frozenset[str]) -> None:
    """Let torch believe that this thread is initialising these accelerators, and no others.

    torch then neither initialises CUDA nor looks for NVIDIA's library.
    """
    for family, of_accelerator in _initializing.items():
        if family in families:
            of_accelerator.is_initializing = True
        else:
            # Removed instead of set to False, because torch asks `hasattr`.
            vars(of_accelerator).pop("is_initializing", None)


on_context: Callable[[Context | None], None] | None = None
"""Is told of the context that answers in this thread from now on, while kernels in C++ may serve
it.
"""


def _after_fork() -> None:
    """Let torch refuse to initialise CUDA in a child process, as it does on a machine with CUDA."""
    context = state.context
    if context is not None and context.driver.is_in_bad_fork:
        # The child has the same context and other answers, so `settle` must set them.
        state.answers = False
        settle()


forks.in_child(_after_fork)


def stacked_modes() -> list[Any]:
    """Return torch's stack of function modes, the topmost last."""
    while True:
        try:
            return list(map(_stack_at, chain.from_iterable(map(range, islice(_LENGTHS, 1)))))
        except RuntimeError:
            # A collection within the line has left a statement, and shortened the stack.
            continue


def _retire(mode: ContextMode) -> None:
    """Take a mode off torch's stack.

    While a mode handles a call, torch itself has taken it off, and puts it back afterwards. Such a
    mode stays on the stack without effect until the next entry or exit.
    """
    # Until it is gone, because a handler of a signal may put modes above it meanwhile.
    while mode in (stack := stacked_modes()):
        top = stack[-1]
        # Each change is one line, so signal handlers between lines find nothing half done.
        try:
            if top is mode:
                mode.is_pushed = False
                _pop() if _is_top(mode) else None
            else:
                state.lifted.append(_Lifted(len(stack) - 1, top, mode))
                _pop() if _is_top(top) else None
        except RuntimeError:
            continue  # a signal handler came within the line, and the stack is empty now
    if not mode.is_pushed:
        state.stacked.pop(mode, None)  # with a default: a handler may have removed it already


def put_back_lost() -> None:
    """Put modes back that an interrupt in torch's own block around a call has lost."""
    for mode in list(state.stacked):
        _serve_or_retire(mode)
    # Rarely any, and each entry comes here.
    if state.lifted:
        _put_back_lifted()


def _put_back(mode: ContextMode) -> None:
    """Put a mode on torch's stack once.

    Torch takes it off while it handles a call, and puts it back where the frame of its block ends.
    An interrupt in that block loses the mode, or leaves the frame to the error, which may end when
    the mode is on the stack again.
    """
    if mode not in stacked_modes() and _handles_a_call(mode):
        return
    # Exactly once: after an interrupt in torch's block the mode may be missing or be there twice.
    while True:
        stack = stacked_modes()
        times = stack.count(mode)
        if times == 1:
            return
        try:
            if times and stack[-1] is not mode:
                return  # until no mode of another package is above
            if times:
                _pop() if _is_top(mode) else None
            elif len(stack) > mode.index:
                state.lifted.append(_Lifted(len(stack), stack[-1], mode))
                _pop() if _is_top(stack[-1]) else None
            else:
                _push(mode)
        except RuntimeError:
            continue  # a signal handler came within the line, and the stack is empty now


_TAKING_OFF = {"_pop_mode", "_pop_mode_temporarily", "_pop_torch_function_stack", "_push_mode"}
"""The names that a function uses if it takes modes off torch's stack for some time, or puts them
back, as ``DeviceContext.__enter__`` does.
"""

_DYNAMO = os.path.join("torch", "_dynamo", "")
"""Dynamo takes all modes off while it compiles."""


def _handles_a_call(mode: ContextMode) -> bool:
    """Return whether a frame of this thread has popped a mode from torch's stack for a call."""
    # From the caller on; this function's own frame takes nothing off.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is type(mode).__torch_function__.__code__ and frame.f_locals.get("self") is mode:
            return True
        # By the names that a function's code uses, since torch has no mark for such frames.
        if not _TAKING_OFF.isdisjoint(code.co_names) or _DYNAMO in code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_top(mode: Any) -> bool:
    # No call follows the look at the stack, to leave a signal handler little room for a scope.
    stack = stacked_modes()
    return stack[-1] is mode if stack else False


def _put_back_lifted() -> None:
    while state.lifted:
        lifted = state.lifted[-1]
        # One lower if the mode below is gone.
        place = lifted.position - (lifted.to_reach not in stacked_modes())
        _push(lifted.mode) if _stack_length() == place else None
        # Compared with the last one: a handler may have put it back and removed it.
        state.lifted.pop() if lifted in state.lifted[-1:] else None


class entered:
    """Be in an entry for the time of a ``with`` statement."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        enter(self.entry)

    __exit__ = Exit(lambda each: LeavingBy(functools.partial(undo, leave, each.entry)))


_NOTHING = contextlib.nullcontext()


def suspended(*, compiling: bool = False) -> AbstractContextManager[None]:
    """Let torch answer for itself in this thread, as if no scope were active.

    Args:
        compiling: Whether a compiler of torch works for a program in a scope; it may then make
            simulated tensors.
    """
    if not (state.entries or compiling):
        return _NOTHING
    # Without a mode, so that the innermost entry answers "torch itself".
    return entered(Entry(None, compiling=compiling))


class lent:
    """Put a mode on torch's stack that no entry of this thread has, for the time of a call."""

    def __init__(self, mode: ContextMode, context: Context) -> None:
        self.mode, self.context = mode, context

    def __enter__(self) -> None:
        state.lent[self.mode] = self.context
        _stack(self.mode, self.context)

    __exit__ = Exit(lambda each: LeavingBy(functools.partial(undo, _take_back, each.mode)))


def _take_back(mode: ContextMode) -> None:
    state.lent.pop(mode, None)
    _serve_or_retire(mode)
    _put_back_lifted()
