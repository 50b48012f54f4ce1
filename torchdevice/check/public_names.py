"""The fidelity of each public name. Read by check, coverage, the docs and the tests; not by a scope.

``torch.cuda``, ``torch.mps`` and the modules beside them are torch's own Python code, which calls supplied names. So
the fidelity of most public names follows from that of supplied names. It is declared for each public name, those of
``torch.cuda`` here and those of its siblings in their own files, and a test uses each in a strict scope, where
approximate names raise and no others.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchdevice.cuda.memory import APPROXIMATE_FIGURES, LIMITS, NO_CACHE
from torchdevice.cuda.memory_history import APPROXIMATE_SNAPSHOT
from torchdevice.cuda.memory_pools import NO_ADDRESSES, NO_POOLS
from torchdevice.foundation.fidelity import Declared, Fidelity, declared
from torchdevice.installed import FAMILY_MODULES

EXACT, DECLARED, APPROXIMATE, INERT, UNSUPPORTED = (
    Fidelity.EXACT,
    Fidelity.DECLARED,
    Fidelity.APPROXIMATE,
    Fidelity.INERT,
    Fidelity.UNSUPPORTED,
)


TARGETS = ("mps", "cpu", "simulated")
"""The targets for which the fidelity of each name is declared."""


PUBLIC_NAMES: dict[str, Declared] = {}

for _module in FAMILY_MODULES:
    PUBLIC_NAMES.update(getattr(_module, "PUBLIC_NAMES", {}))


def _declare(
    module: str,
    names: str,
    note: str,
    fidelity: Fidelity = EXACT,
    on: Mapping[str, tuple[Fidelity, str]] | None = None,
) -> None:
    PUBLIC_NAMES.update(declared(module, names, note, fidelity, on))


_DTYPES = "BFloat16 Byte Char Float Half Int Long Short"


def _types(suffix: str, *more: str) -> str:
    return " ".join(f"{name}{suffix}" for name in (*_DTYPES.split(), *more))


_IN_FLOAT32 = {"mps": (APPROXIMATE, "A tensor of float32, by the policy for float64.")}


_C = "torch.cuda"


_declare(_C, _types("Tensor", "Bool"), "Make a tensor of that dtype on the target; `isinstance` tests for one.")


_declare(_C, "DoubleTensor", "Make a tensor of float64 on the target; `isinstance` tests for one.", on=_IN_FLOAT32)


_declare(f"{_C}.sparse", _types("Tensor"), "Make a sparse tensor of that dtype; `isinstance` tests for one.")


_declare(f"{_C}.sparse", "DoubleTensor", "Make a sparse tensor of float64; `isinstance` tests for one.", on=_IN_FLOAT32)


_declare(
    _C, _types("Storage", "Bool", "Double", "ComplexDouble", "ComplexFloat"), "Make a typed storage on the target."
)


_declare(_C, "is_available", "Return whether the program is written for CUDA.")


_declare(_C, "is_initialized", "Return True; False in a forked process that cannot use the device.")


_declare(_C, "init", "Check what the accelerator checks first. A stand-in device needs no initialisation.")


_declare(_C, "device_count", "Return the number of advertised devices that `CUDA_VISIBLE_DEVICES` leaves.")


_declare(_C, "device current_device set_device", "Set or return the thread's current device.")


_declare(
    _C,
    "device_of",
    "torch's own. It selects a device only where the target's tensors report `is_cuda`: under `identity='program'`.",
    INERT,
)


_declare(_C, "synchronize", "Wait for the target's work.")


_declare(_C, "get_device_name", "Return the target's name, or that of `properties=`.")


_declare(
    _C,
    "get_device_properties",
    "Return the target's name, memory and number of processors, constants of compute capability 8.0 for the other "
    "fields, and the fields of `properties=`.",
    DECLARED,
)


_declare(
    _C,
    "get_device_capability get_arch_list get_gencode_flags is_tf32_supported",
    "Follow from `capability=`, by default (8, 0).",
    DECLARED,
)


_declare(
    _C,
    "is_bf16_supported",
    "Return True from compute capability 8.0 on; below it, whether the target can hold a bfloat16 tensor.",
    DECLARED,
)


_declare(_C, "can_device_access_peer", "Return True for two different devices: tensors can be copied between them.")


_declare(_C, "has_half has_magma CudaError DeferredCudaCallError cudaStatus check_error", "torch's own.")


_declare(
    _C,
    "cudart",
    "Return functions for memory figures and the profiler; others raise `NotSupportedError`.",
)


_declare(_C, "ipc_collect", "No effect: no memory is shared by CUDA IPC.", INERT)


_declare(_C, "set_sync_debug_mode get_sync_debug_mode", "Store and return the mode; nothing is checked.", INERT)


_declare(_C, "utilization", "Return the CPU's utilization.", APPROXIMATE)


_declare(_C, "device_memory_used", "Return the bytes that the process has reserved.", EXACT, APPROXIMATE_FIGURES)


_declare(_C, "temperature power_draw clock_rate memory_usage", "Need NVIDIA's management library.", UNSUPPORTED)


_declare(
    _C,
    "Stream StreamContext stream set_stream",
    "Make streams and select a thread's current one. All streams of a target run their work in one order.",
)


_declare(_C, "current_stream", "Return the thread's current stream of a device.")


_declare(_C, "default_stream", "Return stream 0 of a device.")


_declare(
    _C,
    "ExternalStream get_stream_from_external",
    "Return the stream of a handle that `Stream.cuda_stream` gave; other pointers raise.",
)


_declare(
    _C,
    "Event",
    "Record a point in the target's work, with real times and CUDA's errors.",
    on={"mps": (EXACT, "Record an event of `torch.mps`.")},
)


_declare(_C, "CUDAGraph graph", "Record operators once and run them again, into the memory of the recorded results.")


_declare(_C, "make_graphed_callables", "Make graphs of the forward and backward passes.")


_declare(_C, "graph_pool_handle", "Return a new identifier of a pool.")


_declare(_C, "is_current_stream_capturing", "Return whether this thread captures a graph.")


_declare(
    _C, "export_dot export_graph_data", "Raise when torch calls it as a hook: there is no CUDA graph.", UNSUPPORTED
)


_declare(
    f"{_C}.graph_annotations",
    "is_available mark_kernels get_kernel_annotations clear_kernel_annotations get_kernel_py_stacks "
    "dump_kernel_py_stacks",
    "torch's own: no kernel is annotated without CUDA's bindings.",
)


_declare(_C, "GreenContext", "Divide a GPU's multiprocessors.", UNSUPPORTED)


_declare(
    f"{_C}.green_contexts",
    "SMPartition get_num_locality_domains is_localization_supported",
    "Divide a GPU's multiprocessors.",
    UNSUPPORTED,
)


_FIGURES = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "memory_stats memory_stats_as_nested_dict memory_summary"
)


_declare(_C, _FIGURES, "Return the figures of the target's allocator.", EXACT, APPROXIMATE_FIGURES)


_declare(_C, "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached", "Reset the peaks.")


_declare(_C, "reset_accumulated_memory_stats", "Reset the sums of allocations, where the target keeps such sums.")


_declare(_C, "mem_get_info", "Return the free and the total bytes of the memory in which the target computes.")


_declare(_C, "memory_snapshot", "Return the blocks in use.", EXACT, APPROXIMATE_SNAPSHOT)


_declare(_C, "list_gpu_processes", "Return the memory of this process and, on a CPU, of its children.")


_declare(_C, "empty_cache", "Release the target's unused cached memory.")


_declare(_C, "host_memory_stats host_memory_stats_as_nested_dict", "Return zeros: no page-locked memory is allocated.")


_declare(
    _C,
    "reset_peak_host_memory_stats reset_accumulated_host_memory_stats",
    "No effect: the figures are always 0.",
)


_declare(
    _C,
    "set_per_process_memory_fraction",
    "Set a limit, beyond which allocations raise `torch.cuda.OutOfMemoryError`.",
    EXACT,
    LIMITS,
)


_declare(_C, "get_per_process_memory_fraction", "Return the fraction that was set.")


_declare(_C, "get_allocator_backend", "Return `native`.", DECLARED)


_declare(
    _C,
    "caching_allocator_enable caching_allocator_disabled",
    "Enable and disable the allocator.",
    on=NO_CACHE,
)


_declare(
    _C,
    "change_current_allocator CUDAPluggableAllocator",
    "Replace CUDA's allocator.",
    UNSUPPORTED,
)


_declare(
    _C,
    "caching_allocator_alloc caching_allocator_delete",
    "Allocate and free memory by its address.",
    on=NO_ADDRESSES,
)


_declare(_C, "MemPool use_mem_pool", "Allocate from a pool of the program's own.", on=NO_POOLS)


_declare(_C, "default_generators", "Hold the target's default generators.")


_declare(
    _C,
    "get_rng_state get_rng_state_all set_rng_state set_rng_state_all",
    "Return and set the state of the target's generator.",
)


_declare(
    _C,
    "manual_seed manual_seed_all seed seed_all initial_seed",
    "Seed the target's generator, or return its seed. Its numbers differ from CUDA's.",
)


_declare(_C, "current_blas_handle current_solver_handle", "Return pointers of CUDA libraries.", UNSUPPORTED)


_declare(f"{_C}.jiterator", "_create_jit_fn", "Compile CUDA code.", UNSUPPORTED)


_declare(
    f"{_C}.amp",
    "autocast custom_fwd custom_bwd",
    "Enable autocast of the target; on a CPU float16 becomes bfloat16.",
)


_declare(f"{_C}.amp", "GradScaler amp_definitely_not_available", "torch's own, on the target's tensors.")


_declare(f"{_C}.comm", "broadcast broadcast_coalesced scatter gather", "Copy between the scope's devices.")


_declare(f"{_C}.comm", "reduce_add reduce_add_coalesced", "Sum in the order of the devices.")


_declare(
    f"{_C}.gds",
    "GdsFile gds_register_buffer gds_deregister_buffer is_available",
    "Read and write files through the CPU's memory.",
)


_declare(
    f"{_C}.nccl",
    "all_reduce reduce broadcast all_gather reduce_scatter",
    "Copy and reduce between the devices of one process.",
)


_declare(
    f"{_C}.nvtx",
    "mark range range_push range_pop range_start range_end",
    "Make a range or marker, which `torch.profiler` shows as a `record_function` range.",
    INERT,
)


_declare(f"{_C}.profiler", "start stop profile", "No effect on the target: use `torch.profiler`.")


_declare(f"{_C}.profiler", "init", "Raise torch's own error: it configures NVIDIA's profiler.", UNSUPPORTED)


_declare(
    f"{_C}.tunable",
    "enable tuning_enable record_untuned_enable wildcard_fallback_enable set_max_tuning_duration "
    "set_max_tuning_iterations set_cublaslt_requested_algo_count set_rotating_buffer_size set_filename "
    "set_numerical_check_tolerances dynamic_dims_mask tune_gemm_in_file mgpu_tune_gemm_in_file",
    "Store or ignore the setting: TunableOp tunes products of GPU matrices.",
    INERT,
)


_declare(
    f"{_C}.tunable",
    "is_enabled tuning_is_enabled record_untuned_is_enabled wildcard_fallback_is_enabled get_max_tuning_duration "
    "get_max_tuning_iterations get_cublaslt_requested_algo_count get_rotating_buffer_size get_filename",
    "Return the setting that was stored, or CUDA's default.",
    DECLARED,
)


_declare(f"{_C}.tunable", "get_results", "Return no results: no operation is tuned.")


_declare(f"{_C}.tunable", "get_validators", "Return torch's version.")


_declare(f"{_C}.tunable", "read_file", "Return False: no results are read.")


_declare(
    f"{_C}._sanitizer",
    "enable_cuda_sanitizer",
    "No effect: all streams run their work in one order, so there are no races.",
    INERT,
    {"simulated": (EXACT, "torch's own. It is told of every stream, event, kernel and block.")},
)


_declare(
    f"{_C}._memory_viz",
    "segments memory compare",
    "torch's own, for snapshots of a scope.",
    EXACT,
    APPROXIMATE_SNAPSHOT,
)


_B = "torch.backends.cuda"


_declare(_B, "is_built", "Return True.")


_declare(_B, "matmul cuBLASModule", "torch's own flags, stored and read back. No operator rounds to TF32.")


_declare(
    _B,
    "cufft_plan_cache cuFFTPlanCache cuFFTPlanCacheAttrContextProp cuFFTPlanCacheManager",
    "Store and return the size of the cache.",
)


_declare(
    _B,
    "preferred_linalg_library preferred_blas_library",
    "Store and return the library. The target uses its only one.",
    INERT,
)


_declare(_B, "preferred_rocm_fa_library is_ck_sdpa_available", "torch's own, for ROCm.")


_declare(_B, "cublas_workspace_size cublaslt_workspace_size blas_workspace_size", "Store and return the size.", INERT)


_declare(
    _B,
    "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp flash_sdp_enabled "
    "mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled allow_fp16_bf16_reduction_math_sdp "
    "fp16_bf16_reduction_math_sdp_allowed sdp_kernel",
    "torch's own flags. Attention runs a kernel that the target has.",
)


_declare(
    _B, "SDPAParams can_use_flash_attention can_use_efficient_attention is_flash_attention_available", "torch's own."
)


_declare(_B, "can_use_cudnn_attention", "Return False: there is no cuDNN.")


_declare("torch.backends.cudnn", "is_available", "Return True. No operator runs on cuDNN.", DECLARED)


_declare("torch.backends.cudnn", "version", "Return version 9.10.2.", DECLARED)


_declare("torch.backends.cudnn", "is_acceptable", "Return False: there is no cuDNN.")


_declare("torch.backends.cudnn", "flags set_flags", "torch's own flags, stored and read back.", INERT)


_declare("torch.version", "cuda", "The CUDA version of the build, or 12.8 in a build without CUDA.", DECLARED)


for _module in FAMILY_MODULES:
    for _name in getattr(_module, "AS_IN_CUDA", "").split():
        PUBLIC_NAMES[f"torch.{_module.__name__.rpartition('.')[2]}.{_name}"] = PUBLIC_NAMES[f"{_C}.{_name}"]


_SANITIZERS_OWN = """
    TK TVa TVb AccessType Access SynchronizationError UnsynchronizedAccessError CUDASanitizerErrors TensorInfo
    StreamSynchronizations EventHandler zip_by_key zip_arguments ArgumentHandler CUDASanitizerDispatchMode
    CUDASanitizer cuda_sanitizer
"""


_HOOKS = "capture_start capture_end destroy instantiate replay_start replay_end"


UNTOUCHED = frozenset(
    {
        "torch.cuda._memory_viz.format_flamegraph",
        *(f"torch.cuda._sanitizer.{name}" for name in _SANITIZERS_OWN.split()),
        *(f"torch.cuda.graphs.register_graph_{name}_hook" for name in _HOOKS.split()),
    }
)
"""Names that use no device. In a scope they are torch's own objects."""
