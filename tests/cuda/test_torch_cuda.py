"""``torch.cuda`` in a scope: torch's own Python on supplied bindings."""

from __future__ import annotations

import ctypes
import inspect
import operator
import pickle
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from conftest import plain_torch
from torch.cuda import (  # before any activation, as programs do
    Event,
    Stream,
    current_device,
    device_count,
    get_device_properties,
    is_available,
    is_initialized,
    manual_seed_all,
    max_memory_allocated,
    memory_allocated,
    synchronize,
)

import torchdevice
from torchdevice.errors import FidelityError, NotSupportedError

pytestmark = pytest.mark.usefixtures("cuda")


class TestNamesImportedBeforeActivation:
    @pytest.mark.usefixtures("no_collections")
    def test_functions_and_classes(self) -> None:
        assert is_available() and is_initialized() and device_count() == 1 and current_device() == 0
        assert get_device_properties(0).major >= 8
        manual_seed_all(3)
        synchronize()
        # Read first, because the figures read next include what is allocated in between.
        allocated = memory_allocated()
        assert 0 <= allocated <= max_memory_allocated()
        assert isinstance(Stream(), Stream) and isinstance(Event(), Event)

    def test_nothing_stays_cached(self, target: str) -> None:
        for devices in (1, 3, 1, 2):
            with torchdevice.portable(target, devices=devices):
                assert device_count() == torch.cuda.device_count() == devices
                torch.cuda.init()


