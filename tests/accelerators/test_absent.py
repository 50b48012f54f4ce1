"""Accelerators a program is not written for are absent, as on a machine without them."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from facade_cases import MODULES

import torchdevice
from torchdevice.kernel.devices.accelerators import FAMILIES, of_module
from torchdevice.scope import target_selection

TARGETS = ("cpu", "simulated:cuda")

ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (),
    (0,),
    (1,),
    (0.5,),
    (b"",),
    ("cpu",),
    (torch.ones(1),),
)
"""What each name is called with. Most calls fail: the question is whether they fail as without a
scope.
"""

PROGRAMS = [
    (written_for, absent)
    for written_for in FAMILIES
    for absent in FAMILIES
    if written_for != absent
]


def names_of(family: str) -> Iterator[tuple[ModuleType, str]]:
    """Yield the modules of an accelerator with each of their public names."""
    # Some modules of torch.cuda keep what they are told.
    for name in {"cuda": ["torch.cuda"]}.get(family, MODULES):
        with contextlib.suppress(ImportError):  # of another release of torch
            module = importlib.import_module(name)
            listed = getattr(module, "__all__", None) or [
                each for each in vars(module) if each[0] != "_"
            ]
            if of_module(module) == family:
                yield from (
                    (module, each)
                    for each in listed
                    if not isinstance(vars(module).get(each), ModuleType)
                )


LEFT_OUT = frozenset(
    {"init", "cudart", "ExternalStream", "caching_allocator_delete", "graph_pool_handle"}
)
"""Names that keep their error for the process, fail in torch's own code by the type of None, count
their calls, or return a result with an error set: in builds for CUDA, deleting 0.5 gives
SystemError in whatever Python does next.
"""

NO_CURRENT_DEVICE = "RuntimeError: invalid argument to "
"""What builds for CUDA raise where no accelerator has a current device. In a scope the program's
own one has.
"""


def outcome(call: Callable[[], Any]) -> str:
    """Return what a call gives: the type and text of its error, or its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            told = repr(call())
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
    return re.sub(r"0x[0-9a-f]+|\[.*\]|registered at .*", "", told, flags=re.DOTALL)[:400]


def outcomes(family: str) -> dict[str, str]:
    """Return what each name of an accelerator's modules gives, for each list of arguments."""
    return {
        f"{module.__name__}.{name}{arguments}": outcome(
            lambda module=module, name=name, arguments=arguments: getattr(module, name)(*arguments)
        )
        for module, name in names_of(family)
        if name not in LEFT_OUT
        for arguments in ARGUMENTS
    }


