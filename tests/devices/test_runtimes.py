"""Runtimes of devices missing here: calls are recorded and checked against torch's signatures.

Real runs need an Apple GPU (MPS), an Intel GPU (XPU) or a PrivateUse1 backend. The tests of device
arguments run on the meta device of ``conftest``, which any machine has.
"""

from __future__ import annotations

import gc
import inspect
import io
import platform
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from conftest import MetaRuntime
from processes import run_python

import torchdevice
from torchdevice.calls.error_texts import reword
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.devices import cpu, cpu_memory, registry
from torchdevice.kernel.devices.cpu import CpuRuntime
from torchdevice.kernel.devices.module import ModuleRuntime
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.devices.supplied import SuppliedDevice
from torchdevice.scope import target_selection
from torchdevice.scope.collected_options import chosen
from torchdevice.simulation.simulated_runtime import SimulatedRuntime

REAL = [CpuRuntime, MpsRuntime, ModuleRuntime, SimulatedRuntime]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return the name, kind and default of each parameter."""
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize("kind", REAL, ids=lambda kind: kind.__name__)
def test_a_runtime_implements_the_whole_interface(kind: type[Runtime]) -> None:
    supplied = vars(SuppliedDevice) if issubclass(kind, SuppliedDevice) else {}
    for name, member in {**supplied, **vars(Runtime)}.items():
        if not inspect.isfunction(member) or name == "__init__":
            continue
        found, expected = parameters(getattr(kind, name)), parameters(member)
        # A function that needs nothing of the runtime is a static method.
        is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        assert found == expected[is_static:], name
    assert not kind.__abstractmethods__


def test_a_runtime_that_is_not_complete() -> None:
    class Toy(Runtime):
        device_type = "toy"

    with pytest.raises(
        TypeError, match=r"class Toy .*default_generator.*is_available.*memory.*reset_peak_memory"
    ):
        Toy()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"Toy'> is a class. Register an object of it, Toy\(...\)"):
        registry.register_runtime(Toy)  # type: ignore[arg-type]


def test_a_backend_without_an_allocator() -> None:
    program = """
    import types, torch, torchdevice
    torch.utils.rename_privateuse1_backend("toy")
    module = types.ModuleType("torch.toy")
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    torch._register_device_module("toy", module)
    torchdevice.enable("toy")
    """
    error = run_python("-c", textwrap.dedent(program)).stderr.splitlines()[-1]
    assert "The target 'toy' is not available here. The backend has no kernel of" in error


class Recorder:
    """Stands in for a device module: records calls by dotted name and returns the given answers."""

    def __init__(self, answers: dict[str, Any]):
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self._answers.get(name)
            return answer(*args, **kwargs) if callable(answer) else answer

        return call


class FakeEvent:
    def __init__(self, enable_timing: bool = False):
        self.enable_timing, self.recorded = enable_timing, 0

    def record(self, stream: Any = None) -> None:
        self.recorded += 1

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.5


def resolve(target: object = None) -> Runtime:
    return target_selection.resolve(chosen({"target": target}))[0]


def check_calls(module: Any, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Every recorded call must fit the signature of the installed torch's own function."""
    for name, args, kwargs in calls:
        function = getattr(module, name)
        try:
            signature = inspect.signature(function)
        except ValueError:  # implemented in C
            continue
        signature.bind(*args, **kwargs)


def exercise(runtime: Runtime) -> None:
    runtime.is_available()
    runtime.device_count()
    runtime.name(0)
    runtime.total_memory(0)
    runtime.free_memory(0)
    runtime.memory(0)
    runtime.reset_peak_memory(0)
    runtime.empty_cache()
    runtime.synchronize(0)
    runtime.supports_bfloat16()
    start, end = runtime.mark(0, timing=True), runtime.mark(0, timing=True)
    assert start.query() and start.elapsed_time(end) >= 0
    end.synchronize()
    runtime.multiprocessor_count()


MPS = {
    "recommended_max_memory": 16 * 2**30,
    "driver_allocated_memory": 3 * 2**30,
    "current_allocated_memory": 2 * 2**30,
}


