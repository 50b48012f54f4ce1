"""Random numbers: each device has a generator of its own, a CPU generator, so that equal seeds give equal numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import policy

Drawing = Callable[[Callable[..., Any], int, list[Any], dict[str, Any]], Any]


class Generator(torch.Generator):
    """A generator of the simulated device.

    Args:
        index: The device.
    """

    index: int

    def __new__(cls, index: int) -> Generator:
        self = own(cls, index)
        self.index = index
        return self

    def __init__(self, index: int):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose numbers it draws."""
        with torch._C.DisableTorchFunction():
            return torch.device(policy.spelled(self.index))

    def clone_state(self) -> Generator:
        """Return a generator that will draw the same numbers."""
        clone = Generator(self.index)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> Any:
        return _restored, (self.index, self.get_state())


def own(cls: type, index: int) -> Any:
    """Return a generator of a class, whose numbers go to the device."""
    generator: Any = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
    _index_by_identity[generator._cdata] = index
    weakref.finalize(generator, _index_by_identity.pop, generator._cdata, None).atexit = False
    return generator


def _restored(index: int, state: torch.Tensor) -> Generator:
    generator = Generator(index)
    generator.set_state(state)
    return generator


_index_by_identity: dict[int, int] = {}
"""Devices of the live generators: all that reaches a kernel of a generator is its identity."""


_defaults: dict[int, Generator] = {}


def default_generator(index: int) -> Generator:
    """Return the generator that the device's operators draw from when given none."""
    found = _defaults.get(index)
    if found is None:
        found = _defaults.setdefault(index, Generator(index))
        found.manual_seed(torch.default_generator.initial_seed())
    return found


def kind_of(op: Any) -> Drawing | None:
    """Return how an operator draws numbers: None if it draws none."""
    if any(argument.name == "generator" for argument in op._schema.arguments):
        return _from_argument
    return _from_default if torch.Tag.nondeterministic_seeded in op.tags else None


def _from_argument(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Draw from the generator that was given, or from the device's."""
    given = kwargs.get("generator")
    if given is None:
        return run(*args, **{**kwargs, "generator": default_generator(index)})
    on = _index_by_identity.get(given._cdata)
    if on is None and index >= 0:
        raise RuntimeError(
            f"Expected a {policy.spelled(index).split(':')[0]!r} device type for generator but found 'cpu'"
        )
    return run(*args, **kwargs)


def _from_default(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Let a kernel that draws from the CPU's generator draw from the device's."""
    return drawing(index, run, *args, **kwargs)


def drawing(index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws from the CPU's generator, which continues the device's meanwhile."""
    cpu, own = torch.default_generator, default_generator(index)
    before = cpu.get_state()
    cpu.set_state(own.get_state())
    try:
        return run(*args, **kwargs)
    finally:
        own.set_state(cpu.get_state())
        cpu.set_state(before)
