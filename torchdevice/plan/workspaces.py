"""cuBLAS's memory for products, which torch allocates at the first product and keeps.

torch has a handle of cuBLAS for each thread that computes products, and a workspace for each handle
and stream. A step of training has two, because the backward pass has a thread of its own; other
streams are not counted. cuBLASLt uses the same workspace. cuDNN's workspaces are not counted:
torch's sources have no sizes for them, because it asks cuDNN for that of each algorithm.

Source: ``getChosenWorkspaceSize`` and ``getCurrentCUDABlasHandle`` in torch's
``aten/src/ATen/cuda/CublasHandlePool.cpp``, and ``torch.backends.cuda.cublaslt_workspace_size``.
"""

from __future__ import annotations

import os
import re

import torch

from torchdevice.kernel.context import Context

_NAMES = ("mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "vdot", "_addmm_activation")

PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in _NAMES)
"""The operators whose kernels for CUDA take a handle of cuBLAS."""

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_LARGE = (9, 10)
"""The major compute capabilities with 32 MiB: Hopper and Blackwell for data centers."""


def chosen(context: Context) -> int | None:
    """Return the bytes that the program chose by ``torch.backends.cuda.cublas_workspace_size``,
    which count before the variable; None where it chose none.
    """
    found: int | None = context.settings.get("_cuda_setCublasWorkspaceSize")
    return found


def size(capability: tuple[int, int]) -> int:
    """Return the bytes of one workspace on a GPU of a compute capability, unless the program chose
    some.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get(VARIABLE, ""))
    if pairs:
        return sum(int(kilobytes) * int(count) for kilobytes, count in pairs) << 10
    return 8 * 4096 << 10 if capability[0] in _LARGE else (2 * 4096 + 8 * 16) << 10


def in_backward() -> bool:
    """Return whether this is a thread of the backward pass, on a GPU."""
    return torch._C._current_graph_task_id() != -1