@pytest.mark.usefixtures("no_collections")
def test_mps_calls_fit_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.mps
    recorder = Recorder(MPS)
    recorder.event = types.SimpleNamespace(Event=FakeEvent)
    monkeypatch.setattr(torch, "mps", recorder)
    inspect.signature(torch.backends.mps.is_macos_or_newer).bind(14, 0)
    monkeypatch.setattr(
        torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 0)
    )
    runtime = MpsRuntime()
    exercise(runtime)
    names = {name for name, _, _ in recorder.calls}
    assert {
        "synchronize",
        "empty_cache",
        "current_allocated_memory",
        "driver_allocated_memory",
    } <= names
    check_calls(real, recorder.calls)
    assert runtime.free_memory(0) == 13 * 2**30
    assert runtime.memory(0).peak_allocated == 2 * 2**30
    inspect.signature(real.event.Event.__init__).bind(None, enable_timing=True)


class TestMpsOnTheSimulatedMac:
    """MPS's runtime in a process like a Mac's: ``torch.mps`` answers for a simulated device."""

    @pytest.fixture
    def runtime(self) -> Iterator[MpsRuntime]:
        gc.collect()
        with torchdevice.simulate("mps", written_for="mps", memory="64MiB"):
            torch.mps.empty_cache()
            yield MpsRuntime()

    @pytest.mark.usefixtures("no_collections")
    def test_it_is_there(self, runtime: MpsRuntime) -> None:
        assert (
            runtime.is_available() and runtime.device_count() == 1 and runtime.supports_bfloat16()
        )
        assert runtime.name(0).endswith("(MPS)") and runtime.total_memory(0) == 64 << 20

    @pytest.mark.usefixtures("no_collections")
    def test_figures_follow_the_programs_tensors(self, runtime: MpsRuntime) -> None:
        before, free = runtime.memory(0), runtime.free_memory(0)
        x = torch.ones(1 << 20, device="mps")
        with_it = runtime.memory(0)
        assert (
            with_it.allocated - before.allocated
            == 4 << 20
            == with_it.peak_allocated - before.allocated
        )
        assert free - runtime.free_memory(0) == with_it.reserved - before.reserved >= 4 << 20
        del x
        assert runtime.memory(0).allocated == before.allocated
        assert runtime.memory(0).peak_allocated == with_it.allocated
        runtime.reset_peak_memory(0)
        runtime.empty_cache()
        assert (
            runtime.memory(0).peak_allocated == before.allocated and runtime.free_memory(0) == free
        )

    def test_events_have_times(self, runtime: MpsRuntime) -> None:
        start = runtime.mark(0, timing=True)
        torch.ones(64, 64, device="mps") @ torch.ones(64, 64, device="mps")
        end = runtime.mark(0, timing=True)
        end.synchronize()
        runtime.synchronize(0)
        assert start.query() and end.query() and start.elapsed_time(end) > 0

    def test_its_generator_is_what_the_device_draws_from(self, runtime: MpsRuntime) -> None:
        torch.mps.manual_seed(3)
        first = torch.rand(4, device="mps")
        torch.mps.manual_seed(3)
        assert torch.equal(
            torch.rand(4, device="mps", generator=runtime.default_generator(0)), first
        )

    @pytest.mark.usefixtures("no_collections")
    def test_a_fraction_limits_it(self, runtime: MpsRuntime) -> None:
        assert runtime.limit_memory(0, 0.25)
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.empty(5 << 20, device="mps")
        assert (
            runtime.limit_memory(0, None) and torch.empty(5 << 20, device="mps").nbytes == 20 << 20
        )


@pytest.mark.usefixtures("no_collections")
def test_mps_peak_is_the_largest_figure_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter([10, 50, 20, 20])
    recorder = Recorder({**MPS, "current_allocated_memory": lambda: next(figures)})
    monkeypatch.setattr(torch, "mps", recorder)
    runtime = MpsRuntime()
    assert [runtime.memory(0).peak_allocated for _ in range(3)] == [10, 50, 50]
    runtime.reset_peak_memory(0)
    assert runtime._peak_allocated == 20


