"""Moves as objects: ``ToDevice``, ``DeviceSpec``, ``Prefetcher``, on one device and two."""

from __future__ import annotations

import collections
import copy
import dataclasses
import gc
import io
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ALONE
from processes import run_python
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice import DeviceSpec, Prefetcher, ToDevice
from torchdevice.errors import FidelityError, WrongDeviceError
from torchdevice.torch_modules.cuda import streams
from torchdevice.transfer import batch_moves
from torchdevice.transfer.batch_moves import mapped


@pytest.fixture
def two(target: str) -> Iterator[torchdevice.Scope]:
    """A scope with two devices."""
    with torchdevice.portable(target, devices=2) as scope:
        yield scope


@pytest.fixture
def pair() -> Iterator[torchdevice.Scope]:
    """Two simulated devices."""
    with torchdevice.simulate(count=2) as scope:
        yield scope


def dot(one: torch.Tensor, other: torch.Tensor) -> complex:
    return complex(torch.vdot(one.detach().cpu().flatten(), other.detach().cpu().flatten()))


WAYS = [
    ("cpu", "cuda:0"),
    ("cuda:0", "cpu"),
    ("cuda:0", "cuda:1"),
    ("cuda:1", "cuda:0"),
    ("cuda", "cuda:0"),
]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("way", WAYS, ids="-".join)
class TestMoves:
    def test_there_and_back(self, way: tuple[str, str]) -> None:
        source, target = (torch.zeros(1, device=device).device for device in way)
        move, x = ToDevice(*way), torch.randn(3, 4, device=way[0])
        moved = move(x)
        assert moved.device == target and torch.equal(moved.cpu(), x.cpu())
        for back in (move.H, move.adjoint(), ToDevice(way[1], way[0])):
            assert back(moved).device == source and torch.equal(back(moved).cpu(), x.cpu())
        assert move.H.H(x).device == target

    def test_the_normal_operator_hands_on_what_it_is_given(self, way: tuple[str, str]) -> None:
        move, x = ToDevice(*way), torch.randn(3, device=way[0])
        batch = {"x": x}
        for normal in (move.N, move.normal(), move.N.H, move.N.N, copy.deepcopy(move.N)):
            assert normal(x) is x and normal(batch) is batch
        assert torch.equal(move.H(move(x)), move.N(x))

    @pytest.mark.parametrize("dtype", [None, torch.complex64, torch.bfloat16], ids=str)
    def test_dot_products(
        self, way: tuple[str, str], dtype: torch.dtype | None, float64: torch.dtype
    ) -> None:
        """The defining property of an adjoint: <A x, y> = <x, A^H y>."""
        dtype = dtype or float64
        move = ToDevice(*way)
        x = torch.randn(5, 2, dtype=dtype, device=way[0])
        y = torch.randn(5, 2, dtype=dtype, device=way[1])
        assert dot(move(x), y) == dot(x, move.H(y))
        assert dot(move(x), move(x)) == dot(x, move.N(x))

    @pytest.mark.lacked_by("simulated:mps", "float64, for finite differences")
    def test_autograd(self, way: tuple[str, str]) -> None:
        move = ToDevice(*way)
        x = torch.randn(3, 2, dtype=torch.float64, device=way[0], requires_grad=True)
        assert torch.autograd.gradcheck(move, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda value: move(value) ** 3, x)
        gradient = torch.randn(3, 2, dtype=torch.float64, device=way[1])
        (found,) = torch.autograd.grad(move(x), x, gradient)
        assert found.device == x.device and torch.equal(found, move.H(gradient))

    @pytest.mark.lacked_by("simulated:mps", "complex128, for finite differences")
    def test_complex_autograd(self, way: tuple[str, str]) -> None:
        x = torch.randn(3, dtype=torch.complex128, device=way[0], requires_grad=True)
        assert torch.autograd.gradcheck(ToDevice(*way), x) and torch.autograd.gradgradcheck(
            ToDevice(*way), x
        )

    def test_function_transforms(self, way: tuple[str, str]) -> None:
        move, x = ToDevice(*way), torch.randn(4, 3, device=way[0])
        assert torch.equal(torch.func.vmap(move)(x), move(x))
        assert torch.equal(torch.func.vmap(move, in_dims=1, out_dims=1)(x), move(x))
        assert torch.equal(torch.func.grad(lambda value: (move(value) ** 2).sum())(x), 2 * x)
        value, tangent = torch.func.jvp(move, (x,), (x + 1,))
        assert torch.equal(value, move(x)) and torch.equal(tangent, move(x + 1))
        assert torch.equal(torch.func.jacrev(move)(x[0]).cpu(), torch.eye(3))

    def test_layouts_and_memory_formats(self, way: tuple[str, str]) -> None:
        move = ToDevice(*way)
        image = torch.randn(2, 3, 4, 5, device=way[0]).to(memory_format=torch.channels_last)
        assert move(image).is_contiguous(memory_format=torch.channels_last)
        assert move(image.mT).stride() == image.mT.stride()
        assert move(torch.zeros(0, 3, device=way[0])).shape == (0, 3)
        assert move(torch.tensor(7, device=way[0])).item() == 7

    def test_in_a_sequence(self, way: tuple[str, str]) -> None:
        first, second = torch.nn.Linear(3, 4).to(way[0]), torch.nn.Linear(4, 2).to(way[1])
        model = torch.nn.Sequential(first, ToDevice(*way), second)
        x = torch.randn(5, 3, device=way[0])
        model(x).sum().backward()
        expected = second.cpu()(first.cpu()(x.cpu()))
        assert first.weight.grad is not None and first.weight.grad.abs().sum() > 0
        first.to(way[0]), second.to(way[1])
        assert (
            torch.equal(model(x).cpu(), expected)
            and not list(model[1].parameters())
            and not model[1].state_dict()
        )


# ---- batches -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    x: Any
    note: str = "kept"
    derived: Any = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


