"""Errors instead of hangs: ranks with different collectives, and ranks in a circle of waits.

Before each collective the ranks of a group compare 4 bytes each, made of what must be alike: the
collective, dtypes, numbers of elements, the operation, the root. Where they differ, the ranks
exchange their calls, and all raise.

A rank that has waited for some seconds leaves a note in the store beside the group: what it waits
for, and how many collectives of each group it has begun, and how many tensors to send to and to
receive from each rank. From the notes of all ranks follows which of them can never go on. A rank
without a note is taken to be computing, however long that takes, so that no program which would go
on is ended.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchdevice.kernel.journal import callers
from torchdevice.kernel.python import rank_notes, uncaught_errors
from torchdevice.kernel.thread_state import state

# Longer than ranks usually wait for each other, short enough for a person.
PATIENCE = datetime.timedelta(seconds=2)
"""The time before a waiting rank leaves a note, and between two readings of the notes."""

_SIZES = re.compile(r"\[[0-9, ]*\]")

_END = "end"
"""The key in the store of the first rank's end, which is written before its connections close."""

_ENDED_AT = "ended at"
"""The key of the time at which the first rank gave up, in seconds since the epoch."""

_GRACE = 0.5
"""The seconds that a rank has to write why it gives up."""

TIMED_OUT = "Operation timed out!"
"""The text of torch's ``Work::wait`` at the end of its own time-out. gloo's has another text."""


class Call(NamedTuple):
    """A collective that the program calls, or the sending or receiving of a tensor.

    Attributes:
        name: Its name.
        tensors: The tensors that are sent, or received where none is sent.
        alike: The values that must be the same on all ranks, beside the name.
        line: The line of the program, where another thread asks for the text.
    """

    name: str
    tensors: Sequence[torch.Tensor]
    alike: tuple[Any, ...]
    line: callers.Site | None = None

    def digest(self) -> torch.Tensor:
        """Return an int64 that is the bitwise "and" over all ranks only if their calls fit."""
        # To reduce one number takes a sixth of the time of gathering bytes, with eight ranks on two
        # cores. Bits and their opposites: a bit that differs is 0 in both for all. Once in four
        # billion calls none differs.
        found = hashlib.blake2b(repr((self.name, self.alike)).encode(), digest_size=4).digest()
        return torch.frombuffer(
            bytearray(found + bytes(255 - each for each in found)), dtype=torch.int64
        )

    def __str__(self) -> str:
        # "float32[2, 3]", short enough for one line per rank.
        given = ", ".join(
            f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in self.tensors
        )
        how = ", ".join(each for each in self.alike if isinstance(each, str))
        what = self.name + (f" of {given}" if given else "") + (f", {how}" if how else "")
        return f"{what}, at {self.line or callers.site_of(callers.program_line())}{_where()}"


def _where() -> str:
    """Return on which host this rank is, where a launcher started ranks on several hosts."""
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        return f" on {socket.gethostname()}"
    return ""


def mismatch(group: str, calls: Sequence[str]) -> dist.DistBackendError:
    """Return the error for a group's ranks, in order, that called different collectives."""
    listed = "".join(
        f"\n  rank {rank} of the group calls {call}" for rank, call in enumerate(calls)
    )
    remedy = "Let every rank call the same collectives in the same order."
    if len({_SIZES.sub("", call) for call in calls}) == 1:
        remedy = (
            "Only the sizes differ. Give tensors with as many elements on every rank, padded to "
            "the largest."
        )
    return dist.DistBackendError(
        f"The ranks of the group {group!r} called collectives that do not fit together, which on "
        "CUDA hangs or gives "
        f"wrong data:{listed}\n{remedy}"
    )


class Awaited(NamedTuple):
    """The calls that other ranks have to begin before a rank goes on.

    Attributes:
        keys: The names of the calls, of which any will do.
        times: How often.
        ranks: The ranks, as numbers in the whole program.
        of_one: Whether it is enough that one of the ranks begins it.
    """

    keys: Sequence[str]
    times: int
    ranks: Sequence[int]
    of_one: bool = False


