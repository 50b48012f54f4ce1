"""The end of a launcher under ``torchdevice run``: where its ranks were, in place of its traceback.

A signal such as Ctrl-C ends any launcher: ``--ranks``, torchrun, ``accelerate launch``. Where ranks
of ``--ranks`` failed, the traceback of the rank that failed first comes first. The others have a
line each, or share one where they agree. Under another launcher the ranks show their tracebacks
themselves, and the lines of all ranks follow the launcher's own text.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torchdevice.kernel.python import printable, rank_notes
from torchdevice.kernel.python.environment import COLLECTED
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.python.rank_notes import Failure
from torchdevice.kernel.python.uncaught_errors import add_note

_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)

_SOONER = 1.0
"""A rank without a note may have ended so many seconds before the launcher's time, which is in
whole seconds.
"""


@block
def shown(ranks: int | None) -> Iterator[None]:
    """Show how the ranks ended, in place of the launcher's traceback.

    Args:
        ranks: The number of ``--ranks``; None for a program that may be another launcher. Its error
            passes, with the lines of the program as a note.

    Raises:
        SystemExit: With status 1 where a rank failed, and that of the signal where one ended the
            launcher.
    """
    os.environ.setdefault(COLLECTED, rank_notes.SIGNALS if ranks is None else rank_notes.ALL)
    # One line below covers the launcher's logs of signals and exit codes, for ranks that agree.
    kept = _BeforeSignals() if ranks is None else _is_critical
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(kept)
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        failures = getattr(error, "failures", None) if kind == "ChildFailedError" else None
        if failures and ranks is None:
            add_note(error, "\n".join(map(printable.lines, failed(failures, has_shown=True))))
            raise
        if failures:
            lines, status = failed(failures), 1
        elif kind == "SignalException" and (agent := _agent(error.__traceback__)) is not None:
            stopped = error.sigval  # type: ignore[attr-defined]
            group = [each.global_rank for each in agent.get_worker_group().workers]
            lines, status = interrupted(group, signal.Signals(stopped)), 128 + stopped
        else:
            raise
        print(*map(printable.lines, lines), sep="\n", file=sys.stderr)
        raise SystemExit(status) from None


def _agent(entry: TracebackType | None) -> Any:
    """Return the object that ran a launcher's ranks, from the launcher's traceback; else None."""
    while entry is not None:
        if entry.tb_frame.f_code.co_name == "launch_agent":
            return entry.tb_frame.f_locals.get("agent")
        entry = entry.tb_next
    return None


# A filter, because the launcher sets levels when it is imported.
def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


class _BeforeSignals(logging.Filter):
    """Lets a launcher's log pass until a signal ends the launcher."""

    _ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the launcher goes on."""
        self._ended = self._ended or "death signal" in str(record.msg)
        return not self._ended or _is_critical(record)


# ---- a rank has failed ---------------------------------------------------------------------------


def failed(ended: Mapping[int, Any], *, has_shown: bool = False) -> Iterator[str]:
    """Yield the lines on ranks that failed.

    Args:
        ended: Rank -> the launcher's ``ProcessFailure``, also of ranks that the launcher has ended.
        has_shown: Whether the ranks have shown their tracebacks.
    """
    notes = {rank: note for rank, note in rank_notes.failures().items() if rank in ended}
    first = min(ended, key=lambda rank: _time(ended[rank], notes.get(rank)))
    known = notes.get(first)
    if known is None:
        yield f"torchdevice: rank {first} failed first: {_end(ended[first])}."
    elif has_shown:
        yield f"torchdevice: rank {first} failed first{_at(known)}: {_line(known)}"
    elif not known.traceback:
        yield f"torchdevice: rank {first} failed first, at {known.place}: {known.error}."
    else:
        yield f"torchdevice: rank {first} failed first{_at(known)}:"
        yield known.traceback.rstrip()
    killed = "" if known is not None else f"rank {first} {_how_it_ended(ended[first])}"
    places = rank_notes.stacks()
    others = {}
    for rank in ended.keys() - {first}:
        others[rank] = (
            _of_other(notes[rank], known, killed)
            if rank in notes
            else _end(ended[rank], places.get(rank))
        )
    for named, text in rank_notes.alike(others):
        yield f"torchdevice: {named}: {text}"


def _time(failure: Any, note: Failure | None) -> float:
    if note is not None:
        return note.time
    # The launcher ends the others by this signal, so they come last.
    return float("inf") if failure.exitcode == -signal.SIGTERM else failure.timestamp - _SOONER


def _at(note: Failure) -> str:
    return f" at {note.place}" if note.place else ""


def _of_other(note: Failure, first: Failure | None, killed: str) -> str:
    # A table of all ranks is the same text for each of them, whose lines may differ.
    if first is not None and note.error == first.error:
        return f"failed{_at(note)} with the same error"
    if not note.traceback:
        return f"ended{_at(note)} with {note.error}"
    error = _line(note)
    return (
        f"failed{_at(note)}: {error.replace(rank_notes.UNEXPLAINED, killed) if killed else error}"
    )


def _line(note: Failure) -> str:
    """Return the first line of an error that is about its cause."""
    # After these words of torch, NCCL's errors have a line of source, and the cause at the end.
    line = note.error.rpartition("\nLast error:\n")[2].partition("\n")[0]
    return line.removesuffix(":")  # a table follows in the traceback


def _how_it_ended(failure: Any) -> str:
    return f"{'ended with' if failure.exitcode >= 0 else 'was'} {_end(failure)}"


def _end(failure: Any, place: str | None = None) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    name = signal.Signals(-failure.exitcode).name
    if name == "SIGTERM":
        return f"ended by the launcher{f' at {place}' if place else ''}"
    return f"killed by {name}" + (
        ", as the system does where memory runs out" if name == "SIGKILL" else ""
    )


# ---- a signal has ended the launcher -------------------------------------------------------------


def interrupted(ranks: Sequence[int], by: signal.Signals) -> Iterator[str]:
    """Yield where each rank was when a signal ended the run."""
    notes = rank_notes.failures()
    waits = rank_notes.waits()
    places = rank_notes.stacks()
    now = time.time()
    yield (
        f"torchdevice: ended by {'Ctrl-C' if by is signal.SIGINT else by.name}. Where the ranks "
        "were:"
    )
    found = {}
    for rank in ranks:
        note = notes.get(rank)
        if rank in waits:
            since = (now if note is None else note.time) - waits[rank].since
            found[rank] = f"waiting for {since:.0f} s in {waits[rank].call}"
        elif note is not None and not note.interrupted:
            found[rank] = _of_other(note, None, "")
        elif note is not None:
            found[rank] = f"at {note.place or 'its end'}"
        else:
            found[rank] = f"at {places[rank]}" if rank in places else "no line is known"
    for named, text in rank_notes.alike(found):
        yield f"  {named}: {text}"
