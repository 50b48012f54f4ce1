"""One case per public name under ``torch.cuda`` and neighbours: a call and its postcondition.

A case returns a true value, or raises. It checks an effect that a function which only returns None,
True or 0 does not have: a state that changes and is read back, a figure that grows by a known
amount, the answer to a program written for another accelerator, an error. Names that hold the same
object as a name already listed need no case.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

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

import torchdevice
from torchdevice.check.public_names import PUBLIC_NAMES
from torchdevice.kernel import thread_state

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
    "torch.xpu",
    *(f"torch.xpu.{name}" for name in ("graphs", "memory", "random", "streams")),
)


def accelerator() -> str:
    """Return the accelerator that the program of the active scope is written for."""
    scope = torchdevice.current()
    assert scope is not None
    written_for = scope.options.written_for
    return "cuda" if written_for == "any" else written_for


class _Module:
    """``torch.cuda``, or the module of the accelerator that the program is written for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch, accelerator()), name)


def ones(*shape: int, **options: Any) -> torch.Tensor:
    """Return a tensor of ones on the program's accelerator."""
    return torch.ones(*(shape or (4,)), device=accelerator(), **options)


def quiet(call: Callable[[], Any]) -> Any:
    """Call a function without the warnings of torch that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def inside(context: Any) -> bool:
    """Enter a context manager, leave it and return True."""
    with context:
        pass
    return True


def is_exactly(value: Any, expected: Any) -> bool:
    """Return whether a value has the type and the value of another; True and 1 differ in type."""
    return type(value) is type(expected) and value == expected


def raises(errors: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> bool:
    """Return whether a call raises one of these errors."""
    try:
        call()
    except errors:
        return True
    return False


def elsewhere(call: Callable[[], Any], **options: Any) -> Any:
    """Call a function in a nested scope, on the same target with other options."""
    scope = torchdevice.current()
    assert scope is not None
    with torchdevice.portable(scope.target, **{"written_for": accelerator(), **options}):
        return call()


def by_program(call: Callable[[], Any]) -> list[Any]:
    """Return a call's results in a program for CUDA, and in one for MPS."""
    return [elsewhere(call, written_for="cuda"), elsewhere(call, written_for="mps")]


def of_xpu(call: Callable[[], Any]) -> bool:
    """Return whether a call is True in a program for XPU, and False in one for CUDA."""
    return call() is True and elsewhere(call, written_for="cuda") is False


def _outside(call: Callable[[], Any]) -> Any:
    """Call a function as if no scope were active."""
    with thread_state.suspended(), torch._C.DisableTorchFunction():
        return call()


def only_inside(call: Callable[[], Any]) -> bool:
    """Return whether a call returns None in the scope and raises outside it."""
    return call() is None and raises((AssertionError, RuntimeError), lambda: _outside(call))


def _initialized(asked: Callable[[], bool]) -> bool:
    return asked() is True and not _outside(lambda: bool(asked()))


def reported(call: Callable[[], Any]) -> bool:
    """Return whether a call returns None and is recorded in the journal, as hints are."""
    scope = torchdevice.current()
    assert scope is not None
    before = sum(entry.count for entry in scope.journal.entries)
    return call() is None and sum(entry.count for entry in scope.journal.entries) > before


def asks_the_runtime(method: str, call: Callable[[], Any]) -> bool:
    """Return whether a call returns None and calls this method of runtime or supplied device."""
    scope = torchdevice.current()
    assert scope is not None
    owner: Any = scope.runtime if hasattr(scope.runtime, method) else scope.runtime.supplied
    with mock.patch.object(owner, method, wraps=getattr(owner, method)) as asked:
        return call() is None and asked.called


def asks_torch(binding: str, call: Callable[[], Any]) -> bool:
    """Return whether a call returns None and calls this function of torch's C module."""
    with mock.patch.object(torch._C, binding, wraps=getattr(torch._C, binding)) as asked:
        return call() is None and asked.called


def says_what_torch_says(binding: str, call: Callable[[], Any]) -> bool:
    """Return whether a call returns the bool of torch's C name, or of the C function."""
    answer = object()
    held = getattr(torch._C, binding)
    with mock.patch.object(torch._C, binding, (lambda *args: answer) if callable(held) else answer):
        passed_on = call() is answer
    return passed_on and isinstance(call(), bool)


_NEW = 64 << 20
"""The size in bytes of a tensor that memory figures must show."""

_SLACK = 4 << 20
"""The bytes by which a process's memory may grow more or less than the tensor's size."""


