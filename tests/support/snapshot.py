"""Snapshots of torch in this process, by which a test finds out whether anything changed."""

from __future__ import annotations

import concurrent.futures
import operator
import signal
import sys
import threading
from types import ModuleType
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.cuda.comm
import torch.cuda.green_contexts
import torch.distributed
import torch.jit
import torch.nn.parallel
import torch.profiler
import torch.utils._device
import torch.utils.data
from torch.overrides import _get_current_function_mode_stack

MODULES = [
    torch,
    torch._C,
    torch._C._nn,
    torch._utils,
    torch.accelerator,
    torch.amp.autocast_mode,
    torch.autograd,
    torch.autograd.graph,
    torch.backends.cuda,
    torch.backends.cudnn,
    torch.backends.mps,
    torch.cuda,
    torch.cuda._utils,
    torch.cuda.comm,
    torch.cuda.graphs,
    torch.cuda.green_contexts,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.cuda.streams,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch.fft,
    torch.fx.node,
    torch.jit,
    torch.mps,
    torch.nested,
    torch.nn.functional,
    torch.nn.parallel.comm,
    torch.serialization,
    torch.storage,
    torch.utils._device,
    torch.utils.data.dataloader,
    torch.version,
    torch.xpu,
    torch.xpu._utils,
    sys.modules["torch.nn.parallel.data_parallel"],
    sys.modules["torch.nn.parallel.distributed"],
    threading,
    concurrent.futures.thread,
]

CLASSES = [
    torch.device,
    torch.Tensor,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.TypedStorage,
    torch.UntypedStorage,
    torch.amp.autocast_mode.autocast,
    torch.amp.GradScaler,
    torch.autograd.graph.saved_tensors_hooks,
    torch.cuda.Event,
    torch.cuda.ExternalStream,
    torch.cuda.Stream,
    torch.cuda.GreenContext,
    torch.cuda.CUDAGraph,
    torch.cuda.MemPool,
    torch.cuda.memory.CUDAPluggableAllocator,
    torch.autograd.profiler.profile,
    torch.autograd.profiler.emit_nvtx,
    torch.jit.RecursiveScriptModule,
    torch.mps.Event,
    torch.profiler.profiler._KinetoProfile,
    torch.xpu.Event,
    torch.xpu.Stream,
    type(torch.backends.cudnn),
    torch.nn.DataParallel,
    torch.nn.parallel.DistributedDataParallel,
    torch.utils._device.DeviceContext,
    torch.utils.data.DataLoader,
    threading.Thread,
    concurrent.futures.ThreadPoolExecutor,
]

# Names that torch itself changes when it is used, also without a scope.
OWN_LIFE = {
    ("torch", "_dynamo"),
    ("torch", "_inductor"),
    ("torch", "onnx"),
    ("torch", "export"),
    ("torch", "manual_seed"),
    ("torch", "compile"),
    ("torch.cuda", "_queued_calls"),
    ("torch.jit", "_get_trace_graph"),  # Dynamo replaces these three when it is imported
    ("torch.jit", "trace"),
    ("torch.jit", "trace_module"),
    ("torch.distributed", "_spmd_types_available"),
    ("torch.utils.data.dataloader", "_persistent_workers_atexit_registered"),
    ("torch.utils.data.dataloader.DataLoader", "__delattr__"),  # replaced by Lightning
    ("threading", "_active"),
    ("threading", "_dangling"),
    ("threading", "_limbo"),
    ("threading", "_counter"),
    ("concurrent.futures.thread", "_threads_queues"),
}


def of_thread() -> dict[str, Any]:
    """Return what torch keeps for this thread, and how its process answers an interrupt.

    torch keeps whether autograd records, and which dispatch keys are left out.
    """
    return {
        "interrupt": signal.getsignal(signal.SIGINT),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "excluded keys": str(torch._C._dispatch_tls_local_exclude_set()),
    }


