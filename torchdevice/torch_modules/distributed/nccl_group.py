"""An NCCL group's names and refusals, its ranks' agreement on each collective, and its work.

Source of the rules and of the error texts: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import visible_ordinals
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.python.uncaught_errors import add_note
from torchdevice.kernel.stand_ins import tensors
from torchdevice.torch_modules.cuda.constants import NCCL
from torchdevice.torch_modules.distributed import collective_checks, flight_recorder

_OpType = torch._C._distributed_c10d.OpType  # type: ignore[attr-defined]
_register_backend = torch._C._distributed_c10d.ProcessGroup._register_backend

_CPU = torch.device("cpu")

_UNKNOWN_TO_NCCL = {
    torch.int16: "Short",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
}
"""dtype -> how the error calls it. Of complex tensors torch gives the real view."""


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is contiguous in the format that its strides suggest."""
    suggested = torch._prims_common.suggest_memory_format(tensor)
    return tensor.is_contiguous(memory_format=suggested)


class Gloo(dist.ProcessGroupGloo):
    """The gloo backend of a group, with NCCL's interface for programs."""

    counts: Counter[str]
    nccl_options: Any = None
    """The settings of NCCL, where the group stands in for NCCL's."""

    @property
    def options(self) -> Any:
        """The settings of the backend that the program asked for."""
        of_gloo = super().options
        if self.nccl_options is None:
            return of_gloo
        self.nccl_options._timeout = of_gloo._timeout
        return self.nccl_options

    def comm_split_count(self) -> int:
        """Return how many groups torch split from this communicator, if it knows the device."""
        return self.counts["split"]

    def _is_initialized(self) -> bool:
        """Return whether NCCL would have connected ranks, as it does at the first collective."""
        return any(self.counts.values())


