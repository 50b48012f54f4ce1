"""Memory of the host and of the device are two spaces: a write to one never changes the other.

Random programs create, move, view and write tensors. A reference holds the values of two separate
spaces, with plain tensors and without this package; a program must see these values. A program is
text, so a failure prints a program that can be run by hand.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchdevice

SPACES = ("host", "device")

SCOPES: dict[str, Callable[[], Any]] = {
    "cpu, mode": lambda: torchdevice.portable("cpu", engine="mode"),
    "cpu, wrap": lambda: torchdevice.portable("cpu", engine="wrap"),
    "simulated, mode": lambda: torchdevice.simulate("cuda", engine="mode"),
    "simulated, wrap": lambda: torchdevice.simulate("cuda", engine="wrap"),
}

PROGRAMS, LINES = 40, 45

HOW_TO_SPELL = {
    "host": ("'cpu'", "torch.device('cpu')"),
    "device": ("'cuda'", "'cuda:0'", "torch.device('cuda')", "torch.device('cuda', 0)", "0"),
}


# ---- the reference -------------------------------------------------------------------------------


@dataclass
class Held:
    """The reference's value of a variable of the program.

    Attributes:
        value: A tensor of the reference, or an array that shares memory with one.
        space: ``"host"`` or ``"device"``.
        pinned: Whether the tensor is in page-locked memory.
    """

    value: Any
    space: str
    pinned: bool = False

    @property
    def memory(self) -> int:
        """The address of the tensor's memory; -1 for an array."""
        return (
            self.value.untyped_storage().data_ptr() if isinstance(self.value, torch.Tensor) else -1
        )