@pytest.mark.usefixtures("no_collections")
def test_mps_out_of_memory_becomes_cudas(
    meta_target: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "MPS backend out of memory (MPS allocated: 5.00 GB, other allocations: 1.00 GB, max "
        "allowed: 6.00 GB)."
    )
    assert MpsRuntime.out_of_memory(object.__new__(MpsRuntime), RuntimeError(text)) == text
    assert MpsRuntime.out_of_memory(object.__new__(MpsRuntime), RuntimeError("other")) is None
    with torchdevice.portable("meta") as scope:
        monkeypatch.setattr(type(scope.runtime), "out_of_memory", MpsRuntime.out_of_memory)
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match=r"CUDA out of memory\. MPS backend out of memory"
        ) as caught:
            reword(scope._resolved(), RuntimeError(text))
    assert len(caught.value.args) == 1


def xpu_answers() -> dict[str, Any]:
    properties = types.SimpleNamespace(total_memory=8 * 2**30, gpu_eu_count=96)
    return {
        "is_available": True,
        "device_count": 2,
        "get_device_name": "an Intel GPU",
        "get_device_properties": properties,
        "mem_get_info": (5, 8),
        "memory_allocated": 1,
        "memory_reserved": 2,
        "max_memory_allocated": 3,
        "max_memory_reserved": 4,
        "is_bf16_supported": True,
    }


@pytest.mark.usefixtures("no_collections")
def test_xpu_calls_fit_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.xpu
    recorder = Recorder(xpu_answers())
    recorder.Event = FakeEvent
    monkeypatch.setattr(torch, "xpu", recorder)
    runtime = ModuleRuntime("xpu")
    exercise(runtime)
    check_calls(real, recorder.calls)
    assert runtime.memory(1) == (1, 2, 3, 4)
    assert runtime.multiprocessor_count() == 96
    assert runtime.device(1) == torch.device("xpu:1")


def test_two_devices_keep_their_ordinals(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(xpu_answers())
    monkeypatch.setattr(torch, "xpu", recorder)
    monkeypatch.setattr(
        target_selection,
        "runtime",
        lambda kind: ModuleRuntime(kind) if kind == "xpu" else registry.runtime(kind),
    )
    with torchdevice.portable("xpu") as scope:
        assert scope._resolved().devices.count == 2 and torch.cuda.device_count() == 2
        assert torch.device("cuda:1") == torch.device("xpu:1") and torch.device(
            "cuda"
        ) == torch.device("xpu:0")
        torch.cuda.set_device(1)
        assert torch.device("cuda") == torch.device("xpu:1") and scope.target == torch.device(
            "xpu:1"
        )
        assert torch.device("xpu:0") == torch.device("xpu:0")


def test_a_function_missing_from_a_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "vax", types.SimpleNamespace(is_available=lambda: True), raising=False
    )
    runtime = ModuleRuntime("vax")
    with pytest.raises(NotSupportedError, match=r"torch\.vax\.synchronize"):
        runtime.synchronize(0)
    with pytest.raises(NotSupportedError, match="default_generators"):
        runtime.default_generator(0)


