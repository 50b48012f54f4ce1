"""How faithful each public name is. For the documentation and the tests; nothing at run time reads this.

``torch.cuda``, ``torch.mps`` and their neighbours are torch's own Python on what this package supplies, so most of
their names are as faithful as what they stand on. Here that is said name by name, and a test uses each of them in a
strict scope, where an approximate name raises, to see that it is so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchdevice.cuda.memory import APPROXIMATE_FIGURES, LIMITS
from torchdevice.cuda.memory_history import APPROXIMATE_SNAPSHOT
from torchdevice.fidelity import Fidelity

EXACT, DECLARED, APPROXIMATE, INERT, UNSUPPORTED = (
    Fidelity.EXACT,
    Fidelity.DECLARED,
    Fidelity.APPROXIMATE,
    Fidelity.INERT,
    Fidelity.UNSUPPORTED,
)


TARGETS = ("mps", "cpu", "simulated")
"""The targets for which each name says what it does."""


class Declared(NamedTuple):
    """How faithful a public name is.

    Attributes:
        fidelity: How close it comes to the family's own device.
        note: What it does.
        on: The same for the targets where it differs.
    """

    fidelity: Fidelity
    note: str
    on: Mapping[str, tuple[Fidelity, str]] = {}


PUBLIC_NAMES: dict[str, Declared] = {}


def _declare(
    module: str,
    names: str,
    note: str,
    fidelity: Fidelity = EXACT,
    on: Mapping[str, tuple[Fidelity, str]] | None = None,
) -> None:
    for name in names.split():
        PUBLIC_NAMES[f"{module}.{name}"] = Declared(fidelity, note, on or {})


_TENSORS = "BFloat16 Byte Char Double Float Half Int Long Short"


def _types(suffix: str, *more: str) -> str:
    return " ".join(f"{name}{suffix}" for name in (*_TENSORS.split(), *more))


_C = "torch.cuda"


_declare(_C, _types("Tensor", "Bool"), "A tensor of that dtype on the target; `isinstance` asks for one.")


_declare(f"{_C}.sparse", _types("Tensor"), "A sparse tensor of that dtype on the target; `isinstance` asks for one.")


_declare(_C, _types("Storage", "Bool", "ComplexDouble", "ComplexFloat"), "A typed storage on the target.")


_declare(_C, "is_available", "True in a scope of a program written for CUDA.")


_declare(_C, "is_initialized init", "CUDA counts as initialised; nothing is.")


_declare(_C, "device_count", "The devices the scope advertises, as `CUDA_VISIBLE_DEVICES` shapes them.")


_declare(_C, "device current_device set_device", "The current device of the thread, among the advertised.")


_declare(
    _C, "device_of", "torch's own: it selects no device, for the target's tensors say that `is_cuda` is false.", INERT
)


_declare(_C, "synchronize", "Waits for the target's work.")


_declare(_C, "get_device_name", "The target's name, or `properties={'name': ...}`.")


_declare(
    _C,
    "get_device_properties",
    "The target's name, memory and number of processors, constants of compute capability 8.0 for the other fields, or "
    "what `properties=` sets.",
    DECLARED,
)


_declare(
    _C,
    "get_device_capability get_arch_list get_gencode_flags is_tf32_supported",
    "What follows from `capability=`, which is (8, 0) if it is not given.",
    DECLARED,
)


_declare(
    _C,
    "is_bf16_supported",
    "True from compute capability 8.0; below it, whether the target can hold a bfloat16 tensor.",
    DECLARED,
)


_declare(_C, "can_device_access_peer", "True for two different devices: tensors can be copied between them.")


_declare(_C, "has_half has_magma CudaError DeferredCudaCallError cudaStatus check_error", "torch's own.")


_declare(_C, "cudart", "Memory figures and the profiler's switches; other functions raise `NotSupportedError`.")


_declare(_C, "ipc_collect", "Nothing to collect.", INERT)


_declare(_C, "set_sync_debug_mode get_sync_debug_mode", "Stored and read back; nothing is checked.", INERT)


_declare(_C, "utilization", "The processor's utilization.", APPROXIMATE)


_declare(_C, "device_memory_used", "What the process has reserved.", EXACT, APPROXIMATE_FIGURES)


_declare(_C, "temperature power_draw clock_rate memory_usage", "Readings of NVIDIA's library.", UNSUPPORTED)


_declare(_C, "Stream StreamContext stream set_stream", "A name for an order that is kept anyway; current per thread.")


_declare(_C, "current_stream default_stream", "The thread's current stream of a device; stream 0.")


_declare(_C, "ExternalStream get_stream_from_external", "The default stream for a null pointer; others raise.")


_declare(
    _C,
    "Event",
    "A point in the target's work, with real times and CUDA's errors.",
    on={"mps": (EXACT, "An event of `torch.mps`.")},
)


_declare(_C, "CUDAGraph graph", "Operators are noted once and run again, into the same memory.")


_declare(_C, "make_graphed_callables", "Forward and backward as such graphs.")


_declare(_C, "graph_pool_handle", "A fresh identifier, from which nothing allocates.")


_declare(_C, "is_current_stream_capturing", "Whether this thread captures a graph.")


_declare(_C, "export_dot export_graph_data", "There is no CUDA graph to look into; said at its capture.", UNSUPPORTED)


_declare(
    f"{_C}.graph_annotations",
    "is_available mark_kernels get_kernel_annotations clear_kernel_annotations get_kernel_py_stacks "
    "dump_kernel_py_stacks",
    "torch's own: without CUDA's bindings nothing is annotated.",
)


_declare(_C, "GreenContext", "It divides a GPU's multiprocessors.", UNSUPPORTED)


_declare(
    f"{_C}.green_contexts", "SMPartition get_num_locality_domains is_localization_supported", "As above.", UNSUPPORTED
)


_FIGURES = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached "
    "memory_stats memory_stats_as_nested_dict memory_summary"
)


_declare(_C, _FIGURES, "The allocator's own figures.", EXACT, APPROXIMATE_FIGURES)


_declare(_C, "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached", "Peaks start again.")


_declare(_C, "reset_accumulated_memory_stats", "Sums start again, where any are kept.")


_declare(_C, "mem_get_info", "Free and total bytes of the memory the target computes in.")


_declare(_C, "memory_snapshot", "The blocks in use.", EXACT, APPROXIMATE_SNAPSHOT)


_declare(_C, "list_gpu_processes", "This process (and, on a CPU, its children) and its memory.")


_declare(_C, "empty_cache", "Gives the target's unused memory back.")


_declare(_C, "host_memory_stats host_memory_stats_as_nested_dict", "Zeros: no page-locked memory is allocated.")


_declare(_C, "reset_peak_host_memory_stats reset_accumulated_host_memory_stats", "Nothing to reset.")


_declare(_C, "set_per_process_memory_fraction", "A limit that raises `torch.cuda.OutOfMemoryError`.", EXACT, LIMITS)


_declare(_C, "get_per_process_memory_fraction", "The fraction that was set.")


_declare(_C, "get_allocator_backend", "`native`.", DECLARED)


_declare(_C, "caching_allocator_enable caching_allocator_disabled", "Stored; there is no caching allocator.", INERT)


_declare(
    _C,
    "caching_allocator_alloc caching_allocator_delete change_current_allocator CUDAPluggableAllocator MemPool "
    "use_mem_pool",
    "Raw memory, pools and allocators; tensors are allocated as usual without.",
    UNSUPPORTED,
)


_declare(_C, "default_generators", "The target's default generators.")


_declare(_C, "get_rng_state get_rng_state_all set_rng_state set_rng_state_all", "The state of the target's generator.")


_declare(_C, "manual_seed manual_seed_all seed seed_all initial_seed", "Seeds the target's generator; its own numbers.")


_declare(_C, "current_blas_handle current_solver_handle", "Pointers of CUDA libraries.", UNSUPPORTED)


_declare(f"{_C}.jiterator", "_create_jit_fn", "It compiles CUDA code.", UNSUPPORTED)


_declare(f"{_C}.amp", "autocast custom_fwd custom_bwd", "The target's autocast; float16 becomes bfloat16 on a CPU.")


_declare(f"{_C}.amp", "GradScaler amp_definitely_not_available", "torch's own, on the target's tensors.")


_declare(f"{_C}.comm", "broadcast broadcast_coalesced scatter gather", "Copies between the scope's devices.")


_declare(f"{_C}.comm", "reduce_add reduce_add_coalesced", "Sums in the order of the devices.")


_declare(f"{_C}.gds", "GdsFile gds_register_buffer gds_deregister_buffer is_available", "Files, by way of the CPU.")


_declare(f"{_C}.nccl", "all_reduce reduce broadcast all_gather reduce_scatter", "Between the devices of one process.")


_declare(
    f"{_C}.nvtx",
    "mark range range_push range_pop range_start range_end",
    "Shown by `torch.profiler` as `record_function`.",
    INERT,
)


_declare(f"{_C}.profiler", "start stop profile", "Nothing to start: use `torch.profiler`.")


_declare(f"{_C}.profiler", "init", "torch's own error: its files are NVIDIA's.", UNSUPPORTED)


_declare(
    f"{_C}.tunable",
    "enable tuning_enable record_untuned_enable wildcard_fallback_enable set_max_tuning_duration "
    "set_max_tuning_iterations set_cublaslt_requested_algo_count set_rotating_buffer_size set_filename "
    "set_numerical_check_tolerances dynamic_dims_mask tune_gemm_in_file mgpu_tune_gemm_in_file",
    "Stored or ignored: TunableOp tunes products of GPU matrices.",
    INERT,
)


_declare(
    f"{_C}.tunable",
    "is_enabled tuning_is_enabled record_untuned_is_enabled wildcard_fallback_is_enabled get_max_tuning_duration "
    "get_max_tuning_iterations get_cublaslt_requested_algo_count get_rotating_buffer_size get_filename",
    "What was stored, CUDA's default before.",
    DECLARED,
)


_declare(f"{_C}.tunable", "get_results get_validators read_file", "No results; torch's version; nothing is read.")


_declare(f"{_C}._sanitizer", "enable_cuda_sanitizer", "Nothing to find: order is kept on every stream.", INERT)


_declare(
    f"{_C}._memory_viz",
    "segments memory compare",
    "torch's own, on this package's snapshots.",
    EXACT,
    APPROXIMATE_SNAPSHOT,
)


_B = "torch.backends.cuda"


_declare(_B, "is_built", "True.")


_declare(_B, "matmul cuBLASModule", "torch's own flags, stored and read back; nothing rounds to TF32.")


_declare(_B, "cufft_plan_cache cuFFTPlanCache cuFFTPlanCacheAttrContextProp cuFFTPlanCacheManager", "Sizes are stored.")


_declare(_B, "preferred_linalg_library preferred_blas_library", "Stored and read back: the target has one.", INERT)


_declare(_B, "preferred_rocm_fa_library is_ck_sdpa_available", "torch's own: they are ROCm's.")


_declare(_B, "cublas_workspace_size cublaslt_workspace_size blas_workspace_size", "Stored and read back.", INERT)


_declare(
    _B,
    "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp flash_sdp_enabled "
    "mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled allow_fp16_bf16_reduction_math_sdp "
    "fp16_bf16_reduction_math_sdp_allowed sdp_kernel",
    "torch's own flags; attention runs by a kernel that the target has.",
)


_declare(
    _B, "SDPAParams can_use_flash_attention can_use_efficient_attention is_flash_attention_available", "torch's own."
)


_declare(_B, "can_use_cudnn_attention", "False: there is no cuDNN.")


_declare("torch.backends.cudnn", "is_available version", "True; 9.10.2. Nothing runs on it.", DECLARED)


_declare("torch.backends.cudnn", "is_acceptable", "False: there is no cuDNN.")


_declare("torch.backends.cudnn", "flags set_flags", "torch's own flags, stored and read back.", INERT)


_declare("torch.version", "cuda", "The version of the build, or 12.8.", DECLARED)


_M = "torch.mps"


_NATIVE = {"mps": (EXACT, "torch's own.")}


_declare(_M, "is_available device_count", "Whether the program is written for MPS.", EXACT, _NATIVE)


_declare(_M, "synchronize empty_cache", "On the target.", EXACT, _NATIVE)


_declare(_M, "get_rng_state set_rng_state manual_seed seed", "The target's generator.", EXACT, _NATIVE)


_declare(_M, "set_per_process_memory_fraction", "A limit on simulated devices.", EXACT, {**LIMITS, **_NATIVE})


_declare(
    _M,
    "current_allocated_memory driver_allocated_memory",
    "The allocator's own figures.",
    EXACT,
    {**APPROXIMATE_FIGURES, **_NATIVE},
)


_declare(_M, "recommended_max_memory", "Bytes of the memory the target computes in.", EXACT, _NATIVE)


_declare(_M, "Event Stream stream set_stream current_stream default_stream", "As for CUDA.", EXACT, _NATIVE)


_declare(_M, "compile_shader load_metallib profiler.metal_capture", "It needs Metal.", UNSUPPORTED, _NATIVE)


_declare(_M, "profiler.start profiler.stop profiler.profile", "There are no OS signposts.", INERT, _NATIVE)


_declare(_M, "profiler.is_metal_capture_enabled profiler.is_capturing_metal", "False.", EXACT, _NATIVE)


_declare("torch.backends.mps", "is_built is_available", "Whether the program is written for MPS.", EXACT, _NATIVE)


_declare("torch.backends.mps", "is_macos_or_newer is_macos13_or_newer", "As on macOS 14.0.", APPROXIMATE, _NATIVE)


_declare("torch.backends.mps", "get_name get_core_count", "The target's.", EXACT, _NATIVE)


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
"""Names that ask nothing of a device: torch's own, the same objects in a scope as outside."""
