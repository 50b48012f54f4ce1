"""Torch's notes in C++ of the device types that it has initialised.

Code in C++ that is asked for a CUDA device calls ``torch.cuda._lazy_init()`` once in a process,
which returns in a scope. Without the mode such a call gets that far. After the scope torch would
not initialise CUDA again, and calls would end with another error than "Torch not compiled with CUDA
enabled".
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import torch

DEVICE_TYPES = {"cuda": 1, "xpu": 12}
"""``c10::DeviceType`` of the families that torch initialises, which have streams
(c10/core/DeviceType.h).
"""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """Return one of torch's libraries in C++."""
    ending = ".dylib" if sys.platform == "darwin" else ".so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}{ending}"))


_SET = "_ZN5torch5utils24set_requires_device_initEN3c1010DeviceTypeEb"
"""The mangled name of ``torch::utils::set_requires_device_init(c10::DeviceType, bool)``."""


def forget() -> None:
    """Let torch initialise each accelerator at its next use, unless it is really initialised."""
    require = None if sys.platform == "win32" else getattr(library("torch_python"), _SET, None)
    for family, number in DEVICE_TYPES.items() if require is not None else ():
        if not getattr(torch, family)._initialized:
            require(number, True)