class TestDevices:
    @pytest.mark.usefixtures("no_collections")
    def test_information(self, target: str) -> None:
        capability = torch.cuda.get_device_capability()
        # A GPU, or a model of one, has its own.
        is_model = target not in ("cpu", "mps", "simulated:mps", "simulated:cuda")
        assert capability >= (8, 0) if is_model else capability == (8, 0)
        assert torch.cuda.get_device_name() and torch.cuda.get_device_name(
            "cuda:0"
        ) == torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_name(torch.device("cuda")) == torch.cuda.get_device_name()
        properties = torch.cuda.get_device_properties("cuda")
        assert properties.total_memory > 2**28 and properties.multi_processor_count >= 1
        assert "total_memory=" in repr(properties)
        assert isinstance(properties, torch._C._CudaDeviceProperties)
        assert isinstance(properties, torch.cuda._CudaDeviceProperties)
        assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported()
        architecture = "{}{}".format(*capability)
        assert f"sm_{architecture}" in torch.cuda.get_arch_list()
        flag = f"-gencode compute=compute_{architecture},code=sm_{architecture}"
        assert flag in torch.cuda.get_gencode_flags()
        assert torch.backends.cuda.is_built()

    def test_capability_is_settable(self, target: str) -> None:
        with torchdevice.portable(target, capability=(9, 0)):
            assert torch.cuda.get_device_capability() == (9, 0)

    def test_current_device(self, target: str) -> None:
        with torchdevice.portable(target, devices=3):
            torch.cuda.set_device("cuda:1")
            assert torch.cuda.current_device() == 1
            with torch.cuda.device(2):
                assert torch.cuda.current_device() == 2
                with torch.cuda.device(-1), torch.cuda.device(None):
                    assert torch.cuda.current_device() == 2
            assert torch.cuda.current_device() == 1
            with torch.cuda.device_of(torch.ones(1)):
                assert torch.cuda.current_device() == 1
            assert torch.cuda.can_device_access_peer(0, 1)

    def test_torchs_own_errors(self) -> None:
        with pytest.raises(AssertionError, match="Invalid device id"):
            torch.cuda.get_device_properties(7)
        with pytest.raises(ValueError, match="Expected a cuda device"):
            torch.cuda.get_device_name(torch.device("meta"))
        for device in ("cpu", "mps", "xpu:0", torch.device("xpu")):
            with pytest.raises(ValueError, match=f"^Expected a cuda device, but got: {device}"):
                torch.cuda.synchronize(device)
        with pytest.raises(ValueError, match=r"specified index or an integer, but got:cuda$"):
            torch.cuda.set_device("cuda")
        with pytest.raises(RuntimeError, match="invalid value of debug_mode"):
            torch.cuda.set_sync_debug_mode("loud")

    @pytest.mark.usefixtures("no_collections")
    def test_settings_are_stored(self) -> None:
        torch.cuda.set_sync_debug_mode("warn")
        assert torch.cuda.get_sync_debug_mode() == 1
        torch.cuda.set_per_process_memory_fraction(0.5)
        assert torch.cuda.get_per_process_memory_fraction() == 0.5
        cache = torch.backends.cuda.cufft_plan_cache[0]
        cache.max_size = 7
        assert (cache.max_size, cache.size) == (7, 0)

    @pytest.mark.parametrize("library", ["Cublas", "CublasLt"])
    def test_a_size_of_workspaces_is_forgotten(self, library: str) -> None:
        set_, get, reset = (
            getattr(torch._C, f"_cuda_{verb}{library}WorkspaceSize", None)
            for verb in ("set", "get", "reset")
        )
        default = get()
        set_(1 << 20 if library == "Cublas" else 1 << 21)
        assert get() != default
        reset()
        assert get() == default

    def test_versions(self) -> None:
        assert int(torch.version.cuda.split(".")[0]) >= 12
        assert torch.backends.cudnn.version() >= 8000
        assert torch.cuda.nccl.version()[:2] == (2, 27)

    def test_accelerator(self, kind: str) -> None:
        accelerator = torch.accelerator.current_accelerator()
        assert (
            torch.accelerator.is_available()
            and accelerator is not None
            and accelerator.type == "cuda"
        )
        assert (
            torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0
        )
        torch.accelerator.synchronize()
        assert torch.ones(2).to(accelerator).device.type == kind
        assert torch.get_device_module("cuda") is torch.cuda
        assert torch.get_device_module(torch.device("cuda")) is torch.cuda

    def test_accelerator_takes_what_torch_cuda_takes(self, target: str) -> None:
        with torchdevice.portable(target, devices=2):
            for device in ("cuda:1", 1):
                torch.accelerator.set_device_index(device)
                assert torch.accelerator.current_device_index() == torch.cuda.current_device() == 1
                torch.accelerator.synchronize(device)
                torch.accelerator.set_device_index(0)
            for device in ("cuda", torch.device("cuda"), torch.ones(1, device="cuda").device):
                torch.accelerator.synchronize(device)
            with pytest.raises(ValueError, match=r"specified index or an integer, but got:cuda"):
                torch.accelerator.set_device_index("cuda")
            with pytest.raises(
                ValueError, match=r"^mps doesn't match the current accelerator cuda"
            ):
                torch.accelerator.synchronize("mps")

    def test_a_target_that_torch_counts_as_an_accelerator_is_torchs(
        self, distinct: torchdevice.Scope
    ) -> None:
        """Torch's functions answer; here they know no such device, and raise as without a scope."""
        calls: list[Callable[[], Any]] = [lambda: torch.accelerator.synchronize("cpu")]
        if hasattr(torch.accelerator, "Graph"):
            calls.append(torch.accelerator.Graph)
        for call in calls:
            with plain_torch(), pytest.raises((RuntimeError, ValueError)) as outside:
                call()
            with pytest.raises(type(outside.value), match=f"^{re.escape(str(outside.value))}$"):
                call()

    @pytest.mark.usefixtures("no_collections")
    def test_accelerator_memory(self) -> None:
        kept = torch.ones(1 << 20, device="cuda")
        assert torch.accelerator.memory_stats().keys() == torch.cuda.memory_stats().keys()
        free, total = torch._C._accelerator_getMemoryInfo(
            0
        )  # torch 2.12 and later have a function for it
        assert 0 < free <= total == torch.cuda.mem_get_info()[1] and kept.is_contiguous()
        torch.accelerator.empty_cache()
        torch._C._accelerator_emptyHostCache()
        state = torch._C._accelerator_getDefaultGenerator(0).get_state()
        assert torch.equal(state, torch.cuda.get_rng_state())
        with pytest.raises(RuntimeError, match="doesn't support getting device capabilities"):
            torch.accelerator.get_device_capability()


