"""Settings of CUDA libraries, for ``torch/backends/cuda``, ``torch/backends/cudnn`` and ``torch/cuda/tunable.py``.

The libraries are absent, so a setting is stored for the scope and read back. The defaults were read from a CUDA build
of torch 2.15.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from torchdevice.core import REPLACED, Context, ReplacedItem, replaces, supplied_function
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity

_STORED: dict[str, dict[str, Any]] = {
    "the target has one linear algebra library": {"_set_linalg_preferred_backend": torch._C._LinalgBackend.Default},
    "the target has one BLAS": {"_set_blas_preferred_backend": torch._C._BlasBackend.Default},
    **data_files.read(__file__, "settings.json"),
}
"""Why a value is only stored -> its setter in ``torch._C`` -> what the getter returns before the setter was called.

The size of cuBLAS's workspace is that of ``:4096:2:16:8``, the default of aten/src/ATen/cuda/CublasHandlePool.cpp."""


def _store(setter: str, default: Any, why: str) -> None:
    def set_(context: Context, value: Any) -> None:
        context.settings[setter] = value

    def get(context: Context) -> Any:
        return context.settings.get(setter, default)

    supplied_function(setter, Fidelity.INERT, note=f"stored; {why}")(set_)
    getter = re.sub("^_cudnn", "_cuda", setter).replace("_set", "_get").replace("_enable", "_is_enabled")
    supplied_function(getter, note="Return the value that was stored, or CUDA's default.")(get)


for _why, _defaults in _STORED.items():
    for _setter, _default in _defaults.items():
        _store(_setter, _default, _why)


for _name in ("CublasWorkspaceSize", "CublasLtWorkspaceSize"):

    @supplied_function(f"_cuda_reset{_name}", note="Drop the size that was stored, so that CUDA's default applies.")
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


REPLACED.append(ReplacedItem(vars(torch.backends.cuda.cufft_plan_cache), "caches", lambda _: _PlanCaches()))
