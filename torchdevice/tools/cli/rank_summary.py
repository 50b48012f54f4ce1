"""The end of ``torchdevice run --ranks``: failed ranks, or ranks ended by signals like Ctrl-C.

The traceback of the rank that failed first comes first. The others have a line each, or share one
where they agree.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torchdevice.kernel.python import printable, rank_notes
from torchdevice.kernel.python.environment import COLLECTED
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.python.rank_notes import Failure

_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)

_SOONER = 1.0
"""Seconds by which a rank that left no note may have ended before the launcher's time, which are
whole seconds.
"""


@block
def shown(ranks: int) -> Iterator[None]:
    """Show how the ranks ended, in place of the launcher's traceback.

    Args:
        ranks: How many there are.

    Raises:
        SystemExit: With status 1 where a rank failed, and that of the signal where one ended the
            launcher.
    """
    os.environ[COLLECTED] = "1"
    # One line below covers the launcher's logs of signals and exit codes, for ranks that agree.
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_critical)
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "ChildFailedError":
            ended = getattr(error, "failures", None)
        else:
            ended = None
        if type(error).__name__ == "SignalException":
            stopped = getattr(error, "sigval", None)
        else:
            stopped = None
        if ended:
            lines, status = failed(ended), 1
        elif stopped is not None:
            lines, status = interrupted(ranks, signal.Signals(stopped)), 128 + stopped
        else:
            raise
        print(*map(printable.lines, lines), sep="\n", file=sys.stderr)
        raise SystemExit(status) from None


# A filter, because the launcher sets levels when it is imported.
def _is_critical(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL


# ---- a rank has failed ---------------------------------------------------------------------------


def failed(ended: Mapping[int, Any]) -> Iterator[str]:
    """Yield what is shown of ranks that failed.

    Args:
        ended: Rank -> the launcher's ``ProcessFailure``, also of ranks that the launcher has ended.
    """
    notes = {rank: note for rank, note in rank_notes.failures().items() if rank in ended}
    first = min(ended, key=lambda rank: _time(ended[rank], notes.get(rank)))
    known = notes.get(first)
    if known is None:
        yield f"torchdevice: rank {first} failed first: {_end(ended[first])}."
    elif not known.traceback:
        yield f"torchdevice: rank {first} failed first, at {known.place}: {known.error}."
    else:
        yield f"torchdevice: rank {first} failed first{_at(known)}:"
        yield known.traceback.rstrip()
    killed = "" if known is not None else f"rank {first} was {_end(ended[first])}"
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
    # After these words of torch, NCCL's errors have a line of source, and the cause at the end.
    error = note.error.rpartition("\nLast error:\n")[2].partition("\n")[0]
    return (
        f"failed{_at(note)}: {error.replace(rank_notes.UNEXPLAINED, killed) if killed else error}"
    )


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


def interrupted(ranks: int, by: signal.Signals) -> Iterator[str]:
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
    for rank in range(ranks):
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