class Writer:
    """Writes a random program, and keeps its variables' values with two separate spaces.

    Args:
        seed: The seed of all choices.
        exact: Whether a move to the space where a tensor is always returns the tensor itself, as on
            CUDA. Otherwise it may copy as docs/performance.md describes, and the program no longer
            writes to such memory.
    """

    def __init__(self, seed: int, exact: bool) -> None:
        self.choose = random.Random(seed)
        self.exact = exact
        self.held: dict[str, Held] = {}
        self.lines: list[str] = []
        self.expected: list[dict[str, Any]] = []
        self.known: dict[int, bool] = {}
        self.perhaps_copied: set[int] = set()
        self.add(
            "b = np.arange(6, dtype=np.float32).reshape(2, 3)",
            "b",
            np.arange(6, dtype=np.float32).reshape(2, 3),
        )

    def program(self, lines: int) -> Writer:
        actions = (
            [self.create] * 4 + [self.create_alike] * 2 + [self.of_data] * 2 + [self.move] * 8 + [self.view] * 3
            + [self.operate] * 2 + [self.write] * 6 + [self.to_numpy, self.pin, self.parameter, self.by_default_device]
        )  # fmt: skip
        while len(self.lines) < lines:
            self.choose.choice(actions)()
        return self

    # -- bookkeeping

    def add(
        self,
        line: str,
        name: str | None = None,
        value: Any = None,
        space: str = "host",
        **more: Any,
    ) -> None:
        """Add a line to the program, and the variable that it assigns."""
        if name is not None:
            self.held[name] = Held(value, space, **more)
        self.lines.append(line)
        self.expected.append(
            {key: np.array(each.value.tolist()) for key, each in self.held.items()}
        )

    def assign(
        self, text: str, value: torch.Tensor, space: str, known: bool | None = None, **more: Any
    ) -> None:
        """Add a line that assigns a tensor to a new variable.

        ``known`` says, for a tensor with new memory, whether the package can know the tensor's
        space.
        """
        name = f"v{len(self.lines)}"
        self.add(f"{name} = {text}", name, value, space, **more)
        if known is not None:
            self.known[self.held[name].memory] = known

    def pick(
        self, space: str | None = None, fits: Callable[[Held], bool] = lambda _: True
    ) -> str | None:
        names = [
            name
            for name, each in self.held.items()
            if isinstance(each.value, torch.Tensor) and space in (None, each.space) and fits(each)
        ]
        return self.choose.choice(names) if names else None

    def spelling(self, space: str) -> str:
        return self.choose.choice(HOW_TO_SPELL[space])

    def is_known(self, name: str) -> bool:
        return self.known[self.held[name].memory]

    # -- creation

    def create(self) -> None:
        space = self.choose.choice(SPACES)
        device = self.spelling(space)
        number = self.choose.randint(0, 9)
        filled = torch.full((2, 3), float(number))
        texts = [
            f"torch.full((2, 3), {number}., device={device})",
            f"torch.tensor([[{number}.] * 3] * 2, device={device})",
            f"torch.as_tensor([[{number}.] * 3] * 2, device={device})",
            f"torch.zeros(2, 3, device={device}).fill_({number})",
        ]
        if space == "host":
            texts += [
                f"torch.full((2, 3), {number}.)",
                f"torch.full((2, 3), {number}., pin_memory=True)",
            ]
        text = self.choose.choice(texts)
        self.assign(text, filled, space, known=True, pinned="pin_memory" in text)

    def create_alike(self) -> None:
        source = self.pick()
        if source is None:
            return
        like = self.held[source]
        space = self.choose.choice(SPACES)
        device = self.spelling(space)
        text, value, there = self.choose.choice(
            [
                (f"torch.ones_like({source})", torch.ones_like(like.value), None),
                (f"torch.ones_like(input={source})", torch.ones_like(like.value), None),
                (f"torch.full_like({source}, 3)", torch.full_like(like.value, 3), None),
                (f"{source}.new_ones(2, 3)", like.value.new_ones(2, 3), None),
                (
                    f"{source}.new_tensor([[5.] * 3] * 2)",
                    like.value.new_tensor([[5.0] * 3] * 2),
                    None,
                ),
                (f"torch.ones_like({source}, device={device})", torch.ones_like(like.value), space),
                (f"{source}.new_ones((2, 3), device={device})", like.value.new_ones(2, 3), space),
            ]
        )
        known = there is not None or self.is_known(source)
        self.assign(text, value.detach(), there or like.space, known=known)

    def of_data(self) -> None:
        """Make a tensor of the program's NumPy buffer or of another tensor."""
        buffer = self.held["b"].value
        space = self.choose.choice(SPACES)
        device = self.spelling(space)
        function = self.choose.choice(["as_tensor", "asarray"])
        kind = self.choose.choice(["memory", "buffer", "tensor", "new"])
        if kind == "memory":
            text = self.choose.choice(
                [
                    "torch.from_numpy(b)",
                    f"torch.{function}(b)",
                    f"torch.{function}(b, device='cpu')",
                ]
            )
            self.assign(text, torch.from_numpy(buffer), "host", known=True)
        elif kind == "buffer" and space == "device":
            self.assign(
                f"torch.{function}(b, device={device})",
                torch.from_numpy(buffer).clone(),
                space,
                known=True,
            )
        elif kind == "new":
            self.assign(
                f"torch.tensor(b, device={device})", torch.tensor(buffer), space, known=True
            )
        elif (
            kind == "tensor"
            and (source := self.pick(fits=lambda each: not each.value.requires_grad)) is not None
        ):
            self.moved(
                f"torch.{function}({source}, device={device})", source, space, is_ambiguous=False
            )

    def by_default_device(self) -> None:
        text, value = self.choose.choice(
            [
                ("torch.ones(2, 3)", torch.ones(2, 3)),
                ("torch.as_tensor(b)", torch.from_numpy(self.held["b"].value).clone()),
                ("torch.tensor([[4.] * 3] * 2)", torch.full((2, 3), 4.0)),
            ]
        )
        name = f"v{len(self.lines)}"
        device = self.spelling("device")
        self.add(f"with torch.device({device}): {name} = {text}", name, value, "device")
        self.known[self.held[name].memory] = True

    def parameter(self) -> None:
        source = self.pick(
            fits=lambda each: not each.value.requires_grad and self.known[each.memory]
        )
        if source is not None:
            held = self.held[source]
            self.assign(
                f"nn.Parameter({source})", nn.Parameter(held.value), held.space, pinned=False
            )

    def pin(self) -> None:
        source = self.pick("host", lambda each: not each.value.requires_grad)
        if source is None:
            return
        memory = self.held[source].memory
        if not any(each.pinned and each.memory == memory for each in self.held.values()):
            self.assign(
                f"{source}.pin_memory()",
                self.held[source].value.clone(),
                "host",
                known=True,
                pinned=True,
            )

    # -- moves

    def move(self) -> None:
        source = self.pick()
        if source is None:
            return
        value = self.held[source].value
        other = self.pick()
        assert other is not None
        to = self.choose.choice(SPACES)
        device = self.spelling(to)
        kind = self.choose.randint(0, 9)
        if kind == 0:
            self.moved(f"{source}.cpu()", source, "host", is_ambiguous=False)
        elif kind == 1:
            self.moved(
                f"{source}.cuda({self.choose.choice(['', '0', 'non_blocking=True'])})",
                source,
                "device",
                False,
            )
        elif kind == 2:
            self.assign(f"{source}.to({device}, copy=True)", value.detach().clone(), to, known=True)
        elif kind == 3:
            dtype = self.choose.choice(["float32", "float64"])
            self.moved(
                f"{source}.to({device}, torch.{dtype})", source, to, False, getattr(torch, dtype)
            )
        elif kind == 4:
            target = self.held[other]
            self.moved(
                f"{source}.to({other})",
                source,
                target.space,
                not self.is_known(other),
                target.value.dtype,
            )
        elif kind == 5:
            self.moved(
                f"{source}.to({other}.device)", source, self.held[other].space, is_ambiguous=True
            )
        elif kind == 6:
            target = self.held[other]
            self.moved(
                f"{source}.type_as({other})",
                source,
                target.space,
                not self.is_known(other),
                target.value.dtype,
            )
        elif kind == 7:
            self.moved(f"{source}.type(torch.FloatTensor)", source, "host", False, torch.float32)
        else:
            text = self.choose.choice(
                [f"{source}.to({device})", f"{source}.to(device={device}, non_blocking=True)"]
            )
            self.moved(text, source, to, is_ambiguous=False)

    def moved(
        self, text: str, source: str, to: str, is_ambiguous: bool, dtype: torch.dtype | None = None
    ) -> None:
        held = self.held[source]
        if is_ambiguous and held.value.requires_grad and not self.exact:
            return  # a leaf stays the same object, which tests below check
        if to != held.space or dtype not in (None, held.value.dtype):
            moved = held.value.detach().to(dtype or held.value.dtype, copy=True)
            # CUDA copies into page-locked memory then, and pinning that returns the tensor itself.
            pinned = to == "host" and "non_blocking=True" in text
            self.assign(text, moved, to, known=not is_ambiguous, pinned=pinned)
            return
        if is_ambiguous or not self.is_known(source):
            self.perhaps_copied.add(held.memory)
            self.known[held.memory] = False
        self.assign(text, held.value, to, pinned=held.pinned)

    # -- everything else

    def view(self) -> None:
        source = self.pick()
        if source is None:
            return
        held = self.held[source]
        suffixes = [".detach()", ".data", "[1:]", "[:, 1:]", ".t()", ".view_as(SELF)", "[...]"]
        suffix = self.choose.choice(suffixes if held.value.ndim == 2 else suffixes[:2])
        if held.value.requires_grad:
            suffix = ".detach()"
        suffix = suffix.replace("SELF", source)
        view = eval(f"{source}{suffix}", {source: held.value})
        self.assign(f"{source}{suffix}", view, held.space)

    def operate(self) -> None:
        source = self.pick()
        if source is None:
            return
        held = self.held[source]
        suffix = self.choose.choice([" + 1", " * 2", ".clone()", ".abs()", ".double()"])
        result = eval(f"v{suffix}", {"v": held.value.detach()})
        if result is not held.value.detach() and result.data_ptr() != held.value.data_ptr():
            self.assign(
                f"{source}.detach(){suffix}",
                result,
                held.space,
                known="clone" in suffix and self.is_known(source),
            )
        deep = copy.deepcopy(held.value)
        self.assign(
            f"copy.deepcopy({source})",
            deep,
            held.space,
            known=held.value.requires_grad and self.is_known(source),
        )

    def to_numpy(self) -> None:
        source = self.pick(
            "host", lambda each: not each.value.requires_grad and self.may_write(each)
        )
        if source is None:
            return
        name = f"a{len(self.lines)}"
        self.add(f"{name} = {source}.numpy()", name, self.held[source].value.numpy(), "host")
        self.known[self.held[source].memory] = True
        self.held[name].value += 1
        self.add(f"{name} += 1")

    def may_write(self, held: Held) -> bool:
        return self.exact or held.memory not in self.perhaps_copied

    def write(self) -> None:
        buffer = self.held["b"].value
        if self.choose.random() < 0.15 and (
            self.exact or buffer.ctypes.data not in self.perhaps_copied
        ):
            buffer += 1
            self.add("b += 1")
            return
        target = self.pick(fits=self.may_write)
        if target is None:
            return
        into = self.held[target].value
        source = self.pick(
            fits=lambda each: (
                each.value.shape == into.shape and each.memory != self.held[target].memory
            )
        )
        texts = [f"{target} += 1", f"{target}.zero_()", f"{target}.mul_(2)", f"{target}[0] = 7"]
        if (
            into.ndim == 2
            and into.is_contiguous()
            and into.dtype is torch.float32
            and not into.requires_grad
        ):
            texts.append(f"torch.ones({into.shape[0]}, {into.shape[1]}, out={target})")
        if source is not None:
            texts += [f"{target}.copy_({source})", f"{target}[:1] = {source}[:1]"]
        text = self.choose.choice(texts)
        with torch.no_grad():
            exec(text, {"torch": torch, **{name: held.value for name, held in self.held.items()}})
        self.add(text)


