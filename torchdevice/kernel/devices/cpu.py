"""The CPU standing in for an accelerator."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

import torch

from torchdevice.kernel.devices.device_memory import Memory
from torchdevice.kernel.devices.runtime import Runtime, TorchSupport, device_of
from torchdevice.kernel.python.byte_sizes import written


@functools.cache
def computes_in_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices natively; if not, float32 is faster."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        # oneDNN also says yes where it converts to float32 and back, and no where
        # ONEDNN_MAX_CPU_ISA forbids it.
        has_instructions = (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
        return bool(has_instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def computes_in_float16() -> bool:
    """Return whether the CPU multiplies float16 matrices natively; if not, float32 is faster."""
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.lru_cache(maxsize=1)
def processor_name() -> str:
    """Return the processor's name, from /proc/cpuinfo or from Python's platform module."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


class CpuRuntime(Runtime):
    """The CPU standing in for an accelerator. Memory figures: see ``cpu_memory.py``."""

    device_type = "cpu"
    support = TorchSupport(
        compiles_flex_backward=False,
        synchronizes_batch_norm=False,
        is_torch_accelerator=False,
        # CPU autocast in float16 leaves exp, softmax, layer_norm, sum and others in half: a public
        # toy task gives NaN at its first step.
        float16_autocast_is_finite=False,
        autocast_key="AutocastCPU",
    )
    shares_host_memory = True
    degraded_notice = "no accelerator is in use: what the program asks of CUDA runs on the CPU"
    exact_memory = False

    def __init__(self) -> None:
        from torchdevice.kernel.devices import cpu_memory  # here, since psutil takes long to import

        self._memory = cpu_memory.ProcessMemory()

    def is_available(self) -> bool:
        return True

    def device(self, index: int) -> torch.device:
        return device_of("cpu", None)

    def name(self, index: int) -> str:
        return f"{processor_name()} (CPU standing in)"

    def memory(self, index: int) -> Memory:
        return self._memory.figures()

    def reset_peak_memory(self, index: int) -> None:
        self._memory.reset_peak()

    def empty_cache(self) -> None:
        from torchdevice.kernel.devices import cpu_memory

        cpu_memory.trim_heap()

    def default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    @property
    def slow_product_dtypes(self) -> frozenset[torch.dtype]:
        slow = set()
        if not computes_in_float16():
            slow.add(torch.float16)
        if not computes_in_bfloat16():
            slow.add(torch.bfloat16)
        return frozenset(slow)

    def out_of_memory(self, error: BaseException) -> str | None:
        wanted = bytes_wanted(error)
        return None if wanted is None else f"Tried to allocate {written(wanted)}. "


def bytes_wanted(error: BaseException) -> int | None:
    """Return how many bytes the CPU's allocator could not allocate; None for another error."""
    found = re.search(
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory).*?allocate (\d+) bytes",
        str(error),
        re.S,
    )
    return int(found[1]) if found else None
