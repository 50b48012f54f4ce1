"""Streams and events of ``torch.cuda``, generic classes, ``torch.accelerator``: CUDA's errors."""

from __future__ import annotations

import ctypes
import operator
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.devices import current_streams


@pytest.fixture
def two(target: str) -> Iterator[torchdevice.Scope]:
    """A scope with two devices."""
    with torchdevice.portable(target, devices=2) as scope:
        yield scope


@pytest.mark.usefixtures("two")
class TestStreams:
    def test_both_classes(self) -> None:
        for stream in (
            torch.cuda.Stream(),
            torch.Stream("cuda"),
            torch.Stream(device=torch.device("cuda:1")),
        ):
            assert isinstance(stream, torch.Stream) and isinstance(stream, torch.cuda.Stream)
        assert torch.cuda.Stream(1).device == torch.Stream(device="cuda:1").device
        assert not isinstance(torch.Event("cuda"), torch.Stream)

    def test_each_device_has_a_current_stream(self) -> None:
        first, second = torch.cuda.Stream(0), torch.cuda.Stream(1)
        with torch.cuda.stream(first), torch.cuda.stream(second):
            assert torch.cuda.current_device() == 1
            assert torch.cuda.current_stream(0) == first and torch.cuda.current_stream(1) == second
            assert (
                torch.accelerator.current_stream(1) == second == torch.accelerator.current_stream()
            )
        assert torch.cuda.current_device() == 0
        for index in (0, 1):
            assert torch.cuda.current_stream(index) == torch.cuda.default_stream(index)

    def test_a_stream_is_a_context(self) -> None:
        stream = torch.cuda.Stream(1)
        with stream:
            assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 1
            with torch.Stream(device="cuda:0") as inner:
                assert torch.accelerator.current_stream() == inner
        assert (
            torch.cuda.current_device() == 0
            and torch.cuda.current_stream() == torch.cuda.default_stream()
        )

    def test_the_accelerator_module_sets_it(self) -> None:
        stream = torch.cuda.Stream(1)
        torch.accelerator.set_stream(stream)
        assert (
            torch.cuda.current_stream() == stream and torch.accelerator.current_device_index() == 1
        )
        torch.cuda.set_stream(torch.cuda.default_stream(1))
        with torch.accelerator.device_index(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.current_device() == 1

    def test_threads_have_their_own(self) -> None:
        seen: list[Any] = []
        with torch.cuda.stream(torch.cuda.Stream()):
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            thread.start()
            thread.join()
        assert seen == [torch.cuda.default_stream()]

    def test_priorities_are_clamped_as_cuda_does(self) -> None:
        assert torch.cuda.Stream.priority_range() == (0, -3) == torch.cuda.Stream().priority_range()
        assert [torch.cuda.Stream(priority=p).priority for p in (5, 0, -1, -9)] == [0, 0, -1, -3]

    def test_equality_and_hashing(self) -> None:
        stream = torch.cuda.Stream()
        same = torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        assert same == stream and hash(same) == hash(stream) and {stream: 1}[same] == 1
        assert stream != torch.cuda.Stream() and stream != 3
        assert torch.cuda.default_stream(0) != torch.cuda.default_stream(1)

    @pytest.mark.usefixtures("no_collections")
    def test_record_stream_by_both_forms(self, two: torchdevice.Scope, kind: str) -> None:
        """A simulated device defers reuse of memory; the CPU has none to defer, and reports it."""
        stream = torch.cuda.Stream()
        for record in (lambda x: x.record_stream(stream), lambda x: x.record_stream(s=stream)):
            x = torch.zeros(1000, device="cuda")
            before = torch.cuda.memory_stats().get("active.all.current", 0)
            record(x)
            del x
            if kind == "simulated":
                assert torch.cuda.memory_stats()["active.all.current"] == before
                torch.cuda.synchronize()
                assert torch.cuda.memory_stats()["active.all.current"] == before - 1
        reported = [
            entry for entry in two.journal.entries if entry.requested == "Tensor.record_stream"
        ]
        assert bool(reported) is (kind in ("cpu", "npu_like"))

    def test_work_on_another_stream_is_done_after_waiting(self) -> None:
        stream, data = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
        with torch.cuda.stream(stream):
            data += 1
        event = stream.record_event()
        torch.cuda.current_stream().wait_stream(stream)
        stream.wait_event(event)
        assert event.query() and stream.query()
        data.record_stream(stream)
        stream.synchronize()
        assert data.sum().item() == 1000

    def test_pointers(self, kind: str) -> None:
        assert torch.cuda.default_stream().cuda_stream == 0 == torch._C._cuda_getCurrentRawStream(0)
        assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()
        assert torch.cuda.get_stream_from_external(0, 1) == torch.cuda.default_stream(1)
        stream = torch.cuda.Stream()
        if kind == "simulated":
            assert torch.cuda.ExternalStream(stream.cuda_stream) == stream and hex(
                stream.native_handle
            )
            assert ctypes.c_void_p(stream.cuda_stream).value == stream._as_parameter_.value
            with pytest.raises(NotSupportedError):
                torch.cuda.ExternalStream(1234)
            return
        calls: list[Callable[[], Any]] = [
            lambda: int(stream.cuda_stream),
            lambda: ctypes.c_void_p(operator.index(stream.cuda_stream)),
            lambda: hex(stream.native_handle),
            lambda: torch.cuda.ExternalStream(stream.cuda_stream),
            lambda: torch.cuda.ExternalStream(1234),
            lambda: torch.cuda.get_stream_from_external(1234, 0),
        ]
        for call in calls:
            with pytest.raises(NotSupportedError):
                call()
        with pytest.raises(TypeError):
            ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.stream(stream), pytest.raises(NotSupportedError):
            torch._C._cuda_getCurrentRawStream(0)

    def test_a_program_prints_and_compares_pointers(self) -> None:
        stream, other = torch.cuda.Stream(), torch.cuda.Stream()
        assert (
            re.fullmatch("0x[0-9a-f]+", f"0x{stream.cuda_stream:x}")
            and str(stream.cuda_stream).isdigit()
        )
        assert stream.cuda_stream == stream.cuda_stream == stream.native_handle != other.cuda_stream
        assert (
            stream.cuda_stream
            and stream.cuda_stream != 0
            and len({stream.cuda_stream, stream.cuda_stream}) == 1
        )

    @pytest.mark.usefixtures("no_collections")
    def test_ordinals_that_do_not_exist(self) -> None:
        invalid: list[Callable[[], Any]] = [
            lambda: torch.cuda.Stream(5),
            lambda: torch.cuda.set_device(5),
            lambda: torch.cuda.synchronize(5),
            lambda: torch.cuda.mem_get_info(5),
            lambda: torch.cuda.get_rng_state(5),
            lambda: torch.accelerator.set_device_index(5),
            lambda: torch.zeros(1, device="cuda:5"),
        ]
        for call in invalid:
            with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
                call()
        for query in (torch.cuda.current_stream, torch.cuda.default_stream):
            with pytest.raises(
                RuntimeError, match=r"Device index value 5 is out of index range \[0, 2\)"
            ):
                query(5)
        for figure in (torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats):
            with pytest.raises(
                RuntimeError, match=r"Invalid device argument 5: did you call init\?"
            ):
                figure(5)
        with pytest.raises(AssertionError, match="Invalid peer device id"):
            torch.cuda.can_device_access_peer(0, 5)
        with pytest.raises(ValueError, match="Expected a cuda device"):
            torch.cuda.Stream(torch.device("meta"))


@pytest.mark.usefixtures("two")
class TestEvents:
    def test_both_classes(self) -> None:
        for event in (
            torch.cuda.Event(),
            torch.Event("cuda"),
            torch.Event(device="cuda:0", enable_timing=True),
        ):
            assert isinstance(event, torch.Event) and isinstance(event, torch.cuda.Event)
        assert not isinstance(torch.Event("cpu"), torch.cuda.Event)

    def test_times_between_generic_and_cuda_events(self) -> None:
        start, end = torch.Event("cuda", enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.ones(300, 300, device="cuda") @ torch.ones(300, 300, device="cuda")
        end.record(torch.cuda.current_stream())
        end.synchronize()
        assert 0 < start.elapsed_time(end) < 60_000 and end.elapsed_time(start) < 0

    def test_waiting_across_devices(self) -> None:
        event = torch.cuda.current_stream(0).record_event()
        assert event.device is not None and event.device.index == 0
        torch.cuda.current_stream(1).wait_event(event)
        event.wait(torch.cuda.current_stream(1))
        assert event.query()

    def test_errors_of_cuda(self) -> None:
        def event(timing: bool = True, device: int | None = None) -> torch.cuda.Event:
            made = torch.cuda.Event(enable_timing=timing)
            if device is not None:
                made.record(torch.cuda.current_stream(device))
            return made

        with pytest.raises(ValueError, match="created with argument 'enable_timing=True'"):
            event(False, 0).elapsed_time(event(True, 0))
        with pytest.raises(ValueError, match="must be recorded before calculating elapsed time"):
            event(True, 0).elapsed_time(event())
        with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid resource handle"):
            event(True, 0).elapsed_time(event(True, 1))
        with pytest.raises(
            RuntimeError, match="Event device 0 does not match recording stream's device 1"
        ):
            event(True, 0).record(torch.cuda.current_stream(1))

    def test_an_unfinished_event_has_no_time(
        self, two: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The event is made to look unfinished, because on the CPU recorded work is always done."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        monkeypatch.setattr(type(end._mark), "query", lambda self: self is start._mark)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="must be completed before calculating elapsed time"):
            start.elapsed_time(end)

    def test_handles_are_refused(self) -> None:
        event = torch.cuda.Event(interprocess=True)
        event.record()
        for call in (event.ipc_handle, lambda: torch.cuda.Event.from_ipc_handle("cuda:0", b"")):
            with pytest.raises(NotSupportedError, match="Share an event between threads"):
                call()


def test_a_stream_of_another_library() -> None:
    with torchdevice.simulate(count=2):
        cudart, place = torch.cuda.cudart(), ctypes.c_uint64()
        with torch.cuda.device(1):
            assert cudart.cudaStreamCreate(ctypes.addressof(place)) == 0 != place.value
        stream = torch.cuda.ExternalStream(place.value, device=1)
        assert (stream.cuda_stream, stream.device.index) == (place.value, 1)
        assert cudart.cudaStreamDestroy(place.value) == 0
        with pytest.raises(torch.cuda.CudaError, match="invalid resource handle"):
            torch.cuda.check_error(cudart.cudaStreamDestroy(place.value))
    with torchdevice.portable("cpu"), pytest.raises(NotSupportedError, match="cudaStreamCreate"):
        torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(place))


def test_events_have_numbers(two: torchdevice.Scope) -> None:
    events = [torch.cuda.Event(), torch.Event("cuda")]
    assert [event.event_id for event in events] == [0, 0]
    for event in events:
        event.record()
    assert 0 not in (numbers := {event.event_id for event in events}) and len(numbers) == 2


class _Doubled(torch.autograd.Function):
    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Doubled.seen.append(torch.cuda.current_stream())
        return grad * 2


@pytest.fixture(params=[True, False], ids=["its device is told", "it is not"])
def custom_nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom functions whose nodes know their gradients' device, and those before torch 2.13."""

    def metadata_of(node: Any) -> Any:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise RuntimeError(
                "Attribute '_input_metadata' is invalid for this instance of _C._FunctionBase."
            )
        return node._input_metadata

    if not request.param:
        monkeypatch.setattr(current_streams, "_metadata_of", metadata_of)


def test_custom_backward_runs_on_the_stream_of_its_forward(custom_nodes: None) -> None:
    with torchdevice.simulate(races="error"):
        side, ambient = torch.cuda.Stream(), torch.cuda.Stream()
        x = torch.ones(3, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = _Doubled.apply(x).sum()
        ambient.wait_stream(side)
        with torch.cuda.stream(ambient):
            loss.backward()
            assert torch.cuda.current_stream() == ambient and (x.grad * 1).tolist() == [2, 2, 2]
        assert _Doubled.seen == [side]
        _Doubled.seen.clear()
        torch.cuda.synchronize()
        _Doubled.apply(x).sum().backward()
        assert _Doubled.seen == [torch.cuda.default_stream()]
    _Doubled.seen.clear()


class _Elsewhere(torch.autograd.Function):
    seen: list[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Elsewhere.seen.append([torch.cuda.current_stream(index).stream_id for index in range(2)])
        return grad * 2


def test_custom_backward_on_a_device_that_is_not_current(
    custom_nodes: None, request: pytest.FixtureRequest
) -> None:
    """The engine sets the stream of the device of the gradients."""
    with torchdevice.simulate(count=2, races="error"):
        streams = [torch.cuda.Stream(index) for index in range(2)]
        x = torch.ones(3, device="cuda:1", requires_grad=True)
        streams[1].wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(streams[1]), torch.cuda.stream(streams[0]):
            loss = _Elsewhere.apply(x).sum()
        torch.cuda.current_stream(1).wait_stream(streams[1])
        loss.backward()
        assert [torch.cuda.current_stream(index).stream_id for index in range(2)] == [0, 0]
    of_other = streams[0].stream_id if "it is not" in request.node.name else 0
    assert _Elsewhere.seen == [[of_other, streams[1].stream_id]]
    _Elsewhere.seen.clear()


def _seen(streams: list[torch.cuda.Stream]) -> Callable[[torch.Tensor], None]:
    return lambda gradient: streams.append(torch.cuda.current_stream())


@pytest.mark.parametrize("options", [{}, {"races": "error"}, {"asynchronous": True}], ids=str)
def test_nodes_run_backward_on_the_stream_of_their_forward(options: dict[str, Any]) -> None:
    with torchdevice.simulate(**options):
        side, ambient = torch.cuda.Stream(), torch.cuda.Stream()
        early, late = (torch.ones(3, device="cuda", requires_grad=True) for _ in range(2))
        seen: dict[str, list[torch.cuda.Stream]] = {
            name: [] for name in ("early", "late", "within", "posted", "loss")
        }
        early.register_hook(_seen(seen["early"]))
        late.register_hook(_seen(seen["late"]))
        late.register_post_accumulate_grad_hook(_seen(seen["posted"]))
        ready = early * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            product = ready * late * early
        product.register_hook(_seen(seen["within"]))
        ambient.wait_stream(side)
        with torch.cuda.stream(ambient):
            loss = product.sum()
            loss.register_hook(_seen(seen["loss"]))
            for _ in range(2):
                loss.backward(retain_graph=True)
                assert torch.cuda.current_stream() == ambient
            assert (early.grad + late.grad).tolist() == [12, 12, 12]  # type: ignore[operator]
            with pytest.raises(ZeroDivisionError):
                product.register_hook(lambda gradient: 1 / 0)
                loss.backward()
            assert torch.cuda.current_stream() == ambient
    default = (0, 0)
    found = {
        name: {(each.device_index, each.stream_id) for each in streams}
        for name, streams in seen.items()
    }
    on_side, on_ambient = {(0, side.stream_id)}, {(0, ambient.stream_id)}
    expected = {
        "early": {default},
        "late": on_side,
        "posted": on_side,
        "within": on_side,
        "loss": on_ambient,
    }
    assert found == expected


@pytest.mark.usefixtures("no_collections")
def test_gradients_belong_to_the_stream_of_the_forward() -> None:
    """The memory of a gradient, and the work that makes it: whoever uses it there need not wait."""
    with torchdevice.simulate(races="error"):
        side, x = torch.cuda.Stream(), torch.ones(1 << 19, device="cuda", requires_grad=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        gradient = torch.ones_like(y)
        y.backward(gradient)
        with torch.cuda.stream(side):
            assert x.grad is not None and (x.grad + 1).max().item() == 3
        of_gradient = [
            each["stream"]
            for each in torch.cuda.memory_snapshot()
            for block in each["blocks"]
            if block.get("data_ptr") == x.grad.data_ptr()
        ]
        assert of_gradient == [side.stream_id]


def test_recomputed_nodes_run_on_the_stream_of_what_recomputes_them(custom_nodes: None) -> None:
    with torchdevice.simulate(races="error"):
        side, x = torch.cuda.Stream(), torch.ones(3, device="cuda", requires_grad=True)
        seen: list[torch.cuda.Stream] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            if y.requires_grad:  # not in the first pass of the reentrant kind
                y.register_hook(_seen(seen))
            return y * y

        side.wait_stream(torch.cuda.current_stream())
        for reentrant in (True, False):
            with torch.cuda.stream(side):
                y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            torch.cuda.current_stream().wait_stream(side)
            y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [16, 16, 16] and set(seen) == {side}


def test_changes_of_the_stream_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_streams, "_KEPT", 3)
    x = torch.ones(1, requires_grad=True)
    streams, nodes = current_streams.CurrentStreams(), []
    assert not streams.history.has_changes
    streams[0] = 5
    streams[0] = 0  # no node between them
    assert not streams.history.has_changes
    for number in range(1, 9):
        streams[0] = number
        nodes.append((x * 2).grad_fn)
    assert streams.history.has_changes
    known = [streams.history.at(node._sequence_nr()).get(0, 0) for node in nodes]
    assert known[-3:] == [6, 7, 8] and 0 in known  # the oldest are forgotten


def test_legacy_types_on_a_device() -> None:
    with torchdevice.simulate(count=2):
        assert torch.cuda.FloatTensor(1, device=1).get_device() == 1
        with torch.cuda.device(1):
            devices = [
                torch.cuda.LongTensor([2], device=each).get_device() for each in (None, 0, "cuda:0")
            ]
        assert devices == [1, 0, 0]
        with pytest.raises(
            RuntimeError,
            match=r"^legacy constructor expects device type: cuda but device type: cpu",
        ):
            torch.cuda.FloatTensor(1, device="cpu")