def run(writer: Writer) -> dict[str, Any]:
    """Run a program in the active scope, check all variables after every line; return them."""
    names: dict[str, Any] = {"torch": torch, "np": np, "nn": nn, "copy": copy}
    for number, (line, expected) in enumerate(zip(writer.lines, writer.expected, strict=True)):
        with torch.no_grad():
            exec(line, names)
        for name, value in expected.items():
            found = np.array(names[name].tolist())
            program = "\n".join(writer.lines[: number + 1])
            assert np.array_equal(found, value), (
                f"{name} is {found}, and not {value}, after\n{program}"
            )
    return names


def aliases(names: dict[str, Any], writer: Writer) -> None:
    """Check that variables share memory as in the reference, unless a move may have copied."""
    program = "\n".join(writer.lines)
    tensors = {
        name: held for name, held in writer.held.items() if isinstance(held.value, torch.Tensor)
    }
    actual = {name: names[name].untyped_storage().data_ptr() for name in tensors}
    for one, held in tensors.items():
        for two, other in tensors.items():
            shares = actual[one] == actual[two]
            if held.memory == other.memory and writer.may_write(held):
                assert shares, f"{one} and {two} share no memory after\n{program}"
            elif held.memory != other.memory:
                assert not shares, f"{one} and {two} share memory after\n{program}"


