"""NCCL's flight recorder, the last collectives of this process, and their names in profiles.

Source of the names and of the format: ``ProcessGroupNCCL.cpp`` and ``FlightRecorder.hpp`` of
``torch/csrc/distributed/c10d``. Torch's analyser (``torchfrtrace``) reads the format. Times are the
host's.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import itertools
import json
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._traceback import CapturedTraceback

from torchdevice.kernel import stand_ins, thread_state
from torchdevice.torch_modules.cuda.constants import NCCL

_VERSION = "2.10"

_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""The variables for the number of recorded collectives, 0 by default: torch's names now and before.
"""

_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The variables with the file, less the rank, to which a rank that cannot go on writes its record.
"""

_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "_all_gather_base",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "all_reduce_barrier",
    "recv_anysource": "recvAnySource",
}
"""Method of a group -> the name in NCCL's events, where that is another one."""

_between_two = frozenset(("send", "recv", "recv_anysource"))


def recorded(
    group: Any, name: str, tensors: Sequence[Any], opts: Any, collective: Callable[[], Any]
) -> Any:
    """Run a collective, a send or a receive, shown to recorder and profiler; return its work.

    Args:
        group: The group.
        name: The name of its method.
        tensors: The tensors, or lists of them, that are written, and those that are sent where
            these are others.
        opts: The other arguments of its operator.
        collective: Does it.
    """
    if not group.batch:  # the operators of a batch have one number
        group.counts["p2p" if name in _between_two else "collective"] += 1
    group.counts["operator"] += 1
    ends = {
        "send": lambda: f" {group.rank()}->{opts.dst}",
        "recv": lambda: f" {group.rank()}<-{opts.src}",
    }
    work = shown(
        group,
        f"nccl:{_NAMES.get(name, name)}{ends.get(name, str)()}",
        tensors,
        opts.timeout,
        collective,
    )
    if group.batch is not None:
        group.batch.append(work)
    return work


def shown(
    group: Any,
    title: str,
    tensors: Sequence[Any],
    timeout: datetime.timedelta,
    collective: Callable[[], Any],
) -> Any:
    """Run it as :func:`recorded` does, under the collective's name at NCCL, without counting."""
    recorder, profiled = group.recorder, torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    # The usual case: nobody asks for the collective's name.
    if group.is_gloo or not (recorder.size or profiled):
        return collective()
    record = recorder.begin(group, title, tensors, timeout)
    with torch.profiler.record_function(title) if profiled else contextlib.nullcontext():
        work = collective()
    if record is not None and not record.is_part:
        record.awaits(work)
    return work


class _Record:
    """A collective that was recorded.

    Args:
        group: Its group.
        fields: Its entry in the format.

    Attributes:
        fields: The same.
        is_part: Whether it is one of a batch, whose end alone is noted.
    """

    def __init__(self, group: Any, fields: dict[str, Any]):
        self.fields, self.is_part = fields, group.batch is not None
        self.group_name, self._is_timed = group.group_name, group.is_timed
        # Not the calls from a method of the group to here.
        self.trace = CapturedTraceback.extract(skip=6)
        self._awaited: list[weakref.ref[Any]] | None = None

    def awaits(self, work: Any) -> None:
        """Take the collective for ended once its work has."""
        # Weak, since a work holds tensors.
        self._awaited = [weakref.ref(each) for each in _unfinished(work)]
        if not self._awaited:
            self.has_ended()

    def has_ended(self) -> bool:
        """Return whether the collective has ended."""
        fields = self.fields
        if not fields["retired"] and self._awaited is not None:
            works = [each() for each in self._awaited]
            if all(work is None or work.is_completed() for work in works):
                now = time.time_ns()
                fields |= {
                    "state": "completed",
                    "retired": True,
                    "time_discovered_completed_ns": now,
                }
                if self._is_timed:
                    fields["duration_ms"] = (now - fields["time_created_ns"]) / 1e6
        return bool(fields["retired"])


def _unfinished(work: Any) -> list[Any]:
    """Return the works in Python that a work consists of; torch's own are finished ones here."""
    if type(work) is torch._C._distributed_c10d.Work:
        return []
    parts = getattr(work, "_parts", None)
    return [work] if parts is None else [each for part in parts for each in _unfinished(part)]


