"""Errors that end a part of a program, and that the program goes on after: those of threads, of
futures that nobody reads, and of asyncio's tasks.

The program may have asked for less memory than it would have without them. Only their names are
kept: their frames hold tensors.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.python.uncaught_errors import last_place


@dataclass(slots=True)
class LostError:
    """One such error.

    Attributes:
        part: The part of the program that it ended.
        error: Its class.
        place: The program's line; empty if it has none, as an error of another process.
        ran_out: Whether memory ran out.
        is_read: Whether the program has asked for it.
    """

    part: str
    error: str
    place: str
    ran_out: bool
    is_read: bool = False

    def __str__(self) -> str:
        at = f" at {self.place}" if self.place else ""
        return f"{self.part} ended by {self.error}{at}"


class LostErrors:
    """The errors that the parts of a program lose, from :meth:`follow` on."""

    def __init__(self) -> None:
        self._noted: list[LostError] = []
        self._of_futures: WeakKeyDictionary[Future[Any], LostError | None] = WeakKeyDictionary()

    def found(self) -> list[LostError]:
        """Return those that nobody has read."""
        return [each for each in self._noted if not each.is_read]

    def follow(self) -> Callable[[], None]:
        """Note errors from now on, and return a function that ends this."""
        undo = [self._follow_threads(), self._follow_futures(), self._follow_tasks()]

        def end() -> None:
            while undo:
                undo.pop()()

        return end

    def _is_followed(self) -> bool:
        """Return whether this thread is in a scope: others of the process are not planned."""
        return thread_state.state.context is not None

    def _note(self, part: str, error: BaseException) -> LostError:
        ran_out = isinstance(error, torch.OutOfMemoryError)
        noted = LostError(part, type(error).__name__, last_place(error), ran_out)
        self._noted.append(noted)
        return noted

    def _follow_threads(self) -> Callable[[], None]:
        before = threading.excepthook

        def note(given: threading.ExceptHookArgs) -> None:
            if given.exc_value is not None:
                self._note("a thread", given.exc_value)
            before(given)

        def end() -> None:
            if threading.excepthook is note:
                threading.excepthook = before

        threading.excepthook = note
        return end

    def _follow_futures(self) -> Callable[[], None]:
        """Note what the program's futures get, and that it is read. Iterators of ``Executor.map``
        and asyncio read it by these methods, too.
        """
        reading_names = ("result", "exception")
        names = ("__init__", "set_exception", *reading_names)
        before: dict[str, Callable[..., Any]] = {name: getattr(Future, name) for name in names}

        @functools.wraps(before["__init__"])
        def __init__(future: Future[Any]) -> None:
            before["__init__"](future)
            # The thread that gives it an error may be in a scope only while it works.
            if self._is_followed():
                self._of_futures[future] = None

        @functools.wraps(before["set_exception"])
        def set_exception(future: Future[Any], exception: BaseException | None) -> None:
            if exception is not None and future in self._of_futures:
                self._of_futures[future] = self._note("a future", exception)
            before["set_exception"](future, exception)

        def reading(name: str) -> Callable[..., Any]:
            original = before[name]

            @functools.wraps(original)
            def read(future: Future[Any], timeout: float | None = None) -> Any:
                try:
                    return original(future, timeout)
                finally:
                    noted = self._of_futures.get(future)
                    if noted is not None:
                        noted.is_read = True

            return read

        ours: dict[str, Callable[..., Any]] = {
            "__init__": __init__,
            "set_exception": set_exception,
            **{name: reading(name) for name in reading_names},
        }
        for name, function in ours.items():
            setattr(Future, name, function)

        def end() -> None:
            for name, function in ours.items():
                if getattr(Future, name) is function:
                    setattr(Future, name, before[name])

        return end

    def _follow_tasks(self) -> Callable[[], None]:
        """Note the errors that asyncio logs: those of tasks and of callbacks, where the program has
        no handler of its own.
        """
        logger = logging.getLogger("asyncio")

        def note(record: logging.LogRecord) -> bool:
            if record.exc_info and record.exc_info[1] is not None and self._is_followed():
                self._note("a task", record.exc_info[1])
            return True

        logger.addFilter(note)
        return functools.partial(logger.removeFilter, note)