@pytest.mark.one_engine
@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_programs_see_two_spaces(name: str, sweep: tuple[bool, int]) -> None:
    complete, seed = sweep
    for number in range(PROGRAMS * (20 if complete else 1)):
        writer = Writer(seed * 100_000 + number, exact=name.startswith("simulated")).program(LINES)
        try:
            with SCOPES[name]():
                aliases(run(writer), writer)
        except Exception as error:
            raise AssertionError(
                f"seed {seed * 100_000 + number}, {name}: {error}\n" + "\n".join(writer.lines)
            ) from error


def _on_one_space(line: str) -> str:
    """Return a line with every spelling of CUDA replaced by the CPU's."""
    for old, new in {
        "cuda:0": "cpu",
        ".cuda(": ".cpu(",
        "cuda', 0": "cuda'",
        "cuda": "cpu",
        "(0)": "('cpu')",
        "(0, ": "('cpu', ",
        "device=0": "device='cpu'",
        ".cpu('cpu')": ".cpu()",
        ".cpu(non_blocking=True)": ".cpu()",
        ".fill_('cpu')": ".fill_(0)",
        ".pin_memory()": ".clone()",
        ", pin_memory=True": "",
    }.items():
        line = line.replace(old, new)
    return line


def test_programs_fail_on_a_single_space() -> None:
    """Spelled for one space, the CPU's, half of the programs fail: they do detect it."""
    caught = 0
    for seed in range(20):
        writer = Writer(seed, exact=True).program(LINES)
        writer.lines = [_on_one_space(line) for line in writer.lines]
        try:
            aliases(run(writer), writer)
        except AssertionError:
            caught += 1
    assert caught >= 10


# ---- moves of tensors ----------------------------------------------------------------------------


@pytest.fixture
def on_cpu(target: str) -> bool:
    """Whether the target shares the CPU's memory."""
    return target == "cpu"