class FlightRecorder:
    """The last collectives of a scope.

    Args:
        size: How many are kept.

    Attributes:
        size: The same.
    """

    def __init__(self, size: int):
        self.size, self._numbers = size, itertools.count()
        self._records: collections.deque[_Record] = collections.deque(maxlen=size)
        self._groups: dict[str, dict[str, str]] = {}
        self._counts: dict[str, collections.Counter[str]] = {}

    def begin(
        self, group: Any, title: str, tensors: Sequence[Any], timeout: datetime.timedelta
    ) -> _Record | None:
        """Record that this rank begins a collective, see :func:`shown`."""
        if not self.size:
            return None
        counts = group.counts
        group_name = group.group_name
        desc = group.group_desc
        self._groups[group_name] = {
            "name": group_name,
            "desc": desc,
            "ranks": json.dumps(group.ranks()),
        }
        self._counts[group_name] = counts
        now, thread = time.time_ns(), threading.current_thread()
        is_timed = group.is_timed and group.batch is None
        patience = timeout if timeout.days >= 0 else group.timeout
        fields = {
            "record_id": next(self._numbers),
            "pg_id": list(self._groups).index(group_name),
            "process_group": (group_name, desc),
            "collective_seq_id": counts["collective"],
            "p2p_seq_id": counts["p2p"],
            "op_id": counts["operator"],
            "profiling_name": title,
            "time_created_ns": now,
            "time_discovered_started_ns": now if is_timed else None,
            "time_discovered_completed_ns": None,
            "state": "started" if is_timed else "scheduled",
            "retired": False,
            "is_p2p": title.startswith(("nccl:send", "nccl:recv")),
            "timeout_ms": round(1e3 * patience.total_seconds()),
            "thread_id": str(thread.ident),
            "thread_name": thread.name,
        }
        for way, value in (("output", tensors[0]), ("input", tensors[-1])):
            given = list(stand_ins.tensors(value))
            fields[f"{way}_sizes"] = [list(each.shape) for each in given]
            fields[f"{way}_dtypes"] = [
                each.type().rpartition(".")[2].removesuffix("Tensor") for each in given
            ]
        self._records.append(_Record(group, fields))
        return self._records[-1]

    def dump(
        self,
        includeCollectives: bool = True,
        includeStackTraces: bool = True,
        onlyActive: bool = False,
    ) -> dict[str, Any]:
        """Return the record. The arguments are those of torch's ``_dump_nccl_trace``."""
        active = [each for each in list(self._records) if not each.has_ended()]
        found: dict[str, Any] = {
            "version": _VERSION,
            "comm_lib_version": NCCL,
            "pg_config": self._groups,
        }
        found["pg_status"] = {
            str(place): self._status(name, active) for place, name in enumerate(self._groups)
        }
        if includeCollectives:
            shown = active if onlyActive else list(self._records)
            found["entries"] = [each.fields | _frames(each, includeStackTraces) for each in shown]
        return found

    def _status(self, name: str, active: Sequence[_Record]) -> dict[str, int]:
        begun = self._counts[name]["collective"]
        numbers = [
            each.fields["collective_seq_id"]
            for each in active
            if each.group_name == name and not each.is_part
        ]
        completed = min(filter(None, numbers), default=begun + 1) - 1
        started = begun if self._counts[name]["timed"] else -1
        names = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
        return dict(zip(names, (begun, started, completed), strict=True))

    def write(self, rank: int) -> None:
        """Write the record to the file of a rank."""
        if self.size:
            default = Path(torch.hub._get_torch_home(), "comm_lib_trace_rank_")
            path = Path(f"{_variable(_FILE, str(default))}{rank}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(self.dump()))


class Pipe:
    """A rank's named pipe. A process writes to it to make the rank write its records to a file.

    Args:
        recorder: The recorder.
        rank: The rank, as a number in the whole program.
    """

    def __init__(self, recorder: FlightRecorder, rank: int):
        self._path, self._write = Path(f"{os.environ[PIPE]}{rank}.pipe"), recorder.write
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)
        # For writing too, so that the pipe has no end where a process has written and closed it.
        self._number = os.open(self._path, os.O_RDWR)
        with thread_state.suspended():  # a thread keeps the scope that it is started in
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def _serve(self, rank: int) -> None:
        while _END not in os.read(self._number, 4096):
            self._write(rank)
        os.close(self._number)

    def close(self) -> None:
        """Remove the pipe."""
        os.write(self._number, _END)
        self._path.unlink(missing_ok=True)


_END = b"\0"

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
"""The variable of torch's that names the pipes, less the rank and an ending."""


def _frames(record: _Record, wanted: bool) -> dict[str, Any]:
    frames = [
        {"name": each.name, "filename": each.filename, "line": each.lineno}
        for each in record.trace.summary()
    ]
    return {"frames": frames[::-1]} if wanted else {}


def _variable(names: Sequence[str], default: str) -> str:
    return next((os.environ[name] for name in names if name in os.environ), default)


def of_thread() -> FlightRecorder:
    """Return the recorder of this thread's scope."""
    context = thread_state.state.context
    settings = {} if context is None else context.settings
    found = settings.get(FlightRecorder)
    # `setdefault` decides between threads.
    return found or settings.setdefault(FlightRecorder, FlightRecorder(int(_variable(_SIZE, "0"))))


def dump_pickle(*args: Any, **kwargs: Any) -> bytes:
    """``torch._C._distributed_c10d._dump_nccl_trace``: what was recorded, pickled."""
    return pickle.dumps(of_thread().dump(*args, **kwargs))


def dump_json(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
    """``torch._C._distributed_c10d._dump_nccl_trace_json``: the records as JSON without frames."""
    found = of_thread().dump(includeCollectives, False, onlyActive)
    for entry in found.get("entries", ()):
        entry |= {key: 0 for key, value in entry.items() if value is None}
    return json.dumps(found).encode()
