"""What each kind of device can do: one class per backend behind one interface.

Differences between devices live here and nowhere else; the rest of the package asks a :class:`Runtime`.
Ordinals are those of the target: 0 .. ``device_count() - 1``. Sizes are bytes, times are milliseconds.
"""

from __future__ import annotations

import functools
import platform
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from torchdevice import _history
from torchdevice.errors import NotSupportedError

MEMORY_FRACTION = "memory fraction"
"""Setting of a scope, with an ordinal: the fraction of the device's memory that the process may have."""


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
    """A kind of device. The base class describes one that computes where it is called and needs no waiting.

    Attributes:
        kind: The device type, as ``torch.device`` has it.
        unsupported_dtypes: Dtypes the device cannot hold.
        pins_memory: Whether torch can allocate page-locked memory for this device.
        blocking_copies_only: Whether ``non_blocking=True`` must be dropped to get whole data.
        shares_host_memory: Whether a tensor of the device is a CPU tensor, so that a move moves nothing.
        takes_device_ids: Whether ``DistributedDataParallel(device_ids=[i])`` is accepted.
        exact_memory: Whether the memory figures are those of the device's own allocator.
        is_torch_accelerator: Whether ``torch.accelerator`` speaks of this device by itself.
        is_asynchronous: Whether calls return before the device has done the work.
        compiles: Whether torch's compilers make code for the device.
        exchanges_data: Whether ``parameter.data = tensor`` moves a parameter by exchanging what two objects of Python
            are, which holders of the parameter in C++ do not notice.
        folds_ordinals: Whether an ordinal beyond the devices means the first one, unless the program is told how many
            there are. On a device that simulates several, it is the error that CUDA makes of it.
        generator_type: The type of its generators, where that is a subclass of torch's.
    """

    kind: str
    unsupported_dtypes: frozenset[torch.dtype] = frozenset()
    pins_memory = False
    blocking_copies_only = False
    shares_host_memory = False
    takes_device_ids = False
    exact_memory = True
    is_torch_accelerator = True
    is_asynchronous = False
    compiles = True
    exchanges_data = False
    folds_ordinals = True
    generator_type: type[torch.Generator] = torch.Generator

    @property
    def target(self) -> str:
        """The name by which another process asks for this device."""
        return self.kind

    @property
    def family(self) -> str:
        """The device family under which files name this device's tensors."""
        return self.kind

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        """Rewriters of torch functions that this device needs beyond the common ones."""
        return {}

    @property
    def collectives(self) -> str:
        """The ``torch.distributed`` backend that stands in for NCCL."""
        return "gloo"

    def begin(self) -> None:
        """Prepare this thread for the device: a scope on it is being entered."""

    def end(self) -> None:
        """Undo :meth:`begin`."""

    def is_available(self) -> bool:
        """Return whether this machine and torch build have the device."""
        raise NotImplementedError

    def device_count(self) -> int:
        """Return how many there are."""
        return 1

    def device(self, index: int) -> torch.device:
        """Return the device of that ordinal, as a tensor on it reports it."""
        return _device(self.kind, index)

    def name(self, index: int) -> str:
        """Return a name for people."""
        return f"{self.kind}:{index}"

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

    def blocks(self, index: int) -> list[_history.Block]:
        """Return the memory of the tensors of the device that are alive."""
        return _history.held_by_python(self.kind, self.device(index).index or 0)

    def watch_allocations(self, observer: _history.Observer) -> Callable[[], None]:
        """Tell an observer of allocations from now on; return what ends that, and may be called again.

        Here this thread's operators are watched.
        """
        return _history.OperatorWatcher(self.kind, observer).stop

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