@pytest.fixture(params=["mode", "wrap"])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def scope(chosen: str, engine: str) -> Iterator[torchdevice.Scope]:
    """An active scope, with each engine."""
    with torchdevice.portable(engine=engine) as active:
        yield active


in_scope = pytest.mark.usefixtures("scope")


def same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()


@in_scope
def test_a_reused_buffer() -> None:
    buffer, staging = np.zeros(3, dtype=np.float32), torch.zeros(3)
    batches: list[torch.Tensor] = []
    for number in range(3):
        buffer[:] = number
        staging.fill_(number)
        batches += [torch.as_tensor(buffer, device="cuda"), torch.asarray(buffer, device="cuda")]
        batches += [staging.to("cuda"), torch.as_tensor(staging, device="cuda")]
    assert [batch[0].item() for batch in batches] == [0] * 4 + [1] * 4 + [2] * 4


MOVES_TO_DEVICE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cuda()": lambda x: x.cuda(),
    "to('cuda')": lambda x: x.to("cuda"),
    "to(device)": lambda x: x.to(torch.device("cuda", 0)),
    "to(other)": lambda x: x.to(torch.zeros(1, device="cuda")),
    "to(other.device)": lambda x: x.to(torch.zeros(1, device="cuda").device),
    "to(str(other.device))": lambda x: x.to(str(torch.zeros(1, device="cuda").device)),
    "to(device of its type)": lambda x: x.to(
        torch.device(torch.zeros(1, device="cuda").device.type)
    ),
    "type_as": lambda x: x.type_as(torch.zeros(1, device="cuda")),
    "type": lambda x: x.type("torch.cuda.FloatTensor"),
    "pin_memory": lambda x: x.pin_memory(),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda"),
    "aten": lambda x: torch.ops.aten.to.device(x, torch.device("cuda"), torch.float32),
    "default device": lambda x: _by_default_device(x),
    "subclass": lambda x: x.as_subclass(Named).cuda(),
}


class Named(torch.Tensor):
    """A plain subclass of a tensor."""


def _by_default_device(x: torch.Tensor) -> torch.Tensor:
    with torch.device("cuda"):
        return torch.as_tensor(x)


@in_scope
@pytest.mark.parametrize("way", MOVES_TO_DEVICE)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3),
        lambda: torch.zeros(3) + 0,
        lambda: torch.from_numpy(np.zeros(3, "f")),
    ],
)
def test_a_write_to_a_moved_tensor_does_not_change_its_source(
    way: str, make: Callable[[], torch.Tensor]
) -> None:
    x = make()
    y = MOVES_TO_DEVICE[way](x)
    y += 1
    assert x.tolist() == [0] * 3 and y.tolist() == [1] * 3


MOVES_TO_HOST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cpu()": lambda x: x.cpu(),
    "to('cpu')": lambda x: x.to("cpu"),
    "to(device)": lambda x: x.to(torch.device("cpu")),
    "detach().to(device)": lambda x: x.detach().to(torch.device("cpu")),
    "cpu().clone()": lambda x: x.cpu().clone(),
    "to(other)": lambda x: x.to(torch.zeros(1)),
    "type": lambda x: x.type(torch.FloatTensor),
    "as_tensor": lambda x: torch.as_tensor(x, device="cpu"),
    "asarray": lambda x: torch.asarray(x.detach(), device=torch.device("cpu")),
    "numpy": lambda x: torch.from_numpy(x.detach().cpu().numpy()),
}

MADE_ON_DEVICE: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "an operator": lambda: torch.zeros(3, device="cuda") + 0,
    "zeros_like": lambda: torch.zeros_like(torch.ones(3, device="cuda")),
    "zeros_like by keyword": lambda: torch.zeros_like(input=torch.ones(3, device="cuda")),
    "normal": lambda: torch.normal(0.0, torch.zeros(3, device="cuda")),
    "out": lambda: torch.zeros(3, out=torch.empty(3, device="cuda")),
    "default device": lambda: _zeros_by_default_device(),
    "device of its type": lambda: torch.zeros(3, device=torch.zeros(1, device="cuda").device.type),
    "legacy type": lambda: torch.cuda.FloatTensor([0, 0, 0]),
    "deepcopy": lambda: copy.deepcopy(torch.zeros(3, device="cuda")),
    "clone as a leaf": lambda: torch.zeros(3, device="cuda").clone().requires_grad_(),
    "deepcopy of a parameter": lambda: copy.deepcopy(nn.Parameter(torch.zeros(3, device="cuda"))),
    "loaded": lambda: torch.load(_saved(torch.zeros(3)), map_location="cuda"),
    "loaded by device": lambda: torch.load(
        _saved(torch.zeros(3)), map_location=torch.device("cuda")
    ),
    "loaded by function": lambda: torch.load(
        _saved(torch.zeros(3)), map_location=lambda storage, _: storage.cuda()
    ),
}


