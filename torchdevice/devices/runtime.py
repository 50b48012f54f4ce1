"""The interface of a device that can stand in.

Differences between devices are answered here and nowhere else: the rest of the package asks a :class:`Runtime`.
Ordinals are those of the target: 0 .. ``device_count() - 1``. Sizes are bytes, times are milliseconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from torchdevice.devices.allocations import Block, Observer, OperatorWatcher, held_by_python

MEMORY_FRACTION = "memory fraction"
"""Setting of a context, with an ordinal: the fraction of the device's memory that the process may have."""


class Mark(Protocol):
    """A point in a device's work, as an event records it."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


class HostMark:
    """A point in time on the host, for devices whose work is done when the call returns."""

    def __init__(self) -> None:
        self._time = time.perf_counter_ns()

    def synchronize(self) -> None:
        """Return at once: the work is done."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True

    def elapsed_time(self, end: HostMark) -> float:
        """Return the milliseconds from this mark to ``end``."""
        return (end._time - self._time) / 1e6


class Memory(NamedTuple):
    """Memory figures of one device, in bytes."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stat(NamedTuple):
    """One figure of an allocator: now, at the most, and all that was ever added and taken away."""

    current: int
    peak: int
    allocated: int
    freed: int


class Runtime:
    """What a kind of device can do. The base class describes a device that has finished the work when a call returns.

    Attributes:
        device_type: The device type, as ``torch.device`` has it.
        unsupported_dtypes: Dtypes the device cannot hold.
        pins_memory: Whether torch can allocate page-locked memory for this device.
        blocking_copies_only: Whether ``non_blocking=True`` must be dropped to get whole data.
        shares_host_memory: Whether a tensor of the device is a CPU tensor, so that a move moves nothing.
        takes_device_ids: Whether ``DistributedDataParallel(device_ids=[i])`` is accepted.
        exact_memory: Whether the memory figures are those of the device's own allocator.
        is_torch_accelerator: Whether ``torch.accelerator`` speaks of this device by itself.
        is_asynchronous: Whether calls return before the device has done the work.
        is_integrated: Whether the device computes in the host's memory.
        compiles: Whether torch's compilers make code for the device.
        makes_triton_code: Whether Inductor's code for the device is written in Triton.
        exchanges_data: Whether ``parameter.data = tensor`` moves a parameter by exchanging what two objects of Python
            are, which holders of the parameter in C++ do not notice.
        folds_ordinals: Whether an ordinal beyond the devices means the first one, unless the program is told how many
            there are. On a device that simulates several, such an ordinal is the error that CUDA makes of it.
        generator_type: The type of its generators, where that is a subclass of torch's.
        degraded_notice: What to log, once in a run, when the program first asks for its accelerator: that the device is
            slower. Empty for nothing.
    """

    device_type: str
    unsupported_dtypes: frozenset[torch.dtype] = frozenset()
    pins_memory = False
    blocking_copies_only = False
    shares_host_memory = False
    takes_device_ids = False
    exact_memory = True
    is_torch_accelerator = True
    is_asynchronous = False
    is_integrated = True
    compiles = True
    makes_triton_code = False
    exchanges_data = False
    folds_ordinals = True
    generator_type: type[torch.Generator] = torch.Generator
    degraded_notice = ""

    @property
    def target(self) -> str:
        """The name by which another process asks for this device."""
        return self.device_type

    @property
    def location_tag(self) -> str:
        """The device type by which files name the storages of this device."""
        return self.device_type

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        """Rewriters of torch functions that this device needs beyond the common ones."""
        return {}

    @property
    def collectives(self) -> str:
        """The ``torch.distributed`` backend that stands in for NCCL."""
        return "gloo"

    def enter_thread(self, entry: object) -> None:
        """Prepare this thread for the device: a scope on it is being entered.

        Called once for each entry, and once more with the same one after an interrupt, which must change nothing.
        """

    def leave_thread(self, entry: object) -> None:
        """Undo :meth:`enter_thread` of an entry; also if it was interrupted, or undone before."""

    def is_available(self) -> bool:
        """Return whether this machine and torch build have the device."""
        raise NotImplementedError

    def device_count(self) -> int:
        """Return how many there are."""
        return 1

    def device(self, index: int) -> torch.device:
        """Return the device of that ordinal, as a tensor on it reports it."""
        return device_of(self.device_type, index)

    def name(self, index: int) -> str:
        """Return a name for people."""
        return f"{self.device_type}:{index}"

    def total_memory(self, index: int) -> int:
        """Return the size of the memory the device computes in."""
        return psutil.virtual_memory().total

    def free_memory(self, index: int) -> int:
        """Return how much of it is free."""
        return psutil.virtual_memory().available

    def memory(self, index: int) -> Memory:
        """Return what this process has of it."""
        raise NotImplementedError

    def reset_peak_memory(self, index: int) -> None:
        """Let the peaks start at the present figures."""
        raise NotImplementedError

    def statistics(self, index: int) -> Mapping[str, Any]:
        """Return what the device's allocator keeps besides, under the keys of ``torch.cuda.memory_stats``.

        A value is a number, or a :class:`Stat` for each of ``"all"``, ``"small_pool"`` and ``"large_pool"``.
        """
        return {}

    def reset_accumulated_memory(self, index: int) -> None:
        """Let the sums of those figures start at 0."""

    def blocks(self, index: int) -> list[Block]:
        """Return the memory of the tensors of the device that are alive."""
        return held_by_python(self.device_type, self.device(index).index or 0)

    def watch_allocations(self, observer: Observer) -> Callable[[], None]:
        """Tell an observer of allocations from now on; return what ends that, and may be called again.

        Here this thread's operators are watched.
        """
        return OperatorWatcher(self.device_type, observer).stop

    def processes(self, index: int) -> list[tuple[int, int]]:
        """Return the processes known to use the device, and how many bytes each has of its memory."""
        return [(psutil.Process().pid, self.memory(index).reserved)]

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        """Hold allocations to a fraction of the memory, as the scope's settings name it; None lifts the limit.

        Returns:
            Whether they will be.
        """
        return False

    def empty_cache(self) -> None:
        """Give unused memory back."""

    def synchronize(self, index: int) -> None:
        """Wait for the device's work."""

    def mark(self, index: int, *, timing: bool) -> Mark:
        """Record a point in the device's work."""
        return HostMark()

    def default_generator(self, index: int) -> torch.Generator:
        """Return the generator that the device's random functions draw from."""
        raise NotImplementedError

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        """Return a new generator for the device, of torch's class or of a subclass of it."""
        return torch._C.Generator.__new__(cls, self.device(index))  # type: ignore[call-arg]

    def new_storage(self, original: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """Make a ``torch.UntypedStorage`` on a device of this kind; ``original`` is torch's own way."""
        return original(*args, device=device, **kwargs)

    def multiprocessor_count(self) -> int:
        """Return the number of units that compute in parallel."""
        return torch.get_num_threads()

    def supports_bfloat16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return True

    def autocast_dtype(self, requested: torch.dtype) -> torch.dtype:
        """Return the dtype in which autocast of ``requested`` gives finite results where CUDA does."""
        return requested

    def out_of_memory(self, error: BaseException) -> str | None:
        """Return the size part of an out-of-memory message if ``error`` is one, else None."""
        return None


@functools.cache
def device_of(device_type: str, index: int | None) -> torch.device:
    """Return a device, made once: in a scope, ``torch.device(...)`` is a torch call that a mode would see."""
    with torch._C.DisableTorchFunction():
        return torch.device(device_type) if index is None else torch.device(device_type, index)