class Note(NamedTuple):
    """The note of a waiting rank.

    Attributes:
        number: Counts the notes of the rank.
        what: The collective, with shapes and the line of the program.
        awaited: The calls that the rank waits for.
        begun: The number of calls that the rank has begun and others wait for, by key.
        since: When the wait began, in seconds since the epoch.
    """

    number: int
    what: str
    awaited: Awaited
    begun: Mapping[str, int]
    since: float


def stuck(notes: Mapping[int, Note]) -> list[int]:
    """Return ranks that can never go on: each waits for another that waits elsewhere for ever.

    Args:
        notes: The notes of the ranks that wait, by rank. They must have been valid at one moment.
    """
    # Ranks without a note are computing, and count as going on.
    left = set(notes)
    while going := {rank for rank in left if _can_go_on(notes, rank, left)}:
        # Remove ranks whose peers can all progress; the others are deadlocked.
        left -= going
    return sorted(left)


def _can_go_on(notes: Mapping[int, Note], rank: int, left: set[int]) -> bool:
    """Return whether a rank can go on, where those that are left can not."""
    awaited = notes[rank].awaited
    others = [other for other in awaited.ranks if other != rank]
    done = {
        other: sum(notes[other].begun.get(key, 0) for key in awaited.keys)
        for other in others
        if other in left
    }
    if awaited.of_one:
        # One that may still come is enough.
        return len(done) < len(others) or sum(done.values()) >= awaited.times
    return all(times >= awaited.times for times in done.values())


