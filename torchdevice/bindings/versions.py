"""Versions that programs compare before they dare to use CUDA. The build's own where it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdevice.bindings import answers, supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope

CUDA = "12.8"
CUDNN = 91002
NCCL = 2 << 32 | 27 << 16 | 3
"""NCCL 2.27.3 as ``_nccl_version`` packs it: major, minor and patch, the latter two in 16 bits each."""


@answers("torch.version.cuda")
def cuda(scope: Scope) -> str:
    """The version of the build, or 12.8."""
    return vars(torch.version).get("cuda") or CUDA


@answers("torch._C._has_cudnn")
def has_cudnn(scope: Scope) -> bool:
    """True, so that programs set its flags; no tensor is acceptable to it."""
    return True


@supplies("_can_use_cudnn_attention")
def can_use_cudnn_attention(scope: Scope, params: Any, debug: bool = False) -> bool:
    """False: there is no cuDNN."""
    return False


@supplies("_cuda_getCompiledVersion")
def get_compiled_version(scope: Scope) -> int:
    """The same as a number: 12080 for 12.8."""
    major, minor = (int(part) for part in cuda(scope).split(".")[:2])
    return 1000 * major + 10 * minor


@supplies("_nccl_version")
def nccl_version(scope: Scope) -> int:
    """2.27.3, packed."""
    return NCCL


@supplies("_nccl_version_suffix")
def nccl_version_suffix(scope: Scope) -> bytes:
    """No suffix."""
    return b""