class Pair(NamedTuple):
    x: Any
    y: Any


class Checked(Pair):
    """A named tuple whose constructor takes other arguments than its fields."""

    def __new__(cls, both: Any) -> Checked:
        return super().__new__(cls, both, both)


class Bag(dict):
    """A mapping with something of its own."""

    label = ""


class Itself:
    """What moves itself, as the batches of other libraries do."""

    def __init__(self, x: torch.Tensor):
        self.x = x

    def to(self, device: torch.device) -> Itself:
        return Itself(self.x.to(device))


def bag(x: Any) -> Bag:
    made = Bag(x=x)
    made.label = "kept"
    return made


NESTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x, 3: "text"},
    "ordered dict": lambda x: collections.OrderedDict(b=x, a=x),
    "default dict": lambda x: collections.defaultdict(list, {"x": [x]}),
    "user dict": lambda x: collections.UserDict(x=x),
    "dict with attributes": bag,
    "read-only mapping": lambda x: types.MappingProxyType({"x": x}),
    "list": lambda x: [x, None, 1.5, [x]],
    "user list": lambda x: collections.UserList([x]),
    "deque": lambda x: collections.deque([x, x], maxlen=2),
    "tuple": lambda x: (x, "text", b"bytes", True),
    "empty": lambda x: ({}, [], ()),
    "set": lambda x: {x},
    "frozen set": lambda x: frozenset({x}),
    "named tuple": lambda x: Pair(x, [x]),
    "named tuple with a constructor": Checked,
    "torch's return type": lambda x: torch.max(x, dim=0),
    "size": lambda x: (x.shape, x),
    "dataclass": lambda x: Record([x]),
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "deep": lambda x: {"a": [(Record({"b": Pair(x, x)}),)]},
}


def tensors(batch: Any) -> list[torch.Tensor]:
    """Return a batch's tensors, found by pickling: unlike the package finds them."""
    found = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                found.append(value)
                return len(found)
            return None

    Pickler(io.BytesIO()).dump(dict(batch) if isinstance(batch, types.MappingProxyType) else batch)
    return found