def grows(figure: Callable[[], int]) -> bool:
    """Return whether a memory figure grows by the size of a new tensor."""
    ones()  # torch allocates memory of its own for the first tensor
    before = figure()
    kept = ones(_NEW // 4)
    return abs(figure() - before - kept.nbytes) < _SLACK


def peak_grows(figure: Callable[[], int]) -> bool:
    """Return whether a peak grows by a new tensor's size, after a reset to the present."""
    c.empty_cache()
    c.reset_peak_memory_stats()
    return grows(figure)


def _new_graph() -> Any:
    return getattr(c, f"{accelerator().upper()}Graph")()


def _graph() -> bool:
    x = ones()
    graph = _new_graph()
    with c.graph(graph):
        y = x + 1
    x.fill_(5)
    graph.replay()
    return y.tolist() == [6.0] * 4


def _exported(hook: Callable[[Any], None]) -> bool:
    graph = c.CUDAGraph()
    graph.register_capture_end_hook(hook)
    with c.graph(graph):
        ones()
    return True


def _graphed() -> bool:
    double = c.make_graphed_callables(
        torch.nn.Linear(2, 2, device=accelerator()), (torch.ones(1, 2, device=accelerator()),)
    )
    return double(torch.zeros(1, 2, device=accelerator())).shape == (1, 2)


def _annotated() -> bool:
    state = c.get_rng_state()
    a = torch.rand(3, device=accelerator())
    c.set_rng_state(state)
    return torch.equal(a, torch.rand(3, device=accelerator()))


def _scaled() -> bool:
    scaler = quiet(c.amp.GradScaler)
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


def _held(module: Any, name: str) -> Any:
    """Return the type of what a legacy constructor makes on the target: MPS holds no float64."""
    return (
        module.FloatTensor
        if name == "DoubleTensor" and ones().device.type == "mps"
        else getattr(module, name)
    )


def _sparse_type(name: str) -> Callable[[], bool]:
    def use() -> bool:
        kind = getattr(c.sparse, name)
        made = kind(torch.tensor([[0, 2]]), getattr(torch, name)([1, 2]), torch.Size([3]))
        return (
            isinstance(made, _held(c.sparse, name))
            and made.is_sparse
            and made.to_dense().tolist() == [1, 0, 2]
        )

    return use


def _elapsed() -> bool:
    start, end = c.Event(enable_timing=True), c.Event(enable_timing=True)
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
    return end.query() and isinstance(start.elapsed_time(end), float)


def _set_and_get(module: Any, setter: str, getter: str, *values: Any) -> bool:
    """Return whether all set values are read back; a constant would pass with fewer than two."""
    read = []
    for value in values:
        getattr(module, setter)(value)
        read.append(getattr(module, getter)())
    return len(values) > 1 and all(map(is_exactly, read, values))


def _flag(setter: Callable[[bool], None], getter: Callable[[], bool]) -> bool:
    """Return whether a flag takes both values. One function is of torch's C module."""
    before = getter()
    try:
        return all(setter(value) is None and getter() is value for value in (not before, before))
    finally:
        setter(bool(before))


_FLAGS = {
    ("enable_flash_sdp", "flash_sdp_enabled"): ("_set_sdp_use_flash", "_get_flash_sdp_enabled"),
    ("enable_mem_efficient_sdp", "mem_efficient_sdp_enabled"): (
        "_set_sdp_use_mem_efficient",
        "_get_mem_efficient_sdp_enabled",
    ),
    ("enable_math_sdp", "math_sdp_enabled"): ("_set_sdp_use_math", "_get_math_sdp_enabled"),
    ("enable_cudnn_sdp", "cudnn_sdp_enabled"): ("_set_sdp_use_cudnn", "_get_cudnn_sdp_enabled"),
    ("allow_fp16_bf16_reduction_math_sdp", "fp16_bf16_reduction_math_sdp_allowed"): (
        "_set_math_sdp_allow_fp16_bf16_reduction",
        "_get_math_sdp_allow_fp16_bf16_reduction",
    ),
}
"""Setter and getter of ``torch.backends.cuda`` -> the functions of torch's C module that they call.
"""


def _simulates_cuda() -> bool:
    scope = torchdevice.current()
    assert scope is not None
    profile = getattr(scope.runtime, "profile", None)
    return profile is not None and profile.stands_for_cuda


def _params(width: int = 8) -> Any:
    q = torch.ones(1, 1, 4, width, device=accelerator())
    return torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)


def _tensor_type(name: str) -> Callable[[], bool]:
    return lambda: isinstance(getattr(torch.cuda, name)(3), _held(torch.cuda, name))


def _storage_type(name: str) -> Callable[[], bool]:
    return lambda: getattr(torch.cuda, name)(3).size() == 3


def _sync_debug_mode() -> bool:
    read = []
    for mode in ("warn", "error", "default"):
        c.set_sync_debug_mode(mode)
        read.append(c.get_sync_debug_mode())
    return read == [1, 2, 0]


def _stream_context(context: Callable[[Any], Any]) -> bool:
    stream = c.Stream()
    with context(stream):
        inner = c.current_stream()
    return inner == stream != c.current_stream()


def _snapshot() -> Any:
    kept = ones(100)
    found = c.memory_snapshot()
    addresses = {block["data_ptr"] for segment in found for block in segment["blocks"]}
    return kept.untyped_storage().data_ptr() in addresses


def _seeded(seed: Callable[[], Any], state: Callable[[], torch.Tensor]) -> bool:
    """Return whether a call sets another seed."""
    c.manual_seed(3)
    before = state()
    return seed() is None and not torch.equal(before, state())


def _initial_seed() -> bool:
    seeds = []
    for seed in (3, 5):
        c.manual_seed(seed)
        seeds.append(c.initial_seed())
    return seeds == [3, 5]


def _all_states() -> bool:
    states = c.get_rng_state_all()
    first = torch.rand(3, device=accelerator())
    c.set_rng_state_all(states)
    return len(states) == c.device_count() and torch.equal(
        first, torch.rand(3, device=accelerator())
    )


def _generators() -> bool:
    c.manual_seed(11)
    return [each.initial_seed() for each in c.default_generators] == [11] * c.device_count()


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
        c.tunable.tune_gemm_in_file(path)
    c.tunable.enable(False)
    return raises(AssertionError, lambda: c.tunable.tune_gemm_in_file("none.csv"))


def _on_the_third(call: Callable[[], Any]) -> Any:
    """Call a function in a scope with three devices."""
    return elsewhere(call, devices=3)


def _selected() -> bool:
    c.set_device(2)
    return is_exactly(c.current_device(), 2)


def _inside_device(context: Callable[[], Any]) -> bool:
    with context():
        inner = c.current_device()
    return [inner, c.current_device()] == [2, 0]


def _peers() -> bool:
    asked = c.can_device_access_peer
    return asked(0, 1) is True and asked(1, 1) is False


def _by_capability(call: Callable[[], Any]) -> bool:
    """Return whether a call returns True at compute capability 8.0, and False at 7.5."""
    return call() is True and elsewhere(call, capability=(7, 5)) is False


