"""Random moves: on a CPU target, the same tensors share memory as on a real device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice

KEEP = torch.preserve_format

MAKES: dict[str, Callable[[], torch.Tensor]] = {
    "ones": lambda: torch.ones(2),
    "ones on the host": lambda: torch.ones(2, device="cpu"),
    "ones on the device": lambda: torch.ones(2, device="cuda"),
    "ones on a device object": lambda: torch.ones(2, device=torch.device("cuda", 0)),
    "ones on a host object": lambda: torch.ones(2, device=torch.device("cpu")),
    "ones on a host object by keyword": lambda: torch.ones(2, device=torch.device(type="cpu")),
    "aten": lambda: torch.ops.aten.ones.default([2], dtype=torch.float32, device="cuda"),
    "pinned": lambda: torch.ones(2, pin_memory=True),
    "pinned on the host": lambda: torch.ones(2, device="cpu", pin_memory=True),
    "not pinned": lambda: torch.ones(2, device="cuda", pin_memory=False),
}

ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        f"to {name} {form}": (lambda x, to=to, make=make: to(x, make()))
        for name, make in {
            "the host": lambda: "cpu",
            "the device": lambda: "cuda",
            "an ordinal": lambda: "cuda:0",
            "a number": lambda: 0,
            "a host object": lambda: torch.device("cpu"),
            "a host object with an ordinal": lambda: torch.device("cpu", 0),
            "a host object with an ordinal by keyword": lambda: torch.device(type="cpu", index=0),
            "a device object": lambda: torch.device("cuda"),
        }.items()
        for form, to in {
            "alone": lambda x, d: x.to(d),
            "by keyword": lambda x, d: x.to(device=d),
            "with a dtype": lambda x, d: x.to(d, torch.float32),
            "with both keywords": lambda x, d: x.to(device=d, dtype=torch.float32),
            "with no dtype": lambda x, d: x.to(d, None, False),
            "with all": lambda x, d: x.to(d, None, False, False),
            "as a copy": lambda x, d: x.to(d, copy=True),
            "as a copy by position": lambda x, d: x.to(d, torch.float32, False, True),
            "with a format": lambda x, d: x.to(d, memory_format=KEEP),
            "as_tensor": lambda x, d: torch.as_tensor(x, device=d),
            "as_tensor by keyword": lambda x, d: torch.as_tensor(data=x, device=d),
            "asarray": lambda x, d: torch.asarray(x, device=d),
            "aten": lambda x, d: torch.ops.aten.to.device(x, d, torch.float32),
            "aten by keyword": lambda x, d: torch.ops.aten.to.device(
                x, device=d, dtype=torch.float32
            ),
        }.items()
    },
    "to its dtype": lambda x: x.to(torch.float32),
    "to its dtype by keyword": lambda x: x.to(dtype=torch.float32),
    "to its dtype as a copy": lambda x: x.to(torch.float32, False, True),
    "to float16 and back": lambda x: x.to(torch.float16).to(dtype=torch.float32),
    "to no device": lambda x: x.to(device=None, copy=True),
    "to None": lambda x: x.to(None, torch.float32, False, True),
    "cuda": lambda x: x.cuda(),
    "cuda of None": lambda x: x.cuda(None, False),
    "cuda of a number": lambda x: x.cuda(0),
    "cuda of a number by keyword": lambda x: x.cuda(device=0),
    "cuda of a text": lambda x: x.cuda("cuda:0", True),
    "cuda not blocking": lambda x: x.cuda(non_blocking=True),
    "cuda of a format": lambda x: x.cuda(0, memory_format=KEEP),
    "cpu": lambda x: x.cpu(),
    "cpu of a format": lambda x: x.cpu(memory_format=KEEP),
    "clone": lambda x: x.clone(),
    "clone of a format": lambda x: x.clone(memory_format=KEEP),
    "torch.clone": lambda x: torch.clone(x),
    "torch.clone by keyword": lambda x: torch.clone(input=x),
    "view": lambda x: x.view(-1),
    "detach": lambda x: x.detach(),
    "alike": lambda x: torch.ones_like(x),
    "new": lambda x: x.new_ones(2),
    "pin_memory": lambda x: x.pin_memory(),
    "pin_memory of a device": lambda x: x.pin_memory("cuda"),
    "pin_memory twice": lambda x: x.pin_memory().pin_memory(),
    "pin_memory of a device twice": lambda x: x.pin_memory("cuda").pin_memory("cuda"),
    "pin_memory by another road": lambda x: torch._pin_memory(x, torch.device("cuda")),
}

TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "to another": lambda x, y: x.to(y),
    "to another by keyword": lambda x, y: x.to(tensor=y),
    "to another, blocking": lambda x, y: x.to(y, False),
    "to another as a copy": lambda x, y: x.to(y, False, True),
    "type_as": lambda x, y: x.type_as(y),
    "type_as by keyword": lambda x, y: x.type_as(other=y),
    "alike on the device of another": lambda x, y: torch.ones_like(x) if y is x else y.new_ones(2),
}

Step = tuple[str, Callable[..., torch.Tensor], tuple[int, ...]]

Seen = tuple[str, list[int], list[int], tuple[bool, bool]]
"""Of a step's result: which tensors before it are it, which share its memory, and whether it is
pinned.
"""


def program(choose: random.Random) -> list[Step]:
    """Return a program with every move in it, of tensors that it has made or moved before."""
    ones, twos = list(ONE.items()), 3 * list(TWO.items())
    steps = [(name, function, 1) for name, function in ones] + [
        (name, function, 2) for name, function in twos
    ]
    choose.shuffle(steps)
    made: list[Step] = [(name, function, ()) for name, function in MAKES.items()]
    for name, function, number in steps:
        made.append((name, function, tuple(choose.randrange(len(made)) for _ in range(number))))
    return made


def run(steps: list[Step], refused: set[int]) -> list[Seen]:
    tensors: list[torch.Tensor] = []
    seen: list[Seen] = []
    for at, (name, function, inputs) in enumerate(steps):
        try:
            result = (
                torch.ones(2) if at in refused else function(*(tensors[each] for each in inputs))
            )
        except RuntimeError as error:
            # Pins a tensor of the device, which a CPU target need not know.
            assert "cannot pin" in str(error)
            refused.add(at)
            result = torch.ones(2)
        memory = result.untyped_storage()._cdata
        same = [n for n, each in enumerate(tensors) if each is result]
        shares = [n for n, each in enumerate(tensors) if each.untyped_storage()._cdata == memory]
        seen.append(
            (f"{name} of {inputs}", same, shares, (result.is_pinned(), result.is_pinned("cuda")))
        )
        tensors.append(result)
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_the_same_tensors_share_memory(seed: int) -> None:
    steps, refused = program(random.Random(seed)), set[int]()
    with torchdevice.simulate("cuda"):
        expected = run(steps, refused)
    with torchdevice.portable("cpu"):
        assert run(steps, refused) == expected


MODULES: dict[str, Callable[[torch.nn.Module, str, Any], Any]] = {
    "a text": lambda module, device, like: module.to(device),
    "a text by keyword": lambda module, device, like: module.to(device=device),
    "a device": lambda module, device, like: module.to(torch.device(device)),
    "a device by keyword": lambda module, device, like: module.to(device=torch.device(device)),
    "a device and a dtype": lambda module, device, like: module.to(
        torch.device(device), like.dtype
    ),
    "a device, not blocking": lambda module, device, like: module.to(
        torch.device(device), None, True
    ),
    "a tensor": lambda module, device, like: module.to(like),
    "a tensor by keyword": lambda module, device, like: module.to(tensor=like),
    "a tensor, not blocking": lambda module, device, like: module.to(like, True),
}


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("form", MODULES)
def test_a_module_that_was_moved_is_known_to_be_there(form: str, target: str) -> None:
    with torchdevice.portable(target):
        module = torch.nn.Linear(2, 2)
        for to, other in (("cuda", "cpu"), ("cpu", "cuda")):
            assert MODULES[form](module, to, torch.ones(1, device=to)) is module
            weight = module.weight.detach()
            assert weight.to(to) is weight and weight.to(other) is not weight