@pytest.mark.usefixtures("two")
class TestBatches:
    @pytest.mark.parametrize("name", NESTED)
    @pytest.mark.parametrize("way", [("cpu", "cuda:1"), ("cuda:1", "cuda:0")], ids="-".join)
    def test_containers(self, name: str, way: tuple[str, str]) -> None:
        x = torch.arange(6.0, device=way[0]).reshape(2, 3)
        there = torch.zeros(1, device=way[1]).device
        batch = NESTED[name](x)
        before = tensors(batch)
        moved = ToDevice(*way)(batch)
        after = tensors(moved)
        assert (
            type(moved) is type(batch)
            and len(before) == len(after)
            and repr(batch) == repr(NESTED[name](x))
        )
        for old, new in zip(before, after, strict=True):
            assert (
                new.device == there and torch.equal(old.cpu(), new.cpu()) and old.device == x.device
            )
        assert [tensor is x for tensor in before] == [tensor is x for tensor in tensors(batch)], (
            "the batch was changed"
        )

    def test_what_containers_hold_besides(self) -> None:
        move, x = ToDevice("cpu", "cuda:0"), torch.ones(2)
        default = move(collections.defaultdict(list, x=x))
        assert default["new"] == [] and list(default) == ["x", "new"]
        assert move(bag(x)).label == "kept" and move(Record(x)).note == "kept"
        assert move(collections.deque([x], maxlen=3)).maxlen == 3
        assert list(move(collections.OrderedDict(b=x, a=x))) == ["b", "a"]
        assert move((x.shape, "text", None))[0] == torch.Size([2])
        record = Record(x)
        record.derived = x * 2
        assert torch.equal(move(record).derived.cpu(), x * 2)

    def test_packed_sequence(self) -> None:
        x = torch.randn(3, 4, 2, device="cuda:0")
        packed = pack_padded_sequence(
            x, torch.tensor([2, 4, 1]), batch_first=True, enforce_sorted=False
        )
        move = ToDevice("cuda:0", "cuda:1")
        moved = move(packed)
        assert type(moved) is PackedSequence and moved.batch_sizes.device.type == "cpu"
        assert moved.sorted_indices is not None and moved.unsorted_indices is not None
        for one, other in zip(moved, packed, strict=True):
            assert torch.equal(one.cpu(), other.cpu())
        there = torch.zeros(1, device="cuda:1").device
        assert (
            moved.data.device
            == moved.sorted_indices.device
            == moved.unsorted_indices.device
            == there
        )
        rnn = torch.nn.GRU(2, 3).to("cuda:1")
        output, _ = rnn(moved)
        assert output.data.device == there
        assert (
            move(pack_padded_sequence(x, torch.tensor([4, 4, 4]), batch_first=True)).sorted_indices
            is None
        )

    def test_hugging_face(self) -> None:
        transformers = pytest.importorskip("transformers", reason="install with the [hf] extra")
        from transformers.modeling_outputs import BaseModelOutput

        ids = torch.arange(4).reshape(1, 4)
        move, there = ToDevice("cpu", "cuda:0"), torch.zeros(1, device="cuda:0").device
        encoding = transformers.BatchEncoding({"input_ids": ids, "text": ["a"]}, encoding=None)
        moved = move(encoding)
        assert (
            type(moved) is type(encoding)
            and moved.input_ids.device == there
            and moved["text"] == ["a"]
        )
        assert encoding["input_ids"] is ids
        output = BaseModelOutput(last_hidden_state=ids.float(), hidden_states=(ids.float(),))
        moved_output = move(output)
        assert (
            type(moved_output) is BaseModelOutput
            and moved_output[0] is moved_output.last_hidden_state
        )
        assert moved_output.hidden_states[0].device == there and output.last_hidden_state.sum() == 6

    def test_modules(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        weight, before = model[0].weight, model[0].weight.detach().clone()
        there = torch.zeros(1, device="cuda:1").device
        model(torch.ones(4, 2)).sum().backward()
        assert ToDevice("cpu", "cuda:0")(model) is model
        assert (
            ToDevice("cuda:0", "cuda:1")({"model": model, "x": torch.ones(1, device="cuda:0")})[
                "model"
            ]
            is model
        )
        assert model[0].weight is weight and isinstance(weight, torch.nn.Parameter)
        assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {there}
        assert weight.grad is not None and weight.grad.device == there
        assert torch.equal(weight.detach().cpu(), before)

    def test_what_moves_itself(self) -> None:
        batch = [Itself(torch.ones(2, device="cuda:0")), Itself, torch.float32]
        moved = ToDevice("cuda:0", "cuda:1")(batch)
        assert moved[0].x.device == torch.zeros(1, device="cuda:1").device
        assert moved[1] is Itself and moved[2] is torch.float32


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pair")
class TestErrors:
    @pytest.mark.parametrize("found", ["cpu", "cuda:1"])
    def test_a_wrong_device_is_named_beside_the_right_one(self, found: str) -> None:
        move = ToDevice("cuda:0", "cpu")
        with pytest.raises(
            WrongDeviceError, match=rf"the batch is on '{found}', but expected on 'cuda:0'"
        ) as caught:
            move(torch.zeros(2, device=found))
        assert isinstance(caught.value, RuntimeError) and isinstance(
            caught.value, torchdevice.errors.TorchDeviceError
        )
        assert (str(caught.value.found), str(caught.value.expected)) == (found, "cuda:0")
        with pytest.raises(WrongDeviceError):
            move.N(torch.zeros(2, device=found))

    @pytest.mark.parametrize(
        "batch, name",
        [
            ({"x": ["here", "there"]}, "the batch['x'][1]"),
            (Record(Pair("here", "there")), "the batch.x[1]"),
            (({3: "there"},), "the batch[0][3]"),
        ],
        ids=["dict", "dataclass", "tuple"],
    )
    def test_the_place_in_a_batch_is_named_and_nothing_is_moved(
        self, batch: Any, name: str
    ) -> None:
        model = torch.nn.Linear(2, 2).to("cuda:0")
        values = {"here": torch.ones(1, device="cuda:0"), "there": torch.ones(1)}
        filled = mapped(batch, values.get)
        with pytest.raises(WrongDeviceError) as caught:
            ToDevice("cuda:0", "cuda:1")({"first": model, "then": filled})
        assert caught.value.name == name.replace("the batch", "the batch['then']")
        assert model.weight.device == torch.device("cuda:0")

    def test_a_parameter_or_buffer_elsewhere_is_named(self) -> None:
        model = torch.nn.BatchNorm1d(3).to("cuda:1")
        model.running_var = model.running_var.cpu()
        with pytest.raises(
            WrongDeviceError, match=r"the batch\[0\]\.running_var is on 'cpu'.*'cuda:1'"
        ):
            ToDevice("cuda:1", "cuda:0")([model])

    def test_bad_devices_raise_as_torch_does(self) -> None:
        for bad in ("gpu", "cuda:x"):
            with pytest.raises(RuntimeError, match=r"[Ii]nvalid device|Expected one of"):
                ToDevice("cpu", bad)
        with pytest.raises(TypeError, match=r"device\(\)"):
            DeviceSpec(1.5)
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            ToDevice("cpu", "cuda:7")(torch.ones(1))
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
            ToDevice("cuda:0", "cuda:7")(torch.ones(1, device="cuda:0"))

    def test_a_stream_of_another_device_is_refused(self) -> None:
        for name in ("compute_stream", "transfer_stream"):
            with pytest.raises(
                ValueError, match=rf"{name} is a stream of 'cuda:1', and .* for 'cuda:0'"
            ):
                DeviceSpec("cuda:0", **{name: torch.cuda.Stream(1)})

    @pytest.mark.parametrize("stream", ["cuda", 3, torch.device("cuda:0")])
    def test_what_is_no_stream(self, stream: Any) -> None:
        with pytest.raises(TypeError, match=r"transfer_stream=.* is not a stream"):
            DeviceSpec("cuda:0", transfer_stream=stream)

    @pytest.mark.parametrize("depth", [0, -1, 1.5, "2", True, None])
    def test_a_bad_depth(self, depth: Any) -> None:
        with pytest.raises(ValueError, match=r"depth=.* is not a number of batches"):
            Prefetcher([], "cuda", depth=depth)


# ---- streams -------------------------------------------------------------------------------------


class Order(TorchDispatchMode):
    """What each stream knows to be done: the order that real streams must be given.

    Attributes:
        known: Stream -> the work that is done before whatever the stream does next.
        copies: For each copy between devices: its stream, what that one knew, and source and
            target.
        memory: For each copy to a device: the stream that its memory is of.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self.known: dict[Any, set[str]] = collections.defaultdict(set)
        self.recorded: dict[int, set[str]] = {}
        self.kept: list[Any] = []
        self.copies: list[tuple[Any, set[str], str]] = []
        self.memory: list[Any] = []
        record, wait = streams.EventStandIn.record, streams.EventStandIn.wait

        def recording(event: Any, stream: Any = None) -> None:
            self.recorded[id(event)] = set(self.known[stream or torch.cuda.current_stream()])
            self.kept.append(event)
            record(event, stream)

        def waiting(event: Any, stream: Any = None) -> None:
            self.known[stream or torch.cuda.current_stream()] |= self.recorded[id(event)]
            wait(event, stream)

        monkeypatch.setattr(streams.EventStandIn, "record", recording)
        monkeypatch.setattr(streams.EventStandIn, "wait", waiting)

    def work(self, name: str, stream: Any) -> None:
        """Let a stream do something."""
        self.known[stream].add(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if device is not None and device.index is not None:
            self.memory.append(torch.cuda.current_stream(device.index))
        if (
            func is torch.ops.aten._to_copy.default
            and device is not None
            and args[0].device.index is not None
        ):
            stream = torch.cuda.current_stream(args[0].device.index)
            self.copies.append(
                (stream, set(self.known[stream]), f"{args[0].device.index}-{device.index}")
            )
            self.work(f"copy {len(self.copies)}", stream)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def order(pair: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    with Order(monkeypatch) as order:
        yield order


class TestStreams:
    def test_the_handshake(self, order: Order) -> None:
        """The copy follows the work of both devices so far, and precedes the target's next."""
        move, x = ToDevice("cuda:0", "cuda:1"), torch.ones(3, device="cuda:0")
        order.work("input", torch.cuda.current_stream(0))
        order.work("earlier", torch.cuda.current_stream(1))
        current = (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )
        move(x)
        ((stream, known, way),) = order.copies
        assert stream == move.ispec.transfer_stream and stream != current[0] and way == "0-1"
        assert known >= {"input", "earlier"}
        assert "copy 1" in order.known[torch.cuda.current_stream(1)]
        assert "copy 1" not in order.known[torch.cuda.current_stream(0)], "the source need not wait"
        assert current == (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )

    def test_current_streams_are_the_compute_streams(self, order: Order) -> None:
        move, x = ToDevice("cuda:0", "cuda:1"), torch.ones(3, device="cuda:0")
        one, other = torch.cuda.Stream(0), torch.cuda.Stream(1)
        order.work("unrelated", torch.cuda.default_stream(0))
        order.work("input", one)
        with torch.cuda.stream(other), torch.cuda.stream(one):
            move(x)
        ((_, known, _),) = order.copies
        assert "input" in known and "unrelated" not in known
        assert (
            "copy 1" in order.known[other]
            and "copy 1" not in order.known[torch.cuda.default_stream(1)]
        )

    @pytest.mark.usefixtures("no_collections")
    def test_streams_of_the_program(self, order: Order) -> None:
        one, way, other = torch.cuda.Stream(0), torch.cuda.Stream(0), torch.Stream(device="cuda:1")
        move = ToDevice(
            DeviceSpec("cuda:0", one, transfer_stream=way),
            DeviceSpec("cuda:1", compute_stream=other),
        )
        assert (
            move.ispec.compute_stream,
            move.ispec.transfer_stream,
            move.ospec.compute_stream,
        ) == (one, way, other)
        order.work("input", one)
        order.work("unrelated", torch.cuda.default_stream(0))
        move(torch.ones(3, device="cuda:0"))
        ((stream, known, _),) = order.copies
        assert order.memory[-1] == other
        assert (
            stream == way
            and "input" in known
            and "unrelated" not in known
            and "copy 1" in order.known[other]
        )
        host = ToDevice(DeviceSpec("cuda:0", one), "cpu")
        host(torch.ones(3, device="cuda:0"))
        assert order.copies[-1][0] == one

    def test_an_event_instead_of_the_compute_stream(self, order: Order) -> None:
        compute = torch.cuda.current_stream(0)
        order.work("input", compute)
        ready = compute.record_event()
        order.work("unrelated", compute)
        move = ToDevice("cuda:0", "cuda:1")
        move(torch.ones(3, device="cuda:0"), after=ready)
        ((_, known, _),) = order.copies
        assert "input" in known and "unrelated" not in known
        waited: list[str] = []
        event = types.SimpleNamespace(synchronize=lambda: waited.append("host"))
        ToDevice("cpu", "cuda:0")(torch.ones(1), after=event)  # type: ignore[arg-type]
        assert waited == ["host"]

    def test_the_gradient_takes_the_way_of_the_adjoint(self, order: Order) -> None:
        move = ToDevice("cuda:0", "cuda:1")
        x = torch.ones(3, device="cuda:0", requires_grad=True)
        y = move(x)
        order.work("loss", torch.cuda.current_stream(1))
        y.sum().backward()
        stream, known, way = order.copies[-1]
        assert stream == move.H.ispec.transfer_stream == move.ospec.transfer_stream and way == "1-0"
        assert "loss" in known and len(order.copies) == 2
        for index in (0, 1):  # the engine asks for the second, see the comment there
            assert "copy 2" in order.known[torch.cuda.current_stream(index)]

    def test_one_handshake_for_a_batch(self, order: Order) -> None:
        batch = [torch.ones(3, device="cuda:0") for _ in range(4)]
        ToDevice("cuda:0", "cuda:1")([*batch, "text", None, Itself])
        assert len(order.copies) == 4 and len(order.kept) == 3
        assert order.known[torch.cuda.current_stream(0)] == set(), (
            "what is no tensor holds nothing up"
        )
        assert {"copy 1", "copy 4"} <= order.known[torch.cuda.current_stream(1)]

    def test_memory_that_cannot_be_kept_holds_up_the_source(self, order: Order) -> None:
        move = ToDevice("cuda:0", "cuda:1")
        for number, leaf in enumerate(
            [torch.nn.Linear(2, 2).to("cuda:0"), Itself(torch.ones(1, device="cuda:0"))]
        ):
            before = len(order.copies)
            move([leaf, None, "text", 3])
            made = {f"copy {number + 1}" for number in range(before, len(order.copies))}
            assert made and made <= order.known[torch.cuda.current_stream(0)], number

    @pytest.mark.usefixtures("pair")
    def test_a_stream_for_each_source_and_target(self) -> None:
        spec = DeviceSpec("cuda:0")
        assert spec.compute_stream is None and spec.transfer_stream is None
        one, other = ToDevice(spec, "cuda:1"), ToDevice("cuda:0", "cuda:1")
        assert one.ispec.transfer_stream == other.ispec.transfer_stream != one.ospec.transfer_stream
        assert one.H.ispec.transfer_stream == ToDevice("cuda:1", "cuda:0").ispec.transfer_stream
        spec.p2p_setup(torch.device("cuda:1"))
        assert spec.transfer_stream == one.ispec.transfer_stream
        assert spec.compute_stream == torch.cuda.default_stream(0) and spec.type == "cuda"
        spec.p2p_setup("cpu")
        assert spec.transfer_stream is None

    def test_a_specification_serves_several_targets(self) -> None:
        with torchdevice.simulate(count=3):
            spec = DeviceSpec("cuda:0")
            moves = [ToDevice(spec, "cuda:1"), ToDevice(spec, "cuda:2"), ToDevice(spec, "cpu")]
            first, second, third = (move.ispec.transfer_stream for move in moves)
            assert first is not None and second is not None and first != second and third is None

    @pytest.mark.usefixtures("pair")
    @pytest.mark.parametrize("other", ["cpu", "cuda:0"])
    def test_no_streams_where_none_are_needed(self, other: str) -> None:
        move = ToDevice("cuda:0", other)
        assert {
            move.ispec.transfer_stream,
            move.ospec.compute_stream,
            move.ispec.compute_stream,
        } == {None}

    @pytest.mark.parametrize("written_for", ["cuda", "xpu"])
    def test_by_what_the_program_is_written_for(self, written_for: Any) -> None:
        with torchdevice.portable("simulated:cuda:2", written_for=written_for):
            move = ToDevice(f"{written_for}:0", f"{written_for}:1")
            assert isinstance(move.ispec.transfer_stream, getattr(torch, written_for).Stream)
            assert move(torch.ones(2, device=f"{written_for}:0")).device.index == 1

    @pytest.mark.usefixtures("two")
    @pytest.mark.parametrize(
        "way", [("cpu", "cuda:1"), ("cuda:0", "cpu"), ("cuda:0", "cuda:1")], ids="-".join
    )
    def test_streams_of_the_program_on_every_way(self, way: tuple[str, str]) -> None:
        specs = [
            DeviceSpec(device) if device == "cpu" else DeviceSpec(device, torch.Stream(device))
            for device in way
        ]
        before = (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )
        x = torch.randn(3, device=way[0], requires_grad=True)
        move = ToDevice(*specs)
        move.H(move(x)).sum().backward()
        assert x.grad is not None and x.grad.eq(1).all() and torch.equal(move(x).cpu(), x.cpu())
        assert before == (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )

    @pytest.mark.usefixtures("two")
    def test_nothing_is_left_half_done_where_a_move_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )

        class Fails:
            def to(self, device: torch.device) -> None:
                raise RuntimeError("on its way")

        with pytest.raises(RuntimeError, match="on its way"):
            ToDevice("cuda:0", "cuda:1")([torch.ones(2, device="cuda:0"), Fails()])
        assert before == (
            torch.cuda.current_stream(0),
            torch.cuda.current_stream(1),
            torch.cuda.current_device(),
        )