def _follows_the_name(call: Callable[[], str]) -> bool:
    return bool(call()) and elsewhere(call, properties={"name": "a name"}) == "a name"


def _utilization() -> bool:
    with mock.patch("psutil.cpu_percent", return_value=37.4):
        return is_exactly(c.utilization(), 37 if accelerator() == "cuda" else 37.4)


def _stream_set() -> bool:
    stream, before = c.Stream(), c.current_stream()
    c.set_stream(stream)
    inner = c.current_stream()
    c.set_stream(before)
    return inner == stream != before == c.current_stream()


def _caching_allocator() -> bool:
    read = []
    for value in (False, True):
        c.caching_allocator_enable(value)
        read.append(torch._C._cuda_cudaCachingAllocator_is_enabled())
    return read == [False, True]


def _memory_by_its_address() -> bool:
    address = c.caching_allocator_alloc(8)
    return c.caching_allocator_delete(address) is None and _is_gone(address)


def _is_gone(address: int) -> bool:
    try:
        c.caching_allocator_delete(address)
    except RuntimeError as error:
        return f"invalid device pointer: {address:#x}" in str(error)
    return False


def _caching_allocator_off() -> bool:
    with c.caching_allocator_disabled():
        inner = torch._C._cuda_cudaCachingAllocator_is_enabled()
    return [inner, torch._C._cuda_cudaCachingAllocator_is_enabled()] == [False, True]


def _limit_of_mps() -> bool:
    read = []
    for fraction in (0.5, 0.9):
        torch.mps.set_per_process_memory_fraction(fraction)
        read.append(c.get_per_process_memory_fraction())
    return read == [0.5, 0.9]


def _capturing() -> bool:
    with c.graph(_new_graph()):
        inner = c.is_current_stream_capturing()
        ones() + 1
    return [inner, c.is_current_stream_capturing()] == [True, False]


def _nested_ranges() -> bool:
    first, second = c.nvtx.range_push("a"), c.nvtx.range_push("b")
    return second == first + 1 and [c.nvtx.range_pop(), c.nvtx.range_pop()] == [second, first]


def _range_ended() -> bool:
    number = c.nvtx.range_start("a")
    return reported(lambda: c.nvtx.range_end(number))


