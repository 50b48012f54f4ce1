"""Module-level state of ``torch.cuda``: what its functions read as globals, where no binding stands between."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.cuda.comm
import torch.cuda.green_contexts

from torchdevice import _active
from torchdevice._journal import Fidelity
from torchdevice._patching import Callback, Patch, Replaced, per_scope, replaced_everywhere, replaced_function
from torchdevice._private import require
from torchdevice._spelling import parse
from torchdevice.bindings import collectives, device, memory, versions
from torchdevice.bindings.nvtx import Cudart, Nvtx
from torchdevice.errors import NotSupportedError

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class InitializedFlag:
    """``torch.cuda._initialized``: true for threads with a scope, what it was for the others.

    ``device_count()`` keeps its answer for the whole process once CUDA is initialised. To it alone the flag is false,
    so that the answer of a scope is never kept.
    """

    family = "cuda"
    device_count = torch.cuda.device_count.__code__

    def __init__(self, original: Any):
        self._original = original

    def __bool__(self) -> bool:
        scope = _active.state.scope
        if scope is None or scope.kind == self.family:
            return bool(self._original)
        return sys._getframe(1).f_code is not self.device_count

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


_CUDA_STATE_BYTES = 16
"""Seed and offset of Philox, 8 bytes each."""


class _NvtxByScope:
    """``torch.cuda.nvtx._nvtx``: ours for threads with a scope, torch's own for the others."""

    def __init__(self, original: Any):
        self._original = original
        self._ours = Nvtx()

    def __getattr__(self, name: str) -> Any:
        scope = _active.state.for_cuda
        if scope is None:
            return getattr(self._original, name)
        scope.report(f"nvtx.{name}", "what torch.profiler shows as record_function", Fidelity.INERT)
        return getattr(self._ours, name)


def get_device_index(scope: Scope, original: Any, device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """``torch.cuda._utils._get_device_index``, for devices the mode has already rewritten to the target."""
    if device is None and optional:
        return scope.thread.device_index
    if type(device) is int:
        return device
    if isinstance(device, torch.device) and device.type == scope.kind:
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


def _is_acceptable(scope: Scope, original: Any, tensor: torch.Tensor) -> bool:
    """There is no cuDNN, whatever tensors say they are on."""
    return False


class _BenchmarkLimit:
    """``torch.backends.cudnn.benchmark_limit``, which a build without cuDNN lacks: stored for the scope."""

    def __get__(self, module: Any, owner: type) -> int | None:
        if _active.state.for_cuda is None:
            return vars(module).get("benchmark_limit")
        return torch._C._cuda_get_cudnn_benchmark_limit()

    def __set__(self, module: Any, limit: int) -> None:
        if _active.state.for_cuda is None:
            vars(module)["benchmark_limit"] = limit
        else:
            torch._C._cuda_set_cudnn_benchmark_limit(limit)


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


def _list_gpu_processes(scope: Scope, original: Any, device: Any = None) -> str:
    return memory.list_processes(scope, torch.cuda._utils._get_device_index(device, optional=True))


def _device_memory_used(scope: Scope, original: Any, device: Any = None) -> int:
    index = torch.cuda._utils._get_device_index(device, optional=True)
    memory.report(scope, "torch.cuda.device_memory_used")
    return scope.runtime.memory(scope.device(index).index or 0).reserved


_READING = "It is a reading of NVIDIA's management library, which knows no stand-in. Leave it out, or ask psutil."


def _refuses(owner: Any, name: str, remedy: str) -> Replaced:
    """Return the patch of a name that has no honest equivalent."""

    def refuse(scope: Scope, original: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupportedError(f"{owner.__module__ if isinstance(owner, type) else owner.__name__}.{name}", remedy)

    return replaced_function(owner, name, refuse, family="cuda")


_DIVIDES = "It divides a GPU's multiprocessors. Leave it out; the work runs on the whole target."


def _green_contexts() -> list[Patch]:
    """Return the patches of what makes green contexts, which differs between versions of torch."""
    module = torch.cuda.green_contexts
    found: list[Patch] = [_refuses(module, name, _DIVIDES) for name in _LOCALITIES if hasattr(module, name)]
    for cls_name, constructor in (("GreenContext", "create"), ("SMPartition", "from_device")):
        cls = getattr(module, cls_name, None)
        if hasattr(cls, constructor):
            make = _refuses(cls, constructor, _DIVIDES).make
            found.append(Replaced(cls, constructor, lambda original, make=make: staticmethod(make(original))))
    return found


_LOCALITIES = ("get_num_locality_domains", "is_localization_supported")


def _reduce_add(scope: Scope, original: Any, inputs: Any, destination: Any = None) -> torch.Tensor:
    if not scope.runtime.shares_host_memory:
        return original(inputs, destination)
    return collectives.reduced(inputs)


def patches() -> list[Patch]:
    """Return the patches of ``torch.cuda``'s globals."""
    cudnn = type(torch.backends.cudnn)
    lacks_limit = vars(cudnn).get("benchmark_limit") is None
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes it as an attribute
    return [
        Replaced(torch.cuda, "_initialized", InitializedFlag),
        Replaced(torch.cuda, "_cached_device_count", lambda _: None),
        Replaced(torch.cuda, "_cudart", Cudart),
        Replaced(torch.cuda.nvtx, "_nvtx", _NvtxByScope),
        Replaced(
            torch.cuda,
            "_get_device_properties",
            lambda original: per_scope(original or _uninitialized, _device_properties, family="cuda"),
            may_be_absent=True,
        ),
        Callback(lambda: None, require(torch.cuda, "_check_bf16_tensor_supported").cache_clear),
        replaced_function(torch.cuda, "utilization", _utilization, family="cuda"),
        *(_refuses(torch.cuda, name, _READING) for name in ("temperature", "power_draw", "clock_rate", "memory_usage")),
        replaced_function(torch.cuda, "device_memory_used", _device_memory_used, family="cuda"),
        *([Replaced(cudnn, "benchmark_limit", lambda _: _BenchmarkLimit())] if lacks_limit else []),
        *_green_contexts(),
        replaced_function(torch.nn.parallel.comm, "reduce_add", _reduce_add, family="cuda"),
        replaced_function(torch.cuda.comm, "reduce_add", _reduce_add, family="cuda"),
        replaced_everywhere(torch.cuda.memory, "list_gpu_processes", _list_gpu_processes, family="cuda"),
        replaced_function(torch.backends.cudnn, "is_acceptable", _is_acceptable, family="cuda"),
        replaced_function(torch.backends.cudnn, "version", _cudnn_version, family="cuda"),
        replaced_function(torch._utils, "_get_current_device_index", _current_index, family="cuda"),
        replaced_everywhere(torch.accelerator._utils, "_get_device_index", _accelerator_index, family="cuda"),
        replaced_everywhere(torch.cuda.random, "set_rng_state", _set_rng_state, family="cuda"),
        replaced_function(torch, "get_device_module", _get_device_module, family="cuda"),
        replaced_everywhere(torch.cuda._utils, "_get_device_index", get_device_index, family="cuda"),
        replaced_everywhere(optimizer, "_get_capturable_supported_devices", _capturable_devices, family="cuda"),
    ]
