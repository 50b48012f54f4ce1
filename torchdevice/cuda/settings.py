"""Settings of CUDA libraries, for ``torch/backends/cuda``, ``torch/backends/cudnn`` and ``torch/cuda/tunable.py``.

The libraries are absent, so a setting is stored for the scope and read back. The defaults were read from a CUDA build
of torch 2.15.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchdevice.core.bindings import supplied_function
from torchdevice.core.context import Context
from torchdevice.core.patching import Callback, Patch
from torchdevice.engines.rewriters import rewrites
from torchdevice.foundation.fidelity import Fidelity


class Stored(NamedTuple):
    """A setter and a getter of ``torch._C`` for one value.

    Attributes:
        setter: The setter's name.
        getter: The getter's name.
        default: The getter's result before the first call of the setter.
        why: Why the value is only stored.
    """

    setter: str
    getter: str
    default: Any
    why: str


_NOTHING_TUNED = "TunableOp tunes products of GPU matrices"


_NO_WORKSPACE = "there are no cuBLAS workspaces"


_STORED = (
    Stored(
        "_set_linalg_preferred_backend",
        "_get_linalg_preferred_backend",
        torch._C._LinalgBackend.Default,
        "the target has one linear algebra library",
    ),
    Stored(
        "_set_blas_preferred_backend",
        "_get_blas_preferred_backend",
        torch._C._BlasBackend.Default,
        "the target has one BLAS",
    ),
    Stored("_cuda_set_sync_debug_mode", "_cuda_get_sync_debug_mode", 0, "nothing is checked"),
    Stored("_cuda_set_cudnn_benchmark_limit", "_cuda_get_cudnn_benchmark_limit", 10, "there is no cuDNN"),
    Stored("_cudnn_set_conv_benchmark_empty_cache", "_cuda_get_conv_benchmark_empty_cache", True, "there is no cuDNN"),
    # ``:4096:2:16:8`` of CUBLAS_WORKSPACE_CONFIG, the default of aten/src/ATen/cuda/CublasHandlePool.cpp.
    Stored("_cuda_setCublasWorkspaceSize", "_cuda_getCublasWorkspaceSize", 8_519_680, _NO_WORKSPACE),
    Stored("_cuda_setCublasLtWorkspaceSize", "_cuda_getCublasLtWorkspaceSize", 1_048_576, _NO_WORKSPACE),
    Stored("_cuda_tunableop_enable", "_cuda_tunableop_is_enabled", False, _NOTHING_TUNED),
    Stored("_cuda_tunableop_tuning_enable", "_cuda_tunableop_tuning_is_enabled", True, _NOTHING_TUNED),
    Stored("_cuda_record_untuned_enable", "_cuda_record_untuned_is_enabled", False, _NOTHING_TUNED),
    Stored(
        "_cuda_tunableop_wildcard_fallback_enable",
        "_cuda_tunableop_wildcard_fallback_is_enabled",
        False,
        _NOTHING_TUNED,
    ),
    Stored("_cuda_tunableop_set_max_tuning_duration", "_cuda_tunableop_get_max_tuning_duration", 30, _NOTHING_TUNED),
    Stored(
        "_cuda_tunableop_set_max_tuning_iterations", "_cuda_tunableop_get_max_tuning_iterations", 100, _NOTHING_TUNED
    ),
    Stored("_cuda_tunableop_set_rotating_buffer_size", "_cuda_tunableop_get_rotating_buffer_size", 0, _NOTHING_TUNED),
    Stored(
        "_cuda_tunableop_set_cublaslt_requested_algo_count",
        "_cuda_tunableop_get_cublaslt_requested_algo_count",
        8,
        _NOTHING_TUNED,
    ),
)


def _store(stored: Stored) -> None:
    def set_(context: Context, value: Any) -> None:
        context.settings[stored.setter] = value

    def get(context: Context) -> Any:
        return context.settings.get(stored.setter, stored.default)

    supplied_function(stored.setter, Fidelity.INERT, note=f"stored; {stored.why}")(set_)
    supplied_function(stored.getter, note="Return the value that was stored, or CUDA's default.")(get)


for _stored in _STORED:
    _store(_stored)


@supplied_function("_cuda_resetCublasWorkspaceSize")
def reset_cublas_workspace_size(context: Context) -> None:
    """Drop the size that was stored, so that CUDA's default applies."""
    context.settings.pop("_cuda_setCublasWorkspaceSize", None)


@supplied_function("_cuda_resetCublasLtWorkspaceSize")
def reset_cublaslt_workspace_size(context: Context) -> None:
    """Drop the size that was stored, so that CUDA's default applies."""
    context.settings.pop("_cuda_setCublasLtWorkspaceSize", None)