def _zeros_by_default_device() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.zeros(3)


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@in_scope
@pytest.mark.parametrize("way", MOVES_TO_HOST)
@pytest.mark.parametrize("made", MADE_ON_DEVICE)
def test_a_snapshot_keeps_its_values(made: str, way: str) -> None:
    x = MADE_ON_DEVICE[made]()
    snapshot = MOVES_TO_HOST[way](x)
    with torch.no_grad():
        x += 1
    assert snapshot.tolist() == [0] * 3 and x.tolist() == [1] * 3


def test_memory_imported_by_dlpack_keeps_its_side() -> None:
    with torchdevice.portable("cpu"):
        x = torch.zeros(3, device="cuda")
        snapshot = torch.from_dlpack(x).cpu()
        x += 1
        assert snapshot.tolist() == [0] * 3


def test_between_two_devices() -> None:
    with torchdevice.portable("cpu", devices=2):
        x = torch.zeros(3, device="cuda:0")
        y = x.to("cuda:1")
        y += 1
        assert x.tolist() == [0] * 3
        leaf = torch.zeros(3, device="cuda:1", requires_grad=True)
        assert leaf.to("cuda:1") is leaf


def test_a_tensor_like_one_of_the_device_on_the_host() -> None:
    with torchdevice.simulate("cuda"):
        assert torch.zeros_like(torch.zeros(2, device="cuda"), device="cpu").device.type == "cpu"


STAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cpu()": lambda x: x.cpu(),
    "to('cpu')": lambda x: x.to("cpu"),
    "to(device)": lambda x: x.to(torch.device("cpu")),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float32),
    "to(its device)": lambda x: x.to(x.device),
}


@pytest.mark.usefixtures("no_collections")
@in_scope
@pytest.mark.parametrize("way", STAYS)
def test_what_was_never_moved_stays_itself(way: str, on_cpu: bool) -> None:
    stay = STAYS[way]
    module = nn.Module()
    module.weight = stay(nn.Parameter(torch.zeros(2)))
    module.scaled = stay(nn.Parameter(torch.randn(2) * 0.1))
    assert {name for name, _ in module.named_parameters()} == {"weight", "scaled"}
    leaf = torch.zeros(2, requires_grad=True)
    assert stay(leaf) is leaf and stay(leaf).is_leaf
    if way != "to(its device)":
        x = torch.zeros(2)
        assert stay(x) is x
        shared = torch.zeros(2).share_memory_()
        assert stay(shared) is shared and stay(shared).is_shared()


@pytest.mark.usefixtures("no_collections")
@in_scope
def test_what_is_on_the_device_stays_itself() -> None:
    x = torch.zeros(3, device="cuda")
    moves = [
        x.cuda(),
        x.to("cuda"),
        x.to(torch.device("cuda")),
        x.to(x),
        x.type_as(x),
        torch.as_tensor(x, device="cuda"),
    ]
    assert all(same_memory(move, x) for move in moves)
    weight = torch.zeros(3, device="cuda", requires_grad=True)
    assert weight.to(x.device) is weight and weight.cuda() is weight


@in_scope
def test_a_moved_leaf_is_no_leaf() -> None:
    weight = torch.ones(3, requires_grad=True)
    moved = weight.cuda()
    (moved * 2).sum().backward()
    assert moved is not weight and not moved.is_leaf and weight.grad is not None


@pytest.mark.usefixtures("no_collections")
def test_an_ambiguous_move_of_a_leaf_forgets_its_side() -> None:
    """Afterwards neither the leaf's mark nor memory from NumPy may count as the host's."""
    with torchdevice.portable("cpu"):
        for weight in (torch.zeros(3), torch.from_numpy(np.zeros(3, "f"))):
            weight.requires_grad_()
            moved = weight.to(torch.zeros(1, device="cuda").device)
            assert moved is weight
            assert not same_memory(moved.detach().cpu(), moved)


