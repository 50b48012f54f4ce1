"""One use of every public name under ``torch.cuda`` and beside it: what each is called with, and what must hold.

A case returns something true, or raises. Names that hold the same object as a name already listed need no case.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda._memory_viz
import torch.cuda._sanitizer
import torch.cuda.comm
import torch.cuda.gds
import torch.cuda.green_contexts
import torch.cuda.nccl
import torch.cuda.profiler
import torch.cuda.sparse
import torch.cuda.tunable

_SUBMODULES = """
    amp comm gds graphs green_contexts jiterator memory nccl nvtx profiler random sparse streams tunable _sanitizer
    _memory_viz graph_annotations
"""

MODULES = (
    "torch.cuda",
    *(f"torch.cuda.{name}" for name in _SUBMODULES.split()),
    "torch.backends.cuda",
    "torch.backends.cudnn",
    "torch.mps",
    "torch.mps.event",
    "torch.mps.profiler",
    "torch.backends.mps",
)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    """A tensor on the program's accelerator."""
    return torch.ones(*(shape or (4,)), device="cuda", **options)


def quiet(call: Callable[[], Any]) -> Any:
    """Call what torch itself calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def inside(context: Any) -> bool:
    """Enter a context and leave it."""
    with context:
        pass
    return True


def none(*values: Any) -> bool:
    """Whether calls that return nothing returned nothing."""
    return all(value is None for value in values)


def _graph() -> bool:
    x = ones()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    x.fill_(5)
    graph.replay()
    return y.tolist() == [6.0] * 4


def _exported(hook: Callable[[Any], None]) -> bool:
    graph = torch.cuda.CUDAGraph()
    graph.register_capture_end_hook(hook)
    with torch.cuda.graph(graph):
        ones()
    return True


def _graphed() -> bool:
    double = torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2, device="cuda"), (torch.ones(1, 2, device="cuda"),))
    return double(torch.zeros(1, 2, device="cuda")).shape == (1, 2)


def _annotated() -> bool:
    state = torch.cuda.get_rng_state()
    a = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    return torch.equal(a, torch.rand(3, device="cuda"))


def _saved_and_loaded() -> bool:
    with tempfile.TemporaryDirectory(dir=os.getcwd() if os.access(".", os.W_OK) else None) as folder:
        source, target = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
        file = torch.cuda.gds.GdsFile(os.path.join(folder, "data"), os.O_CREAT | os.O_RDWR)
        file.save_storage(source.untyped_storage(), offset=0)
        file.load_storage(target.untyped_storage(), offset=0)
        del file
        return torch.equal(source, target)


def _nccl_reduced(function: Callable[..., Any]) -> bool:
    outputs = [torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")]
    function([ones(), ones() * 2], outputs)
    return [t.tolist() for t in outputs] == [[3.0] * 4] * 2


def _gathered() -> bool:
    outputs = [torch.zeros(8, device="cuda")]
    torch.cuda.nccl.all_gather([ones(), ones() * 2], outputs * 2)
    return outputs[0].tolist() == [1.0] * 4 + [2.0] * 4


def _scattered() -> bool:
    outputs = [torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")]
    torch.cuda.nccl.reduce_scatter([ones(), ones()], outputs)
    return [t.tolist() for t in outputs] == [[2.0] * 2] * 2


def _reduced_to_one() -> bool:
    output = torch.zeros(4, device="cuda")
    torch.cuda.nccl.reduce([ones(), ones()], output=output)
    return output.tolist() == [2.0] * 4


def _broadcast_in_place() -> bool:
    tensors = [ones(), torch.zeros(4, device="cuda")]
    torch.cuda.nccl.broadcast(tensors)
    return tensors[1].tolist() == [1.0] * 4


def _scaled() -> bool:
    scaler = quiet(torch.cuda.amp.GradScaler)
    return bool(scaler.is_enabled()) and scaler.scale(ones().sum()).item() == 4 * 65536.0


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return quiet(lambda: c.amp.custom_fwd(lambda context, x: 2 * x))(context, x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return quiet(lambda: c.amp.custom_bwd(lambda context, g: 2 * g))(context, gradient)


def _custom() -> bool:
    x = ones(requires_grad=True)
    _Double.apply(x).sum().backward()
    return x.grad is not None and x.grad.tolist() == [2.0] * 4


def _sparse_type(name: str) -> Callable[[], bool]:
    def use() -> bool:
        kind = getattr(torch.cuda.sparse, name)
        made = kind(torch.tensor([[0, 2]]), getattr(torch, name)([1, 2]), torch.Size([3]))
        return isinstance(made, kind) and made.is_sparse and made.to_dense().tolist() == [1, 0, 2]

    return use


def _elapsed() -> bool:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    ones().sum()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) >= 0


def _elapsed_on_mps() -> bool:
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    start.record()
    torch.ones(3, device="mps").sum()
    end.record()
    end.wait()
    end.synchronize()
    return end.query() and start.elapsed_time(end) >= 0


def _set_and_get(module: Any, setter: str, getter: str, value: Any) -> bool:
    getattr(module, setter)(value)
    return getattr(module, getter)() == value


def _flag(setter: Callable[[bool], None], getter: Callable[[], bool]) -> bool:
    before = getter()
    try:
        setter(not before)
        return getter() is (not before)
    finally:
        setter(before)


def _params() -> Any:
    q = torch.ones(1, 1, 4, 8, device="cuda")
    return torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)


def _tensor_type(name: str) -> Callable[[], bool]:
    return lambda: isinstance(getattr(torch.cuda, name)(3), getattr(torch.cuda, name))


def _storage_type(name: str) -> Callable[[], bool]:
    return lambda: getattr(torch.cuda, name)(3).size() == 3


def _sync_debug_mode() -> bool:
    torch.cuda.set_sync_debug_mode("warn")
    return torch.cuda.get_sync_debug_mode() == 1


def _stream_context() -> bool:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inner = torch.cuda.current_stream()
    return inner == stream != torch.cuda.current_stream()


def _snapshot() -> Any:
    kept = ones(100)
    found = torch.cuda.memory_snapshot()
    addresses = {block["address"] for segment in found for block in segment["blocks"]}
    return kept.untyped_storage().data_ptr() in addresses


def _seeded(seed: Callable[[], Any]) -> bool:
    seed()
    return 0 <= torch.cuda.initial_seed() < 1 << 64


def _same_numbers(seed: Callable[[int], Any], device: str) -> bool:
    seed(7)
    first = torch.rand(3, device=device)
    seed(7)
    return torch.equal(first, torch.rand(3, device=device))


def _state_of_mps() -> bool:
    state = torch.mps.get_rng_state()
    first = torch.rand(3, device="mps")
    torch.mps.set_rng_state(state)
    return torch.equal(first, torch.rand(3, device="mps"))


def _tuned_file() -> bool:
    c.tunable.enable(True)
    c.tunable.tuning_enable(True)
    c.tunable.record_untuned_enable(False)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "untuned.csv")
        with open(path, "w") as file:
            file.write("GemmTunableOp_float_NT,nt_4_4_4_ld_4_4_4\n")
        torch.cuda.tunable.tune_gemm_in_file(path)
    return True


def _sanitized() -> bool:
    torch.cuda._sanitizer.enable_cuda_sanitizer()
    try:
        return ones().sum().item() == 4
    finally:
        torch.cuda._sanitizer.cuda_sanitizer.__del__()
        torch.cuda._sanitizer.cuda_sanitizer.enabled = False


def _viewed(function: Callable[..., Any]) -> bool:
    kept = ones(100)
    drawn: list[str] = []
    function(torch.cuda.memory._snapshot(), format_flamegraph=drawn.append)
    return bool(drawn) and "active_allocated" in drawn[0] and kept.numel() == 100


def _compared() -> bool:
    before = torch.cuda.memory_snapshot()
    kept = ones(1000)
    drawn: list[str] = []
    torch.cuda._memory_viz.compare(before, torch.cuda.memory_snapshot(), format_flamegraph=drawn.append)
    return "only_after" in drawn[0] and kept.numel() == 1000


_DTYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]

c = torch.cuda
m = torch.mps

CASES: dict[str, Callable[[], Any]] = {
    **{f"torch.cuda.{name}Tensor": _tensor_type(f"{name}Tensor") for name in _DTYPES},
    **{f"torch.cuda.sparse.{name}Tensor": _sparse_type(f"{name}Tensor") for name in _DTYPES if name != "Bool"},
    **{f"torch.cuda.{name}Storage": _storage_type(f"{name}Storage") for name in _DTYPES},
    **{f"torch.cuda.Complex{name}Storage": _storage_type(f"Complex{name}Storage") for name in ("Double", "Float")},
    # ---- devices
    "torch.cuda.device": lambda: inside(c.device(0)),
    "torch.cuda.device_of": lambda: inside(c.device_of(ones())),
    "torch.cuda.device_count": lambda: c.device_count() >= 1,
    "torch.cuda.current_device": lambda: c.current_device() == 0,
    "torch.cuda.set_device": lambda: none(c.set_device(0)),
    "torch.cuda.is_available": lambda: c.is_available(),
    "torch.cuda.is_initialized": lambda: c.is_initialized(),
    "torch.cuda.init": lambda: none(c.init()),
    "torch.cuda.synchronize": lambda: none(c.synchronize()),
    "torch.cuda.get_device_name": lambda: bool(c.get_device_name()),
    "torch.cuda.get_device_capability": lambda: c.get_device_capability() == (8, 0),
    "torch.cuda.get_device_properties": lambda: c.get_device_properties(0).major == 8,
    "torch.cuda.get_arch_list": lambda: c.get_arch_list() == ["sm_80"],
    "torch.cuda.get_gencode_flags": lambda: "sm_80" in c.get_gencode_flags(),
    "torch.cuda.can_device_access_peer": lambda: c.can_device_access_peer(0, 0) is False,
    "torch.cuda.is_bf16_supported": lambda: c.is_bf16_supported(),
    "torch.cuda.is_tf32_supported": lambda: c.is_tf32_supported(),
    "torch.cuda.has_half": lambda: c.has_half,
    "torch.cuda.has_magma": lambda: c.has_magma in (True, False),
    "torch.cuda.ipc_collect": lambda: none(c.ipc_collect()),
    "torch.cuda.set_sync_debug_mode": _sync_debug_mode,
    "torch.cuda.get_sync_debug_mode": lambda: c.get_sync_debug_mode() in (0, 1),
    "torch.cuda.check_error": lambda: none(c.check_error(c.cudart().cudaError.success)),
    "torch.cuda.cudart": lambda: c.cudart().cudaMemGetInfo(0)[1] > 0,
    "torch.cuda.cudaStatus": lambda: c.cudaStatus.SUCCESS == 0,
    "torch.cuda.CudaError": lambda: issubclass(c.CudaError, RuntimeError),
    "torch.cuda.DeferredCudaCallError": lambda: issubclass(c.DeferredCudaCallError, Exception),
    # ---- readings of NVML
    "torch.cuda.utilization": lambda: 0 <= c.utilization() <= 100,
    "torch.cuda.temperature": lambda: c.temperature() > 0,
    "torch.cuda.power_draw": lambda: c.power_draw() > 0,
    "torch.cuda.clock_rate": lambda: c.clock_rate() > 0,
    "torch.cuda.memory_usage": lambda: 0 <= c.memory_usage() <= 100,
    "torch.cuda.device_memory_used": lambda: c.device_memory_used() >= 0,
    # ---- streams and events
    "torch.cuda.Stream": lambda: c.Stream().query(),
    "torch.cuda.Event": _elapsed,
    "torch.cuda.ExternalStream": lambda: c.ExternalStream(0) == c.default_stream(),
    "torch.cuda.get_stream_from_external": lambda: c.get_stream_from_external(0, 0) == c.default_stream(),
    "torch.cuda.StreamContext": lambda: inside(c.StreamContext(c.Stream())),
    "torch.cuda.stream": _stream_context,
    "torch.cuda.set_stream": lambda: none(c.set_stream(c.default_stream())),
    "torch.cuda.current_stream": lambda: c.current_stream() == c.default_stream(),
    "torch.cuda.default_stream": lambda: c.default_stream().stream_id == 0,
    # ---- graphs
    "torch.cuda.CUDAGraph": _graph,
    "torch.cuda.graph": _graph,
    "torch.cuda.make_graphed_callables": _graphed,
    "torch.cuda.graph_pool_handle": lambda: c.graph_pool_handle() != c.graph_pool_handle(),
    "torch.cuda.is_current_stream_capturing": lambda: not c.is_current_stream_capturing(),
    "torch.cuda.export_dot": lambda: _exported(c.export_dot("graph.dot")),
    "torch.cuda.export_graph_data": lambda: _exported(c.export_graph_data("graph.pickle")),
    "torch.cuda.graph_annotations.is_available": lambda: c.graph_annotations.is_available() is False,
    "torch.cuda.graph_annotations.mark_kernels": lambda: inside(c.graph_annotations.mark_kernels("a")),
    "torch.cuda.graph_annotations.get_kernel_annotations": lambda: not c.graph_annotations.get_kernel_annotations(),
    "torch.cuda.graph_annotations.clear_kernel_annotations": lambda: none(
        c.graph_annotations.clear_kernel_annotations()
    ),
    "torch.cuda.graph_annotations.get_kernel_py_stacks": lambda: not c.graph_annotations.get_kernel_py_stacks(),
    "torch.cuda.graph_annotations.dump_kernel_py_stacks": lambda: none(
        c.graph_annotations.dump_kernel_py_stacks("stacks")
    ),
    "torch.cuda.green_contexts.SMPartition": lambda: c.green_contexts.SMPartition.from_device(0),
    "torch.cuda.green_contexts.get_num_locality_domains": lambda: c.green_contexts.get_num_locality_domains(0),
    "torch.cuda.green_contexts.is_localization_supported": lambda: c.green_contexts.is_localization_supported(0),
    "torch.cuda.GreenContext": lambda: c.green_contexts.GreenContext.create(num_sms=1, device_id=0),
    # ---- memory
    "torch.cuda.empty_cache": lambda: none(c.empty_cache()),
    "torch.cuda.memory_allocated": lambda: c.memory_allocated() >= 0,
    "torch.cuda.max_memory_allocated": lambda: c.max_memory_allocated() >= 0,
    "torch.cuda.memory_reserved": lambda: c.memory_reserved() >= 0,
    "torch.cuda.max_memory_reserved": lambda: c.max_memory_reserved() >= 0,
    "torch.cuda.memory_cached": lambda: quiet(c.memory_cached) >= 0,
    "torch.cuda.max_memory_cached": lambda: quiet(c.max_memory_cached) >= 0,
    "torch.cuda.memory_stats": lambda: "num_ooms" in c.memory_stats(),
    "torch.cuda.memory_stats_as_nested_dict": lambda: "num_ooms" in c.memory_stats_as_nested_dict(),
    "torch.cuda.memory_summary": lambda: "CUDA OOMs" in c.memory_summary(),
    "torch.cuda.memory_snapshot": _snapshot,
    "torch.cuda.mem_get_info": lambda: c.mem_get_info()[0] <= c.mem_get_info()[1],
    "torch.cuda.list_gpu_processes": lambda: str(os.getpid()) in c.list_gpu_processes(),
    "torch.cuda.reset_peak_memory_stats": lambda: none(c.reset_peak_memory_stats()),
    "torch.cuda.reset_accumulated_memory_stats": lambda: none(c.reset_accumulated_memory_stats()),
    "torch.cuda.reset_max_memory_allocated": lambda: none(quiet(c.reset_max_memory_allocated)),
    "torch.cuda.reset_max_memory_cached": lambda: none(quiet(c.reset_max_memory_cached)),
    "torch.cuda.host_memory_stats": lambda: "num_host_alloc" in c.host_memory_stats(),
    "torch.cuda.host_memory_stats_as_nested_dict": lambda: "num_host_alloc" in c.host_memory_stats_as_nested_dict(),
    "torch.cuda.reset_peak_host_memory_stats": lambda: none(c.reset_peak_host_memory_stats()),
    "torch.cuda.reset_accumulated_host_memory_stats": lambda: none(c.reset_accumulated_host_memory_stats()),
    "torch.cuda.set_per_process_memory_fraction": lambda: none(c.set_per_process_memory_fraction(0.99)),
    "torch.cuda.get_per_process_memory_fraction": lambda: 0 < c.get_per_process_memory_fraction() <= 1,
    "torch.cuda.get_allocator_backend": lambda: c.get_allocator_backend() == "native",
    "torch.cuda.caching_allocator_enable": lambda: none(c.caching_allocator_enable(True)),
    "torch.cuda.caching_allocator_disabled": lambda: inside(c.caching_allocator_disabled()),
    "torch.cuda.caching_allocator_alloc": lambda: c.caching_allocator_alloc(8),
    "torch.cuda.caching_allocator_delete": lambda: c.caching_allocator_delete(1),
    "torch.cuda.change_current_allocator": lambda: c.change_current_allocator(c.memory._CUDAAllocator(None)),
    "torch.cuda.CUDAPluggableAllocator": lambda: c.CUDAPluggableAllocator("none.so", "alloc", "free"),
    "torch.cuda.MemPool": lambda: c.MemPool(),
    "torch.cuda.use_mem_pool": lambda: inside(c.use_mem_pool(_Pool())),
    # ---- random numbers
    "torch.cuda.default_generators": lambda: len(c.default_generators) == c.device_count(),
    "torch.cuda.get_rng_state": _annotated,
    "torch.cuda.get_rng_state_all": lambda: len(c.get_rng_state_all()) == c.device_count(),
    "torch.cuda.set_rng_state": _annotated,
    "torch.cuda.set_rng_state_all": lambda: none(c.set_rng_state_all(c.get_rng_state_all())),
    "torch.cuda.manual_seed": lambda: _same_numbers(c.manual_seed, "cuda"),
    "torch.cuda.manual_seed_all": lambda: _same_numbers(c.manual_seed_all, "cuda"),
    "torch.cuda.seed": lambda: _seeded(c.seed),
    "torch.cuda.seed_all": lambda: _seeded(c.seed_all),
    "torch.cuda.initial_seed": lambda: _seeded(lambda: c.manual_seed(3)) and c.initial_seed() == 3,
    # ---- handles and kernels
    "torch.cuda.current_blas_handle": lambda: c.current_blas_handle(),
    "torch.cuda.current_solver_handle": lambda: c.current_solver_handle(),
    "torch.cuda.jiterator._create_jit_fn": lambda: c.jiterator._create_jit_fn(
        "template <typename T> T f(T x) { return x; }"
    )(ones()),
    # ---- submodules
    "torch.cuda.amp.autocast": lambda: inside(quiet(lambda: c.amp.autocast(dtype=torch.bfloat16))),
    "torch.cuda.amp.GradScaler": _scaled,
    "torch.cuda.amp.amp_definitely_not_available": lambda: not c.amp.amp_definitely_not_available(),
    "torch.cuda.amp.custom_fwd": _custom,
    "torch.cuda.amp.custom_bwd": _custom,
    "torch.cuda.comm.broadcast": lambda: c.comm.broadcast(ones(), [0])[0].sum() == 4,
    "torch.cuda.comm.broadcast_coalesced": lambda: len(c.comm.broadcast_coalesced([ones()], [0])) == 1,
    "torch.cuda.comm.scatter": lambda: c.comm.scatter(ones(), [0], chunk_sizes=[4])[0].numel() == 4,
    "torch.cuda.comm.gather": lambda: c.comm.gather([ones(), ones()], destination=0).numel() == 8,
    "torch.cuda.comm.reduce_add": lambda: c.comm.reduce_add([ones(), ones()], 0).tolist() == [2.0] * 4,
    "torch.cuda.comm.reduce_add_coalesced": lambda: c.comm.reduce_add_coalesced([[ones()], [ones()]], 0)[0].sum() == 8,
    "torch.cuda.gds.GdsFile": _saved_and_loaded,
    "torch.cuda.gds.is_available": lambda: c.gds.is_available(),
    "torch.cuda.gds.gds_register_buffer": lambda: none(c.gds.gds_register_buffer(ones().untyped_storage())),
    "torch.cuda.gds.gds_deregister_buffer": lambda: none(c.gds.gds_deregister_buffer(ones().untyped_storage())),
    "torch.cuda.nccl.all_reduce": lambda: _nccl_reduced(c.nccl.all_reduce),
    "torch.cuda.nccl.reduce": _reduced_to_one,
    "torch.cuda.nccl.broadcast": _broadcast_in_place,
    "torch.cuda.nccl.all_gather": _gathered,
    "torch.cuda.nccl.reduce_scatter": _scattered,
    "torch.cuda.nvtx.mark": lambda: none(c.nvtx.mark("a")),
    "torch.cuda.nvtx.range": lambda: inside(c.nvtx.range("a")),
    "torch.cuda.nvtx.range_push": lambda: c.nvtx.range_push("a") >= 0 and c.nvtx.range_pop() >= 0,
    "torch.cuda.nvtx.range_pop": lambda: c.nvtx.range_push("a") == c.nvtx.range_pop(),
    "torch.cuda.nvtx.range_start": lambda: none(c.nvtx.range_end(c.nvtx.range_start("a"))),
    "torch.cuda.nvtx.range_end": lambda: none(c.nvtx.range_end(c.nvtx.range_start("a"))),
    "torch.cuda.profiler.start": lambda: c.profiler.start() is None,
    "torch.cuda.profiler.stop": lambda: c.profiler.stop() is None,
    "torch.cuda.profiler.profile": lambda: inside(c.profiler.profile()),
    "torch.cuda.profiler.init": lambda: c.profiler.init("out", None, "csv"),
    "torch.cuda.tunable.enable": lambda: _set_and_get(c.tunable, "enable", "is_enabled", True),
    "torch.cuda.tunable.is_enabled": lambda: c.tunable.is_enabled() in (True, False),
    "torch.cuda.tunable.tuning_enable": lambda: _set_and_get(c.tunable, "tuning_enable", "tuning_is_enabled", False),
    "torch.cuda.tunable.tuning_is_enabled": lambda: c.tunable.tuning_is_enabled() in (True, False),
    "torch.cuda.tunable.record_untuned_enable": lambda: _set_and_get(
        c.tunable, "record_untuned_enable", "record_untuned_is_enabled", True
    ),
    "torch.cuda.tunable.record_untuned_is_enabled": lambda: c.tunable.record_untuned_is_enabled() in (True, False),
    "torch.cuda.tunable.wildcard_fallback_enable": lambda: _set_and_get(
        c.tunable, "wildcard_fallback_enable", "wildcard_fallback_is_enabled", True
    ),
    "torch.cuda.tunable.wildcard_fallback_is_enabled": lambda: (
        c.tunable.wildcard_fallback_is_enabled() in (True, False)
    ),
    "torch.cuda.tunable.set_max_tuning_duration": lambda: _set_and_get(
        c.tunable, "set_max_tuning_duration", "get_max_tuning_duration", 5
    ),
    "torch.cuda.tunable.get_max_tuning_duration": lambda: c.tunable.get_max_tuning_duration() > 0,
    "torch.cuda.tunable.set_max_tuning_iterations": lambda: _set_and_get(
        c.tunable, "set_max_tuning_iterations", "get_max_tuning_iterations", 5
    ),
    "torch.cuda.tunable.get_max_tuning_iterations": lambda: c.tunable.get_max_tuning_iterations() > 0,
    "torch.cuda.tunable.set_cublaslt_requested_algo_count": lambda: _set_and_get(
        c.tunable, "set_cublaslt_requested_algo_count", "get_cublaslt_requested_algo_count", 5
    ),
    "torch.cuda.tunable.get_cublaslt_requested_algo_count": lambda: c.tunable.get_cublaslt_requested_algo_count() > 0,
    "torch.cuda.tunable.set_rotating_buffer_size": lambda: _set_and_get(
        c.tunable, "set_rotating_buffer_size", "get_rotating_buffer_size", 5
    ),
    "torch.cuda.tunable.get_rotating_buffer_size": lambda: c.tunable.get_rotating_buffer_size() >= 0,
    "torch.cuda.tunable.set_filename": lambda: _set_and_get(c.tunable, "set_filename", "get_filename", "a.csv"),
    "torch.cuda.tunable.get_filename": lambda: isinstance(c.tunable.get_filename(), str),
    "torch.cuda.tunable.get_results": lambda: c.tunable.get_results() == (),
    "torch.cuda.tunable.get_validators": lambda: c.tunable.get_validators()[0][0] == "PT_VERSION",
    "torch.cuda.tunable.read_file": lambda: c.tunable.read_file("none.csv") is False,
    "torch.cuda.tunable.set_numerical_check_tolerances": lambda: none(
        c.tunable.set_numerical_check_tolerances(True, 1e-3, 1e-3)
    ),
    "torch.cuda.tunable.dynamic_dims_mask": lambda: inside(c.tunable.dynamic_dims_mask("m")),
    "torch.cuda.tunable.tune_gemm_in_file": _tuned_file,
    "torch.cuda.tunable.mgpu_tune_gemm_in_file": lambda: (
        quiet(lambda: c.tunable.mgpu_tune_gemm_in_file("none*.csv", 1)) is None
    ),
    "torch.cuda._sanitizer.enable_cuda_sanitizer": _sanitized,
    "torch.cuda._memory_viz.segments": lambda: _viewed(c._memory_viz.segments),
    "torch.cuda._memory_viz.memory": lambda: _viewed(c._memory_viz.memory),
    "torch.cuda._memory_viz.compare": _compared,
    # ---- torch.backends
    "torch.backends.cuda.is_built": lambda: torch.backends.cuda.is_built(),
    "torch.backends.cuda.SDPAParams": lambda: _params().dropout == 0,
    "torch.backends.cuda.can_use_flash_attention": lambda: (
        torch.backends.cuda.can_use_flash_attention(_params()) in (True, False)
    ),
    "torch.backends.cuda.can_use_efficient_attention": lambda: (
        torch.backends.cuda.can_use_efficient_attention(_params()) is False
    ),
    "torch.backends.cuda.can_use_cudnn_attention": lambda: (
        torch.backends.cuda.can_use_cudnn_attention(_params()) is False
    ),
    "torch.backends.cuda.is_flash_attention_available": lambda: (
        torch.backends.cuda.is_flash_attention_available() in (True, False)
    ),
    "torch.backends.cuda.is_ck_sdpa_available": lambda: torch.backends.cuda.is_ck_sdpa_available() is False,
    "torch.backends.cuda.sdp_kernel": lambda: quiet(lambda: inside(torch.backends.cuda.sdp_kernel())),
    "torch.backends.cuda.preferred_linalg_library": lambda: (
        torch.backends.cuda.preferred_linalg_library("magma") == torch._C._LinalgBackend.Magma
    ),
    "torch.backends.cuda.preferred_blas_library": lambda: (
        torch.backends.cuda.preferred_blas_library("cublaslt") == torch._C._BlasBackend.Cublaslt
    ),
    "torch.backends.cuda.preferred_rocm_fa_library": lambda: (
        torch.backends.cuda.preferred_rocm_fa_library() == torch._C._ROCmFABackend.Default
    ),
    "torch.backends.cuda.cublas_workspace_size": lambda: torch.backends.cuda.cublas_workspace_size(1024) == 1024,
    "torch.backends.cuda.cublaslt_workspace_size": lambda: torch.backends.cuda.cublaslt_workspace_size(1024) == 1024,
    "torch.backends.cuda.blas_workspace_size": lambda: torch.backends.cuda.blas_workspace_size(1024, "cublas") == 1024,
    "torch.backends.cuda.matmul": lambda: torch.backends.cuda.matmul.allow_tf32 in (True, False),
    "torch.backends.cuda.cuBLASModule": lambda: isinstance(
        torch.backends.cuda.matmul, torch.backends.cuda.cuBLASModule
    ),
    "torch.backends.cuda.cufft_plan_cache": lambda: torch.backends.cuda.cufft_plan_cache.max_size > 0,
    "torch.backends.cuda.cuFFTPlanCache": lambda: torch.backends.cuda.cufft_plan_cache[0].size == 0,
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp": lambda: torch.backends.cuda.cufft_plan_cache.size == 0,
    "torch.backends.cuda.cuFFTPlanCacheManager": lambda: none(torch.backends.cuda.cufft_plan_cache.clear()),
    **{
        f"torch.backends.cuda.{setter}": (
            lambda setter=setter, getter=getter: _flag(
                getattr(torch.backends.cuda, setter), getattr(torch.backends.cuda, getter)
            )
        )
        for pair in (
            ("enable_flash_sdp", "flash_sdp_enabled"),
            ("enable_mem_efficient_sdp", "mem_efficient_sdp_enabled"),
            ("enable_math_sdp", "math_sdp_enabled"),
            ("enable_cudnn_sdp", "cudnn_sdp_enabled"),
            ("allow_fp16_bf16_reduction_math_sdp", "fp16_bf16_reduction_math_sdp_allowed"),
        )
        for setter, getter in (pair,)
    },
    **{
        f"torch.backends.cuda.{name}": (lambda name=name: getattr(torch.backends.cuda, name)() in (True, False))
        for name in (
            "flash_sdp_enabled",
            "mem_efficient_sdp_enabled",
            "math_sdp_enabled",
            "cudnn_sdp_enabled",
            "fp16_bf16_reduction_math_sdp_allowed",
        )
    },
    "torch.backends.cudnn.is_available": lambda: torch.backends.cudnn.is_available(),
    "torch.backends.cudnn.version": lambda: torch.backends.cudnn.version() >= 8000,
    "torch.backends.cudnn.is_acceptable": lambda: torch.backends.cudnn.is_acceptable(ones()) is False,
    "torch.backends.cudnn.flags": lambda: inside(torch.backends.cudnn.flags(enabled=False, benchmark=True)),
    "torch.backends.cudnn.set_flags": lambda: (
        torch.backends.cudnn.set_flags(*torch.backends.cudnn.set_flags(_benchmark=True)) is not None
    ),
    "torch.version.cuda": lambda: torch.version.cuda.count(".") == 1,
    # ---- torch.mps
    "torch.mps.is_available": lambda: m.is_available() is False,
    "torch.mps.device_count": lambda: m.device_count() == 0,
    "torch.mps.synchronize": lambda: none(m.synchronize()),
    "torch.mps.get_rng_state": _state_of_mps,
    "torch.mps.set_rng_state": _state_of_mps,
    "torch.mps.manual_seed": lambda: none(m.manual_seed(3)),
    "torch.mps.seed": lambda: none(m.seed()),
    "torch.mps.empty_cache": lambda: none(m.empty_cache()),
    "torch.mps.set_per_process_memory_fraction": lambda: none(m.set_per_process_memory_fraction(0.9)),
    "torch.mps.current_allocated_memory": lambda: m.current_allocated_memory() >= 0,
    "torch.mps.driver_allocated_memory": lambda: m.driver_allocated_memory() >= 0,
    "torch.mps.recommended_max_memory": lambda: m.recommended_max_memory() > 0,
    "torch.mps.compile_shader": lambda: m.compile_shader("kernel void f() {}"),
    "torch.mps.load_metallib": lambda: m.load_metallib(b"none"),
    "torch.mps.Event": _elapsed_on_mps,
    "torch.mps.Stream": lambda: m.Stream() != m.Stream(),
    "torch.mps.stream": lambda: inside(m.stream(m.Stream())),
    "torch.mps.set_stream": lambda: none(m.set_stream(m.default_stream())),
    "torch.mps.current_stream": lambda: m.current_stream() == m.default_stream(),
    "torch.mps.default_stream": lambda: m.default_stream().stream_id == 0,
    "torch.mps.profiler.start": lambda: none(m.profiler.start()),
    "torch.mps.profiler.stop": lambda: none(m.profiler.stop()),
    "torch.mps.profiler.profile": lambda: inside(m.profiler.profile()),
    "torch.mps.profiler.metal_capture": lambda: inside(m.profiler.metal_capture("a")),
    "torch.mps.profiler.is_metal_capture_enabled": lambda: m.profiler.is_metal_capture_enabled() is False,
    "torch.mps.profiler.is_capturing_metal": lambda: m.profiler.is_capturing_metal() is False,
    "torch.backends.mps.is_built": lambda: torch.backends.mps.is_built() is False,
    "torch.backends.mps.is_available": lambda: torch.backends.mps.is_available() is False,
    "torch.backends.mps.is_macos_or_newer": lambda: torch.backends.mps.is_macos_or_newer(13, 3),
    "torch.backends.mps.is_macos13_or_newer": lambda: torch.backends.mps.is_macos13_or_newer(),
    "torch.backends.mps.get_name": lambda: bool(torch.backends.mps.get_name()),
    "torch.backends.mps.get_core_count": lambda: torch.backends.mps.get_core_count() > 0,
}


class _Pool:
    id = (0, 1)