@pytest.fixture
def kept(pair: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """``Tensor.record_stream``'s arguments: the memory's address, and the keeping stream."""
    found: list[tuple[int, Any]] = []
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: found.append((tensor.data_ptr(), stream)),
    )
    return found


class Calls(TorchFunctionMode):
    """The calls of some methods of tensors, as they are made.

    Attributes:
        seen: For each: its tensor, its further arguments, its keyword arguments.
    """

    def __init__(self, name: str, do: Callable[[], Any] = lambda: None):
        super().__init__()
        self.name, self.do = name, do
        self.seen: list[tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == self.name:
            self.seen.append((args[0], args[1:], kwargs or {}))
            self.do()
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_collections")
@pytest.mark.usefixtures("pair")
def test_the_host_does_not_wait_only_where_its_memory_stays_in_place() -> None:
    move, pinned = ToDevice("cpu", "cuda:0"), torch.ones(2).pin_memory()
    batch = [pinned, torch.ones(2), torch.eye(2).to_sparse()]
    with Calls("to") as calls:
        moved = move(batch)
        move.H(moved[0])
        ToDevice("cpu", "cpu")(pinned)
    assert [kwargs["non_blocking"] for _, _, kwargs in calls.seen] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_the_host_waits_for_a_device_that_copies_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS's runtime warns that an asynchronous copy may return partly copied data."""
    pinned = torch.ones(2)
    monkeypatch.setattr(pinned, "is_pinned", lambda: True)
    assert batch_moves.may_copy_alone(pinned, torch.device("cuda"))
    assert not batch_moves.may_copy_alone(pinned, torch.device("mps"))


def test_memory_is_kept_until_the_copy_is_done(kept: list[tuple[int, Any]]) -> None:
    move, x = ToDevice("cuda:0", "cuda:1"), torch.ones(3, device="cuda:0")
    move(x)
    assert kept == [(x.data_ptr(), move.ispec.transfer_stream)]


def test_whose_memory_is_known() -> None:
    def addresses(tensor: torch.Tensor) -> set[int]:
        return {part.data_ptr() for part in batch_moves.memory_of(tensor)}

    sparse = torch.eye(3).to_sparse().requires_grad_()
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert addresses(sparse) == {sparse._indices().data_ptr(), sparse.detach()._values().data_ptr()}
    assert {jagged.values().data_ptr(), jagged.offsets().data_ptr()} <= addresses(jagged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls both layouts experimental
        assert addresses(torch.nested.nested_tensor([torch.ones(2)])) == set()
        csr = torch.eye(3).to_sparse_csr()
    assert addresses(csr) == {
        part.data_ptr() for part in (csr.crow_indices(), csr.col_indices(), csr.values())
    }


# ---- copies of the objects -----------------------------------------------------------------------


class TestCopies:
    @pytest.mark.usefixtures("pair")
    def test_copies_share_streams(self) -> None:
        stream = torch.cuda.Stream(0)
        spec = DeviceSpec("cuda:0", transfer_stream=stream)
        move = ToDevice(spec, "cuda:1")
        for other in (
            copy.copy(spec),
            copy.deepcopy(spec),
            copy.deepcopy(move).ispec,
            copy.copy(move).ispec,
        ):
            assert other == spec and hash(other) == hash(spec) and other.transfer_stream == stream
        assert move.ispec is not spec and DeviceSpec("cuda:0") != spec and spec != "cuda:0"

    @pytest.mark.usefixtures("two")
    @pytest.mark.parametrize("way", WAYS, ids="-".join)
    def test_pickles(self, way: tuple[str, str], kind: str) -> None:
        move = pickle.loads(pickle.dumps(ToDevice(*way)))
        x = torch.randn(3, device=way[0])
        moved = move(x)
        assert moved.device == torch.zeros(1, device=way[1]).device and repr(move) == repr(
            ToDevice(*way)
        )
        moved += 1
        one = way == ("cuda", "cuda:0")
        assert one or not torch.equal(moved.cpu(), x.cpu()), "the pickle moved nothing"
        here = pickle.loads(pickle.dumps(ToDevice("cpu", "cpu")))
        host = torch.zeros(3)
        assert here(host) is host
        loaded = torch.nn.Sequential(move)
        assert torch.equal(pickle.loads(pickle.dumps(loaded))(x).cpu(), x.cpu())

    @ALONE
    def test_a_pickle_means_the_same_on_another_target(self, target: str, kind: str) -> None:
        """What was made with one device standing in is read with another one."""
        with torchdevice.portable("simulated:cuda:2"):
            simulated = pickle.dumps(
                [ToDevice("cpu", "cuda:0"), ToDevice("cuda:0", "cuda:1"), DeviceSpec("cuda:1")]
            )
        with torchdevice.portable("cpu"):
            on_cpu = pickle.dumps(
                [ToDevice("cpu", "cuda:0"), ToDevice("cuda:0", "cuda:0"), DeviceSpec("cuda:0")]
            )
        for dumped in (simulated, on_cpu):
            with torchdevice.portable(target, devices=2):
                up, over, spec = pickle.loads(dumped)
                x = torch.ones(2)
                moved = over(up(x))
                moved += 1
                assert moved.device.type == spec.here.type == kind and x.sum() == 2
        assert str(pickle.loads(simulated)[1]) == "ToDevice(cuda:0 -> cuda:1)"

    @pytest.mark.usefixtures("pair")
    def test_streams_stay_out_of_pickles(self) -> None:
        spec = DeviceSpec("cuda:0", torch.cuda.Stream(0), torch.cuda.Stream(0))
        loaded = pickle.loads(pickle.dumps(spec))
        assert loaded == DeviceSpec("cuda:0") and loaded.transfer_stream is None


# ---- scopes --------------------------------------------------------------------------------------


class TestScopes:
    def test_without_a_scope(self) -> None:
        move, x = ToDevice("cpu", "cpu"), torch.randn(3, requires_grad=True)
        assert move(x) is x and move.H(x) is x and move.N(x) is x and ToDevice()(x) is x
        assert move({"x": [x]})["x"][0] is x
        assert repr(move) == "ToDevice(cpu -> cpu)" and repr(DeviceSpec()) == "DeviceSpec(cpu)"
        assert torch.autograd.gradcheck(move, x.double().detach().requires_grad_())
        assert ToDevice("cpu", "meta")(x).device.type == "meta"
        with pytest.raises(WrongDeviceError, match="the batch is on 'meta', but expected on 'cpu'"):
            move(torch.ones(2, device="meta"))
        model = torch.nn.Linear(2, 2)
        assert ToDevice("cpu", "meta")(model) is model and model.weight.is_meta
        assert pickle.loads(pickle.dumps(move))(x) is x
        assert [batch.sum() for batch in Prefetcher([torch.ones(2), torch.zeros(2)], "cpu")] == [
            2,
            0,
        ]

    def test_compiled_without_a_scope(self) -> None:
        move, x = ToDevice("cpu", "cpu"), torch.randn(3, requires_grad=True)
        compiled = torch.compile(lambda value: move(value * 2) + 1, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), x * 2 + 1)

    def test_without_a_scope_a_device_that_is_not_there_is_torchs_error(self) -> None:
        move = ToDevice("cpu", "cuda:1")
        assert repr(ToDevice("cuda:0", "cuda:1")) == "ToDevice(cuda:0 -> cuda:1)"
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            move(torch.ones(2))

    def test_made_before_a_scope(self, target: str) -> None:
        """As a constant of a module: the scope gives the devices their meaning."""
        up, over = ToDevice("cpu", "cuda"), ToDevice("cuda:0", "cuda:1")
        for _ in range(2):
            with torchdevice.portable(target, devices=2):
                x = torch.ones(3)
                moved = over(up(x))
                assert moved.device == torch.zeros(1, device="cuda:1").device
                moved += 1
                assert (
                    x.sum() == 3 and over.H(moved).device == torch.zeros(1, device="cuda:0").device
                )
        assert (up.ospec.device, over.ispec.device) == (
            torch.device("cuda"),
            torch.device("cuda:0"),
        )

    @pytest.mark.parametrize("identity", ["target", "program"])
    def test_both_identities(self, identity: Any) -> None:
        before = ToDevice("cuda:0", "cuda:1")
        with torchdevice.portable("simulated:cuda:2", identity=identity):
            for move in (before, ToDevice("cuda:0", "cuda:1"), ToDevice(0, 1)):
                x = torch.ones(3, device="cuda:0", requires_grad=True)
                y = move(x)
                y.sum().backward()
                assert (
                    y.device == torch.device("cuda:1")
                    and x.grad is not None
                    and x.grad.device == x.device
                )
                assert (
                    move.ispec.transfer_stream is not None
                    and torch.func.vmap(move)(x).device == y.device
                )

    def test_streams_end_with_their_scope(self) -> None:
        move = ToDevice("cuda:0", "cuda:1")
        with torchdevice.simulate(count=2):
            first = move.ispec.transfer_stream
            assert first is not None and move.ispec.transfer_stream is first
        assert move.ispec.transfer_stream is None and repr(move) == "ToDevice(cuda:0 -> cuda:1)"
        with torchdevice.simulate(count=2):
            assert (
                move.ispec.transfer_stream is not None and move.ispec.transfer_stream is not first
            )

    def test_the_device_without_an_ordinal_is_the_current_one_of_then(self) -> None:
        with torchdevice.simulate(count=2):
            with torch.cuda.device(1):
                move = ToDevice("cpu", "cuda")
            assert move(torch.ones(1)).device == torch.device("cuda:1")

    @pytest.mark.usefixtures("pair")
    def test_text(self) -> None:
        move = ToDevice("cuda:0", DeviceSpec("cuda:1", torch.cuda.Stream(1)))
        there, back, on = (
            stream.stream_id  # type: ignore[union-attr]
            for stream in (
                move.ispec.transfer_stream,
                move.ospec.transfer_stream,
                move.ospec.compute_stream,
            )
        )
        assert repr(move) == (
            f"ToDevice(cuda:0 (compute stream 0, transfer stream {there}) -> "
            f"cuda:1 (compute stream {on}, transfer stream {back}))"
        )
        assert (
            repr(move.ospec) == f"DeviceSpec(cuda:1 (compute stream {on}, transfer stream {back}))"
        )
        assert repr(torch.nn.Sequential(move)).count("cuda:1") == 1

    def test_what_is_strict_allows_moves(self) -> None:
        with torchdevice.portable("simulated:cuda:2", strict=True):
            x = torch.ones(2, device="cuda:0", requires_grad=True)
            ToDevice("cuda:0", "cuda:1")(x).sum().backward()
            assert next(iter(Prefetcher([torch.ones(1)], "cuda:1"))).device.index == 1

    def test_what_a_float64_becomes_is_reported(self) -> None:
        with torchdevice.portable("simulated:mps", strict=True), pytest.raises(FidelityError):
            ToDevice("cpu", "cuda")(torch.ones(1, dtype=torch.float64))

    # Dynamo, of any broken graph.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
    @pytest.mark.usefixtures("two")
    def test_compiled(self) -> None:
        move, x = ToDevice("cuda:0", "cuda:1"), torch.randn(3, device="cuda:0", requires_grad=True)
        compiled = torch.compile(lambda value: move(value * 2) + 1, backend="eager")
        result = compiled(x)
        result.sum().backward()
        assert (
            torch.equal(result.cpu(), (x * 2 + 1).cpu())
            and x.grad is not None
            and x.grad.eq(2).all()
        )


class TestThreads:
    @pytest.mark.usefixtures("two")
    def test_one_move_in_many_threads(self) -> None:
        move = ToDevice("cuda:0", "cuda:1")
        there = torch.zeros(1, device="cuda:1").device

        def run(number: int) -> tuple[int, Any, torch.device]:
            before = torch.cuda.current_stream(0), torch.cuda.current_device()
            x = torch.full((50,), float(number), device="cuda:0", requires_grad=True)
            for _ in range(5):
                y = move(x)
                (y * y).sum().backward()
            assert before == (torch.cuda.current_stream(0), torch.cuda.current_device())
            assert x.grad is not None
            return int(x.grad[0]), move.ispec.transfer_stream, y.device

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(run, range(24)))
        assert [gradient for gradient, _, _ in found] == [10 * number for number in range(24)]
        assert {device for _, _, device in found} == {there} and len(
            {stream for _, stream, _ in found}
        ) == 1

    @pytest.mark.usefixtures("pair")
    def test_threads_that_come_at_once_get_one_stream(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both find none, and both make one."""
        gate, found = threading.Barrier(2), []
        make = torch.cuda.Stream.__new__

        def slow(cls: Any, *args: Any, **kwargs: Any) -> Any:
            gate.wait(10)
            return make(cls, *args, **kwargs)

        monkeypatch.setattr(torch.cuda.Stream, "__new__", slow)
        threads = [
            threading.Thread(
                target=lambda: found.append(ToDevice("cuda:0", "cuda:1").ispec.transfer_stream)
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found[0] is not None and found[0] is found[1]


# ---- loaders -------------------------------------------------------------------------------------


class Counted:
    """A loader that counts its batches, and may refill one buffer, or fail."""

    def __init__(
        self, count: int, *, fails_at: int | None = None, buffer: torch.Tensor | None = None
    ):
        self.asked = 0
        self.count, self.fails_at, self.buffer = count, fails_at, buffer

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.count):
            self.asked += 1
            if number == self.fails_at:
                raise OSError("the disk is gone")
            buffer = torch.zeros(2) if self.buffer is None else self.buffer
            yield {"x": buffer.fill_(number), "number": number}


class TestPrefetcher:
    @pytest.mark.usefixtures("two")
    @pytest.mark.parametrize("depth", [1, 2, 3, 10])
    def test_every_batch_in_order_again_and_again(self, depth: int) -> None:
        loader = Counted(5)
        batches = Prefetcher(loader, "cuda:1", depth=depth)
        there = torch.zeros(1, device="cuda:1").device
        for _ in range(2):
            got = list(batches)
            assert (
                [batch["number"] for batch in got]
                == list(range(5))
                == [int(batch["x"][0]) for batch in got]
            )
            assert all(batch["x"].device == there for batch in got)
        assert len(batches) == 5 and loader.asked == 10
        assert list(Prefetcher([], "cuda")) == []

    @pytest.mark.usefixtures("two")
    def test_it_is_ahead_by_its_depth(self) -> None:
        for depth in (1, 2, 4):
            loader = Counted(8)
            batches = iter(Prefetcher(loader, "cuda", depth=depth))
            assert loader.asked == 0
            for step in range(1, 4):
                next(batches)
                assert loader.asked == depth + step - 1

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.usefixtures("pair")
    @pytest.mark.parametrize("depth", [1, 3])
    def test_it_holds_no_more_than_its_depth(self, depth: int) -> None:
        held: list[int] = []
        gc.collect()  # what earlier tests left in reference cycles is on the device until then
        before = torch.cuda.memory_allocated(1)
        torch.cuda.reset_peak_memory_stats(1)
        batches = iter(Prefetcher((torch.ones(1 << 18) for _ in range(6)), "cuda:1", depth=depth))
        for batch in batches:
            held.append(torch.cuda.memory_allocated(1) - before)
            del batch
        assert held == [min(depth, left) << 20 for left in range(6, 0, -1)]
        assert torch.cuda.max_memory_allocated(1) - before == depth << 20
        assert torch.cuda.memory_allocated(1) == before

    @pytest.mark.usefixtures("two")
    def test_an_error_comes_after_the_batches_before_it(self) -> None:
        batches = iter(Prefetcher(Counted(5, fails_at=2), "cuda", depth=4))
        assert [next(batches)["number"], next(batches)["number"]] == [0, 1]
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)

    @pytest.mark.usefixtures("two")
    def test_an_interrupt_comes_at_once(self) -> None:
        def loader() -> Iterator[torch.Tensor]:
            yield torch.ones(1)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            next(iter(Prefetcher(loader(), "cuda", depth=2)))

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.usefixtures("two")
    @pytest.mark.parametrize("pinned", [True, False])
    def test_a_loader_that_fills_one_buffer(self, pinned: bool) -> None:
        buffer = torch.zeros(2).pin_memory() if pinned else torch.zeros(2)
        got = [batch["x"] for batch in Prefetcher(Counted(4, buffer=buffer), "cuda", depth=3)]
        assert [int(x[0]) for x in got] == [0, 1, 2, 3]

    @pytest.mark.usefixtures("pair")
    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_a_loader_is_asked_after_the_copy_before(
        self, depth: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        happened: list[str] = []
        synchronize = streams.EventStandIn.synchronize

        def synchronizing(event: Any) -> None:
            happened.append("copied")
            synchronize(event)

        monkeypatch.setattr(streams.EventStandIn, "synchronize", synchronizing)

        def loader() -> Iterator[torch.Tensor]:
            for number in range(3):
                happened.append(f"asked for {number}")
                yield torch.ones(1).pin_memory()

        list(Prefetcher(loader(), "cuda", depth=depth))
        assert happened == [
            "asked for 0",
            "copied",
            "asked for 1",
            "copied",
            "asked for 2",
            "copied",
        ]

    @pytest.mark.usefixtures("no_collections")
    def test_on_a_stream_of_its_own(self, order: Order, kept: list[tuple[int, Any]]) -> None:
        compute, where = torch.cuda.current_stream(1), []
        loader = [torch.ones(2).pin_memory() for _ in range(3)]

        def copy() -> None:
            where.append(torch.cuda.current_stream(1))
            order.work(f"copy {len(where)}", where[-1])

        with Calls("to", copy):
            batches = iter(Prefetcher(loader, "cuda:1"))
            first = next(batches)
            assert len(where) == 2 and where[0] == where[1] != compute
            assert "copy 1" in order.known[compute] and "copy 2" not in order.known[compute]
            with torch.cuda.stream(torch.cuda.Stream(1)):
                used = torch.cuda.current_stream(1)
                second = next(batches)
        assert "copy 2" in order.known[used] and kept == [
            (first.data_ptr(), compute),
            (second.data_ptr(), used),
        ]
        assert torch.cuda.current_stream(1) == compute

    def test_on_streams_of_the_program(self, order: Order) -> None:
        way, compute = torch.cuda.Stream(1), torch.cuda.Stream(1)
        order.work("copied", way)
        next(iter(Prefetcher([torch.ones(2)], DeviceSpec("cuda:1", compute, way))))
        assert (
            "copied" in order.known[compute]
            and "copied" not in order.known[torch.cuda.current_stream(1)]
        )

    @pytest.mark.usefixtures("two")
    def test_what_cannot_be_kept_is_moved_in_the_current_stream(self) -> None:
        model, other = torch.nn.Linear(1, 1), Itself(torch.ones(1))
        ((moved, itself),) = Prefetcher([(model, other)], "cuda:1")
        there = torch.zeros(1, device="cuda:1").device
        assert moved is model and model.weight.device == itself.x.device == there

    @pytest.mark.usefixtures("two")
    def test_a_data_loader_with_workers(self) -> None:
        data = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, pin_memory=True)
        batches = Prefetcher(loader, "cuda", depth=3)
        assert [batch[0].tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5], [6, 7]] and len(
            batches
        ) == 4
        for batch in batches:
            assert batch[0].device == torch.zeros(1, device="cuda").device
            break

    def test_a_pickle_and_its_text(self, pair: torchdevice.Scope) -> None:
        batches = pickle.loads(pickle.dumps(Prefetcher([torch.ones(1)], "cuda:1", depth=3)))
        assert batches.depth == 3 and [batch.device for batch in batches] == [
            torch.device("cuda:1")
        ]
        assert repr(Prefetcher([], "cuda:1")) == "Prefetcher([], 'cuda:1', depth=2)"
        with pytest.raises(TypeError, match="len"):
            len(Prefetcher(iter([]), "cuda"))


def test_importing_it_changes_nothing() -> None:
    """In its own process: moves outside scopes neither enter one nor register the device."""
    result = run_python(
        "-c",
        "import torch, torchdevice\n"
        "x = torch.ones(2)\n"
        "assert torchdevice.ToDevice('cpu', 'cpu')(x) is x and list(torchdevice.Prefetcher([x], "
        "'cpu')) == [x]\n"
        "assert torchdevice.current() is None and not hasattr(torch, 'simulated')\n",
        TORCHDEVICE="0",
    )
    assert result.returncode == 0, result.stderr
