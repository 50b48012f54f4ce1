"""The end of a ``with`` statement, which an interrupt cannot put off.

A ``with`` statement looks ``__exit__`` up before it enters, holds the result, and drops it when it
ends, however it ends. Where ``__exit__`` is a method of Python, an interrupt before its first line
leaves the statement entered as long as anybody keeps the error, because the frames of its traceback
keep the object. A destructor in Python, in turn, loses what a signal handler raises in it, although
there was nothing to leave.

So the statement holds an object of C here, which is in no frame. Dropped before the end, it leaves
late; dropped afterwards, it runs nothing of Python.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_unfinished: set[Leaving] = set()
"""The statements in progress, each with its way to leave. It keeps them for garbage collections,
which call no weak reference that is itself garbage.
"""


class Leaving:
    """Leaves, for one ``with`` statement. :meth:`late` says how."""

    _watcher: object = None
    _thread = 0

    def as_exit(self) -> Callable[..., Any]:
        """Return the callable that the statement holds as ``__exit__``."""
        # A partial is an object of C: no frame holds it, and its end runs no code of Python.
        held = functools.partial(self.exit)
        self._thread = threading.get_ident()
        self._watcher = weakref.ref(held, self._dropped)
        _unfinished.add(self)  # last, for the watcher takes it out
        return held

    def exit(self, *exc_info: Any) -> Any:
        """Leave at the end of the block."""
        # In this order: an interrupt leaves the entry in the set, and leaving twice is harmless.
        self.late()
        self.done()

    def late(self) -> None:
        """Leave if :meth:`exit` was kept from it. May be repeated, and called before entry."""
        raise NotImplementedError

    def done(self) -> None:
        """Note that nothing is left to do."""
        # In this order: an interrupted entry without its watcher would stay in the set.
        _unfinished.discard(self)
        self._watcher = None

    def _dropped(self, _: object) -> None:
        try:
            # A statement that ends in another thread must not change this thread's state.
            if self in _unfinished and self._thread == threading.get_ident():
                self.late()
        finally:
            _unfinished.discard(self)


class LeavingBy(Leaving):
    """Leaves by calling ``leave``."""

    def __init__(self, leave: Callable[[], object]):
        self._leave = leave

    def late(self) -> None:
        """Call it."""
        self._leave()


class Exit:
    """The descriptor of a context manager's ``__exit__``.

    Args:
        leaving: Returns the object that leaves the context manager it is called with.
    """

    def __init__(self, leaving: Callable[[Any], Leaving]):
        self._leaving = leaving

    def __get__(self, manager: Any, owner: type) -> Any:
        return self._of if manager is None else self._leaving(manager).as_exit()

    def _of(self, manager: Any, *exc_info: Any) -> Any:
        return self._leaving(manager).exit(*exc_info)


class _Block(contextlib._GeneratorContextManager):
    """A context manager made from a generator."""

    __exit__ = Exit(lambda block: _LeavingBlock(block))  # type: ignore[assignment]


class _LeavingBlock(LeavingBy):
    def __init__(self, block: _Block):
        # Closing a generator that has not started, or has ended, does nothing.
        super().__init__(block.gen.close)
        self._block = block

    def exit(self, *exc_info: Any) -> Any:
        # The generator decides whether the error is swallowed.
        result = contextlib._GeneratorContextManager.__exit__(self._block, *exc_info)
        self.done()
        return result


def block(function: Callable[P, Iterator[T]]) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Make a context manager from a generator function, as ``contextlib.contextmanager`` does."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _Block(function, args, kwargs)  # type: ignore[arg-type]

    return make
