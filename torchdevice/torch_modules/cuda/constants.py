"""Names that are equal on all stand-in devices: constants, versions, and names that raise.

``_UNSUPPORTED`` lists names without an equivalent on a stand-in device, such as raw pointers and
allocators: names of
``torch._C``, which are supplied, and functions of torch's Python. Each raises with a remedy.
"""

from __future__ import annotations

import copy
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
import torch.cuda.nccl

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import asked, replaces, supplied_function, supplied_value
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import without_original


def _supply(name: str, fidelity: Fidelity, value: Any, note: str) -> None:
    def constant(context: Context) -> Any:
        # A copy, since the program may change a table that it gets.
        return copy.deepcopy(value)

    constant.__doc__ = note
    if "." in name:
        supplied_value(name, fidelity)(constant)
        return
    prefix = name.split("_")[1]
    supplied_function(
        name, fidelity, note=note, native_to=prefix if prefix in FAMILIES else "cuda"
    )(constant)


_NO_HOST_MEMORY = {
    "allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "allocated_bytes": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "active_requests": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "active_bytes": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
    "num_host_alloc": 0,
    "num_host_free": 0,
    "host_alloc_time": {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0},
    "host_free_time": {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0},
}

_CONSTANTS: Mapping[Fidelity, Mapping[str, tuple[Any, str]]] = {
    Fidelity.EXACT: {
        "torch._C._has_cuda": (
            True,
            "Return True, so that ``torch.backends.cuda.is_built()`` does.",
        ),
        "torch._C._has_gds": (False, "Return False: files cannot be read into storages."),
        "_cuda_getAllocatorBackend": (
            "native",
            'Return `"native"`, the name of CUDA\'s default allocator.',
        ),
        "_cuda_hostMemoryStats": (
            _NO_HOST_MEMORY,
            "Return zeros: no page-locked host memory is allocated.",
        ),
        "_cuda_memoryMetadataSupported": (False, "Return False: recorded events carry no labels."),
        "_cuda_resetAccumulatedHostMemoryStats": (None, "Do nothing: the figures are always 0."),
        "_cuda_resetPeakHostMemoryStats": (None, "Do nothing: the figures are always 0."),
        "_mps_isCaptureEnabled": (False, "Return False: there is no Metal to capture."),
        "_mps_isCapturing": (False, "Return False: there is no Metal to capture."),
        "_xpu_getArchFlags": (None, "Return None: no code for a GPU was compiled."),
    },
    Fidelity.DECLARED: {
        "torch._C._has_cudnn": (
            True,
            "Return True, so that ``torch.backends.cudnn`` lets programs set its flags.",
        )
    },
    Fidelity.INERT: {
        "_cuda_clearCublasWorkspaces": (None, "there are no cuBLAS workspaces"),
        "_cuda_ipc_collect": (None, "no memory is shared by CUDA IPC"),
        "_cuda_lock_mutex": (None, "there is no allocator to lock"),
        "_cuda_unlock_mutex": (None, "there is no allocator to unlock"),
        "_host_emptyCache": (None, "no page-locked host memory is cached"),
        "_mps_profilerStopTrace": (None, "there are no OS signposts"),
        "_mps_stopCapture": (None, "there is no Metal to capture"),
    },
}
"""Names of ``torch._C``, by fidelity, with a value and what the coverage and the report say of it.

A dotted name is the value itself, another one a function that returns it.
"""

for _fidelity, _rows in _CONSTANTS.items():
    for _name, (_value, _note) in _rows.items():
        _supply(_name, _fidelity, _value, _note)


CUDA = "12.8"
"""The version in a build of torch without CUDA."""


@supplied_value("torch.version.cuda", Fidelity.DECLARED)
def cuda(context: Context) -> str:
    """Return the CUDA version of the build, or 12.8 in a build without CUDA."""
    return vars(torch.version).get("cuda") or CUDA


@supplied_function("_cuda_getCompiledVersion", Fidelity.DECLARED)
def get_compiled_version(context: Context) -> int:
    """Return the CUDA version as a number, such as 12080 for 12.8."""
    major, minor = (int(part) for part in cuda(context).split(".")[:2])
    return 1000 * major + 10 * minor