def take() -> dict[str, Any]:
    """Return a snapshot that compares equal to another one if nothing changed."""
    return {
        "members": {owner: dict(vars(owner)) for owner in (*MODULES, *CLASSES)},
        "module types": {module.__name__: type(module) for module in MODULES},
        "packages": list(torch.serialization._package_registry),
        "function modes": list(_get_current_function_mode_stack()),
        "autocast": {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps")},
        "included keys": str(torch._C._dispatch_tls_local_include_set()),
        "excluded keys": str(torch._C._dispatch_tls_local_exclude_set()),
        "autocast dtype": {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda", "mps")},
        "default dtype": torch.get_default_dtype(),
        "flags": {name: getattr(torch._C, name)() for name in _FLAGS},
        "visible": {
            "is_available": torch.cuda.is_available(),
            "is_initialized": torch.cuda.is_initialized(),
            "device_count": torch.cuda.device_count(),
            "version": torch.version.cuda,
            "binding": hasattr(torch._C, "_cuda_getDeviceCount"),
            "accelerator": torch.accelerator.is_available(),
            "mps": (torch.backends.mps.is_available(), torch.mps._default_mps_generator is None),
            "xpu": (torch.xpu.is_available(), torch.xpu.is_initialized()),
        },
    }


_FLAGS = (
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_mkldnn_enabled",
    "_get_nnpack_enabled",
    "_get_deterministic_algorithms",
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
)
"""The process's flags that choose kernels, by the functions of ``torch._C`` that read them."""


PRECISIONS = [
    ("generic", "all"),
    *(
        (backend, kind)
        for backend in ("cuda", "mkldnn")
        for kind in ("all", "matmul", "conv", "rnn")
    ),
]
"""Backends and kinds of operators that have a precision of float32 arithmetic. The first ones hold
for the others.
"""


def precisions() -> list[str]:
    """Return the process's float32 precisions, which programs and the Trainer set."""
    return [torch._C._get_fp32_precision_getter(*each) for each in PRECISIONS]


def restore_precisions(before: list[str]) -> None:
    """Restore changed precisions only: torch counts a setting as a use of newer flags."""
    if precisions() == before:
        return
    # torch has an older flag for the same, refuses to read it where the two differ, and sets each
    # with the other.
    torch.set_float32_matmul_precision("highest")
    for _ in range(2):
        for each, value in zip(PRECISIONS, before, strict=True):
            torch._C._set_fp32_precision_setter(*each, value)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return changes, one per line, without names of submodules that torch imported."""
    found = [
        f"{part}: {value!r} -> {after[part]!r}"
        for part, value in before.items()
        if part != "members" and value != after[part]
    ]
    for owner, members in before["members"].items():
        now = after["members"][owner]
        # By identity, as some replacements equal the originals; `all(map())` is fast if all agree.
        if len(now) != len(members) or not all(map(operator.is_, members.values(), now.values())):
            found += _changed_members(_name_of(owner), members, now)
    return found


def _name_of(owner: Any) -> str:
    return (
        owner.__name__
        if isinstance(owner, ModuleType)
        else f"{owner.__module__}.{owner.__qualname__}"
    )


def _changed_members(owner: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = []
    for name in before.keys() | after.keys():
        old, new = before.get(name, _GONE), after.get(name, _GONE)
        if (
            old is new
            or (owner, name) in OWN_LIFE
            or name in _PYTHONS_OWN
            or _is_one_of(old, ModuleType)
        ):
            continue
        if old is _GONE:
            if not (_is_one_of(new, ModuleType) or f"{owner}.{name}" in sys.modules):
                found.append(f"{owner}.{name} is new")
        elif not _is_one_of(old, int, float, str):
            found.append(f"{owner}.{name} is another object")
        elif not name.startswith("__") and repr(old) != repr(new):
            found.append(f"{owner}.{name}: {old!r} -> {new!r}")
    return found


_GONE = object()

_PYTHONS_OWN = ("__warningregistry__", "__slotnames__")


def _is_one_of(value: Any, *types: type) -> bool:
    """Like isinstance, without asking for ``__class__``, which warns in torch at times."""
    return issubclass(type(value), types)