def spellings(family: str) -> dict[str, Callable[[], Any]]:
    """Return calls that name a device of an accelerator, in the ways that torch takes."""
    x, model, tag, file = torch.ones(2), torch.nn.Linear(2, 2), f"{family}:0", io.BytesIO()
    torch.save({"w": x}, file)
    saved = file.getvalue()
    found: dict[str, Callable[[], Any]] = {
        "a method": lambda: getattr(x, family)(),
        "a module's method": lambda: getattr(model, family)(),
        "a legacy type": lambda: x.type(f"torch.{family}.FloatTensor"),
        "a class of it": lambda: getattr(torch, family).FloatTensor(2),
        "a default device": lambda: with_default(family),
        "a location": lambda: torch.load(io.BytesIO(saved), map_location=tag),
        "a location as a device": lambda: torch.load(
            io.BytesIO(saved), map_location=torch.device(family)
        ),
        "a module of it": lambda: torch.get_device_module(family).is_available(),
        "a state of it": lambda: getattr(torch, family).get_rng_state(),
        "a context": lambda: with_context(torch.device(family)),
        "whether it is there": lambda: getattr(torch, family).is_available(),
    }
    for spelled in (family, tag, f"{family}:1", torch.device(family), torch.device(family, 0)):
        found |= {
            f"a factory {spelled!r}": lambda spelled=spelled: torch.ones(2, device=spelled),
            f"a likeness {spelled!r}": lambda spelled=spelled: torch.zeros_like(x, device=spelled),
            f"a new one {spelled!r}": lambda spelled=spelled: x.new_zeros(2, device=spelled),
            f"a move {spelled!r}": lambda spelled=spelled: x.to(spelled),
            f"a move by keyword {spelled!r}": lambda spelled=spelled: x.to(device=spelled),
            f"a module {spelled!r}": lambda spelled=spelled: model.to(spelled),
            f"a new module {spelled!r}": lambda spelled=spelled: torch.nn.Linear(
                2, 2, device=spelled
            ),
            f"an operator {spelled!r}": lambda spelled=spelled: torch.ops.aten.empty.memory_format(
                [2], device=spelled
            ),
            f"a generator {spelled!r}": lambda spelled=spelled: torch.Generator(spelled),
            f"a stream {spelled!r}": lambda spelled=spelled: torch.Stream(spelled),
            f"an event {spelled!r}": lambda spelled=spelled: torch.Event(spelled),
            f"a storage {spelled!r}": lambda spelled=spelled: torch.UntypedStorage(
                2, device=spelled
            ),
            f"a nested tensor {spelled!r}": lambda spelled=spelled: torch.nested.nested_tensor(
                [x], device=spelled
            ),
            f"a sparse tensor {spelled!r}": lambda spelled=spelled: torch.sparse_coo_tensor(
                size=(2,), device=spelled
            ),
            f"pinned memory {spelled!r}": lambda spelled=spelled: x.pin_memory(spelled),
            f"pinned memory by keyword {spelled!r}": lambda spelled=spelled: x.pin_memory(
                device=spelled
            ),
            f"whether it is pinned {spelled!r}": lambda spelled=spelled: x.is_pinned(spelled),
            f"a pinned storage {spelled!r}": lambda spelled=spelled: x.untyped_storage().pin_memory(
                spelled
            ),
            f"a range {spelled!r}": lambda spelled=spelled: torch.arange(3, device=spelled),
            f"data {spelled!r}": lambda spelled=spelled: torch.tensor([1.0], device=spelled),
        }
    return found


def with_default(spelled: Any) -> torch.Tensor:
    torch.set_default_device(spelled)
    try:
        return torch.ones(2)
    finally:
        torch.set_default_device(None)


def with_context(device: torch.device) -> torch.Tensor:
    with device:
        return torch.ones(2)


def is_here(family: str) -> bool:
    """Return whether this machine has the accelerator, which its own code serves."""
    return target_selection.runtime(family).is_available()


# Torch.mps.Event's, which was not made.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("written_for", "absent"), PROGRAMS)
def test_every_name(written_for: Any, absent: str, target: str) -> None:
    if is_here(absent):
        pytest.skip(f"this machine has {absent}")
    expected = outcomes(absent)
    with torchdevice.portable(target, written_for=written_for):
        found = outcomes(absent)
    assert len(expected) > 60
    compared = {
        name: told for name, told in expected.items() if not told.startswith(NO_CURRENT_DEVICE)
    }
    assert {
        name: (found[name], told) for name, told in compared.items() if found[name] != told
    } == {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("written_for", "absent"), PROGRAMS)
def test_every_spelling(written_for: Any, absent: str, target: str) -> None:
    if is_here(absent):
        pytest.skip(f"this machine has {absent}")
    expected = {name: outcome(call) for name, call in spellings(absent).items()}
    with torchdevice.portable(target, written_for=written_for) as scope:
        found = {name: outcome(call) for name, call in spellings(absent).items()}
        reported = {
            entry.requested for entry in scope.journal.entries if entry.requested.startswith(absent)
        }
    assert {
        name: (found[name], told) for name, told in expected.items() if found[name] != told
    } == {}
    assert reported == set() and len(expected) > 80


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", [each for each in FAMILIES if each != "cuda"])
def test_any_family_may_be_asked_for(family: str, target: str) -> None:
    with torchdevice.portable(target, written_for="any", identity="target") as scope:
        kind = torch.ones(2, device="cuda").device.type
        assert (
            torch.ones(2, device=family).device.type
            == torch.ones(2).to(f"{family}:0").device.type
            == kind
        )
        getattr(torch, family).synchronize()
        assert torch.Generator(family).device.type == kind and torch.cuda.is_available()
        assert not getattr(torch, family).is_available() and scope.options.written_for == "any"