NCCL = "2.27.3"
"""The version of NCCL whose rules and texts process groups have."""


@supplied_function("_nccl_version", Fidelity.DECLARED)
def nccl_version(context: Context) -> int:
    """Return NCCL 2.27.3 as one packed number."""
    major, minor, patch = map(int, NCCL.split("."))
    return major << 32 | minor << 16 | patch


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""


# False: torch sums several devices' tensors without NCCL, whose collectives are refused.
replaces(torch.cuda.nccl, "is_available")(lambda *_: False)


POOL = (
    "Memory pools and pluggable allocators replace the accelerator's allocator. Leave them out; "
    "tensors are allocated as usual."
)
"""The remedy of memory pools."""


def _refuse(name: str, remedy: str, family: str) -> None:
    """Let a function of an accelerator, by its dotted name, raise with a remedy."""

    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        named = name.removesuffix(".__init__").removesuffix(".__new__")
        thread_state.refuse(asked(named, sys._getframe(1)), remedy)

    path, _, attribute = name.rpartition(".")
    if path == "torch._C":
        supplied_function(name, Fidelity.UNSUPPORTED, note=remedy, native_to=family)(refuse)
        return
    owner = _found(path)
    # Modules import functions by value; methods are found by their class.
    of_module = isinstance(owner, ModuleType)
    replaces(owner, attribute, native_to=family, optional=True, by_value=of_module)(
        without_original(refuse)
    )


def _found(dotted: str) -> Any:
    """Return a module or class of torch; None where the installed torch lacks it."""
    try:
        return pkgutil.resolve_name(dotted)
    except AttributeError:
        return None


class _Unsupported(NamedTuple):
    """Names of an accelerator that raise.

    Attributes:
        remedy: What to do instead.
        names: The names.
        family: The accelerator that has them.
    """

    remedy: str
    names: Sequence[str]
    family: str = "cuda"


