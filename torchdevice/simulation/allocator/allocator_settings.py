"""The settings of CUDA's allocator: what torch refuses of them, and what they mean.

CUDA reads ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF`` at initialisation. torch's parser
of the settings that all accelerators have is in every build and raises the errors of values. The
keys are listed below, with those that only CUDA has (c10/cuda/CUDAAllocatorConfig.cpp).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torchdevice.kernel import thread_state
from torchdevice.kernel.python import allocator_texts

_INTERVALS = 16
"""The settings of ``roundup_power2_divisions``: for sizes from 1 MiB, from 2 MiB, and so on up to
32 GiB.
"""


class Settings(NamedTuple):
    """The settings of an allocator.

    Attributes:
        expandable_segments: Whether segments grow.
        large_segment_size: The segments of the large pools, in bytes.
        max_non_split_rounding: How many bytes larger than the request a block may be that is too
            large to be split.
        max_split_size: The bytes from which a block is not split; None for no limit.
        divisions: Into how many steps a power of 2 is divided when sizes are rounded up: for sizes
            from 1 MiB, from 2 MiB, and so on. 0 or 1 for steps of 512 bytes.
        memory_fraction: The fraction of a device's memory that the process may have. Counts at
            initialisation only.
    """

    expandable_segments: bool = False
    # 20 MiB: `kLargeBuffer`.
    large_segment_size: int = 20 << 20
    max_non_split_rounding: int = 20 << 20
    max_split_size: int | None = None
    divisions: tuple[int, ...] = (0,) * _INTERVALS
    memory_fraction: float = 1.0

    def shown(self) -> dict[str, Any]:
        """Return the settings under the keys of ``torch.cuda.memory._snapshot``."""
        return {
            # Torch's own sign for no limit.
            "max_split_size": -1 if self.max_split_size is None else self.max_split_size,
            "expandable_segments": self.expandable_segments,
            "roundup_power2_divisions": {
                str(1 << at): each for at, each in enumerate(self.divisions)
            },
        }


DEFAULT = Settings()

_OF_ALL = (
    "expandable_segments",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_use_background_threads",
    "roundup_power2_divisions",
)
"""Keys that the allocators of all accelerators have."""

_OF_CUDA = (
    "backend",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)
"""Keys of CUDA's allocator alone."""

_BACKENDS = ("native", "cudaMallocAsync")

_SETTING = re.compile(r"[^,\[]+(?:\[[^\]]*\])?")
"""A setting: its key and its value, which may be a list in brackets."""


def text() -> str:
    """Return the text of the settings in the environment."""
    return next(
        (os.environ[name] for name in allocator_texts.VARIABLES if os.environ.get(name)), ""
    )


def parsed(text: str) -> Settings:
    """Return the settings that a text means.

    Raises:
        ValueError: A key is unknown, or a value is wrong. The text is torch's.
        RuntimeError: There is another backend than CUDA has.
    """
    # The usual case, without a call of torch's parser.
    if not text:
        return DEFAULT
    # Keys and values, without the colon.
    pairs = [setting.strip().partition(":")[::2] for setting in _SETTING.findall(text)]
    for key, value in pairs:
        if key not in (*_OF_ALL, *_OF_CUDA):
            raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.")
        if key == "backend" and value.strip() not in _BACKENDS:
            raise RuntimeError("Unknown allocator backend, options are native and cudaMallocAsync")
    # Torch's parser knows the common keys only, and refuses those of CUDA.
    _check(",".join(f"{key}:{value}" for key, value in pairs if key in _OF_ALL))
    return DEFAULT._replace(
        **{_READ[key][0]: _READ[key][1](value.strip()) for key, value in pairs if key in _READ}
    )


def _check(text: str) -> None:
    """Let torch parse settings, then forget them: a build without CUDA has no use for them."""
    # The parser is the accelerator's, which the scope would answer for.
    with thread_state.suspended():
        try:
            allocator_texts.parse(text)
        finally:
            # Also after an error, since the parser keeps the settings before the wrong one.
            allocator_texts.parse("")
            # An empty text resets all settings but this one, which torch 2.10 does not know.
            if "large_segment_size_mb" in text:
                with contextlib.suppress(ValueError):
                    allocator_texts.parse("large_segment_size_mb:20")


def _mebibytes(text: str) -> int:
    return int(text) << 20


def _divisions(text: str) -> tuple[int, ...]:
    """Return the divisions per interval, of ``4`` or of ``[256:1,512:2,>:4]`` with keys in MiB."""
    if not text.startswith("["):
        return (int(text),) * _INTERVALS
    found = [0] * _INTERVALS
    last = None
    for pair in text.strip("[]").split(","):
        key, _, value = (part.strip() for part in pair.partition(":"))
        if key == ">":
            # ">" means all intervals after the last that was named.
            start = 0 if last is None else last + 1
            found[start:] = [int(value)] * (_INTERVALS - start)
            continue
        # MiB as a power of 2 are the number of the interval.
        at = min(int(key).bit_length() - 1, _INTERVALS - 1)
        found[at] = int(value)
        # The first value holds for all smaller sizes too.
        if last is None:
            found[:at] = [int(value)] * at
        last = at
    return tuple(found)


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return value


_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    # Torch's parser refuses other texts.
    "expandable_segments": ("expandable_segments", "True".__eq__),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
    "roundup_power2_divisions": ("divisions", _divisions),
}
"""Key -> the field of :class:`Settings` and how its value is read. The other keys change no block.
"""
