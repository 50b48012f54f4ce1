"""Module-level state of ``torch.cuda``: what its functions read as globals, where no binding stands between."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import torch

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._patching import Callback, Patch, Replaced, per_scope, replaced_everywhere, replaced_function
from torchdevice._private import require
from torchdevice._spelling import parse
from torchdevice.bindings import device, versions
from torchdevice.bindings.nvtx import Cudart, Nvtx

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class InitializedFlag:
    """``torch.cuda._initialized``: true for threads with a scope, what it was for the others.

    ``device_count()`` keeps its answer for the whole process once CUDA is initialised. To it alone the flag is false,
    so that the answer of a scope is never kept.
    """

    def __init__(self, original: Any):
        self._original = original

    def __bool__(self) -> bool:
        if _active.state.scope is None:
            return bool(self._original)
        return sys._getframe(1).f_code is not _DEVICE_COUNT

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


_CUDA_STATE_BYTES = 16
"""Seed and offset of Philox, 8 bytes each."""

_DEVICE_COUNT = torch.cuda.device_count.__code__


class _NvtxByScope:
    """``torch.cuda.nvtx._nvtx``: ours for threads with a scope, torch's own for the others."""

    def __init__(self, original: Any):
        self._original = original
        self._ours = Nvtx()

    def __getattr__(self, name: str) -> Any:
        scope = _active.state.scope
        if scope is None:
            return getattr(self._original, name)
        scope.report(f"nvtx.{name}", "counted, not shown", Fidelity.INERT)
        return getattr(self._ours, name)


def _get_device_index(scope: Scope, original: Any, device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """``torch.cuda._utils._get_device_index``, for devices the mode has already rewritten to the target."""
    if isinstance(device, torch.device) and device.type == scope.runtime.kind and device.type != "cuda":
        if device.index is not None:
            return device.index
        if allow_cpu and device.type == "cpu":
            return -1
        return scope.thread.device_index
    spelling = parse(device) if isinstance(device, (str, torch.device)) else None
    if spelling is None or spelling.family == scope.runtime.kind:
        return original(device, optional, allow_cpu)
    if spelling.index is not None:
        return spelling.index
    if optional:
        return scope.thread.device_index
    raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")


def _accelerator_index(scope: Scope, original: Any, device: Any, optional: bool = False) -> int:
    """``torch.accelerator._utils._get_device_index``, for devices the mode has already rewritten to the target."""
    if (
        not scope.runtime.is_torch_accelerator
        and isinstance(device, torch.device)
        and device.type == scope.runtime.kind
    ):
        return scope.thread.device_index
    return original(device, optional)


def _current_index(scope: Scope, original: Any) -> int:
    return scope.thread.device_index


def _device_properties(scope: Scope, original: Any, index: int) -> device.DeviceProperties:
    return device.properties(scope, index)


def _uninitialized(index: int) -> Any:
    raise AttributeError("module 'torch.cuda' has no attribute '_get_device_properties'")


def _cudnn_version(scope: Scope, original: Any) -> int:
    return versions.CUDNN


def _set_rng_state(scope: Scope, original: Any, new_state: torch.Tensor, device: Any = "cuda") -> None:
    if new_state.numel() == _CUDA_STATE_BYTES:
        raise RuntimeError(
            f"a random state of {_CUDA_STATE_BYTES} bytes is that of a CUDA generator, whose numbers "
            f"{scope.runtime.kind!r} cannot continue. Seed with torch.manual_seed() instead of restoring it."
        )
    original(new_state, device)


def _get_device_module(scope: Scope, original: Any, device: Any = None) -> Any:
    """The module of the family that the program spelled: that of a rewritten device cannot do what the program asks."""
    if (
        not scope.runtime.is_torch_accelerator
        and isinstance(device, torch.device)
        and device.type == scope.runtime.kind
    ):
        return torch.cuda
    spelling = parse(device) if isinstance(device, str) else None
    return getattr(torch, spelling.family) if spelling is not None else original(device)


def _capturable_devices(scope: Scope, original: Any, supports_xla: bool = True) -> list[str]:
    """Optimizers with ``capturable=True`` run their tensor arithmetic on the target; nothing is captured."""
    return [*original(supports_xla), scope.runtime.kind]


def _utilization(scope: Scope, original: Any, device: Any = None) -> int:
    import psutil

    scope.report("torch.cuda.utilization", "processor utilization", Fidelity.APPROXIMATE)
    return round(psutil.cpu_percent())


def patches() -> list[Patch]:
    """Return the patches of ``torch.cuda``'s globals."""
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes it as an attribute
    return [
        Replaced(torch.cuda, "_initialized", InitializedFlag),
        Replaced(torch.cuda, "_cached_device_count", lambda _: None),
        Replaced(torch.cuda, "_cudart", Cudart),
        Replaced(torch.cuda.nvtx, "_nvtx", _NvtxByScope),
        Replaced(
            torch.cuda,
            "_get_device_properties",
            lambda original: per_scope(original or _uninitialized, _device_properties),
            may_be_absent=True,
        ),
        Callback(lambda: None, require(torch.cuda, "_check_bf16_tensor_supported").cache_clear),
        replaced_function(torch.cuda, "utilization", _utilization),
        replaced_function(torch.backends.cudnn, "version", _cudnn_version),
        replaced_function(torch._utils, "_get_current_device_index", _current_index),
        *replaced_everywhere(torch.accelerator._utils, "_get_device_index", _accelerator_index),
        *replaced_everywhere(torch.cuda.random, "set_rng_state", _set_rng_state),
        replaced_function(torch, "get_device_module", _get_device_module),
        *replaced_everywhere(torch.cuda._utils, "_get_device_index", _get_device_index),
        *replaced_everywhere(optimizer, "_get_capturable_supported_devices", _capturable_devices),
    ]
