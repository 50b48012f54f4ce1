"""The fidelity of each public name, for documentation, ``check`` and tests, not for scopes.

``torch.cuda``, ``torch.mps`` and the modules beside them are torch's own Python code, which calls
supplied names. So the fidelity of most public names follows from that of supplied names. The tables
below declare it for each public name, and a test uses each in a strict scope, where approximate
names raise and no others. Names that are untouched use no device: in a scope they are torch's own
objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchdevice.kernel.bindings import SUPPLIED
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.scope import installed

assert installed.AREAS  # importing these modules has registered the names that they supply

TARGETS = ("mps", "cpu", "simulated")
"""The targets for which the fidelity of each name is declared."""


class Declared(NamedTuple):
    """The fidelity of a public name.

    Attributes:
        fidelity: How close the name comes to the accelerator's own.
        note: The effect of the name.
        on: Target -> fidelity and note, for the targets where these differ.
    """

    fidelity: Fidelity
    note: str
    on: Mapping[str, tuple[Fidelity, str]]


class Row(NamedTuple):
    """Names of a module that are alike.

    Attributes:
        names: The names, with spaces between them.
        does: Their effect.
        fidelity: How close they come to the accelerator's own.
        on: Target -> fidelity and sentence where these differ. A text names the function of
            ``torch._C`` that differs in the same way.
        as_in: Another module, whose rows the names have too.
    """

    names: str
    does: str = ""
    fidelity: Fidelity = Fidelity.EXACT
    on: str | Mapping[str, tuple[Fidelity, str]] = {}
    as_in: str = ""


_ON_TARGETS: Mapping[str, Mapping[str, tuple[Fidelity, str]]] = {
    "torch.mps": {"mps": (Fidelity.EXACT, "torch's own.")},
    "torch.backends.mps": {"mps": (Fidelity.EXACT, "torch's own.")},
}
"""Module -> the difference on a target of all its names."""

_ROWS: Mapping[str, Sequence[Row]] = {
    "torch.cuda": (
        Row(
            (
                "BFloat16Tensor ByteTensor CharTensor FloatTensor HalfTensor IntTensor LongTensor "
                "ShortTensor BoolTensor"
            ),
            "Make a tensor of that dtype on the target; `isinstance` tests for one.",
        ),
        Row(
            "DoubleTensor",
            "Make a tensor of float64 on the target; `isinstance` tests for one.",
            on={"mps": (Fidelity.APPROXIMATE, "A tensor of float32, by the policy for float64.")},
        ),
        Row(
            (
                "BFloat16Storage ByteStorage CharStorage FloatStorage HalfStorage IntStorage "
                "LongStorage ShortStorage BoolStorage DoubleStorage ComplexDoubleStorage "
                "ComplexFloatStorage"
            ),
            "Make a typed storage on the target.",
        ),
        Row("is_available", "Return whether the program is written for CUDA."),
        Row("is_initialized", "Return True; False in a forked process that cannot use the device."),
        Row(
            "init", "Run the accelerator's first checks. A stand-in device needs no initialisation."
        ),
        Row(
            "device_count",
            "Return the number of advertised devices that `CUDA_VISIBLE_DEVICES` leaves.",
        ),
        Row("device current_device set_device", "Set or return the thread's current device."),
        Row(
            "device_of",
            (
                "torch's own. It selects a device only where the target's tensors report "
                "`is_cuda`: under `identity='program'`."
            ),
            Fidelity.INERT,
        ),
        Row("synchronize", "Wait for the target's work."),
        Row("get_device_name", "Return the target's name, or that of `properties=`."),
        Row(
            "get_device_properties",
            (
                "Return the target's name, memory and number of processors, constants of compute "
                "capability 8.0 for the other fields, and the fields of `properties=`."
            ),
            Fidelity.DECLARED,
        ),
        Row(
            "get_device_capability get_arch_list get_gencode_flags is_tf32_supported",
            "Follow from `capability=`, by default (8, 0).",
            Fidelity.DECLARED,
        ),
        Row(
            "is_bf16_supported",
            (
                "Return True from compute capability 8.0 on; below it, whether the target can hold "
                "a bfloat16 tensor."
            ),
            Fidelity.DECLARED,
        ),
        Row(
            "can_device_access_peer",
            "Return True for two different devices: tensors can be copied between them.",
        ),
        Row(
            "has_half has_magma CudaError DeferredCudaCallError cudaStatus check_error",
            "torch's own.",
        ),
        Row(
            "cudart",
            "Return functions for memory figures and the profiler; others raise "
            "`NotSupportedError`.",
        ),
        Row("ipc_collect", "No effect: no memory is shared by CUDA IPC.", Fidelity.INERT),
        Row(
            "set_sync_debug_mode get_sync_debug_mode",
            "Store and return the mode; nothing is checked.",
            Fidelity.INERT,
        ),
        Row("utilization", "Return the CPU's utilization.", Fidelity.APPROXIMATE),
        Row(
            "temperature power_draw clock_rate memory_usage device_memory_used",
            "Need NVIDIA's management library.",
            Fidelity.UNSUPPORTED,
        ),
        Row(
            "Stream StreamContext stream set_stream",
            (
                "Make streams and select a thread's current one. All streams of a target run their "
                "work in one order."
            ),
        ),
        Row("current_stream", "Return the thread's current stream of a device."),
        Row("default_stream", "Return stream 0 of a device."),
        Row(
            "ExternalStream get_stream_from_external",
            "Return the stream of a handle that `Stream.cuda_stream` gave; other pointers raise.",
        ),
        Row(
            "Event",
            "Record a point in the target's work, with real times and CUDA's errors.",
            on={"mps": (Fidelity.EXACT, "Record an event of `torch.mps`.")},
        ),
        Row(
            "CUDAGraph graph",
            "Record operators once and run them again, into the memory of the recorded results.",
        ),
        Row("make_graphed_callables", "Make graphs of the forward and backward passes."),
        Row("graph_pool_handle", "Return a new identifier of a pool."),
        Row("is_current_stream_capturing", "Return whether this thread captures a graph."),
        Row(
            "export_dot export_graph_data",
            "Raise when torch calls it as a hook: there is no CUDA graph.",
            Fidelity.UNSUPPORTED,
        ),
        Row("GreenContext", "Divide a GPU's multiprocessors.", Fidelity.UNSUPPORTED),
        Row(
            (
                "memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
                "memory_cached max_memory_cached memory_stats memory_stats_as_nested_dict "
                "memory_summary"
            ),
            "Return the figures of the target's allocator.",
            on="_cuda_memoryStats",
        ),
        Row(
            "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached",
            "Reset the peaks.",
        ),
        Row(
            "reset_accumulated_memory_stats",
            "Reset the sums of allocations, where the target keeps such sums.",
        ),
        Row(
            "mem_get_info",
            "Return the free and the total bytes of the memory in which the target computes.",
        ),
        Row("memory_snapshot", "Return the blocks in use.", on="_cuda_memorySnapshot"),
        Row("list_gpu_processes", "Needs NVIDIA's management library.", Fidelity.UNSUPPORTED),
        Row("empty_cache", "Release the target's unused cached memory."),
        Row(
            "host_memory_stats host_memory_stats_as_nested_dict",
            "Return zeros: no page-locked memory is allocated.",
        ),
        Row(
            "reset_peak_host_memory_stats reset_accumulated_host_memory_stats",
            "No effect: the figures are always 0.",
        ),
        Row(
            "set_per_process_memory_fraction",
            "Set a limit, beyond which allocations raise `torch.cuda.OutOfMemoryError`.",
            on="_cuda_setMemoryFraction",
        ),
        Row("get_per_process_memory_fraction", "Return the fraction that was set."),
        Row("get_allocator_backend", "Return `native`.", Fidelity.DECLARED),
        Row(
            "caching_allocator_enable caching_allocator_disabled",
            "Store the value; the allocator stays enabled.",
            Fidelity.INERT,
        ),
        Row(
            "change_current_allocator CUDAPluggableAllocator",
            "Replace CUDA's allocator.",
            Fidelity.UNSUPPORTED,
        ),
        Row(
            "caching_allocator_alloc caching_allocator_delete",
            "Allocate and free memory by its address.",
            on="_cuda_cudaCachingAllocator_raw_alloc",
        ),
        Row(
            "MemPool use_mem_pool",
            "Allocate from a pool of the program's own.",
            on="_cuda_beginAllocateToPool",
        ),
        Row("default_generators", "Hold the target's default generators."),
        Row(
            "get_rng_state get_rng_state_all set_rng_state set_rng_state_all",
            "Return and set the state of the target's generator.",
        ),
        Row(
            "manual_seed manual_seed_all seed seed_all initial_seed",
            "Seed the target's generator, or return its seed. Its numbers differ from CUDA's.",
        ),
        Row(
            "current_blas_handle current_solver_handle",
            "Return pointers of CUDA libraries.",
            Fidelity.UNSUPPORTED,
        ),
    ),
    "torch.cuda.sparse": (
        Row(
            "BFloat16Tensor ByteTensor CharTensor FloatTensor HalfTensor IntTensor LongTensor "
            "ShortTensor",
            "Make a sparse tensor of that dtype; `isinstance` tests for one.",
        ),
        Row(
            "DoubleTensor",
            "Make a sparse tensor of float64; `isinstance` tests for one.",
            on={"mps": (Fidelity.APPROXIMATE, "A tensor of float32, by the policy for float64.")},
        ),
    ),
    "torch.cuda.graph_annotations": (
        Row(
            (
                "is_available mark_kernels get_kernel_annotations clear_kernel_annotations "
                "get_kernel_py_stacks dump_kernel_py_stacks"
            ),
            "torch's own: no kernel is annotated without CUDA's bindings.",
        ),
    ),
    "torch.cuda.green_contexts": (
        Row(
            "SMPartition get_num_locality_domains is_localization_supported",
            "Divide a GPU's multiprocessors.",
            Fidelity.UNSUPPORTED,
        ),
    ),
    "torch.cuda.jiterator": (
        Row("_create_jit_fn _create_multi_output_jit_fn", "Compile C++ for the CPU."),
    ),
    "torch.cuda.amp": (
        Row(
            "autocast custom_fwd custom_bwd",
            "Enable autocast of the target; on a CPU float16 becomes bfloat16.",
        ),
        Row("GradScaler amp_definitely_not_available", "torch's own, on the target's tensors."),
    ),
    "torch.cuda.comm": (
        Row("broadcast broadcast_coalesced scatter gather", "Copy between the scope's devices."),
        Row("reduce_add reduce_add_coalesced", "Sum in the order of the devices."),
    ),
    "torch.cuda.gds": (
        Row(
            "GdsFile gds_register_buffer gds_deregister_buffer",
            "Read files into a GPU's memory.",
            Fidelity.UNSUPPORTED,
        ),
        Row("is_available", "Return False."),
    ),
    "torch.cuda.nccl": (
        Row(
            "all_reduce reduce broadcast all_gather reduce_scatter",
            "Copy and reduce by NCCL between the devices of one process.",
            Fidelity.UNSUPPORTED,
        ),
    ),
    "torch.cuda.nvtx": (
        Row(
            "mark range range_push range_pop range_start range_end",
            "Make a range or marker, which `torch.profiler` shows as a `record_function` range.",
            Fidelity.INERT,
        ),
    ),
    "torch.cuda.profiler": (
        Row("start stop profile", "No effect on the target: use `torch.profiler`."),
        Row(
            "init",
            "Raise torch's own error: it configures NVIDIA's profiler.",
            Fidelity.UNSUPPORTED,
        ),
    ),
    "torch.cuda.tunable": (
        Row(
            (
                "enable tuning_enable record_untuned_enable wildcard_fallback_enable "
                "set_max_tuning_duration set_max_tuning_iterations "
                "set_cublaslt_requested_algo_count set_rotating_buffer_size tune_gemm_in_file"
            ),
            "Store or ignore the setting: TunableOp tunes products of GPU matrices.",
            Fidelity.INERT,
        ),
        Row(
            (
                "is_enabled tuning_is_enabled record_untuned_is_enabled "
                "wildcard_fallback_is_enabled get_max_tuning_duration get_max_tuning_iterations "
                "get_cublaslt_requested_algo_count get_rotating_buffer_size"
            ),
            "Return the setting that was stored, or CUDA's default.",
            Fidelity.DECLARED,
        ),
        Row(
            (
                "get_filename set_filename get_results get_validators read_file "
                "set_numerical_check_tolerances dynamic_dims_mask mgpu_tune_gemm_in_file"
            ),
            "Keep results of tuning.",
            Fidelity.UNSUPPORTED,
        ),
    ),
    "torch.cuda._sanitizer": (
        Row(
            "enable_cuda_sanitizer",
            "No effect: all streams run their work in one order, so there are no races.",
            Fidelity.INERT,
            on={
                "simulated": (
                    Fidelity.EXACT,
                    "torch's own. It is told of every stream, event, kernel and block.",
                )
            },
        ),
    ),
    "torch.cuda._memory_viz": (
        Row(
            "segments memory compare",
            "torch's own, for snapshots of a scope.",
            on="_cuda_memorySnapshot",
        ),
    ),
    "torch.backends.cuda": (
        Row("is_built", "Return True."),
        Row(
            "matmul cuBLASModule",
            "torch's own flags, stored and read back. No operator rounds to TF32.",
        ),
        Row(
            "cufft_plan_cache cuFFTPlanCache cuFFTPlanCacheAttrContextProp cuFFTPlanCacheManager",
            "Store and return the size of the cache.",
        ),
        Row(
            "preferred_linalg_library preferred_blas_library",
            "Store and return the library. The target uses its only one.",
            Fidelity.INERT,
        ),
        Row("preferred_rocm_fa_library is_ck_sdpa_available", "torch's own, for ROCm."),
        Row(
            "cublas_workspace_size cublaslt_workspace_size blas_workspace_size",
            "Store and return the size.",
            Fidelity.INERT,
        ),
        Row(
            (
                "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp "
                "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled "
                "allow_fp16_bf16_reduction_math_sdp fp16_bf16_reduction_math_sdp_allowed sdp_kernel"
            ),
            "torch's own flags. Attention runs a kernel that the target has.",
        ),
        Row("SDPAParams is_flash_attention_available", "torch's own."),
        Row(
            "can_use_flash_attention can_use_efficient_attention can_use_cudnn_attention",
            "Return whether CUDA's kernel could compute a call; False where no CUDA is simulated.",
        ),
    ),
    "torch.backends.cudnn": (
        Row("is_available", "Return True. No operator runs on cuDNN.", Fidelity.DECLARED),
        Row("version", "Return version 9.10.2.", Fidelity.DECLARED),
        Row(
            "is_acceptable",
            (
                "Return whether a simulated GPU has the tensor, in a dtype of cuDNN; False where "
                "no CUDA is simulated."
            ),
        ),
        Row("flags set_flags", "torch's own flags, stored and read back.", Fidelity.INERT),
    ),
    "torch.version": (
        Row(
            "cuda",
            "The CUDA version of the build, or 12.8 in a build without CUDA.",
            Fidelity.DECLARED,
        ),
    ),
    "torch.mps": (
        Row("is_available", "Return whether the program is written for MPS."),
        Row("device_count", "Return 1 if the program is written for MPS, else 0."),
        Row("synchronize", "Wait for the target's work."),
        Row("empty_cache", "Release the target's unused cached memory."),
        Row("get_rng_state set_rng_state manual_seed seed", "Use the target's generator."),
        Row(
            "set_per_process_memory_fraction",
            "Limit the memory of simulated devices.",
            on="_cuda_setMemoryFraction",
        ),
        Row(
            "current_allocated_memory driver_allocated_memory",
            "Return the figures of the target's allocator.",
            on="_cuda_memoryStats",
        ),
        Row(
            "recommended_max_memory", "Return the bytes of the memory in which the target computes."
        ),
        Row("Event", "Record a point in the target's work."),
        Row(
            "stream set_stream current_stream default_stream", "Select and return the only stream."
        ),
        Row("Stream", "Make a stream of Metal.", Fidelity.UNSUPPORTED),
        Row(
            "compile_shader load_metallib profiler.metal_capture",
            "Need Metal.",
            Fidelity.UNSUPPORTED,
        ),
        Row(
            "profiler.start profiler.stop profiler.profile",
            "No effect: there are no OS signposts.",
            Fidelity.INERT,
        ),
        Row("profiler.is_metal_capture_enabled profiler.is_capturing_metal", "Return False."),
    ),
    "torch.backends.mps": (
        Row("is_built is_available", "Return whether the program is written for MPS."),
        Row(
            "is_macos_or_newer is_macos13_or_newer",
            "Answer as on macOS 14.0.",
            Fidelity.APPROXIMATE,
        ),
        Row("get_name", "Return the target's name."),
        Row("get_core_count", "Return the number of the target's parallel units."),
    ),
    "torch.xpu": (
        Row("is_available", "Return whether the program is written for XPU."),
        Row(
            "get_device_properties get_device_capability",
            (
                "Return the target's name, memory, number of processors and whether it holds "
                "float64, constants for the other fields, and the fields of `properties=`."
            ),
            Fidelity.DECLARED,
        ),
        Row("is_bf16_supported is_tf32_supported", "Return True.", Fidelity.DECLARED),
        Row("get_arch_list get_gencode_flags", "Return nothing: no code for a GPU was compiled."),
        Row(
            "get_stream_from_external",
            "Return the stream of a handle that `Stream.sycl_queue` gave; other pointers raise.",
        ),
        Row(
            "XPUGraph graph graph_pool_handle make_graphed_callables",
            "Record graphs of SYCL.",
            Fidelity.UNSUPPORTED,
        ),
        Row("XPUPluggableAllocator", "Replace XPU's allocator.", Fidelity.UNSUPPORTED),
        Row(
            "temperature power_draw clock_rate memory_usage",
            "Need Intel's Level Zero.",
            Fidelity.UNSUPPORTED,
        ),
        Row(
            (
                "can_device_access_peer change_current_allocator current_device current_stream "
                "default_generators device device_count device_memory_used device_of empty_cache "
                "Event get_device_name get_per_process_memory_fraction get_rng_state "
                "get_rng_state_all init initial_seed is_current_stream_capturing is_initialized "
                "list_gpu_processes manual_seed manual_seed_all max_memory_allocated "
                "max_memory_reserved mem_get_info memory_allocated memory_reserved memory_snapshot "
                "memory_stats memory_stats_as_nested_dict MemPool reset_accumulated_memory_stats "
                "reset_peak_memory_stats seed seed_all set_device set_per_process_memory_fraction "
                "set_rng_state set_rng_state_all set_stream Stream stream StreamContext "
                "synchronize use_mem_pool utilization"
            ),
            as_in="torch.cuda",
        ),
    ),
}

_UNTOUCHED: Mapping[str, str] = {
    "torch.cuda._memory_viz": "format_flamegraph",
    "torch.cuda._sanitizer": (
        "Access AccessType ArgumentHandler CUDASanitizer CUDASanitizerDispatchMode "
        "CUDASanitizerErrors EventHandler StreamSynchronizations SynchronizationError TK TVa TVb "
        "TensorInfo UnsynchronizedAccessError cuda_sanitizer zip_arguments zip_by_key"
    ),
    "torch.cuda.graphs": (
        "register_graph_capture_end_hook register_graph_capture_start_hook "
        "register_graph_destroy_hook register_graph_instantiate_hook "
        "register_graph_replay_end_hook register_graph_replay_start_hook"
    ),
}
"""Module -> its public names that use no device."""

PUBLIC_NAMES: dict[str, Declared] = {}


def _differences(
    on: str | Mapping[str, tuple[Fidelity, str]],
) -> Mapping[str, tuple[Fidelity, str]]:
    return SUPPLIED[f"torch._C.{on}"].on if isinstance(on, str) else on


for _module, _rows in _ROWS.items():
    for _row in _rows:
        for _name in _row.names.split():
            if _row.as_in:
                PUBLIC_NAMES[f"{_module}.{_name}"] = PUBLIC_NAMES[f"{_row.as_in}.{_name}"]
                continue
            _on = {**_differences(_row.on), **_ON_TARGETS.get(_module, {})}
            PUBLIC_NAMES[f"{_module}.{_name}"] = Declared(_row.fidelity, _row.does, _on)

UNTOUCHED = frozenset(
    f"{module}.{name}" for module, names in _UNTOUCHED.items() for name in names.split()
)
"""Public names that use no device."""
