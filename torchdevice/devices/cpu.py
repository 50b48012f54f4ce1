"""The CPU standing in for an accelerator."""

from __future__ import annotations

import functools
import platform
import re

import psutil
import torch

from torchdevice.devices import process_memory
from torchdevice.devices.runtime import HALF, Memory, Runtime, device_of
from torchdevice.torch_internals import require


@functools.cache
def computes_in_bfloat16() -> bool:
    """Return whether the CPU has instructions that multiply matrices in bfloat16; without them float32 is faster."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN also says yes where it converts to float32 and back, and no where ONEDNN_MAX_CPU_ISA forbids it.
        return bool(_has_avx512_bf16() or _has_amx()) and _by_onednn("bf16")
    return torch.backends.mkldnn.is_available() and _by_onednn("bf16")


@functools.cache
def computes_in_float16() -> bool:
    """Return whether the CPU has instructions that multiply matrices in float16; without them float32 is faster."""
    return torch.backends.mkldnn.is_available() and _by_onednn("fp16")


def _by_onednn(name: str) -> bool:
    return bool(require(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


_has_avx512_bf16 = require(torch.cpu, "_is_avx512_bf16_supported")
_has_amx = require(torch.cpu, "_is_amx_tile_supported")


class CpuRuntime(Runtime):
    """The CPU standing in for an accelerator.

    Memory figures are those of the process heap since the first use: what malloc has handed out (psutil reads the
    C library's own statistics). The peak is the largest figure seen when asked, or the growth of the resident set's
    high-water mark where the system reports one. Both include what the program allocates outside torch.
    """

    device_type = "cpu"
    compiles_flex_backward = False
    shares_host_memory = True
    degraded_notice = "no accelerator is in use: what the program asks of CUDA runs on the CPU"
    exact_memory = False
    is_torch_accelerator = False

    def __init__(self) -> None:
        self._heap_base = process_memory.heap_in_use()
        self._resident_base = psutil.Process().memory_info().rss
        self._peak_allocated = self._peak_reserved = 0
        self._high_water_base: tuple[int, int] | None = None
        self.reset_peak_memory(0)

    def is_available(self) -> bool:
        return True

    def device(self, index: int) -> torch.device:
        return device_of("cpu", None)

    def name(self, index: int) -> str:
        return f"{process_memory.processor_name()} (CPU standing in)"

    def memory(self, index: int) -> Memory:
        allocated = max(0, process_memory.heap_in_use() - self._heap_base)
        reserved = max(allocated, psutil.Process().memory_info().rss - self._resident_base)
        peak = allocated
        if self._high_water_base is not None:
            high_water, allocated_then = self._high_water_base
            peak = max(peak, allocated_then + (process_memory.high_water_mark() or 0) - high_water)
        self._peak_allocated = max(self._peak_allocated, peak)
        self._peak_reserved = max(self._peak_reserved, reserved, self._peak_allocated)
        return Memory(allocated, reserved, self._peak_allocated, self._peak_reserved)

    def reset_peak_memory(self, index: int) -> None:
        self._peak_allocated = self._peak_reserved = 0
        self._high_water_base = None
        allocated = self.memory(0).allocated
        if process_memory.reset_high_water_mark() and (mark := process_memory.high_water_mark()) is not None:
            self._high_water_base = (mark, allocated)

    def empty_cache(self) -> None:
        if hasattr(psutil, "heap_trim"):
            psutil.heap_trim()

    def processes(self, index: int) -> list[tuple[int, int]]:
        own = psutil.Process()
        return [
            (each.pid, process_memory.resident(each))
            for each in (own, *own.children(recursive=True))
            if each.is_running()
        ]

    def default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def slow_product_dtypes(self) -> frozenset[torch.dtype]:
        has_instructions = {torch.float16: computes_in_float16(), torch.bfloat16: computes_in_bfloat16()}
        return frozenset(dtype for dtype, has in has_instructions.items() if not has)

    def autocast_dtype(self, requested: torch.dtype) -> torch.dtype:
        # In float16, CPU autocast leaves exp, softmax, layer_norm, sum and others in half where CUDA computes them in
        # float32: a public toy task gives NaN at its first step. bfloat16 has float32's range.
        if requested not in HALF:
            return requested
        return torch.bfloat16 if computes_in_bfloat16() else torch.float32

    def out_of_memory(self, error: BaseException) -> str | None:
        found = re.search(
            r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?allocate (\d+) bytes", str(error), re.S
        )
        return f"Tried to allocate {_mebibytes(int(found[1]))}. " if found else None


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
