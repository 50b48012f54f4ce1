"""Names of accelerators without an equivalent on a stand-in device, such as raw pointers.

They are names of ``torch._C``, which are supplied, and functions of torch's Python. Each raises an
error with a remedy.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import asked, replaces, supplied_function
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import without_original

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
            "them for a target. Use torch.cuda.graph or torch.cuda.make_graphed_callables."
        ),
        ("torch._C._cuda_beginAllocateCurrentStreamToPool",),
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
            "such as by torch.from_file, and copy that."
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
