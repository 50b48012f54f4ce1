"""Apple's GPU, through ``torch.mps``."""

from __future__ import annotations

import itertools
import re

import torch

from torchdevice.kernel.devices.cpu import processor_name
from torchdevice.kernel.devices.device_memory import Memory
from torchdevice.kernel.devices.runtime import Mark, Runtime, TorchSupport

_NOT = (
    r"(?:not (?:currently )?(?:supported|implemented)|unsupported|(?:doesn't|does not|not) (?:have "
    r")?support)"
)
_SAYS_REFUSED = re.compile(
    rf"(?is)\bMPS\b.*\b{_NOT}\b|\b{_NOT}\b.*\bMPS\b|^Convolution is supported only"
)


def says_refused(error: BaseException) -> bool:
    """Return whether an error reports a call that MPS does not support, in torch's own words.

    A dtype that no tensor of MPS can have is another matter, and memory that ran out too.
    """
    text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
    return (
        not text.startswith("Cannot convert a MPS Tensor to")
        and _SAYS_REFUSED.search(text) is not None
    )


_OUT_OF_MEMORY = ("MPS backend out of memory", "Invalid buffer size")
"""How errors of MPS's allocator begin: beyond the memory that is left, and beyond the largest
buffer of Metal.
"""

_numbers = itertools.count()


class _MpsMark:
    """A recorded event. Times are measured in either order, as on CUDA; torch's MPS refuses one."""

    def __init__(self, timing: bool):
        self._event = torch.mps.event.Event(enable_timing=timing)
        self._event.record()
        self._number = next(_numbers)

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return self._event.query()

    def elapsed_time(self, end: _MpsMark) -> float:
        if end._number < self._number:
            return -end._event.elapsed_time(self._event)
        return self._event.elapsed_time(end._event)


class MpsRuntime(Runtime):
    """Apple's GPU through ``torch.mps``.

    Sources: torch/mps/__init__.py and torch/mps/event.py. There is no peak statistic in
    ``torch.mps``; the peak is the largest figure seen where :meth:`note_memory` is called, and when
    a figure is asked for.
    """

    device_type = "mps"
    support = TorchSupport(
        compiles_flex_backward=False,
        # torch.mps lacks most names that programs use: devices, streams, memory figures.
        is_torch_accelerator=False,
        synchronizes_batch_norm=False,
        autocast_key="AutocastMPS",
        has_addresses=False,
        lacks_in_module=frozenset({"device", "_initialized"}),
    )
    unsupported_dtypes = frozenset({torch.float64, torch.complex128})
    # pytorch issues 139550 and 189690: an asynchronous copy can return partly copied data.
    blocking_copies_only = True
    exact_memory = False
    is_asynchronous = True
    corrected_key = "MPS"
    has_peaks = False
    refusing_key = "MPS"
    _peak_allocated = _peak_reserved = 0

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def name(self, index: int) -> str:
        return f"{processor_name()} (MPS)"

    def total_memory(self, index: int) -> int:
        return torch.mps.recommended_max_memory()

    def free_memory(self, index: int) -> int:
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())

    def note_memory(self) -> None:
        self.memory(0)

    def memory(self, index: int) -> Memory:
        allocated = torch.mps.current_allocated_memory()
        reserved = torch.mps.driver_allocated_memory()
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
        return _MpsMark(timing)

    def default_generator(self, index: int) -> torch.Generator:
        return torch.mps._get_default_mps_generator()

    def supports_bfloat16(self) -> bool:
        # Metal has bfloat16 since macOS 14. Before, torch raises "BFloat16 is not supported".
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def refuses(self, error: BaseException) -> bool:
        return says_refused(error)

    def out_of_memory(self, error: BaseException) -> str | None:
        text = str(error)
        return text if text.startswith(_OUT_OF_MEMORY) else None