# ---- modules -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm, self.memory = nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.scale = nn.Parameter(torch.randn(4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.second(self.first(x))) * self.scale
        return self.memory(x[None])[0]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "cuda()": lambda model: model.cuda(),
    "to('cuda')": lambda model: model.to("cuda"),
    "to(device)": lambda model: model.to(torch.device("cuda")),
    "to(device of another)": lambda model: model.to(torch.zeros(1, device="cuda").device),
    "to(another)": lambda model: model.to(torch.zeros(1, device="cuda")),
    "to(device=)": lambda model: model.to(device="cuda:0"),
    "cuda(), cpu()": lambda model: model.cuda().cpu(),
    "cuda(), to('cpu')": lambda model: model.cuda().to("cpu"),
    "cuda(), cuda()": lambda model: model.cuda().cuda(),
}


@pytest.mark.usefixtures("no_collections")
@in_scope
@pytest.mark.parametrize("way", WAYS)
def test_a_moved_model_keeps_its_parameters(way: str) -> None:
    model = Model()
    before = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert WAYS[way](model) is model
    assert all(
        found is before[name] and isinstance(found, nn.Parameter)
        for name, found in model.named_parameters()
    )
    assert model.second.weight is model.first.weight
    assert all(
        flat is getattr(model.memory, name)
        for flat, name in zip(
            model.memory._flat_weights, model.memory._flat_weights_names, strict=True
        )
    )
    old = {name: value.detach().cpu().clone() for name, value in before.items()}
    device = model.scale.device
    model(torch.randn(8, 4).to(device)).sum().backward()
    optimizer.step()
    changed = {
        name
        for name, value in model.named_parameters()
        if not torch.equal(value.detach().cpu(), old[name])
    }
    assert {"first.weight", "scale", "memory.weight_ih_l0"} <= changed


@in_scope
@pytest.mark.parametrize("way", WAYS)
def test_what_was_taken_before_a_move_stays(way: str) -> None:
    model = Model()
    state, buffer = model.state_dict(), model.norm.running_mean
    view = model.first.weight.detach()[1:]
    values = {name: value.tolist() for name, value in state.items()}
    WAYS[way](model)
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each += 1
    assert {name: value.tolist() for name, value in state.items()} == values
    assert buffer.tolist() == values["norm.running_mean"]
    assert view.tolist() == values["first.weight"][1:]


@in_scope
@pytest.mark.parametrize(
    "hold", [lambda x: x.untyped_storage(), lambda x: x.detach()[1:], lambda x: x.numpy()]
)
def test_parameters_with_another_holder_are_copied(hold: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    held = hold(model.weight)
    before = held.tolist()
    model.cuda()
    with torch.no_grad():
        model.weight.zero_()
    assert held.tolist() == before


@in_scope
def test_an_array_that_a_parameter_was_made_of_stays() -> None:
    array = np.ones((2, 2), dtype=np.float32)
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.from_numpy(array))
    model.cuda()
    with torch.no_grad():
        model.weight.zero_()
    assert array.tolist() == [[1, 1], [1, 1]]


@in_scope
def test_a_state_dict_taken_on_the_device_stays_when_the_model_comes_back() -> None:
    model = Model().cuda()
    snapshot = {
        name: value.detach().to(torch.device("cpu")) for name, value in model.state_dict().items()
    }
    state = model.state_dict()
    model.cpu()
    with torch.no_grad():
        model.scale += 1
    assert not torch.equal(snapshot["scale"], model.scale) and not torch.equal(
        state["scale"].cpu(), model.scale
    )


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("way", WAYS)
def test_a_moved_model_keeps_memory_that_nobody_else_holds(way: str, engine: str) -> None:
    with torchdevice.portable("cpu", engine=engine):
        model = Model()
        before = {name: value.data_ptr() for name, value in model.named_parameters()}
        WAYS[way](model)
        assert {name: value.data_ptr() for name, value in model.named_parameters()} == before


@in_scope
def test_gradients_move_with_a_model() -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    parameter, grads = model.weight, model.weight.grad.tolist()
    model.cuda()
    assert model.weight is parameter and parameter.grad is not None
    assert parameter.grad.tolist() == grads and parameter.grad.device == parameter.device
    model.cpu()
    assert parameter.grad.tolist() == grads and parameter.grad.device.type == "cpu"


