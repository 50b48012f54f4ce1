"""Checks the settings of CUDA's allocator in ``PYTORCH_CUDA_ALLOC_CONF`` where CUDA reads them: at initialisation.

torch's parser of the settings that all accelerators have is in every build and says what is wrong with a value. The
keys that only CUDA has are listed here (c10/cuda/CUDAAllocatorConfig.cpp).
"""

from __future__ import annotations

import os
import re

import torch

from torchdevice.torch_internals import require

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_OF_ALL = frozenset(
    {
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_use_background_threads",
        "roundup_power2_divisions",
    }
)

_OF_CUDA = frozenset(
    {
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
    }
)

_BACKENDS = ("native", "cudaMallocAsync")

_SETTING = re.compile(r"[^,\[]+(?:\[[^\]]*\])?")
"""A setting: its key and its value, which may be a list in brackets."""


def check() -> None:
    """Refuse what CUDA refuses of the settings in the environment.

    Raises:
        ValueError: A key is unknown, or a value is wrong. The text is torch's.
        RuntimeError: There is another backend than CUDA has.
    """
    text = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), None)
    if text is not None:
        _check(text)


def _check(text: str) -> None:
    settings = [setting.strip() for setting in _SETTING.findall(text)]
    for setting in settings:
        key, _, value = setting.partition(":")
        if key not in _OF_ALL | _OF_CUDA:
            raise ValueError(f"Unrecognized key '{key}' in CUDA allocator config.")
        if key == "backend" and value.strip() not in _BACKENDS:
            raise RuntimeError("Unknown allocator backend, options are native and cudaMallocAsync")
    _parse(",".join(setting for setting in settings if setting.partition(":")[0] in _OF_ALL))


def _parse(text: str) -> None:
    """Let torch parse settings, and let it forget them: in a build without CUDA it has no use for them."""
    parse = require(torch._C, "_accelerator_setAllocatorSettings")
    try:
        parse(text)
    finally:
        parse("")
