"""The simulated device behind the interface that all devices have."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from torchdevice import _history
from torchdevice._private import require
from torchdevice._runtimes import Memory, Runtime
from torchdevice.simulation import _allocator, _backend, _policy, _random, _rewriters, _special
from torchdevice.simulation._profiles import PROFILES, Profile

_set_multithreading = require(torch._C, "_set_multithreading_enabled")
_is_multithreading = require(torch._C, "_is_multithreading_enabled")


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.multithreading = True


_thread = _PerThread()


class SimulatedRuntime(Runtime):
    """Some simulated devices of one profile.

    Attributes:
        profile: What is simulated.
        memory_limit: Bytes that each device has, or None for as many as there are.
        fallbacks: Operators that the profile's device lacks and that ran on the CPU: name -> number of calls.
        copies: Copies between devices of this process: (source, destination) -> number.
        copied_bytes: The same in bytes.
    """

    kind = _policy.KIND
    takes_device_ids = True
    is_torch_accelerator = False
    compiles = False
    generator_type = _random.Generator
    exchanges_data = True

    def __init__(self, profile: Profile, count: int, memory_limit: int | None):
        self.profile = profile
        self.memory_limit = memory_limit
        self.unsupported_dtypes = profile.unsupported_dtypes
        self.folds_ordinals = profile.single
        self.fallbacks: Counter[str] = Counter()
        self.copies = _special.copies
        self.copied_bytes = _special.copied_bytes
        self._count = count

    @property
    def target(self) -> str:
        return f"{self.kind}:{self.profile.name}:{self._count}"

    @property
    def family(self) -> str:
        return self.profile.family

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        return _rewriters.TABLE

    @property
    def collectives(self) -> str:
        from torchdevice.simulation import _process_group

        return _process_group.register()

    def begin(self) -> None:
        """Register the device, if nobody has, and keep backward on the calling thread: torch starts one thread per
        device it knows of, and it knows of one."""
        _backend.register()
        if _thread.depth == 0:
            _thread.multithreading = _is_multithreading()
            _set_multithreading(False)
        _thread.depth += 1
        if self._refuses_anything():
            _policy.watch(1)

    def end(self) -> None:
        if self._refuses_anything():
            _policy.watch(-1)
        _thread.depth -= 1
        if _thread.depth == 0:
            _set_multithreading(_thread.multithreading)

    def _refuses_anything(self) -> bool:
        return self.memory_limit is not None or bool(self.profile.backends or self.profile.unsupported_dtypes)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"simulated {self.profile.name} device {index}"

    def total_memory(self, index: int) -> int:
        return self.memory_limit or psutil.virtual_memory().total

    def free_memory(self, index: int) -> int:
        if self.memory_limit is None:
            return psutil.virtual_memory().available
        return self.memory_limit - min(self.memory_limit, _allocator.device(index).figures().reserved)

    def memory(self, index: int) -> Memory:
        return _allocator.device(index).figures()

    def statistics(self, index: int) -> Mapping[str, Any]:
        return _allocator.device(index).statistics()

    def reset_accumulated_memory(self, index: int) -> None:
        _allocator.device(index).reset_accumulated()

    def blocks(self, index: int) -> list[_history.Block]:
        return _allocator.blocks(index)

    def watch_allocations(self, observer: _history.Observer) -> Callable[[], None]:
        _allocator.observers.append(observer)
        return functools.partial(_allocator.forget, observer)

    def reset_peak_memory(self, index: int) -> None:
        _allocator.device(index).reset_peak()

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        _policy.watch_from_now_on()
        return True

    def empty_cache(self) -> None:
        for index in range(self._count):
            _allocator.device(index).empty_cache()

    def default_generator(self, index: int) -> torch.Generator:
        return _random.default_generator(index)

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        return _random.Generator(index) if cls is torch._C.Generator else _random.own(cls, index)

    def new_storage(self, original: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        return _backend.new_storage(original, *args, device=device, **kwargs)

    def out_of_memory(self, error: BaseException) -> str | None:
        # What the host cannot allocate, the device cannot either.
        from torchdevice._runtimes import runtime

        return runtime("cpu").out_of_memory(error)


@functools.cache
def runtime(profile: str, count: int, memory_limit: int | None) -> SimulatedRuntime:
    """Return the runtime of some simulated devices, the same one for equal arguments."""
    return SimulatedRuntime(PROFILES[profile], count, memory_limit)