class Waiting:
    """How this rank waits for others, in all groups of the program.

    Args:
        store: A store that all ranks can write to.
        rank: The rank of this process in the whole program.
        size: The number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int):
        # A part of the store of its own, so that keys of gloo are not met.
        self._store = dist.PrefixStore("waiting", store)  # type: ignore[attr-defined]
        self.rank, self._size = rank, size
        self._begun: Counter[str] = Counter()
        self._threads: set[int] = set()
        self._number = 0
        self._noted = False
        self._hooks = next((entry.hooks for entry in state.entries if entry.hooks), None)
        # Multiprocessing's own processes run no handlers of ``atexit``.
        util.Finalize(None, self._end, exitpriority=1)

    def _end(self) -> None:
        """Tell the other ranks that this one ends, and how."""
        with contextlib.suppress(RuntimeError):  # the store has ended with another rank
            if not self._store.check([_END]):
                ended = (
                    uncaught_errors.told_failure()
                    or f"ended{self._hooks.exit_said if self._hooks else ''}"
                )
                self._store.set(_END, f"rank {self.rank}{_where()} {ended}")

    def first_end(self, mine: str) -> str:
        """Return why ranks were disconnected, in a few words: how a rank ended or gave up.

        Args:
            mine: Why this rank has given up; empty where it has only lost its connections.
        """
        ended = mine or rank_notes.UNEXPLAINED
        with contextlib.suppress(RuntimeError):  # the store has ended with a rank
            # A rank that gives up closes its connections before it can write why. `wait` would log
            # that nothing came.
            until = time.monotonic() + _GRACE
            while not mine and not self._store.check([_END]) and time.monotonic() < until:
                time.sleep(_GRACE / 20)
            # For a rank that could not, so that this one, ending too, is not taken for the first.
            if not self._store.check([_END]):
                # Only the first of ranks that give up at the same time.
                self._store.compare_set(_ENDED_AT, "", repr(time.time()))
                self._store.set(_END, ended)
            return self._store.get(_END).decode()
        return ended

    def begin(self, key: str) -> int:
        """Count a call that this rank begins, and return the count."""
        if self._noted:  # the program has caught an error, and goes on
            self._write(None)
        self._begun[key] += 1
        # The threads of a rank are counted, because a note speaks for the whole rank.
        self._threads.add(threading.get_ident())
        return self._begun[key]

    def rename(self, key: str, to: str) -> None:
        """Count one of the things that this rank has begun as another."""
        self._begun[key] -= 1
        self._begun[to] += 1

    def times(self, *keys: str) -> int:
        """Return how often this rank has begun any of some things."""
        return sum(self._begun[key] for key in keys)

    def wait(self, ended: Callable[[], bool], call: Call, awaited: Callable[[], Awaited]) -> None:
        """Wait for other ranks.

        Args:
            ended: Waits as long as this rank is patient, and returns whether what it waits for has
                ended.
            call: The collective that this rank has called.
            awaited: Returns the calls that the other ranks have to begin.

        Raises:
            DistBackendError: This rank can never go on.
        """
        # The usual case leaves no note.
        began = time.time()
        if ended():
            return
        rank_notes.leave_wait(str(call), began)
        # The number makes each note unique: two equal readings prove that nothing happened.
        self._write(Note(self._number + 1, str(call), awaited(), dict(self._begun), began))
        while not ended():
            notes = self._read()
            found = stuck(notes)
            # Read twice, because ranks go on while their notes are read: what was the same both
            # times held in between. Only a rank that is stuck itself raises; the others read the
            # same notes and raise too.
            if self.rank in found and notes == self._read():
                # Wait until others have read this: a rank that ends takes the store with it.
                what = json.dumps({rank: notes[rank] for rank in found})
                self._store.set(f"{self.rank} knows {what}", "")
                # One of them has ended, or is not to be scheduled.
                with contextlib.suppress(dist.DistError):
                    # Long enough for each of them to read the notes again.
                    self._store.wait([f"{rank} knows {what}" for rank in found], 5 * PATIENCE)
                raise _deadlock(notes, found, self._size)
        self._write(None)
        rank_notes.leave_wait(None)

    def waiting_ranks(self) -> str:
        """Return a line for each rank and its wait; nothing if this rank left no note."""
        if not self._noted:
            return ""
        try:
            # One time for all ranks, so that their errors are equal and are shown once.
            ended_at = float(self._store.get(_ENDED_AT))
            return _listed(self._read(), self._size, ended_at)
        except RuntimeError:  # the store has ended with another rank
            return ""

    def _write(self, note: Note | None) -> None:
        self._number, self._noted = self._number + 1, note is not None
        # Another thread of this rank may go on, and let others go on.
        alone = len(self._threads) == 1
        self._store.set(str(self.rank), json.dumps(note if alone else None))

    def _read(self) -> dict[int, Note]:
        found = {}
        for rank in range(self._size):
            # `get` would wait for a key that is not there.
            text = self._store.get(str(rank)) if self._store.check([str(rank)]) else b"null"
            if fields := json.loads(text):
                number, what, awaited, begun, since = fields
                found[rank] = Note(number, what, Awaited(*awaited), begun, since)
        return found


def ended(work: Any) -> bool:
    """Return whether gloo's work for a collective ends while this rank is patient."""
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        # Any other error is gloo's, such as a lost connection.
        if TIMED_OUT not in str(error):
            raise
        return False
    return True


def _deadlock(notes: Mapping[int, Note], found: Sequence[int], size: int) -> dist.DistBackendError:
    return dist.DistBackendError(
        f"The ranks {list(found)} wait for each other and can never go on:{_listed(notes, size)}\n"
        "Let every rank of a group call the same collectives in the same order, and receive what "
        "another sends."
    )


def _listed(notes: Mapping[int, Note], size: int, now: float | None = None) -> str:
    listed = ""
    for rank in range(size):
        waits = "does not wait"
        if rank in notes:
            since, lasting = notes[rank].since, ""
            # The time is that of the first time-out, which a program may have caught before.
            if now is not None and since <= now:
                lasting = f" for {now - since:.0f} s"
            waits = f"waits{lasting} in {notes[rank].what}"
        listed += f"\n  rank {rank} {waits}"
    return listed
