"""The stacks at allocations, for ``torch/cuda/memory.py``: of Python, of TorchScript and, where asked for, of C++.

Torch gathers them, as it does for CUDA's allocator. Gathering is quick. Names and lines are looked up when they are
asked for: those of C++ take seconds for the first stack of a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchdevice.foundation.tracebacks import PACKAGE

_gather = torch._C._profiler.gather_traceback
_look_up = torch._C._profiler.symbolize_tracebacks

_KERNEL = "torch::impl::dispatch::PythonKernelHolder"
"""The C++ frame that calls a kernel in Python. The frames inside of it are this package's and the interpreter's."""

_GATHERING = ("torch::unwind", "torch::CapturedTraceback")


class Stack:
    """The stack of this thread, innermost frame first, without this package's frames.

    Args:
        cpp: Whether it has the frames of C++.
    """

    __slots__ = ("_captured", "_frames")

    def __init__(self, cpp: bool = False):
        self._captured: Any = _gather(python=True, script=True, cpp=cpp)
        self._frames: list[dict[str, Any]] = []

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The name, file and line of each frame."""
        look_up((self,))
        return self._frames


def look_up(stacks: Iterable[Stack]) -> None:
    """Look up the frames of several stacks. For C++ this is quicker than to look up one after the other."""
    unknown = [stack for stack in stacks if stack._captured is not None]
    for stack, frames in zip(unknown, _look_up([stack._captured for stack in unknown]), strict=True):
        stack._frames, stack._captured = _of_the_program(frames), None


def can_unwind() -> bool:
    """Return whether torch can gather stacks of C++ here."""
    try:
        _gather(python=False, script=False, cpp=True)
    except RuntimeError:  # torch does so for Linux on x86-64 only
        return False
    return True


def _of_the_program(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    kernel = next((at for at, frame in enumerate(frames, 1) if frame["name"].startswith(_KERNEL)), 0)
    return [
        frame
        for frame in frames[kernel:]
        if not frame["filename"].startswith(PACKAGE) and not frame["name"].startswith(_GATHERING)
    ]