class NcclGroup(dist.ProcessGroup):
    """A process group of NCCL without its collectives.

    Args:
        gloo: The gloo backend of the group.
        runtime: The runtime of the target.
        kind: ``"nccl"``, ``"gloo"`` or ``"nccl and gloo"``. CPU tensors are taken where it names
            gloo.
        store: The store of the ranks' rendezvous.
        waiting: How this process waits for other ranks.
    """

    def __init__(
        self, gloo: Any, runtime: Runtime, kind: str, store: Any, waiting: collective_checks.Waiting
    ):
        # The stub lacks the constructor.
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self.gloo = gloo
        self.runtime = runtime
        self.waiting = waiting
        self._store = store
        self.checks_nan = is_set("TORCH_NCCL_NAN_CHECK")
        """Whether NaN is refused in sent tensors."""
        self._ended: str | None = None  # why no collective can begin any more
        self.timeout = gloo.options._timeout
        self.counts = gloo.counts = Counter()
        """How many collectives, and tensors to one rank or from one, this rank has begun, and the
        group's divisions.
        """
        self.ongoing: Any = None
        """The last collective that goes on in another thread, see ``collective_staging.py``."""
        self.batch: list[Any] | None = None
        """The works of the batch that has begun, see :meth:`_start_coalescing`."""
        self.recorder = flight_recorder.of_thread()
        self.pipe: flight_recorder.Pipe | None = None
        self.hooks: list[Callable[[Any], Any]] = []
        self._has_gloo, self.is_gloo = "gloo" in kind, kind == "gloo"
        self._takes_cpu = self._has_gloo or runtime.shares_host_memory
        context = thread_state.state.context
        self._lacks: str | None = None
        if self.is_gloo and context is not None and context.program == "mps":
            # To torch gloo has the CPU and CUDA: the program moves its tensors to the CPU before.
            self._lacks = "mps"
        self.in_cpp = dist.ProcessGroup(store, self.rank(), self.size())
        """torch's own group, whose methods call the operators."""
        for group in (self, self.in_cpp):
            # For C++ that asks for a backend, and operators that are called again by themselves.
            _register_backend(group, _CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        # Nothing to find with one rank, or where ranks may share a device, as gloo's may.
        self._knows_devices = (
            self.size() == 1 or runtime.supplied.shared_by_processes or self.is_gloo
        )

    def know_devices(self, index: int) -> None:
        """Refuse, as NCCL does when it connects the ranks, that two of them are on one device."""
        if not self._knows_devices:
            check_devices(self.rank(), index, self._gathered)
            self._knows_devices = True

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        of_all = [torch.empty_like(mine) for _ in range(self.size())]
        # By gloo directly: the group's own collectives would ask for this check again.
        self.gloo.allgather([of_all], [mine]).wait()
        return torch.cat(of_all)

    def checked_alias(
        self, tensor: torch.Tensor, *, between_two: bool = False
    ) -> torch.Tensor | None:
        """Return the CPU tensor with a tensor's memory, if there is one, after NCCL's checks.

        Raises:
            RuntimeError: The tensor is on a device that the group does not serve.
            TypeError: NCCL does not have the tensor's dtype.
            ValueError: The tensor is sparse, or not contiguous in a memory format. Between two
                ranks the latter is allowed, unless the tensor has gaps in memory, or shares memory
                with itself.
        """
        if tensor.layout is not torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        alias = self.runtime.supplied.host_alias(tensor)
        # `host_alias` returns a CPU tensor itself.
        on_cpu = alias is tensor
        # Of its own tensors alone the target shows other memory.
        if alias is None or on_cpu or self._lacks:
            self._check_device(tensor, on_cpu)
        if tensor.dtype in _UNKNOWN_TO_NCCL:
            self._check_dtype(tensor.dtype, on_cpu)
        if between_two and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError("Tensors for P2P must be non-overlapping and dense")
        if not (between_two or tensor.is_contiguous() or _is_channels_last(tensor)):
            raise ValueError("Tensors must be contiguous")
        return alias

    def _check_device(self, tensor: torch.Tensor, on_cpu: bool) -> None:
        """Refuse a tensor of a device that the group does not serve."""
        if on_cpu:
            served = self._takes_cpu or self.runtime.supplied.runs_on_host()
        else:
            served = tensor.device.type == self.runtime.device_type
        if not served:
            kind = tensor.device.type
            raise RuntimeError(f"No backend type associated with device type {kind}")
        if self._lacks and not on_cpu:
            raise RuntimeError(f"No backend type associated with device type {self._lacks}")

    def _check_dtype(self, dtype: torch.dtype, on_cpu: bool) -> None:
        """Refuse a dtype that NCCL does not have, but for tensors that gloo takes."""
        if not (self.is_gloo or (self._has_gloo and on_cpu)):
            raise TypeError(
                "Input tensor data type is not supported for NCCL process group: "
                f"{_UNKNOWN_TO_NCCL[dtype]}"
            )

    # ---- what torch asks of a group --------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name for torch's C++. For a gloo name, it would demand gloo's class."""
        return "nccl"

    def name(self) -> str:
        """Return the name of the backend that the program asked for."""
        return "gloo" if self.is_gloo else "nccl"

    def shutdown(self) -> None:
        """End the group, as ``destroy_process_group`` does."""
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None
        super().shutdown()
        self.abort()

    def abort(self, reason: str = "") -> None:
        """Let no collective begin any more.

        Args:
            reason: The error after which the ranks are no longer connected.
        """
        if not self._ended:
            self._ended = f" Original reason for failure was: {reason}" if reason else ""

    def get_group_store(self) -> Any:
        """Return the store of the ranks' rendezvous."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of tensors the group takes. Object collectives use the CPU or the first."""
        context = thread_state.state.context
        # As torch's own code spells it, which looks for it in this list; the scope rewrites both.
        types = [self.runtime.device_type if context is None else context.program]
        if self._takes_cpu and not self.runtime.shares_host_memory:
            # The CPU first: object collectives then stay on the host.
            types.insert(0, "cpu")
        return [torch.device(each) for each in types]

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Refuse this for NCCL alone, where torch takes the CPU target's device for gloo's.

        Raises:
            ValueError: The group has no gloo. The text is torch's, from 2.14 on.
        """
        if not self._has_gloo:
            raise ValueError(
                "monitored_barrier requires a group with a CPU-capable backend (e.g. GLOO)."
            )
        limit = self.timeout if timeout is None else timeout
        super().monitored_barrier(limit, wait_all_ranks)  # type: ignore[misc]

    def _set_sequence_number_for_group(self) -> None:
        """Begin to count. torch calls it for each group that it makes."""
        self.counts["collective"] = 0

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has begun."""
        return self.counts["collective"]

    @property
    def is_timed(self) -> bool:
        """Whether the flight recorder shows times."""
        return bool(self.counts["timed"])

    def _enable_collectives_timing(self) -> None:
        """Show times in the flight recorder."""
        self.counts["timed"] = 1

    def _wait_for_pending_works(self) -> None:
        """Wait for the collectives that go on."""
        if self.ongoing is not None:
            self.ongoing.settle()

    def _register_on_completion_hook(self, hook: Callable[[Any], Any]) -> None:
        """Call a hook after each collective, in the thread that has called the collective."""
        self.hooks.append(hook)

    def completed(self, name: str, began: datetime.datetime) -> None:
        """Tell hooks that a collective finished, as ``WorkInfo`` does, not made by Python."""
        ended = datetime.datetime.now()
        times = {"time_started": began, "time_finished": ended, "active_duration": ended - began}
        for hook in self.hooks:
            # Some of torch's names have no underscore, such as ALLREDUCE.
            without = name.replace("_", "")
            kind = getattr(_OpType, name.upper(), None) or getattr(_OpType, without.upper())
            hook(types.SimpleNamespace(op_type=kind, seq=self.counts["collective"], **times))

    def _start_coalescing(self, device: torch.device | None) -> None:
        """Begin a batch. NCCL starts it together; here each collective begins when called."""
        self.batch = []

    def _end_coalescing(self, device: torch.device | None) -> Any:
        works, self.batch = self.batch, None
        if not works:  # torch makes no work then
            return None
        return flight_recorder.shown(
            self, "nccl:coalesced", [[]], self.timeout, lambda: Work(None, works)
        )

    # ---- how ranks agree -------------------------------------------------------------------------

    def begin(self) -> int:
        """Count a collective that this rank begins, and return how many there were.

        Raises:
            DistBackendError: The group was destroyed, or has lost a rank.
        """
        if self._ended is not None:
            raise dist.DistBackendError(
                f"NCCL communicator was aborted on rank {self.rank()}.{self._ended}"
            )
        return self.waiting.begin(self.group_name) if self.size() > 1 else 0

    def wait_for(self, ended: Callable[[], bool], call: collective_checks.Call, times: int) -> None:
        """Wait for the other ranks to begin as many collectives as this one has.

        Args:
            ended: Waits as long as this rank is patient, and returns whether the collective has
                ended.
            call: What this rank calls.
            times: How many it has begun.

        Raises:
            DistBackendError: They will never come.
        """
        self.waiting.wait(
            ended, call, lambda: collective_checks.Awaited([self.group_name], times, self.ranks())
        )

    def agree(
        self,
        call: collective_checks.Call,
        timeout: datetime.timedelta,
        wait: Callable[[Any], object],
    ) -> None:
        """Wait until all ranks are in a collective.

        Args:
            call: What this rank calls.
            timeout: How long to wait; below 0 for the group's time-out.
            wait: Waits for gloo's work.

        Raises:
            DistBackendError: They are in different ones, or will never come.
        """
        mine, options = call.digest(), dist.distributed_c10d.AllreduceOptions()
        of_all = mine.clone()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.BAND)
        options.timeout = timeout
        wait(self.gloo.allreduce([of_all], options))
        # Each rank compares by itself, and all come to the same result.
        if of_all != mine:
            raise collective_checks.mismatch(
                self.group_desc or self.group_name, self._gathered_texts(str(call))
            )

    def ranks(self) -> list[int]:
        """Return the ranks of the group, as numbers in the whole program."""
        # A group that the program made itself, by its class, is none of torch's.
        return list(dist.distributed_c10d._world.pg_group_ranks.get(self, range(self.size())))

    def _gathered_texts(self, said: str) -> list[str]:
        """Return the texts of all ranks."""
        mine = torch.frombuffer(bytearray(said.encode()), dtype=torch.uint8)
        # Sizes first, since gloo gathers tensors of one size only.
        sizes = self._gathered(torch.tensor([mine.numel()], device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        rows = self._gathered(padded).view(self.size(), -1)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    @block
    def naming(self, collective: str) -> Iterator[None]:
        """Name the collective and the rank in errors of gloo, see :meth:`raise_named`."""
        try:
            yield
        except RuntimeError as error:
            self.raise_named(collective, error)
            raise

    def raise_named(self, collective: str, error: RuntimeError) -> None:
        """Raise gloo's error about a lost rank with the names of the collective and the rank.

        Raises:
            DistBackendError: A rank has ended, or has not come within the time-out of the group.
        """
        # Only errors of connections, which name a file of that folder, mean a lost rank. Others are
        # torch's own.
        is_lost = "gloo/transport/" in str(error)
        if is_lost or isinstance(error, dist.DistBackendError):
            self.recorder.write(self.waiting.rank)
        if not is_lost:
            return
        where = f"{collective} of the group {self.group_desc!r} of {self.size()} ranks"
        # gloo tells a rank that ended from one that is late by no type.
        late = re.search(_LATE, str(error))
        reason = self.waiting.first_end(late[0] if late else "")
        if re.fullmatch(_LATE, reason):
            others = self.waiting.waiting_ranks() or " another rank has not come."
            raise dist.DistBackendError(f"{where} cannot end. {reason}:{others}") from None
        raise dist.DistBackendError(
            f"{where} cannot end: {reason.rstrip('.')}. The other ranks wait for it."
        ) from None


_LATE = "Timed out waiting [0-9]+ms"
"""gloo's error at the end of the time-out. The other ranks only lose their connections then."""


def is_set(variable: str) -> bool:
    """Return whether a variable of NCCL's groups is true.

    Raises:
        DistBackendError: It is neither true nor false. The text is torch's
            (torch/csrc/distributed/c10d/Utils.hpp).
    """
    value = os.environ.get(variable, "0").lower()
    if value not in _TRUE + _FALSE:
        raise dist.DistBackendError(f"Invalid value for environment variable: {variable}")
    return value in _TRUE


_TRUE, _FALSE = ("y", "yes", "1", "t", "true"), ("n", "no", "0", "f", "false")


def check_for_nan(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse to send NaN.

    Raises:
        RuntimeError: There is one.
    """
    if any(each.is_floating_point() and each.isnan().any() for each in tensors):
        raise RuntimeError("NaN found in input tensor.")


# ---- ranks on one GPU ----------------------------------------------------------------------------

_BITS_OF_ORDINAL = 16


_DUPLICATE_GPU = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with "
    "NCCL_DEBUG=WARN for details), NCCL version {version}\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device {bus:x}"
)

_ONE_DEVICE_EACH = (
    "Ranks {} and {} both use cuda:{index}; NCCL shows the number of its bus. Give each rank a "
    "device of its own: "
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first collective.'
)


def check_devices(rank: int, index: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse a group of which two ranks are on one device, at its first collective, as NCCL does.

    Source of the text: ``C10D_NCCL_CHECK`` (torch/csrc/distributed/c10d/NCCLUtils.hpp) and NCCL
    (src/init.cc).

    Args:
        rank: The rank of this process.
        index: The ordinal of the device of this rank's tensors.
        gather: Returns the values of all ranks, of shape (ranks,), for the value of this rank, of
            shape (1,).

    Raises:
        torch.distributed.DistBackendError: Another rank is on the device of this one. The text is
            NCCL's.
    """
    mine = _identity(index)
    devices = gather(torch.tensor([mine], dtype=torch.int64, device="cpu")).tolist()
    for other, device in enumerate(devices):
        if other != rank and device == mine:
            raise _duplicate_gpu(rank, other, index)


def _duplicate_gpu(rank: int, other: int, index: int) -> dist.DistBackendError:
    """Return NCCL's error of two ranks that have the device of an ordinal."""
    # NCCL shows a bus id, whose last 12 bits are the device and function on the bus. Buses count
    # from 1 here.
    bus = (_identity(index) % (1 << _BITS_OF_ORDINAL) + 1) << 12
    error = dist.DistBackendError(
        _DUPLICATE_GPU.format(version=NCCL, rank=rank, other=other, bus=bus)
    )
    add_note(error, _ONE_DEVICE_EACH.format(*sorted((rank, other)), index=index))
    return error


def _identity(index: int) -> int:
    """Return a device's number, alike in all processes, and distinct per node of a launcher."""
    # As NCCL does: the variable comes first, then the name of the machine.
    host = (
        os.environ.get("NCCL_HOSTID")
        or f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    )
    visible = visible_ordinals() or []
    return zlib.crc32(host.encode()) << _BITS_OF_ORDINAL | (
        visible[index] if index < len(visible) else index
    )


# ---- work ----------------------------------------------------------------------------------------


def finished(result: Any, watching: Sequence[Any]) -> Any:
    """Return finished work with that result, whose ``wait`` observers are told of."""
    # Torch's own class where there are none: it costs no calls of Python.
    if watching:
        return Work(result)  # type: ignore[attr-defined]
    future: Any = torch._C.Future([])
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def done(result: Any) -> torch.futures.Future[Any]:
    """Return a future that has that result."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


class Work(dist.distributed_c10d.Work):
    """Work with a result, after parts that may go on. Waiting orders the program's streams.

    Args:
        result: The tensors.
        parts: The work that has to be done before.
    """

    def __init__(self, result: Any, parts: Sequence[Any] = ()):
        super().__init__()
        self._result, self._parts = result, parts

    def wait(self, timeout: Any = None) -> bool:
        """Wait, and let the current stream of each device wait for the collectives so far.

        Raises:
            RuntimeError: The collective has failed, or has not ended within the time-out.
        """
        for part in self._parts:
            part.wait(*([timeout] if timeout else ()))
        collectives_waited()
        if torch._C._distributed_c10d._get_work_registry_size():
            # So that torch, where it keeps the work for these tensors, drops it.
            for each in tensors(self._result):
                torch.ops._c10d_functional.wait_tensor(each)
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has ended, also by an error."""
        return all(part.is_completed() for part in self._parts)

    def result(self) -> Any:
        """Return the tensors, which are complete after :meth:`wait`."""
        return self._result

    def get_future(self) -> Any:
        """Wait, and return the result's future. torch's C++ waits for it, not in :meth:`wait`."""
        self.wait()
        return done(self._result)


def observers() -> Sequence[Any]:
    """Return the observers of the collectives of this thread's scope."""
    context = thread_state.state.context
    return () if context is None else context.observers.collectives


def collectives_waited() -> None:
    """Tell that the program has waited for the collectives so far."""
    for observer in observers():
        observer.collectives_waited()