class CpuRuntime(Runtime):
    """The CPU standing in for an accelerator.

    Memory figures are those of the process heap since the first use: what malloc has handed out (psutil reads the
    C library's own statistics). The peak is the largest figure seen when asked, or the growth of the resident set's
    high-water mark where the system reports one. Both include what the program allocates outside torch.
    """

    kind = "cpu"
    shares_host_memory = True
    exact_memory = False
    is_torch_accelerator = False

    def __init__(self) -> None:
        self._heap_base = _heap_in_use()
        self._resident_base = psutil.Process().memory_info().rss
        self._peak_allocated = self._peak_reserved = 0
        self._high_water_base: tuple[int, int] | None = None
        self.reset_peak_memory(0)

    def is_available(self) -> bool:
        return True

    def device(self, index: int) -> torch.device:
        return _device("cpu", None)

    def name(self, index: int) -> str:
        return f"{_processor_name()} (CPU standing in)"

    def memory(self, index: int) -> Memory:
        allocated = max(0, _heap_in_use() - self._heap_base)
        reserved = max(allocated, psutil.Process().memory_info().rss - self._resident_base)
        peak = allocated
        if self._high_water_base is not None:
            high_water, allocated_then = self._high_water_base
            peak = max(peak, allocated_then + (_high_water_mark() or 0) - high_water)
        self._peak_allocated = max(self._peak_allocated, peak)
        self._peak_reserved = max(self._peak_reserved, reserved, self._peak_allocated)
        return Memory(allocated, reserved, self._peak_allocated, self._peak_reserved)

    def reset_peak_memory(self, index: int) -> None:
        self._peak_allocated = self._peak_reserved = 0
        self._high_water_base = None
        allocated = self.memory(0).allocated
        if _reset_high_water_mark() and (mark := _high_water_mark()) is not None:
            self._high_water_base = (mark, allocated)

    def empty_cache(self) -> None:
        if hasattr(psutil, "heap_trim"):
            psutil.heap_trim()

    def processes(self, index: int) -> list[tuple[int, int]]:
        own = psutil.Process()
        return [(each.pid, _resident(each)) for each in (own, *own.children(recursive=True)) if each.is_running()]

    def default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def autocast_dtype(self, requested: torch.dtype) -> torch.dtype:
        # In float16, CPU autocast leaves exp, softmax, layer_norm, sum and others in half where CUDA computes them in
        # float32: a public toy task gives NaN at its first step. bfloat16 has float32's range.
        return torch.bfloat16 if requested is torch.float16 else requested

    def out_of_memory(self, error: BaseException) -> str | None:
        found = re.search(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?allocate (\d+) bytes", str(error), re.S
        )
        return f"Tried to allocate {_mebibytes(int(found[1]))}. " if found else None


class MpsRuntime(Runtime):
    """Apple's GPU through ``torch.mps``.

    Sources: torch/mps/__init__.py and torch/mps/event.py. There is no peak statistic in ``torch.mps``; the peak is the
    largest figure seen when asked.
    """

    kind = "mps"
    unsupported_dtypes = frozenset({torch.float64, torch.complex128})
    # pytorch issues 139550 and 189690: an asynchronous copy can return partly copied data.
    blocking_copies_only = True
    exact_memory = False
    is_asynchronous = True

    def __init__(self) -> None:
        self._peak_allocated = self._peak_reserved = 0

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def name(self, index: int) -> str:
        return f"{_processor_name()} (MPS)"

    def total_memory(self, index: int) -> int:
        return torch.mps.recommended_max_memory()

    def free_memory(self, index: int) -> int:
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())

    def memory(self, index: int) -> Memory:
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        self._peak_allocated = max(self._peak_allocated, allocated)
        self._peak_reserved = max(self._peak_reserved, reserved)
        return Memory(allocated, reserved, self._peak_allocated, self._peak_reserved)

    def reset_peak_memory(self, index: int) -> None:
        self._peak_allocated = self._peak_reserved = 0
        self.memory(index)

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        torch.mps.set_per_process_memory_fraction(0.0 if fraction is None else fraction)
        return True

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()

    def mark(self, index: int, *, timing: bool) -> Mark:
        event = torch.mps.event.Event(enable_timing=timing)
        event.record()
        return event

    def default_generator(self, index: int) -> torch.Generator:
        return torch.mps._get_default_mps_generator()

    def supports_bfloat16(self) -> bool:
        # Metal has bfloat16 since macOS 14 (torch raises "BFloat16 is not supported on MPS" before that).
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def autocast_dtype(self, requested: torch.dtype) -> torch.dtype:
        return torch.float16 if requested is torch.bfloat16 and not self.supports_bfloat16() else requested

    def out_of_memory(self, error: BaseException) -> str | None:
        text = str(error)
        return text if text.startswith("MPS backend out of memory") else None


