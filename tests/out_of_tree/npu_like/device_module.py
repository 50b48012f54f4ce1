"""``torch.npu_like``: the device's module, with the names of public backends' modules.

The names are those of ``torch.xpu`` and of ``torch_npu.npu``. The device has one ordinal and a
memory of its own.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.simulation import device_generators
from torchdevice.simulation.allocator import storages

TOTAL = 8 << 30
"""The bytes of the device's memory."""

default_generators = (device_generators.default_generator(0),)

_initialized = True
"""torch asks for it where it keeps random numbers for a checkpoint."""

_fraction = 1.0


def init() -> None:
    """Do nothing: the device needs no preparation."""


def is_available() -> bool:
    """Return True: the device is CPU memory."""
    return True


def is_initialized() -> bool:
    """Return True: the device needs no preparation."""
    return True


def device_count() -> int:
    """Return 1: torch asks the guard of a backend in Python for one device."""
    return 1


def current_device() -> int:
    """Return the ordinal of the current device."""
    return 0


def _ordinal(device: Any = None) -> int:
    index = (
        device
        if isinstance(device, int)
        else torch.device(device).index
        if device is not None
        else 0
    )
    if index not in (None, 0):
        raise RuntimeError(f"npu_like has no device {index}")
    return 0


def set_device(device: Any) -> None:
    """Accept the only device."""
    _ordinal(device)


class device(contextlib.nullcontext):  # type: ignore[type-arg]
    """The only device, as a context manager."""

    def __init__(self, device: Any):
        super().__init__()
        self.idx = _ordinal(device)


def synchronize(device: Any = None) -> None:
    """Return at once: calls return when the work is done."""
    _ordinal(device)


def get_device_name(device: Any = None) -> str:
    """Return the name of the device."""
    _ordinal(device)
    return "NPU of the tests"


def get_device_properties(device: Any = None) -> Any:
    """Return the properties that public backends agree on."""
    _ordinal(device)
    return types.SimpleNamespace(name=get_device_name(), total_memory=TOTAL)


def get_device_capability(device: Any = None) -> None:
    """Return None, as backends without CUDA's capabilities do."""


def is_bf16_supported() -> bool:
    """Return True."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast accepts."""
    return [torch.float16, torch.bfloat16]


class Stream:
    """A queue of work. Calls return when their work is done, so that nothing waits in it.

    Args:
        device: The device.
        priority: The priority, which has no meaning here.
    """

    _numbers = iter(range(1, 1 << 60))

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None):
        _ordinal(device)
        self.stream_id = next(self._numbers) if stream_id is None else stream_id

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("npu_like", 0)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True

    def wait_event(self, event: Event) -> None:
        """Do nothing: what was recorded has happened."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing: the other stream's work is done."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event."""
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in the work of a stream.

    Args:
        enable_timing: Whether it keeps the time.
    """

    def __init__(self, enable_timing: bool = False):
        self._timing, self._time = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        """Record the present time."""
        self._time = time.perf_counter_ns()

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: what was recorded has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        if not (self._timing and end._timing and self._time and end._time):
            raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        return (end._time - self._time) / 1e6


_default = Stream(stream_id=0)
_current = _default


def default_stream(device: Any = None) -> Stream:
    """Return the stream that work is in where none was chosen."""
    return _default


def current_stream(device: Any = None) -> Stream:
    """Return the stream that work is in."""
    _ordinal(device)
    return _current


def set_stream(stream: Stream) -> None:
    """Choose the stream that work is in."""
    global _current
    _current = stream


@contextlib.contextmanager
def stream(stream: Stream) -> Iterator[None]:
    """Choose the stream that work is in within a block."""
    before = _current
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def memory_limits(index: int) -> tuple[int, int | None]:
    """Return the device's bytes, and those the program allows itself; None for no limit."""
    return TOTAL, None if _fraction == 1.0 else int(TOTAL * _fraction)


def out_of_memory(wanted: int, allocated: int) -> Exception:
    """Return the error where memory runs out: a plain RuntimeError, as torch_npu raises it."""
    return RuntimeError(
        f"NPU out of memory. Tried to allocate {wanted / 2**30:.2f} GiB (NPU 0; "
        f"{TOTAL / 2**30:.2f} GiB total; "
        f"{allocated / 2**30:.2f} GiB already allocated)"
    )


def _figures(device: Any) -> Any:
    return storages.device(_ordinal(device)).figures()


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of live tensors."""
    return _figures(device).allocated


def max_memory_allocated(device: Any = None) -> int:
    """Return the most bytes of live tensors."""
    return _figures(device).peak_allocated


def memory_reserved(device: Any = None) -> int:
    """Return the bytes that the allocator has of the device."""
    return _figures(device).reserved


def max_memory_reserved(device: Any = None) -> int:
    """Return the most bytes that the allocator has had of the device."""
    return _figures(device).peak_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset the peaks to the present figures."""
    storages.device(_ordinal(device)).reset_peak()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the total bytes."""
    return TOTAL - memory_reserved(device), TOTAL


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """Limit the memory that the process may have."""
    global _fraction
    _fraction = fraction


def empty_cache() -> None:
    """Give memory that is not in use back to the device."""
    storages.device(0).empty_cache()


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    default_generators[0].manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    """Return the seed of the current device."""
    return default_generators[0].initial_seed()


def get_rng_state(device: Any = 0) -> torch.Tensor:
    """Return the state of the generator."""
    return default_generators[_ordinal(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = 0) -> None:
    """Go on from a state of the generator."""
    default_generators[_ordinal(device)].set_state(new_state)


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    init()