def shown(call: Callable[[], Any]) -> bool:
    """Return whether torch.profiler shows an event called "a name" that the call makes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        call()
    return "a name" in {event.key for event in profiler.key_averages()}


def _matmul_flag() -> bool:
    flags = torch.backends.cuda.matmul
    before = flags.allow_tf32
    try:
        flags.allow_tf32 = not before
        return flags.allow_tf32 is not before
    finally:
        flags.allow_tf32 = before


def _plan_cache() -> bool:
    cache = torch.backends.cuda.cufft_plan_cache
    cache[0].max_size = 10
    return isinstance(cache, torch.backends.cuda.cuFFTPlanCacheManager) and is_exactly(
        cache.max_size, 10
    )


def _library(call: Callable[..., Any], kind: Any, name: str) -> bool:
    return call(name.lower()) == getattr(kind, name) and call() == getattr(kind, name)


def _cudnn_flags() -> bool:
    before = torch.backends.cudnn.benchmark
    with torch.backends.cudnn.flags(enabled=True, benchmark=not before):
        inner = torch.backends.cudnn.benchmark
    return [inner, torch.backends.cudnn.benchmark] == [not before, before]


def _cudnn_flags_set() -> bool:
    before = torch.backends.cudnn.set_flags(_benchmark=True)
    inner = torch.backends.cudnn.benchmark
    torch.backends.cudnn.set_flags(*before)
    return [inner, torch.backends.cudnn.benchmark] == [True, before[1]]


def _autocast() -> bool:
    with quiet(lambda: c.amp.autocast(dtype=torch.bfloat16)):
        return (ones(2, 2) @ ones(2, 2)).dtype is torch.bfloat16


def _version() -> bool:
    major, minor = (int(part) for part in torch.version.cuda.split("."))
    return 1000 * major + 10 * minor == torch._C._cuda_getCompiledVersion()


def _sanitized() -> bool:
    c._sanitizer.enable_cuda_sanitizer()
    try:
        return c._sanitizer.cuda_sanitizer.enabled is True and ones().sum().item() == 4
    finally:
        c._sanitizer.cuda_sanitizer.__del__()
        c._sanitizer.cuda_sanitizer.enabled = False


def _viewed(function: Callable[..., Any]) -> bool:
    kept = ones(100)
    drawn: list[str] = []
    function(c.memory._snapshot(), format_flamegraph=drawn.append)
    return bool(drawn) and "active_allocated" in drawn[0] and kept.numel() == 100


def _compared() -> bool:
    before = c.memory_snapshot()
    kept = ones(16 << 20)  # more than any cached segment has room for
    drawn: list[str] = []
    c._memory_viz.compare(before, c.memory_snapshot(), format_flamegraph=drawn.append)
    return "only_after" in drawn[0] and kept.numel() == 16 << 20


_DTYPES = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]

c: Any = _Module()
m = torch.mps

CASES: dict[str, Callable[[], Any]] = {
    **{f"torch.cuda.{name}Tensor": _tensor_type(f"{name}Tensor") for name in _DTYPES},
    **{
        f"torch.cuda.sparse.{name}Tensor": _sparse_type(f"{name}Tensor")
        for name in _DTYPES
        if name != "Bool"
    },
    **{f"torch.cuda.{name}Storage": _storage_type(f"{name}Storage") for name in _DTYPES},
    **{
        f"torch.cuda.Complex{name}Storage": _storage_type(f"Complex{name}Storage")
        for name in ("Double", "Float")
    },
    # ---- devices
    "torch.cuda.device": lambda: _on_the_third(lambda: _inside_device(lambda: c.device(2))),
    "torch.cuda.device_of": lambda: inside(c.device_of(ones())),
    "torch.cuda.device_count": lambda: is_exactly(_on_the_third(c.device_count), 3),
    "torch.cuda.current_device": lambda: _on_the_third(_selected),
    "torch.cuda.set_device": lambda: _on_the_third(_selected),
    "torch.cuda.is_available": lambda: by_program(c.is_available) == [True, False],
    "torch.cuda.is_initialized": lambda: _initialized(c.is_initialized),
    "torch.cuda.init": lambda: only_inside(c.init),
    "torch.cuda.synchronize": lambda: asks_the_runtime("synchronize", c.synchronize),
    "torch.cuda.get_device_name": lambda: _follows_the_name(c.get_device_name),
    "torch.cuda.get_device_capability": lambda: (
        [c.get_device_capability(), elsewhere(c.get_device_capability, capability=(7, 5))]
        == [(8, 0), (7, 5)]
    ),
    "torch.cuda.get_device_properties": lambda: c.get_device_properties(0).major == 8,
    "torch.cuda.get_arch_list": lambda: c.get_arch_list() == ["sm_80"],
    "torch.cuda.get_gencode_flags": lambda: (
        c.get_gencode_flags() == "-gencode compute=compute_80,code=sm_80"
    ),
    "torch.cuda.can_device_access_peer": lambda: _on_the_third(_peers),
    "torch.cuda.is_bf16_supported": lambda: _by_capability(
        lambda: c.is_bf16_supported(including_emulation=False)
    ),
    "torch.cuda.is_tf32_supported": lambda: _by_capability(c.is_tf32_supported),
    "torch.cuda.has_half": lambda: c.has_half is True,
    "torch.cuda.has_magma": lambda: c.has_magma is torch._C._has_magma,
    "torch.cuda.ipc_collect": lambda: reported(c.ipc_collect),
    "torch.cuda.set_sync_debug_mode": _sync_debug_mode,
    "torch.cuda.get_sync_debug_mode": _sync_debug_mode,
    "torch.cuda.check_error": lambda: (
        c.check_error(c.cudart().cudaError.success) is None
        and raises((RuntimeError, ValueError), lambda: c.check_error(2))
    ),
    "torch.cuda.cudart": lambda: c.cudart().cudaMemGetInfo(0)[1] > 0,
    "torch.cuda.cudaStatus": lambda: c.cudaStatus.SUCCESS == 0,
    "torch.cuda.CudaError": lambda: issubclass(c.CudaError, RuntimeError),
    "torch.cuda.DeferredCudaCallError": lambda: issubclass(c.DeferredCudaCallError, Exception),
    # ---- readings of NVML
    "torch.cuda.utilization": _utilization,
    "torch.cuda.temperature": lambda: c.temperature() > 0,
    "torch.cuda.power_draw": lambda: c.power_draw() > 0,
    "torch.cuda.clock_rate": lambda: c.clock_rate() > 0,
    "torch.cuda.memory_usage": lambda: 0 <= c.memory_usage() <= 100,
    "torch.cuda.device_memory_used": lambda: c.device_memory_used(),
    # ---- streams and events
    "torch.cuda.Stream": lambda: c.Stream().query(),
    "torch.cuda.Event": _elapsed,
    "torch.cuda.ExternalStream": lambda: c.ExternalStream(0) == c.default_stream(),
    "torch.cuda.get_stream_from_external": lambda: (
        c.get_stream_from_external(0, 0) == c.default_stream()
    ),
    "torch.cuda.StreamContext": lambda: _stream_context(c.StreamContext),
    "torch.cuda.stream": lambda: _stream_context(c.stream),
    "torch.cuda.set_stream": _stream_set,
    "torch.cuda.current_stream": lambda: c.current_stream() == c.default_stream(),
    "torch.cuda.default_stream": lambda: c.default_stream().stream_id == 0,
    # ---- graphs
    "torch.cuda.CUDAGraph": _graph,
    "torch.cuda.graph": _graph,
    "torch.cuda.make_graphed_callables": _graphed,
    "torch.cuda.graph_pool_handle": lambda: c.graph_pool_handle() != c.graph_pool_handle(),
    "torch.cuda.is_current_stream_capturing": _capturing,
    "torch.cuda.export_dot": lambda: _exported(c.export_dot("graph.dot")),
    "torch.cuda.export_graph_data": lambda: _exported(c.export_graph_data("graph.pickle")),
    "torch.cuda.graph_annotations.is_available": lambda: (
        c.graph_annotations.is_available() is False
    ),
    "torch.cuda.graph_annotations.mark_kernels": lambda: inside(
        c.graph_annotations.mark_kernels("a")
    ),
    "torch.cuda.graph_annotations.get_kernel_annotations": lambda: (
        not c.graph_annotations.get_kernel_annotations()
    ),
    "torch.cuda.graph_annotations.clear_kernel_annotations": lambda: (
        quiet(c.graph_annotations.clear_kernel_annotations) is None
    ),
    "torch.cuda.graph_annotations.get_kernel_py_stacks": lambda: (
        not c.graph_annotations.get_kernel_py_stacks()
    ),
    "torch.cuda.graph_annotations.dump_kernel_py_stacks": lambda: (
        c.graph_annotations.dump_kernel_py_stacks("stacks") is None
    ),
    "torch.cuda.green_contexts.SMPartition": lambda: c.green_contexts.SMPartition.from_device(0),
    "torch.cuda.green_contexts.get_num_locality_domains": lambda: (
        c.green_contexts.get_num_locality_domains(0)
    ),
    "torch.cuda.green_contexts.is_localization_supported": lambda: (
        c.green_contexts.is_localization_supported(0)
    ),
    "torch.cuda.GreenContext": lambda: c.GreenContext.create(num_sms=1, device_id=0),
    # ---- memory
    "torch.cuda.empty_cache": lambda: asks_the_runtime("empty_cache", c.empty_cache),
    "torch.cuda.memory_allocated": lambda: grows(c.memory_allocated),
    "torch.cuda.max_memory_allocated": lambda: peak_grows(c.max_memory_allocated),
    "torch.cuda.memory_reserved": lambda: peak_grows(c.memory_reserved),
    "torch.cuda.max_memory_reserved": lambda: peak_grows(c.max_memory_reserved),
    "torch.cuda.memory_cached": lambda: peak_grows(lambda: quiet(c.memory_cached)),
    "torch.cuda.max_memory_cached": lambda: peak_grows(lambda: quiet(c.max_memory_cached)),
    "torch.cuda.memory_stats": lambda: grows(
        lambda: c.memory_stats()["allocated_bytes.all.current"]
    ),
    "torch.cuda.memory_stats_as_nested_dict": lambda: grows(
        lambda: c.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]
    ),
    "torch.cuda.memory_summary": lambda: "CUDA OOMs" in c.memory_summary(),
    "torch.cuda.memory_snapshot": _snapshot,
    "torch.cuda.mem_get_info": lambda: c.mem_get_info()[0] <= c.mem_get_info()[1],
    "torch.cuda.list_gpu_processes": lambda: c.list_gpu_processes(),
    "torch.cuda.reset_peak_memory_stats": lambda: asks_the_runtime(
        "reset_peak_memory", c.reset_peak_memory_stats
    ),
    "torch.cuda.reset_accumulated_memory_stats": lambda: asks_the_runtime(
        "reset_accumulated_memory", c.reset_accumulated_memory_stats
    ),
    "torch.cuda.reset_max_memory_allocated": lambda: asks_the_runtime(
        "reset_peak_memory", lambda: quiet(c.reset_max_memory_allocated)
    ),
    "torch.cuda.reset_max_memory_cached": lambda: asks_the_runtime(
        "reset_peak_memory", lambda: quiet(c.reset_max_memory_cached)
    ),
    "torch.cuda.host_memory_stats": lambda: is_exactly(c.host_memory_stats()["num_host_alloc"], 0),
    "torch.cuda.host_memory_stats_as_nested_dict": lambda: is_exactly(
        c.host_memory_stats_as_nested_dict()["num_host_alloc"], 0
    ),
    "torch.cuda.reset_peak_host_memory_stats": lambda: asks_torch(
        "_cuda_resetPeakHostMemoryStats", c.reset_peak_host_memory_stats
    ),
    "torch.cuda.reset_accumulated_host_memory_stats": lambda: asks_torch(
        "_cuda_resetAccumulatedHostMemoryStats", c.reset_accumulated_host_memory_stats
    ),
    "torch.cuda.set_per_process_memory_fraction": lambda: _set_and_get(
        c, "set_per_process_memory_fraction", "get_per_process_memory_fraction", 0.5, 0.99
    ),
    "torch.cuda.get_per_process_memory_fraction": lambda: is_exactly(
        c.get_per_process_memory_fraction(), 1.0
    ),
    "torch.cuda.get_allocator_backend": lambda: c.get_allocator_backend() == "native",
    "torch.cuda.caching_allocator_enable": _caching_allocator,
    "torch.cuda.caching_allocator_disabled": _caching_allocator_off,
    "torch.cuda.caching_allocator_alloc": _memory_by_its_address,
    "torch.cuda.caching_allocator_delete": _memory_by_its_address,
    "torch.cuda.change_current_allocator": lambda: c.change_current_allocator(
        c.memory._CUDAAllocator(None)
    ),
    "torch.cuda.CUDAPluggableAllocator": lambda: c.CUDAPluggableAllocator(
        "none.so", "alloc", "free"
    ),
    "torch.cuda.MemPool": lambda: c.MemPool().use_count() == 1,
    "torch.cuda.use_mem_pool": lambda: inside(c.use_mem_pool(_Pool())),
    # ---- random numbers
    "torch.cuda.default_generators": _generators,
    "torch.cuda.get_rng_state": _annotated,
    "torch.cuda.get_rng_state_all": _all_states,
    "torch.cuda.set_rng_state": _annotated,
    "torch.cuda.set_rng_state_all": _all_states,
    "torch.cuda.manual_seed": lambda: _same_numbers(c.manual_seed, accelerator()),
    "torch.cuda.manual_seed_all": lambda: _same_numbers(c.manual_seed_all, accelerator()),
    "torch.cuda.seed": lambda: _seeded(c.seed, c.get_rng_state),
    "torch.cuda.seed_all": lambda: _seeded(c.seed_all, c.get_rng_state),
    "torch.cuda.initial_seed": _initial_seed,
    # ---- handles and kernels
    "torch.cuda.current_blas_handle": lambda: c.current_blas_handle(),
    "torch.cuda.current_solver_handle": lambda: c.current_solver_handle(),
    "torch.cuda.jiterator._create_jit_fn": lambda: (
        c.jiterator._create_jit_fn("template <typename T> T f(T x) { return x + x; }")(
            ones()
        ).tolist()
        == [2.0] * 4
    ),
    "torch.cuda.jiterator._create_multi_output_jit_fn": lambda: (
        c.jiterator._create_multi_output_jit_fn(
            "template <typename T> void f(T x, T& y) { y = x + x; }", 1
        )(ones()).tolist()
        == [2.0] * 4
    ),
    # ---- submodules
    "torch.cuda.amp.autocast": _autocast,
    "torch.cuda.amp.GradScaler": _scaled,
    "torch.cuda.amp.amp_definitely_not_available": lambda: (
        by_program(c.amp.amp_definitely_not_available) == [False, True]
    ),
    "torch.cuda.amp.custom_fwd": _custom,
    "torch.cuda.amp.custom_bwd": _custom,
    "torch.cuda.comm.broadcast": lambda: c.comm.broadcast(ones(), [0])[0].tolist() == [1.0] * 4,
    "torch.cuda.comm.broadcast_coalesced": lambda: (
        c.comm.broadcast_coalesced([ones()], [0])[0][0].tolist() == [1.0] * 4
    ),
    "torch.cuda.comm.scatter": lambda: (
        c.comm.scatter(ones(), [0], chunk_sizes=[4])[0].tolist() == [1.0] * 4
    ),
    "torch.cuda.comm.gather": lambda: (
        c.comm.gather([ones(), ones() * 2], destination=0).tolist() == [1.0] * 4 + [2.0] * 4
    ),
    "torch.cuda.comm.reduce_add": lambda: (
        c.comm.reduce_add([ones(), ones()], 0).tolist() == [2.0] * 4
    ),
    "torch.cuda.comm.reduce_add_coalesced": lambda: (
        c.comm.reduce_add_coalesced([[ones()], [ones()]], 0)[0].sum() == 8
    ),
    "torch.cuda.gds.GdsFile": lambda: c.gds.GdsFile(__file__, os.O_RDONLY),
    "torch.cuda.gds.is_available": lambda: says_what_torch_says("_has_gds", c.gds.is_available),
    "torch.cuda.gds.gds_register_buffer": lambda: c.gds.gds_register_buffer(
        ones().untyped_storage()
    ),
    "torch.cuda.gds.gds_deregister_buffer": lambda: c.gds.gds_deregister_buffer(
        ones().untyped_storage()
    ),
    "torch.cuda.nccl.all_reduce": lambda: c.nccl.all_reduce([ones()]),
    "torch.cuda.nccl.reduce": lambda: c.nccl.reduce([ones(), ones()], output=ones()),
    "torch.cuda.nccl.broadcast": lambda: c.nccl.broadcast([ones(), ones()]),
    "torch.cuda.nccl.all_gather": lambda: c.nccl.all_gather([ones()], [ones()]),
    "torch.cuda.nccl.reduce_scatter": lambda: c.nccl.reduce_scatter([ones()], [ones()]),
    "torch.cuda.nvtx.mark": lambda: shown(lambda: c.nvtx.mark("a name")),
    "torch.cuda.nvtx.range": lambda: shown(lambda: inside(c.nvtx.range("a name"))),
    "torch.cuda.nvtx.range_push": _nested_ranges,
    "torch.cuda.nvtx.range_pop": _nested_ranges,
    "torch.cuda.nvtx.range_start": lambda: shown(
        lambda: c.nvtx.range_end(c.nvtx.range_start("a name"))
    ),
    "torch.cuda.nvtx.range_end": _range_ended,
    "torch.cuda.profiler.start": lambda: only_inside(c.profiler.start),
    "torch.cuda.profiler.stop": lambda: only_inside(c.profiler.stop),
    "torch.cuda.profiler.profile": lambda: inside(c.profiler.profile()),
    "torch.cuda.profiler.init": lambda: c.profiler.init("out", None, "csv"),
    "torch.cuda.tunable.enable": lambda: _set_and_get(
        c.tunable, "enable", "is_enabled", True, False
    ),
    "torch.cuda.tunable.is_enabled": lambda: _set_and_get(
        c.tunable, "enable", "is_enabled", True, False
    ),
    "torch.cuda.tunable.tuning_enable": lambda: _set_and_get(
        c.tunable, "tuning_enable", "tuning_is_enabled", False, True
    ),
    "torch.cuda.tunable.tuning_is_enabled": lambda: _set_and_get(
        c.tunable, "tuning_enable", "tuning_is_enabled", False, True
    ),
    "torch.cuda.tunable.record_untuned_enable": lambda: _set_and_get(
        c.tunable, "record_untuned_enable", "record_untuned_is_enabled", True, False
    ),
    "torch.cuda.tunable.record_untuned_is_enabled": lambda: _set_and_get(
        c.tunable, "record_untuned_enable", "record_untuned_is_enabled", True, False
    ),
    "torch.cuda.tunable.wildcard_fallback_enable": lambda: _set_and_get(
        c.tunable, "wildcard_fallback_enable", "wildcard_fallback_is_enabled", True, False
    ),
    "torch.cuda.tunable.wildcard_fallback_is_enabled": lambda: _set_and_get(
        c.tunable, "wildcard_fallback_enable", "wildcard_fallback_is_enabled", True, False
    ),
    "torch.cuda.tunable.set_max_tuning_duration": lambda: _set_and_get(
        c.tunable, "set_max_tuning_duration", "get_max_tuning_duration", 5, 7
    ),
    "torch.cuda.tunable.get_max_tuning_duration": lambda: _set_and_get(
        c.tunable, "set_max_tuning_duration", "get_max_tuning_duration", 5, 7
    ),
    "torch.cuda.tunable.set_max_tuning_iterations": lambda: _set_and_get(
        c.tunable, "set_max_tuning_iterations", "get_max_tuning_iterations", 5, 7
    ),
    "torch.cuda.tunable.get_max_tuning_iterations": lambda: _set_and_get(
        c.tunable, "set_max_tuning_iterations", "get_max_tuning_iterations", 5, 7
    ),
    "torch.cuda.tunable.set_cublaslt_requested_algo_count": lambda: _set_and_get(
        c.tunable, "set_cublaslt_requested_algo_count", "get_cublaslt_requested_algo_count", 5, 7
    ),
    "torch.cuda.tunable.get_cublaslt_requested_algo_count": lambda: _set_and_get(
        c.tunable, "set_cublaslt_requested_algo_count", "get_cublaslt_requested_algo_count", 5, 7
    ),
    "torch.cuda.tunable.set_rotating_buffer_size": lambda: _set_and_get(
        c.tunable, "set_rotating_buffer_size", "get_rotating_buffer_size", 5, 7
    ),
    "torch.cuda.tunable.get_rotating_buffer_size": lambda: _set_and_get(
        c.tunable, "set_rotating_buffer_size", "get_rotating_buffer_size", 5, 7
    ),
    "torch.cuda.tunable.set_filename": lambda: c.tunable.set_filename("a.csv"),
    "torch.cuda.tunable.get_filename": lambda: c.tunable.get_filename(),
    "torch.cuda.tunable.get_results": lambda: c.tunable.get_results(),
    "torch.cuda.tunable.get_validators": lambda: c.tunable.get_validators(),
    "torch.cuda.tunable.read_file": lambda: c.tunable.read_file("none.csv"),
    "torch.cuda.tunable.set_numerical_check_tolerances": lambda: (
        c.tunable.set_numerical_check_tolerances(True)
    ),
    "torch.cuda.tunable.dynamic_dims_mask": lambda: inside(c.tunable.dynamic_dims_mask("m")),
    "torch.cuda.tunable.tune_gemm_in_file": _tuned_file,
    "torch.cuda.tunable.mgpu_tune_gemm_in_file": lambda: c.tunable.mgpu_tune_gemm_in_file(
        "none*.csv", 1
    ),
    "torch.cuda._sanitizer.enable_cuda_sanitizer": _sanitized,
    "torch.cuda._memory_viz.segments": lambda: _viewed(c._memory_viz.segments),
    "torch.cuda._memory_viz.memory": lambda: _viewed(c._memory_viz.memory),
    "torch.cuda._memory_viz.compare": _compared,
    # ---- torch.backends
    "torch.backends.cuda.is_built": lambda: says_what_torch_says(
        "_has_cuda", torch.backends.cuda.is_built
    ),
    "torch.backends.cuda.SDPAParams": lambda: (
        is_exactly(_params().dropout, 0.0) and _params().query.shape == (1, 1, 4, 8)
    ),
    "torch.backends.cuda.can_use_flash_attention": lambda: (
        torch.backends.cuda.can_use_flash_attention(_params()) is False
    ),
    "torch.backends.cuda.can_use_efficient_attention": lambda: (
        torch.backends.cuda.can_use_efficient_attention(_params()) is _simulates_cuda()
        and torch.backends.cuda.can_use_efficient_attention(_params(width=3)) is False
    ),
    "torch.backends.cuda.can_use_cudnn_attention": lambda: (
        torch.backends.cuda.can_use_cudnn_attention(_params()) is False
    ),
    "torch.backends.cuda.is_flash_attention_available": lambda: says_what_torch_says(
        "_is_flash_attention_available", torch.backends.cuda.is_flash_attention_available
    ),
    "torch.backends.cuda.is_ck_sdpa_available": lambda: (
        torch.backends.cuda.is_ck_sdpa_available() is False
    ),
    "torch.backends.cuda.sdp_kernel": lambda: quiet(
        lambda: inside(torch.backends.cuda.sdp_kernel())
    ),
    "torch.backends.cuda.preferred_linalg_library": lambda: _library(
        torch.backends.cuda.preferred_linalg_library, torch._C._LinalgBackend, "Magma"
    ),
    "torch.backends.cuda.preferred_blas_library": lambda: _library(
        torch.backends.cuda.preferred_blas_library, torch._C._BlasBackend, "Cublaslt"
    ),
    "torch.backends.cuda.preferred_rocm_fa_library": lambda: (
        torch.backends.cuda.preferred_rocm_fa_library() == torch._C._ROCmFABackend.Default
    ),
    "torch.backends.cuda.cublas_workspace_size": lambda: (
        torch.backends.cuda.cublas_workspace_size(1024) == 1024
    ),
    "torch.backends.cuda.cublaslt_workspace_size": lambda: (
        torch.backends.cuda.cublaslt_workspace_size(1024) == 1024
    ),
    "torch.backends.cuda.blas_workspace_size": lambda: (
        torch.backends.cuda.blas_workspace_size(1024, "cublas") == 1024
    ),
    "torch.backends.cuda.matmul": _matmul_flag,
    "torch.backends.cuda.cuBLASModule": lambda: isinstance(
        torch.backends.cuda.matmul, torch.backends.cuda.cuBLASModule
    ),
    "torch.backends.cuda.cufft_plan_cache": _plan_cache,
    "torch.backends.cuda.cuFFTPlanCache": lambda: isinstance(
        torch.backends.cuda.cufft_plan_cache[0], torch.backends.cuda.cuFFTPlanCache
    ),
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp": lambda: isinstance(
        vars(type(torch.backends.cuda.cufft_plan_cache[0]))["size"],
        torch.backends.cuda.cuFFTPlanCacheAttrContextProp,
    ),
    "torch.backends.cuda.cuFFTPlanCacheManager": _plan_cache,
    **{
        f"torch.backends.cuda.{setter}": (
            lambda setter=setter, own=own: _flag(
                getattr(torch.backends.cuda, setter), getattr(torch._C, own)
            )
        )
        for (setter, _), (_, own) in _FLAGS.items()
    },
    **{
        f"torch.backends.cuda.{getter}": (
            lambda getter=getter, own=own: _flag(
                getattr(torch._C, own), getattr(torch.backends.cuda, getter)
            )
        )
        for (_, getter), (own, _) in _FLAGS.items()
    },
    "torch.backends.cudnn.is_available": lambda: says_what_torch_says(
        "_has_cudnn", torch.backends.cudnn.is_available
    ),
    "torch.backends.cudnn.version": lambda: is_exactly(torch.backends.cudnn.version(), 91002),
    "torch.backends.cudnn.is_acceptable": lambda: (
        torch.backends.cudnn.is_acceptable(ones()) is _simulates_cuda()
        and torch.backends.cudnn.is_acceptable(torch.ones(1)) is False
    ),
    "torch.backends.cudnn.flags": _cudnn_flags,
    "torch.backends.cudnn.set_flags": _cudnn_flags_set,
    "torch.version.cuda": _version,
    # ---- torch.mps
    "torch.mps.is_available": lambda: by_program(m.is_available) == [False, True],
    "torch.mps.device_count": lambda: by_program(m.device_count) == [0, 1],
    "torch.mps.synchronize": lambda: asks_the_runtime("synchronize", m.synchronize),
    "torch.mps.get_rng_state": _state_of_mps,
    "torch.mps.set_rng_state": _state_of_mps,
    "torch.mps.manual_seed": lambda: elsewhere(
        lambda: _same_numbers(m.manual_seed, "mps"), written_for="mps"
    ),
    "torch.mps.seed": lambda: _seeded(m.seed, m.get_rng_state),
    "torch.mps.empty_cache": lambda: asks_the_runtime("empty_cache", m.empty_cache),
    "torch.mps.set_per_process_memory_fraction": _limit_of_mps,
    "torch.mps.current_allocated_memory": lambda: grows(m.current_allocated_memory),
    "torch.mps.driver_allocated_memory": lambda: peak_grows(m.driver_allocated_memory),
    "torch.mps.recommended_max_memory": lambda: is_exactly(
        m.recommended_max_memory(), c.mem_get_info()[1]
    ),
    "torch.mps.compile_shader": lambda: m.compile_shader("kernel void f() {}"),
    "torch.mps.load_metallib": lambda: m.load_metallib(b"none"),
    "torch.mps.Event": _elapsed_on_mps,
    "torch.mps.Stream": lambda: m.Stream(),
    "torch.mps.stream": lambda: inside(m.stream(m.current_stream())),
    "torch.mps.set_stream": lambda: m.set_stream(m.default_stream()) is None,
    "torch.mps.current_stream": lambda: m.current_stream() == m.default_stream(),
    "torch.mps.default_stream": lambda: m.default_stream() == m.current_stream(),
    "torch.mps.profiler.start": lambda: reported(m.profiler.start),
    "torch.mps.profiler.stop": lambda: reported(m.profiler.stop),
    "torch.mps.profiler.profile": lambda: inside(m.profiler.profile()),
    "torch.mps.profiler.metal_capture": lambda: inside(m.profiler.metal_capture("a")),
    "torch.mps.profiler.is_metal_capture_enabled": lambda: (
        m.profiler.is_metal_capture_enabled() is False
    ),
    "torch.mps.profiler.is_capturing_metal": lambda: m.profiler.is_capturing_metal() is False,
    "torch.backends.mps.is_built": lambda: by_program(torch.backends.mps.is_built) == [False, True],
    "torch.backends.mps.is_available": lambda: (
        by_program(torch.backends.mps.is_available) == [False, True]
    ),
    "torch.backends.mps.is_macos_or_newer": lambda: (
        [torch.backends.mps.is_macos_or_newer(major, 0) for major in (14, 99)] == [True, False]
    ),
    "torch.backends.mps.is_macos13_or_newer": lambda: (
        torch.backends.mps.is_macos13_or_newer() is True
    ),
    "torch.backends.mps.get_name": lambda: torch.backends.mps.get_name() == c.get_device_name(),
    "torch.backends.mps.get_core_count": lambda: is_exactly(
        torch.backends.mps.get_core_count(), c.get_device_properties(0).multi_processor_count
    ),
}


class _Pool:
    id = (0, 1)


_XPU = {
    "is_available": lambda: of_xpu(torch.xpu.is_available),
    "get_device_properties": lambda: (
        torch.xpu.get_device_properties(0).vendor == "Intel(R) Corporation"
    ),
    "get_device_capability": lambda: _follows_the_name(
        lambda: torch.xpu.get_device_capability()["name"]
    ),
    "is_bf16_supported": lambda: of_xpu(torch.xpu.is_bf16_supported),
    "is_tf32_supported": lambda: of_xpu(torch.xpu.is_tf32_supported),
    "get_arch_list": lambda: torch.xpu.get_arch_list() == [],
    "get_gencode_flags": lambda: torch.xpu.get_gencode_flags() == "",
    "get_stream_from_external": lambda: (
        torch.xpu.get_stream_from_external(0, 0) == torch.xpu.current_stream()
    ),
    "current_stream": _stream_set,
    "XPUGraph": _graph,
    "graph": _graph,
    "graph_pool_handle": lambda: torch.xpu.graph_pool_handle(),
    "make_graphed_callables": _graphed,
    "is_current_stream_capturing": lambda: torch.xpu.is_current_stream_capturing() is False,
    "XPUPluggableAllocator": lambda: torch.xpu.XPUPluggableAllocator("none.so", "alloc", "free"),
    "change_current_allocator": lambda: torch.xpu.change_current_allocator(
        torch.xpu.memory._XPUAllocator(None)
    ),
    **{
        name: CASES[f"torch.cuda.{name}"]
        for name in ("temperature", "power_draw", "clock_rate", "memory_usage")
    },
}
_AS_IN_CUDA = {
    name.rpartition(".")[2]
    for name, declared in PUBLIC_NAMES.items()
    if name.startswith("torch.xpu.")
    and declared is PUBLIC_NAMES.get(name.replace("torch.xpu", "torch.cuda"))
}
CASES.update(
    {
        f"torch.xpu.{name}": _XPU.get(name, CASES.get(f"torch.cuda.{name}"))
        for name in {*_AS_IN_CUDA, *_XPU}
    }
)