_UNSUPPORTED = (
    _Unsupported(
        "It hands out a CUDA pointer or handle. Use torch tensors and functions instead.",
        (
            "torch._C._cuda_getCurrentBlasHandle",
            "torch._C._cuda_getCurrentSolverHandle",
            "torch._C._cuda_busy_wait_for_flag",
            "torch._C._cuda_clear_flag",
            "torch._C._construct_storage_from_data_pointer",
        ),
    ),
    _Unsupported(
        POOL,
        (
            "torch._C._cuda_changeCurrentAllocator",
            "torch._C._cuda_cudaHostAllocator",
            "torch._C._cuda_customAllocator",
            "torch._C._cuda_getAllocator",
            "torch.cuda.memory.CUDAPluggableAllocator.__init__",
        ),
    ),
    _Unsupported(
        POOL,
        (
            "torch._C._xpu_changeCurrentAllocator",
            "torch._C._xpu_customAllocator",
            "torch._C._xpu_getAllocator",
            "torch.xpu.XPUPluggableAllocator.__init__",
        ),
        family="xpu",
    ),
    _Unsupported(
        (
            "Trees of CUDA graphs restore the accelerator's allocator by it, and no compiler makes "
            "them "
            "for a target. Use torch.cuda.graph or torch.cuda.make_graphed_callables."
        ),
        ("torch._C._cuda_beginAllocateCurrentStreamToPool",),
    ),
    _Unsupported(
        "It compiles or launches CUDA code. Use a torch function, or a CPU implementation.",
        ("torch._C._cuda_jiterator_compile_and_launch_kernel",),
    ),
    _Unsupported(
        "NCCL needs CUDA. Use torch.distributed, or torch.cuda.comm for the devices of one "
        "process.",
        (
            "torch._C._nccl_init_rank",
            "torch._C._nccl_unique_id",
            "torch._C._nccl_all_reduce",
            "torch._C._nccl_reduce",
            "torch._C._nccl_broadcast",
            "torch._C._nccl_all_gather",
            "torch._C._nccl_reduce_scatter",
        ),
    ),
    _Unsupported(
        "hipBLASLt is a library of ROCm. Check torch.version.hip before this call.",
        ("torch._C._cuda_getHipblasltVersion",),
    ),
    _Unsupported(
        (
            "GPUDirect Storage reads files into a GPU's memory. Read the file into a CPU tensor, "
            "such "
            "as by torch.from_file, and copy that."
        ),
        (
            "torch._C._gds_register_buffer",
            "torch._C._gds_deregister_buffer",
            "torch._C._gds_register_handle",
            "torch._C._gds_deregister_handle",
            "torch._C._gds_load_storage",
            "torch._C._gds_save_storage",
        ),
    ),
    _Unsupported(
        "TunableOp tunes products of GPU matrices, so there are no results to keep. Leave the call "
        "out.",
        (
            "torch._C._cuda_tunableop_set_filename",
            "torch._C._cuda_tunableop_get_filename",
            "torch._C._cuda_tunableop_set_numerical_check_tolerances",
            "torch._C._cuda_tunableop_get_results",
            "torch._C._cuda_tunableop_get_validators",
            "torch._C._cuda_tunableop_read_file",
            "torch._C._cuda_tunableop_clear_all",
            "torch._C._cuda_tunableop_push_dynamic_dims_mask",
            "torch._C._cuda_tunableop_pop_dynamic_dims_mask",
        ),
    ),
    _Unsupported(
        "It divides a GPU's multiprocessors. Leave it out; the work runs on the whole target.",
        (
            "torch.cuda.green_contexts.get_num_locality_domains",
            "torch.cuda.green_contexts.is_localization_supported",
            "torch.cuda.green_contexts.GreenContext.create",
            "torch.cuda.green_contexts.SMPartition.from_device",
        ),
    ),
    _Unsupported(
        "NVIDIA's management library measures it on NVIDIA's GPUs only. Leave it out, or use "
        "psutil.",
        (
            "torch.cuda.temperature",
            "torch.cuda.power_draw",
            "torch.cuda.clock_rate",
            "torch.cuda.memory_usage",
            "torch.cuda.device_memory_used",
            "torch.cuda.memory.list_gpu_processes",
        ),
    ),
    _Unsupported(
        "Intel's Level Zero measures it on Intel's GPUs only. Leave it out, or use psutil.",
        (
            "torch.xpu.temperature",
            "torch.xpu.power_draw",
            "torch.xpu.clock_rate",
            "torch.xpu.memory_usage",
            "torch.xpu.device_memory_used",
            "torch.xpu.memory.list_gpu_processes",
        ),
        family="xpu",
    ),
    _Unsupported(
        "Share an event between threads, not processes.", ("torch.cuda.Event.from_ipc_handle",)
    ),
    _Unsupported(
        "There is no graph of SYCL. Leave it out; the operators run one by one.",
        (
            "torch._C._xpu_graph_pool_handle",
            "torch.xpu.graphs._xpu_graph_pool_handle",
            "torch.xpu.XPUGraph.__new__",
        ),
        family="xpu",
    ),
    _Unsupported(
        "The history of allocations has no labels. Leave it out.",
        (
            "torch._C._cuda_annotateMemory",
            "torch._C._cuda_setMemoryMetadata",
            "torch._C._cuda_getMemoryMetadata",
        ),
    ),
    _Unsupported(
        "The history of allocations is one of programs written for CUDA. Leave it out.",
        ("torch._C._xpu_recordMemoryHistory",),
        family="xpu",
    ),
    _Unsupported(
        "A stand-in device runs all work of torch.mps in one order. Leave the stream out.",
        ("torch.mps.Stream.__new__",),
        family="mps",
    ),
    _Unsupported(
        "It needs Metal. Use a torch function, or torch.profiler to see what runs.",
        (
            "torch._C._mps_compileShader",
            "torch._C._mps_host_alias_storage",
            "torch._C._mps_loadMetallibFromPath",
            "torch._C._mps_loadMetalllib",
            "torch._C._mps_startCapture",
        ),
        family="mps",
    ),
)

for _row in _UNSUPPORTED:
    for _name in _row.names:
        _refuse(_name, _row.remedy, _row.family)
