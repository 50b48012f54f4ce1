"""Settings of ``torch/backends/cuda``, ``torch/backends/cudnn`` and ``torch/cuda/tunable.py``.

The libraries are absent, so a setting is stored for the scope and read back. The defaults were read
from a CUDA build of torch 2.15. cuDNN is reported as available, and computes nothing but on a
simulated GPU.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import REPLACED, replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import ReplacedItem

_STORED: dict[str, dict[str, Any]] = {
    "the target has one linear algebra library": {
        "_set_linalg_preferred_backend": torch._C._LinalgBackend.Default
    },
    "the target has one BLAS": {"_set_blas_preferred_backend": torch._C._BlasBackend.Default},
    "the allocator stays enabled": {"_cuda_cudaCachingAllocator_enable": True},
    "nothing is checked": {"_cuda_set_sync_debug_mode": 0},
    "there is no cuDNN": {
        "_cuda_set_cudnn_benchmark_limit": 10,
        "_cudnn_set_conv_benchmark_empty_cache": True,
    },
    "there are no cuBLAS workspaces": {
        "_cuda_setCublasWorkspaceSize": 8519680,
        "_cuda_setCublasLtWorkspaceSize": 1048576,
    },
    "TunableOp tunes products of GPU matrices": {
        "_cuda_tunableop_enable": False,
        "_cuda_tunableop_tuning_enable": True,
        "_cuda_record_untuned_enable": False,
        "_cuda_tunableop_wildcard_fallback_enable": False,
        "_cuda_tunableop_set_max_tuning_duration": 30,
        "_cuda_tunableop_set_max_tuning_iterations": 100,
        "_cuda_tunableop_set_rotating_buffer_size": 0,
        "_cuda_tunableop_set_cublaslt_requested_algo_count": 8,
    },
}
"""Why a value is only stored -> its setter in ``torch._C`` -> its value before the setter is
called.

The size of cuBLAS's workspace is that of ``:4096:2:16:8``, the default of
aten/src/ATen/cuda/CublasHandlePool.cpp.
"""


def _store(setter: str, default: Any, why: str) -> None:
    def set_(context: Context, value: Any) -> None:
        context.settings[setter] = value

    def get(context: Context) -> Any:
        return context.settings.get(setter, default)

    supplied_function(setter, Fidelity.INERT, note=f"stored; {why}")(set_)
    getter = (
        re.sub("^_cudnn", "_cuda", setter).replace("_set", "_get").replace("_enable", "_is_enabled")
    )
    supplied_function(getter, note="Return the value that was stored, or CUDA's default.")(get)


for _why, _defaults in _STORED.items():
    for _setter, _default in _defaults.items():
        _store(_setter, _default, _why)


for _name in ("CublasWorkspaceSize", "CublasLtWorkspaceSize"):

    @supplied_function(
        f"_cuda_reset{_name}", note="Drop the size that was stored, so that CUDA's default applies."
    )
    def _reset(context: Context, set_: str = f"_cuda_set{_name}") -> None:
        context.settings.pop(set_, None)


_DEFAULT_PLAN_CACHE_SIZE = 4096
"""``CUFFT_DEFAULT_CACHE_SIZE`` of aten/src/ATen/native/cuda/CuFFTPlanCache.h."""


_PLAN_CACHE: Any = torch.backends.cuda.cuFFTPlanCache


@replaces(vars(_PLAN_CACHE)["max_size"], "getter")
def _plan_cache_max_size(context: Context, original: Any, device: int) -> int:
    return context.settings.get(("plan cache", device), _DEFAULT_PLAN_CACHE_SIZE)


@replaces(vars(_PLAN_CACHE)["max_size"], "setter")
def _set_plan_cache_max_size(context: Context, original: Any, device: int, size: int) -> None:
    context.settings["plan cache", device] = size


# There is no plan to count, and none to clear.
replaces(vars(_PLAN_CACHE)["size"], "getter")(lambda *_: 0)
replaces(_PLAN_CACHE, "clear")(lambda *_: None)


_plan_cache = functools.cache(_PLAN_CACHE)  # which is an index, and two settings of the scope


class _PlanCaches(list[Any]):
    """The caches of all devices. Torch makes as many as the scope has devices that asks first."""

    def __getitem__(self, index: Any) -> Any:
        return _plan_cache(index)


REPLACED.append(
    ReplacedItem(vars(torch.backends.cuda.cufft_plan_cache), "caches", lambda _: _PlanCaches())
)


class _BenchmarkLimit:
    """``torch.backends.cudnn.benchmark_limit``, stored per context; torch's own outside scopes.

    Args:
        own: torch's property, which has kept the functions of a build with cuDNN: replacing these
            does not reach it. None in a build without cuDNN.
    """

    def __init__(self, own: Any):
        self.own = own

    def __get__(self, module: Any, owner: type) -> int | None:
        if module is not None and thread_state.state.for_cuda is not None:
            return torch._C._cuda_get_cudnn_benchmark_limit()
        if self.own is not None:
            return self.own.__get__(module, owner)
        return None if module is None else vars(module).get("benchmark_limit")

    def __set__(self, module: Any, limit: int) -> None:
        if thread_state.state.for_cuda is not None:
            torch._C._cuda_set_cudnn_benchmark_limit(limit)
        elif self.own is not None:
            self.own.__set__(module, limit)
        else:
            vars(module)["benchmark_limit"] = limit


CUDNN = 91002
"""cuDNN 9.10.2 as ``torch.backends.cudnn.version()`` packs it: 10,000 x major + 100 x minor +
patch.
"""


def _asks_of(kernel: str) -> None:
    note = (
        f"Return whether CUDA's kernel {kernel!r} could compute attention; False where no CUDA is "
        "simulated."
    )

    @supplied_function(f"_can_use_{kernel}_attention", note=note)
    def can_use(context: Context, params: Any, debug: bool = False) -> bool:
        return context.runtime.supplied.can_use_attention(kernel, params, debug)


for _kernel in ("cudnn", "flash", "mem_efficient"):
    _asks_of(_kernel)


_LIMIT = _BenchmarkLimit(vars(type(torch.backends.cudnn))["benchmark_limit"])
replaces(type(torch.backends.cudnn), "benchmark_limit", makes=True)(lambda _: _LIMIT)


@replaces(torch.backends.cudnn, "is_acceptable", native_to="cuda")
def _is_acceptable(context: Context, original: Any, tensor: torch.Tensor) -> bool:
    """Return False also for a reported CUDA tensor on no simulated GPU, which lacks cuDNN."""
    known = tensor.dtype in torch.backends.cudnn.CUDNN_TENSOR_DTYPES
    return (
        context.runtime.supplied.has_handles
        and torch._C._get_cudnn_enabled()
        and known
        and not tensor.is_cpu
    )


# Modules ask this for weights that are on cuDNN.
replaces(torch, "_use_cudnn_rnn_flatten_weight", native_to="cuda")(lambda *_: True)

_MODES = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU")  # in the order of cuDNN's cudnnRNNMode_t
replaces("torch.backends.cudnn.rnn", "get_cudnn_mode", native_to="cuda")(
    lambda _, original, mode: _MODES.index(mode)
)
replaces(torch.backends.cudnn, "version", native_to="cuda")(lambda *_: CUDNN)
