"""CUDA-written PyTorch programs run unmodified where there is no CUDA.

Importing this package changes nothing. ``with torchdevice.portable():``, ``@torchdevice.portable`` and
``torchdevice.enable()`` do, until they are left.
"""

from __future__ import annotations

from torchdevice import errors
from torchdevice._device import TorchDevice
from torchdevice._journal import Entry, Fidelity, Journal, Site
from torchdevice._runtimes import Memory, Runtime, register_runtime
from torchdevice._scope import Scope, current, disable, enable, portable, simulate

__version__ = "0.1.0"

__all__ = [
    "Entry",
    "Fidelity",
    "Journal",
    "Memory",
    "Runtime",
    "Scope",
    "Site",
    "TorchDevice",
    "current",
    "disable",
    "enable",
    "errors",
    "portable",
    "register_runtime",
    "simulate",
]
