"""torch's own parser of allocator settings, called only with a text made by this package.

In a build with CUDA the parser's first call in a process also reads the settings in the
environment, and ends in an internal assertion if these choose another backend of CUDA's allocator
than the environment did when torch was loaded (c10/cuda/CUDAAllocatorConfig.cpp). Programs such as
ComfyUI choose one before their first line that imports torch, and this package may have loaded
torch earlier.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The environment variables with the settings of CUDA's allocator, in torch's order."""

_parse = torch._C._accelerator_setAllocatorSettings


def parse(text: str) -> None:
    """Let torch parse and keep settings.

    Raises:
        ValueError: A setting is unknown, or a value is wrong. The text is torch's.
    """
    with _unseen_by_torch():
        _parse(text)


@contextmanager
def _unseen_by_torch() -> Iterator[None]:
    """Hide the environment's settings from C++. ``os.environ`` keeps them."""
    hidden = {name: os.environ[name] for name in VARIABLES if "backend" in os.environ.get(name, "")}
    try:
        for name in hidden:
            os.unsetenv(name)
        yield
    finally:
        for name, value in hidden.items():
            os.putenv(name, value)