def test_a_real_cuda_device_and_a_cuda_program_need_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA is made to look available, without a GPU."""
    native = ModuleRuntime("cuda")
    monkeypatch.setattr(ModuleRuntime, "is_available", lambda self: self.device_type == "cuda")
    monkeypatch.setattr(
        target_selection,
        "runtime",
        lambda kind: native if kind == "cuda" else registry.runtime(kind),
    )
    is_available, c_type = torch.cuda.is_available, type(torch._C)
    with torchdevice.portable() as scope:
        assert torchdevice.current() is scope and scope._resolved().names.is_native
        assert torch.cuda.is_available is is_available and type(torch._C) is c_type
        assert torch.overrides._get_current_function_mode_stack() == []
        with torchdevice.portable("cpu"):
            assert torch.zeros(1, device="cuda").device.type == "cpu"
            with torchdevice.portable():
                with pytest.raises((AssertionError, RuntimeError)):
                    torch.zeros(1, device="cuda")
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.overrides._get_current_function_mode_stack() == []


def test_the_best_target_is_chosen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    available: set[str] = set()
    monkeypatch.setattr(target_selection, "runtime", lambda kind: _Named(kind, kind in available))
    for kind in ("cpu", "xpu", "mps", "cuda"):
        available.add(kind)
        assert resolve().device_type == kind
    monkeypatch.setenv("TORCHDEVICE_TARGET", "xpu")
    assert resolve().device_type == "xpu"
    assert resolve("mps").device_type == "mps"
    assert resolve(torch.device("cpu")).device_type == "cpu"


class _Named(MetaRuntime):
    def __init__(self, kind: str, available: bool):
        self.device_type, self._available = kind, available

    def is_available(self) -> bool:
        return self._available


@pytest.mark.usefixtures("no_collections")
def test_cpu_peak_without_the_systems_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the mark cannot be reset (macOS, some containers), the peak is the largest seen."""
    monkeypatch.setattr(cpu_memory, "reset_high_water_mark", lambda: False)
    in_use = iter([100, 100, 100, 700, 300, 300, 300])
    monkeypatch.setattr(cpu_memory, "heap_in_use", lambda: next(in_use))
    runtime = CpuRuntime()
    assert runtime.memory(0).allocated == 0
    assert runtime.memory(0)[::2] == (600, 600)
    assert runtime.memory(0)[::2] == (200, 600)
    runtime.reset_peak_memory(0)
    assert runtime.memory(0).peak_allocated == 200


def lacking(path: str, *mode: str) -> Any:
    raise FileNotFoundError(2, "No such file or directory", path)


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("proc", [lacking, lambda path: io.StringIO("VmRSS:\t5 kB\n")])
def test_cpu_memory_on_systems_that_say_less(proc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mark in /proc, or heap figures of psutil, the resident set is reported."""
    monkeypatch.setattr(cpu_memory.Path, "read_text", lambda path: proc(path).read())
    monkeypatch.setattr(cpu_memory.Path, "write_text", lambda path, text: proc(path).close())
    for name in ("heap_info", "heap_trim"):
        monkeypatch.delattr(psutil, name, raising=False)
    now = types.SimpleNamespace(rss=1000)
    monkeypatch.setattr(psutil, "Process", lambda: types.SimpleNamespace(memory_info=lambda: now))
    memory = cpu_memory.ProcessMemory()
    for resident, allocated, peak in ((5000, 4000, 4000), (2000, 1000, 4000), (500, 0, 4000)):
        now.rss = resident
        cpu_memory.trim_heap()
        assert memory.figures() == (allocated, allocated, peak, peak)
    memory.reset_peak()
    assert memory.figures() == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "cpuinfo", [lacking, lambda path: io.StringIO("BogoMIPS : 50.00\nFeatures : fp asimd\n")]
)
def test_a_processor_that_linux_does_not_name(
    cpuinfo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither macOS nor Windows has /proc/cpuinfo, and that of ARM has no name of the model."""
    monkeypatch.setattr(cpu.Path, "read_text", lambda path: cpuinfo(path).read())
    name = cpu.processor_name.__wrapped__()
    assert name and name == (platform.processor() or platform.machine())


def test_the_engine_works_in_the_thread_that_is_in_the_scope(meta_target: None) -> None:
    """It has a thread for each device of an accelerator, where no scope is active."""
    seen: list[bool] = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch._C._is_multithreading_enabled())
            return grad

    def run() -> None:
        x = torch.ones(2, device="meta", requires_grad=True)
        Backward.apply(x).sum().backward()  # type: ignore[no-untyped-call]

    assert torch._C._is_multithreading_enabled()
    with torchdevice.portable("meta"):
        run()
        assert torch._C._is_multithreading_enabled()
    with torchdevice.portable("cpu"):
        run()
    assert seen == [False, True] and torch._C._is_multithreading_enabled()