@supplied_function("_cuda_clearCublasWorkspaces", Fidelity.INERT, note=_NO_WORKSPACE)
def clear_cublas_workspaces(context: Context) -> None:
    """Do nothing: there are no cuBLAS workspaces."""


@supplied_function("_cuda_tunableop_set_filename", Fidelity.INERT, note=f"stored; {_NOTHING_TUNED}")
def set_tunable_filename(context: Context, filename: str, insert_device_ordinal: bool = False) -> None:
    """Store the name; with ``insert_device_ordinal``, the current device's ordinal precedes its suffix."""
    stem, dot, suffix = filename.rpartition(".")
    numbered = f"{stem or suffix}{context.thread.device_index}{dot}{suffix if dot else ''}"
    context.settings["tunable filename"] = numbered if insert_device_ordinal else filename


@supplied_function("_cuda_tunableop_get_filename")
def get_tunable_filename(context: Context) -> str:
    """Return the name that was stored, or an empty text."""
    return context.settings.get("tunable filename", "")


@supplied_function("_cuda_tunableop_set_numerical_check_tolerances", Fidelity.INERT, note=f"ignored; {_NOTHING_TUNED}")
def set_tunable_tolerances(context: Context, enable: bool, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Do nothing: no results are checked."""


@supplied_function("_cuda_tunableop_get_results")
def get_tunable_results(context: Context) -> tuple[()]:
    """Return no results: no operation is tuned."""
    return ()


@supplied_function("_cuda_tunableop_get_validators")
def get_tunable_validators(context: Context) -> tuple[tuple[str, str], ...]:
    """Return the version of torch, with which TunableOp checks files of results."""
    return (("PT_VERSION", torch.__version__.partition("+")[0]),)


@supplied_function("_cuda_tunableop_read_file")
def read_tunable_file(context: Context, filename: str = "") -> bool:
    """Return False: no results are read, because those of GPU kernels do not apply to the target."""
    return False


@supplied_function("_cuda_tunableop_clear_all")
def clear_tunable(context: Context) -> None:
    """Do nothing: there are no results to clear."""


@supplied_function("_cuda_tunableop_push_dynamic_dims_mask", Fidelity.INERT, note=f"ignored; {_NOTHING_TUNED}")
def push_dynamic_dims_mask(context: Context, bits: int) -> int:
    """Return 0, a handle for ``_cuda_tunableop_pop_dynamic_dims_mask``."""
    return 0


@supplied_function("_cuda_tunableop_pop_dynamic_dims_mask")
def pop_dynamic_dims_mask(context: Context, handle: int) -> None:
    """Do nothing: no mask was pushed."""


_DEFAULT_PLAN_CACHE_SIZE = 4096
"""``CUFFT_DEFAULT_CACHE_SIZE`` of aten/src/ATen/native/cuda/CuFFTPlanCache.h."""


def plan_cache_max_size(context: Context, device: int) -> int:
    """Return the number of plans that was stored for a device, or cuFFT's default."""
    return context.settings.get(("plan cache", device), _DEFAULT_PLAN_CACHE_SIZE)


def set_plan_cache_max_size(context: Context, device: int, size: int) -> None:
    """Store the greatest number of plans for a device."""
    context.settings["plan cache", device] = size


@rewrites(torch._cufft_get_plan_cache_max_size)
def _plan_cache_max_size(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return plan_cache_max_size(context, *args)


@rewrites(torch._cufft_set_plan_cache_max_size)
def _set_plan_cache_max_size(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    set_plan_cache_max_size(context, *args)


@rewrites(torch._cufft_get_plan_cache_size)
def _plan_cache_size(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0


@rewrites(torch._cufft_clear_plan_cache)
def _clear_plan_cache(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do nothing: there is no cache to clear."""


class _PlanCaches(list[Any]):
    """The caches of all devices. Torch keeps as many as the scope has devices that asks first."""

    def __getitem__(self, index: Any) -> Any:
        self.extend(torch.backends.cuda.cuFFTPlanCache(each) for each in range(len(self), index + 1))
        return super().__getitem__(index)


def patches() -> list[Patch]:
    """Return the patch of the caches that ``torch.backends.cuda.cufft_plan_cache`` keeps."""
    attributes = vars(torch.backends.cuda.cufft_plan_cache)
    before = attributes["caches"]

    def install() -> None:
        attributes["caches"] = _PlanCaches()

    def remove() -> None:
        attributes["caches"] = before

    return [Callback(install, remove)]