class TestStreams:
    def test_current_stream_follows_the_context(self) -> None:
        default = torch.cuda.default_stream()
        assert torch.cuda.current_stream() == default
        stream = torch.cuda.Stream()
        assert stream != default and hash(stream) != hash(default)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            with torch.cuda.stream(None):
                assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == default
        with stream:
            assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_stream() == default
        torch.cuda.set_stream(stream)
        assert torch.cuda.current_stream() == stream
        torch.cuda.set_stream(default)

    def test_per_device(self, target: str) -> None:
        with torchdevice.portable(target, devices=2):
            other = torch.cuda.Stream(device=1)
            assert other.device_index == 1 and str(other.device) == "cuda:1"
            with torch.cuda.stream(other):
                assert torch.cuda.current_device() == 1
                assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
            assert torch.cuda.current_device() == 0

    def test_methods(self, kind: str) -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        assert isinstance(first, torch.cuda.Stream) and isinstance(first, torch.Stream)
        assert second.priority == -1 and first.query()
        event = first.record_event()
        second.wait_event(event)
        second.wait_stream(first)
        first.synchronize()
        assert event.query()
        torch.ones(2, device="cuda").record_stream(first)
        assert torch.cuda.default_stream().cuda_stream == 0
        if kind == "simulated":
            assert torch.cuda.ExternalStream(first.cuda_stream) == first
            return
        with pytest.raises(NotSupportedError, match="cudaStream_t"):
            int(first.cuda_stream)

    def test_generic_classes(self) -> None:
        for stream in (torch.Stream("cuda"), torch.Stream(device="cuda:0"), torch.Stream()):
            assert isinstance(stream, torch.Stream) and isinstance(stream, torch.cuda.Stream)
            with stream:
                assert torch.cuda.current_stream() == stream == torch.accelerator.current_stream()
        start, end = torch.Event("cuda", enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        end.record(torch.Stream("cuda"))
        assert start.elapsed_time(end) >= 0 and isinstance(start, torch.Event)
        assert torch.Stream | None and torch.Event | None
        assert not isinstance(torch.Event("cpu"), torch.cuda.Event)

    def test_external_stream_is_refused(self) -> None:
        with pytest.raises(NotSupportedError, match="ExternalStream"):
            torch.cuda.ExternalStream(1234)


class TestEvents:
    def test_elapsed_time_is_real(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        time.sleep(0.02)
        end.record()
        torch.cuda.synchronize()
        assert 20 <= start.elapsed_time(end) < 5000
        assert end.elapsed_time(start) < 0

    def test_errors_of_cuda(self, target: str) -> None:
        timed, untimed = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
        with pytest.raises(ValueError, match="enable_timing=True"):
            timed.elapsed_time(untimed)
        with pytest.raises(ValueError, match="must be recorded"):
            timed.elapsed_time(torch.cuda.Event(enable_timing=True))
        with torchdevice.portable(target, devices=2):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(0))
            with pytest.raises(RuntimeError, match="does not match"):
                event.record(torch.cuda.current_stream(1))

    def test_methods(self) -> None:
        event = torch.cuda.Event()
        assert event.query() and "uninitialized" in repr(event)
        event.record()
        event.wait()
        event.synchronize()
        assert event.query() and isinstance(event, torch.Event)
        with pytest.raises(NotSupportedError, match="processes"):
            event.ipc_handle()


class TestMemory:
    @pytest.mark.usefixtures("no_collections")
    def test_figures_follow_allocations(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        x = torch.ones(8 * 2**20, device="cuda")
        after = torch.cuda.memory_allocated()
        size = x.untyped_storage().nbytes()
        assert size <= after - before < 2 * size
        # Of one moment: between two calls the process gives back small blocks of its heap.
        figures = torch.cuda.memory_stats()
        assert figures["reserved_bytes.all.current"] >= figures["allocated_bytes.all.current"]
        assert torch.cuda.max_memory_allocated() >= after
        del x
        assert torch.cuda.memory_allocated() < before + size
        assert torch.cuda.max_memory_allocated() >= after, "a peak does not fall"
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() < after

    @pytest.mark.usefixtures("no_collections")
    def test_peak_between_two_queries(self) -> None:
        # A CPU target reads its peak from the memory that the process takes from the system, and
        # takes none where the C library has kept what earlier tests freed.
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = torch.ones(16 * 2**20, device="cuda")
        del y
        assert torch.cuda.max_memory_allocated() - before > 48 * 2**20

    @pytest.mark.usefixtures("no_collections")
    def test_further_memory_functions(self) -> None:
        kept = torch.ones(1 << 20, device="cuda")
        free, total = torch.cuda.mem_get_info()
        assert 0 < free < total and kept.is_contiguous()
        assert (
            torch.cuda.mem_get_info("cuda:0")[1]
            == total
            == torch.cuda.get_device_properties(0).total_memory
        )
        stats = torch.cuda.memory_stats()
        for name in (
            "allocated_bytes.all.peak",
            "reserved_bytes.all.current",
            "active_bytes.all.current",
            "num_ooms",
        ):
            assert name in stats
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
        assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary(abbreviated=True)
        torch.cuda.reset_accumulated_memory_stats()
        torch.cuda.ipc_collect()
        assert torch.cuda.get_allocator_backend() == "native"
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0

    @pytest.mark.usefixtures("no_collections")
    def test_strict_refuses_approximate_figures(self) -> None:
        with torchdevice.portable("cpu", strict=True):
            with pytest.raises(FidelityError, match="memory_stats"):
                torch.cuda.memory_allocated()
            torch.cuda.empty_cache()

    def test_out_of_memory(self, kind: str) -> None:
        said = (
            r"CUDA out of memory\. "
            rf"{'Invalid buffer size: ' if kind == 'mps' else 'Tried to allocate'}"
        )
        with pytest.raises(torch.cuda.OutOfMemoryError, match=said) as caught:
            torch.empty(2**60, device="cuda", dtype=torch.uint8)
        assert len(caught.value.args) == 1


class TestRandom:
    def test_seeds(self) -> None:
        torch.cuda.manual_seed(5)
        first = torch.rand(3, device="cuda")
        torch.cuda.manual_seed_all(5)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        assert torch.cuda.initial_seed() == 5

    def test_state_saved_and_restored(self) -> None:
        states, one = torch.cuda.get_rng_state_all(), torch.cuda.get_rng_state("cuda:0")
        first = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(one, "cuda")
        assert torch.equal(torch.rand(3, device="cuda"), first)
        torch.cuda.set_rng_state_all(states)
        assert torch.equal(torch.rand(3, device="cuda"), first)

    def test_fork_rng(self) -> None:
        torch.manual_seed(1)
        with torch.random.fork_rng(devices=[0]):
            torch.rand(5, device="cuda")
        after = torch.rand(3, device="cuda")
        torch.manual_seed(1)
        assert torch.equal(torch.rand(3, device="cuda"), after)
        with torch.random.fork_rng():
            pass

    def test_a_class_of_generators_of_the_programs(self) -> None:
        class Own(torch.Generator):
            pass

        assert issubclass(Own, torch.Generator) and isinstance(Own("cuda"), Own)
        drawn = torch.rand(3, generator=Own("cuda").manual_seed(2), device="cuda")
        assert torch.equal(
            drawn, torch.rand(3, generator=torch.Generator("cuda").manual_seed(2), device="cuda")
        )

    def test_generator(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(2)
        other = torch.Generator("cuda:0").manual_seed(2)
        assert isinstance(generator, torch.Generator)
        drawn = torch.rand(3, generator=generator, device="cuda")
        assert torch.equal(drawn, torch.rand(3, generator=other, device="cuda"))
        assert torch.Generator | None
        state = generator.get_state()
        clone = torch.Generator("cuda")
        clone.set_state(state)
        one, two = (torch.randn(2, generator=each, device="cuda") for each in (generator, clone))
        assert torch.equal(one, two)


class TestLegacyTypes:
    def test_constructors(self) -> None:
        assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        assert torch.cuda.HalfTensor(2).dtype is torch.float16
        assert torch.cuda.FloatTensor().numel() == 0

    def test_isinstance(self) -> None:
        assert isinstance(torch.ones(1, device="cuda"), torch.cuda.FloatTensor)
        assert not isinstance(torch.ones(1, device="cuda").long(), torch.cuda.FloatTensor)
        assert isinstance(torch.ones(1, dtype=torch.int32, device="cuda"), torch.cuda.IntTensor)

    @pytest.mark.filterwarnings("ignore:mps has no torch.float64")
    def test_type(self, float64: torch.dtype) -> None:
        x = torch.ones(2)
        assert x.type("torch.cuda.HalfTensor").dtype is torch.float16
        assert x.type(torch.cuda.DoubleTensor).dtype is float64
        assert x.type(torch.float16).dtype is torch.float16
        assert x.type() == "torch.FloatTensor"
        assert x.type("torch.LongTensor").dtype is torch.int64

    def test_names_of_types_are_those_that_the_program_looks_for(self) -> None:
        """As DeepSpeed, Apex and Megatron sort gradients: by the name of a type on CUDA."""
        layer = torch.nn.Linear(2, 2).cuda()
        layer(torch.ones(1, 2).cuda()).sum().backward()
        made = [
            layer.weight.grad,
            layer.weight.half(),
            torch.cuda.LongTensor([1]),
            torch.ones(2).cuda().to_sparse(),
        ]
        names = [
            "torch.cuda.FloatTensor",
            "torch.cuda.HalfTensor",
            "torch.cuda.LongTensor",
            "torch.cuda.sparse.FloatTensor",
        ]
        for tensor, name in zip(made, names, strict=True):
            assert tensor.type() == name == torch.typename(tensor) and not operator.ne(
                tensor.type(), name
            )
            assert [other for other in names if tensor.type() == other] == [
                name
            ] and tensor.type() in names
            assert pickle.loads(pickle.dumps(tensor.type())) == str(tensor.type())
            buckets = {tensor.type(): 1}
            assert buckets[tensor.type()] == buckets[str(tensor.type())] == 1
        assert [made[1].cpu().type() == name for name in ("torch.HalfTensor", names[1])] == [
            True,
            False,
        ]
        assert (
            repr(type(torch.cuda.FloatTensor))
            == repr(type(torch.FloatTensor))
            == "<class 'torch.tensortype'>"
        )
        grad = made[0]
        assert (
            torch.ones(2).type(grad.type()).type() == names[0]
            and torch.ones(2).type(names[1]).type() == names[1]
        )
        assert torch.ones(2).cuda().type("torch.FloatTensor").type() != names[0]

    def test_set_default_tensor_type(self) -> None:
        try:
            for kind in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
                torch.set_default_tensor_type(kind)
                assert torch.zeros(1).dtype is torch.float16
                torch.set_default_tensor_type(torch.FloatTensor)
                assert torch.zeros(1).dtype is torch.float32
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.fixture
    def default_cuda(self, cuda: torchdevice.Scope) -> Iterator[None]:
        torch.set_default_tensor_type(torch.cuda.FloatTensor)
        yield
        torch.set_default_tensor_type(torch.FloatTensor)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.Tensor(2),
            lambda: torch.Tensor([1.0, 2.0]),
            lambda: torch.Tensor(data=[1.0, 2.0]),
            lambda: torch.Tensor(),
            lambda: torch.Tensor(torch.Size([2])),
            lambda: torch.Tensor(numpy.ones(2, dtype=numpy.float32)),
            lambda: torch.Tensor(2, device="cuda"),
            lambda: type("Subclass", (torch.Tensor,), {})([1.0, 2.0]),
            lambda: torch.nn.Parameter(torch.Tensor(2)).data,
            lambda: torch.ones(2),
        ],
    )
    def test_a_default_type_says_where_new_tensors_are(
        self, default_cuda: None, make: Any, target: str
    ) -> None:
        made = make()
        assert made.dtype is torch.float32 and made.device == torch.ones((), device="cuda").device
        snapshot = made.cpu()
        made.fill_(7)
        assert not (snapshot == 7).any(), "a tensor of CUDA shares no memory with the CPU"
        assert type(made).__name__ in ("Subclass", "Tensor")

    def test_a_default_type_leaves_what_is_somewhere(self, default_cuda: None, kind: str) -> None:
        on_cpu = torch.ones(2, device="cpu")
        assert torch.Tensor(on_cpu).data_ptr() == on_cpu.data_ptr()
        assert torch.Tensor(on_cpu.untyped_storage()).device.type == "cpu"
        assert torch.FloatTensor(2).device.type == torch.LongTensor([1]).device.type == "cpu"
        assert (
            on_cpu.new(2).device.type == "cpu"
            and torch.from_numpy(numpy.ones(1)).device.type == "cpu"
        )
        if kind != "cpu":
            with pytest.raises(
                RuntimeError, match="expects device type: cuda but device type: cpu was passed"
            ):
                torch.Tensor(2, device="cpu")

    def test_a_default_type_ends_with_its_scope_and_with_another_default(
        self, default_cuda: None, cuda: torchdevice.Scope, kind: str
    ) -> None:
        def kinds() -> set[str]:
            return {torch.Tensor(1).device.type, torch.ones(1).device.type}

        with torch.device("cpu"):
            assert torch.ones(1).device.type == "cpu"
        torch.set_default_device("cpu")
        assert torch.ones(1).device.type == "cpu" and torch.Tensor(1).device.type == kind
        torch.set_default_device(None)
        assert kinds() == {kind}
        with torchdevice.kernel.thread_state.suspended():
            assert torch.Tensor(1).device.type == "cpu"
        torch.set_default_tensor_type(torch.FloatTensor)
        assert kinds() == {"cpu"} and "__new__" not in vars(torch.Tensor)

    def test_a_default_type_comes_back_with_its_scope(self, target: str, kind: str) -> None:
        scope = torchdevice.portable(target)
        with scope:
            torch.set_default_tensor_type("torch.cuda.FloatTensor")
        assert torch.Tensor(1).device.type == "cpu" and "__new__" not in vars(torch.Tensor)
        with scope:
            assert torch.Tensor(1).device.type == torch.ones(1).device.type == kind
            torch.set_default_tensor_type("torch.FloatTensor")

    def test_storages(self, kind: str) -> None:
        assert torch.UntypedStorage(4, device="cuda").device.type == kind
        assert torch.UntypedStorage(4).cuda().nbytes() == 4
        assert torch.TypedStorage(3, device="cuda", dtype=torch.float32).size() == 3
        assert torch.cuda.FloatStorage(3).size() == 3
        assert torch.ones(2).untyped_storage().to(device="cuda").nbytes() == 8


class TestProfilingAndInternals:
    def test_nvtx(self) -> None:
        assert torch.cuda.nvtx.range_push("a") == 0
        assert torch.cuda.nvtx.range_push("b") == 1
        assert torch.cuda.nvtx.range_pop() == 1
        assert torch.cuda.nvtx.range_pop() == 0
        torch.cuda.nvtx.mark("x")
        with torch.cuda.nvtx.range("body"):
            pass
        torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("y"))

    def test_cudart_and_profiler(self) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
        torch.cuda.profiler.start()
        torch.cuda.profiler.stop()
        with pytest.raises(NotSupportedError, match="cudaMalloc"):
            torch.cuda.cudart().cudaMalloc(3)

    def test_cudart_registers_memory_of_the_host(self) -> None:
        x, cudart = torch.ones(8), torch.cuda.cudart()
        size = x.numel() * x.element_size()
        assert not x.is_pinned() and cudart.cudaHostRegister(x.data_ptr(), size, 0) == 0
        assert x.is_pinned() and x[4:].is_pinned() and not torch.ones(8).is_pinned()
        with pytest.raises(torch.cuda.CudaError, match="already mapped"):
            torch.cuda.check_error(cudart.cudaHostRegister(x.data_ptr(), size, 0))
        assert cudart.cudaHostUnregister(x.data_ptr()) == 0 and not x.is_pinned()
        with pytest.raises(torch.cuda.CudaError, match="not correspond to a registered"):
            torch.cuda.check_error(cudart.cudaHostUnregister(x.data_ptr()))

    @pytest.mark.parametrize(
        ("code", "text"), [(2, "out of memory"), (710, "device-side"), (12345, "unrecognized")]
    )
    def test_errors_of_cudart(self, code: int, text: str) -> None:
        with pytest.raises(torch.cuda.CudaError, match=rf"{text}.*\({code}\)"):
            torch.cuda.check_error(code)
        with pytest.raises(ValueError, match="'out of memory' is not a valid CudaError"):
            torch.cuda.cudart().cudaError("out of memory")

    def test_private_names_that_libraries_use(self) -> None:
        torch.cuda._lazy_init()
        called: list[int] = []
        torch.cuda._lazy_call(lambda: called.append(1))
        assert called == [1] and not torch.cuda._is_in_bad_fork()
        assert torch.cuda._is_compiled() and torch.cuda._initialized
        assert not torch.cuda.is_current_stream_capturing()
        assert 0 <= torch.cuda.utilization() <= 100
        for host in ("cpu", torch.device("cpu")):
            assert torch.cuda._utils._get_device_index(host, allow_cpu=True) == -1
        assert torch._C._cuda_isInBadFork() is False
        assert torch._C._cuda_hasPrimaryContext(0) and not torch._C._cuda_hasPrimaryContext(7)
        flag = torch.cuda._initialized
        assert flag == True and hash(flag) == hash(True) and repr(flag) == "True"  # noqa: E712

    def test_initializing_by_torchs_private_name(self, target: str) -> None:
        with torchdevice.portable(target) as scope:
            assert not scope._resolved().driver.is_initialized
            torch._C._cuda_init()
            assert scope._resolved().driver.is_initialized

    def test_private_names_in_a_thread_without_a_scope(self, no_cuda_build: bool) -> None:
        with plain_torch():
            with pytest.raises(AttributeError, match=r"torch\.cuda"):
                torch.cuda._get_device_properties(0)
            if no_cuda_build:
                assert not torch.cuda._cudart
                with pytest.raises(AttributeError, match="cudaMemGetInfo"):
                    assert torch.cuda._cudart.cudaMemGetInfo
                assert torch.backends.cudnn.benchmark_limit is None
                torch.backends.cudnn.benchmark_limit = 5
                assert torch.backends.cudnn.benchmark_limit == 5
                # Torch's own value for the class.
                assert type(torch.backends.cudnn).benchmark_limit is None
        assert torch.backends.cudnn.benchmark_limit == 10
        torch.backends.cudnn.benchmark_limit = 7
        assert torch.backends.cudnn.benchmark_limit == 7
        with plain_torch():
            assert torch.backends.cudnn.benchmark_limit != 7  # the scope's own value
            vars(torch.backends.cudnn).pop("benchmark_limit", None)

    @pytest.mark.parametrize(
        "call",
        [
            lambda: torch.cuda.current_blas_handle(),
            lambda: torch.cuda.CUDAGraph().raw_cuda_graph(),
            lambda: torch.cuda.memory.CUDAPluggableAllocator("x.so", "a", "b"),
        ],
        ids=["blas handle", "raw graph", "allocator"],
    )
    def test_functions_without_an_equivalent_raise(self, call: Any) -> None:
        with pytest.raises(NotSupportedError):
            call()


def test_replacements_keep_torchs_signatures() -> None:
    from torchdevice.kernel import patching
    from torchdevice.scope import installed

    compared = 0
    runs = [
        patch
        for patch in installed.INSTALLATION._patches or []
        if isinstance(patch, patching.Together)
    ]
    for patch in (
        each for run in runs for each in run.patches if isinstance(each, patching.Replaced)
    ):
        if inspect.isfunction(patch.before):
            assert inspect.signature(patch.value) == inspect.signature(patch.before), patch.name
            assert patch.value.__name__ == patch.before.__name__
            compared += 1
    assert compared > 20