class ModuleRuntime(Runtime):
    """A device with a module of its own that follows torch's device-module convention: CUDA, XPU, any PrivateUse1.

    The convention is that of ``torch.cuda`` and ``torch.xpu``; a backend that leaves a function out gets a clear error
    when a program needs it.
    """

    pins_memory = True
    takes_device_ids = True
    is_asynchronous = True

    def __init__(self, kind: str):
        self.kind = kind

    @property
    def module(self) -> Any:
        """The module, for example ``torch.xpu``."""
        return getattr(torch, self.kind, None)

    def _call(self, name: str, *args: Any) -> Any:
        function = getattr(self.module, name, None)
        if function is None:
            raise NotSupportedError(f"torch.{self.kind}.{name}", f"The {self.kind!r} backend does not provide it.")
        return function(*args)

    def is_available(self) -> bool:
        return self.module is not None and self._call("is_available")

    def device_count(self) -> int:
        return self._call("device_count")

    def name(self, index: int) -> str:
        return self._call("get_device_name", index)

    def total_memory(self, index: int) -> int:
        return self._call("get_device_properties", index).total_memory

    def free_memory(self, index: int) -> int:
        return self._call("mem_get_info", index)[0]

    def memory(self, index: int) -> Memory:
        names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
        return Memory(*(self._call(name, index) for name in names))

    def reset_peak_memory(self, index: int) -> None:
        self._call("reset_peak_memory_stats", index)

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        self._call("set_per_process_memory_fraction", 1.0 if fraction is None else fraction, index)
        return True

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def synchronize(self, index: int) -> None:
        self._call("synchronize", index)

    def mark(self, index: int, *, timing: bool) -> Mark:
        event = self.module.Event(enable_timing=timing)
        event.record(self._call("current_stream", index))
        return event

    def default_generator(self, index: int) -> torch.Generator:
        self._call("init") if hasattr(self.module, "init") else None
        generators = getattr(self.module, "default_generators", None)
        if not generators:
            raise NotSupportedError(
                f"torch.{self.kind}.default_generators", f"The {self.kind!r} backend does not provide it."
            )
        return generators[index]

    def multiprocessor_count(self) -> int:
        properties = self._call("get_device_properties", 0)
        return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_eu_count", 1))

    def supports_bfloat16(self) -> bool:
        function = getattr(self.module, "is_bf16_supported", None)
        return True if function is None else function()


@functools.cache
def _device(kind: str, index: int | None) -> torch.device:
    """Made once: in a scope, making a device is a torch call like others."""
    with torch._C.DisableTorchFunction():
        return torch.device(kind) if index is None else torch.device(kind, index)


_registered: dict[str, Runtime] = {}
_OWN = ("cpu", "cuda", "mps", "xpu", "simulated")


def register_runtime(runtime: Runtime) -> Callable[[], None]:
    """Let ``target=runtime.kind`` mean a device that this package does not know, and be chosen where it is available.

    For authors of backends of torch: everything a scope needs to know of a device is a :class:`Runtime`. A backend
    that follows torch's convention of device modules needs none; for others, derive from it, or from
    :class:`ModuleRuntime`, and change what differs.

    Args:
        runtime: What the device can do.

    Returns:
        A function that takes it back.

    Raises:
        TypeError: It is no runtime.
        ValueError: There is one of its kind already.
    """
    if not isinstance(runtime, Runtime):
        raise TypeError(f"{runtime!r} is not a runtime. Derive its class from torchdevice.Runtime.")
    kind = getattr(runtime, "kind", None)
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ValueError(f"kind={kind!r} is not a device type. Use the name by which torch.device knows it.")
    if kind in _registered or kind in _OWN:
        raise ValueError(f"there is a runtime for {kind!r} already. Take the other back first, or use another kind.")
    _registered[kind] = runtime

    def take_back() -> None:
        if _registered.get(kind) is runtime:
            del _registered[kind]

    return take_back


def registered() -> tuple[str, ...]:
    """Return the kinds of registered runtimes."""
    return tuple(_registered)


def runtime(kind: str) -> Runtime:
    """Return the runtime of a device type. One per process, because its figures (a peak) are the process's."""
    return _registered.get(kind) or _known_runtime(kind)


@functools.cache
def _known_runtime(kind: str) -> Runtime:
    if kind == "cpu":
        return CpuRuntime()
    if kind == "mps":
        return MpsRuntime()
    return ModuleRuntime(kind)


@functools.lru_cache(maxsize=1)
def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _heap_in_use() -> int:
    if hasattr(psutil, "heap_info"):
        heap = psutil.heap_info()
        return heap.heap_used + heap.mmap_used
    return psutil.Process().memory_info().rss


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return 0


def _high_water_mark() -> int | None:
    try:
        with open("/proc/self/status") as file:
            found = re.search(r"^VmHWM:\s*(\d+) kB$", file.read(), re.M)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _reset_high_water_mark() -> bool:
    # proc(5): writing 5 to clear_refs resets the peak resident set size to the present one.
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
