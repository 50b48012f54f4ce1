"""cuDNN, which is said to be there and takes no tensor. For ``torch/backends/cudnn``."""

from __future__ import annotations

from typing import Any

import torch
import torch.cuda.comm
import torch.cuda.green_contexts

from torchdevice import thread_state
from torchdevice.context import Context
from torchdevice.fidelity import Fidelity
from torchdevice.patching import Patch, Replaced, replaced_function
from torchdevice.supplied import supplied_function, supplied_value


def _cudnn_version(context: Context, original: Any) -> int:
    return CUDNN


def _is_acceptable(context: Context, original: Any, tensor: torch.Tensor) -> bool:
    """There is no cuDNN, whatever tensors say they are on."""
    return False


class _BenchmarkLimit:
    """``torch.backends.cudnn.benchmark_limit``, which a build without cuDNN lacks: stored for the context."""

    def __get__(self, module: Any, owner: type) -> int | None:
        if module is None:
            return None  # what torch has there in a build without cuDNN
        if thread_state.state.for_cuda is None:
            return vars(module).get("benchmark_limit")
        return torch._C._cuda_get_cudnn_benchmark_limit()

    def __set__(self, module: Any, limit: int) -> None:
        if thread_state.state.for_cuda is None:
            vars(module)["benchmark_limit"] = limit
        else:
            torch._C._cuda_set_cudnn_benchmark_limit(limit)


CUDNN = 91002


@supplied_value("torch._C._has_cudnn", Fidelity.DECLARED)
def has_cudnn(context: Context) -> bool:
    """True, so that programs set its flags; no tensor is acceptable to it."""
    return True


@supplied_function("_can_use_cudnn_attention")
def can_use_cudnn_attention(context: Context, params: Any, debug: bool = False) -> bool:
    """False: there is no cuDNN."""
    return False


def patches() -> list[Patch]:
    """Return the patches of ``torch.backends.cudnn``."""
    cudnn = type(torch.backends.cudnn)
    lacks_limit = vars(cudnn).get("benchmark_limit") is None
    return [
        *([Replaced(cudnn, "benchmark_limit", lambda _: _BenchmarkLimit())] if lacks_limit else []),
        replaced_function(torch.backends.cudnn, "is_acceptable", _is_acceptable, native_to="cuda"),
        replaced_function(torch.backends.cudnn, "version", _cudnn_version, native_to="cuda"),
    ]