@in_scope
def test_a_copy_of_a_model_is_on_its_own() -> None:
    model = nn.Linear(2, 2).cuda()
    average = copy.deepcopy(model)
    snapshot = [parameter.cpu() for parameter in average.parameters()]
    with torch.no_grad():
        for parameter in average.parameters():
            parameter += 1
    assert all(
        torch.equal(old, new.cpu()) for old, new in zip(snapshot, model.parameters(), strict=True)
    )


@in_scope
def test_parameters_that_share_memory_part_when_moved() -> None:
    """As on CUDA, only one object that is registered twice stays shared."""
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(2))
    model.two = nn.Parameter(model.one.detach())
    model.cuda()
    with torch.no_grad():
        model.one += 1
    assert model.two.tolist() == [0, 0]


# ---- what torch does with tensors ----------------------------------------------------------------


@in_scope
def test_functorch() -> None:
    x = torch.arange(6.0).reshape(3, 2)

    def moves(row: torch.Tensor) -> torch.Tensor:
        moved = row.cuda()
        moved += 1
        return moved.sum() + (row.to(row.device) * row).cuda().sum()

    expected = [float((row + 1).sum() + (row * row).sum()) for row in x]
    assert torch.func.vmap(moves)(x).tolist() == expected
    assert (
        torch.func.grad(lambda row: (row.cuda() ** 2).sum())(x[1]).tolist() == (2 * x[1]).tolist()
    )
    assert torch.func.vmap(torch.func.grad(moves))(x).tolist() == (2 * x + 1).tolist()
    assert x.tolist() == torch.arange(6.0).reshape(3, 2).tolist()


@in_scope
def test_checkpoint_and_scaler() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    for _ in range(3):
        x = torch.ones(2, 4, requires_grad=True)
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: model(x.cuda()).relu().to(model.weight.device), x, use_reentrant=False
        ).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert x.grad is not None
    assert scaler.get_scale() == 2.0
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.cpu()
    kept = {key: value.tolist() for key, value in optimizer.state[model.weight].items()}
    for state in optimizer.state.values():
        for value in state.values():
            moved = value.to(torch.device("cuda"))
            moved += 1
            assert (value + 1).tolist() == moved.tolist()
    assert {key: value.tolist() for key, value in optimizer.state[model.weight].items()} == kept


@in_scope
def test_batches_of_a_loader() -> None:
    data = torch.arange(8.0).reshape(4, 2)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data), batch_size=2, pin_memory=True
    )
    for (batch,) in loader:
        moved = batch.to("cuda", non_blocking=True)
        moved += 1
        assert batch.is_pinned() and (moved.cpu() - batch).tolist() == [[1, 1], [1, 1]]
    assert data.tolist() == torch.arange(8.0).reshape(4, 2).tolist()


@in_scope
def test_a_loaded_checkpoint() -> None:
    file = _saved(nn.Linear(2, 2).cuda().state_dict())
    for place in ("cpu", "cuda", torch.device("cuda"), lambda storage, location: storage):
        file.seek(0)
        state = torch.load(file, map_location=place)
        model = nn.Linear(2, 2).cuda()
        model.load_state_dict(state)
        snapshot, moved = state["weight"].cpu().tolist(), state["weight"].cuda()
        with torch.no_grad():
            model.weight += 1
            moved.mul_(0)
        assert (
            place == "cuda"
            or isinstance(place, torch.device)
            or state["weight"].tolist() == snapshot
        )


def test_data_parallel() -> None:
    with torchdevice.portable("cpu"):
        model = nn.DataParallel(nn.Linear(2, 2)).cuda()
        x = torch.ones(4, 2)
        model(x.cuda()).sum().backward()
        assert model.module.weight.grad is not None and x.tolist() == [[1, 1]] * 4


@in_scope
def test_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=8,
        vocab_size=20,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=19,
        pad_token_id=19,
    )
    model = transformers.GPT2LMHeadModel(config)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    device = torch.device("cuda")
    model.to(device)
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = torch.ones(1, 4, dtype=torch.long).to(device)
    made = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=4,
        min_new_tokens=4,
        do_sample=False,
    )
    assert made.shape == (1, 8) and tokens.tolist() == [[1] * 4]
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(
        model.transformer.wte.weight.detach().cpu(), before["transformer.wte.weight"]
    )
