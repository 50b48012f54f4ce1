"""Random numbers: each device has its own generator, a CPU generator, so that a seed gives the CPU's numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import enforcement

Drawing = Callable[[Callable[..., Any], int, list[Any], dict[str, Any]], Any]


class Generator(torch.Generator):
    """A generator of the simulated device.

    Args:
        index: The index of the device.
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
        """The device for which this generator draws numbers."""
        with torch._C.DisableTorchFunction():
            return torch.device(enforcement.spelled(self.index))

    def clone_state(self) -> Generator:
        """Return a new generator in this generator's state, which will draw equal numbers."""
        clone = Generator(self.index)
        clone.set_state(self.get_state())
        return clone

    def __reduce__(self) -> Any:
        return _restored, (self.index, self.get_state())


def own(cls: type, index: int) -> Any:
    """Return a new CPU generator of class ``cls`` that draws numbers for device ``index``."""
    generator: Any = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
    _index_by_identity[generator._cdata] = index
    weakref.finalize(generator, _index_by_identity.pop, generator._cdata, None).atexit = False
    return generator


def _restored(index: int, state: torch.Tensor) -> Generator:
    generator = Generator(index)
    generator.set_state(state)
    return generator


_index_by_identity: dict[int, int] = {}
"""``_cdata`` of each live generator -> its device. A kernel gets another Python object for the same C++ generator."""


_defaults: dict[int, Generator] = {}


def default_generator(index: int) -> Generator:
    """Return the generator that the device's operators draw from when the program passes none."""
    found = _defaults.get(index)
    if found is None:
        found = _defaults.setdefault(index, Generator(index))
        found.manual_seed(torch.default_generator.initial_seed())
    return found


def kind_of(op: Any) -> Drawing | None:
    """Return the function that runs an operator with the right generator; None if it draws no numbers."""
    if any(argument.name == "generator" for argument in op._schema.arguments):
        return _from_argument
    return _from_default if torch.Tag.nondeterministic_seeded in op.tags else None


def _from_argument(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel with the generator that the program passed, or with the device's."""
    given = kwargs.get("generator")
    if given is None:
        return run(*args, **{**kwargs, "generator": default_generator(index)})
    on = _index_by_identity.get(given._cdata)
    if on is None and index >= 0:
        raise RuntimeError(
            f"Expected a {enforcement.spelled(index).split(':')[0]!r} device type for generator but found 'cpu'"
        )
    return run(*args, **kwargs)


def _from_default(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that takes no generator and draws from the CPU's."""
    return drawing(index, run, *args, **kwargs)


def drawing(index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws from the CPU's generator, and let it draw the device's next numbers.

    The CPU's generator has the state of the device's during the call, and its own state afterwards.
    """
    cpu, own = torch.default_generator, default_generator(index)
    before = cpu.get_state()
    cpu.set_state(own.get_state())
    try:
        return run(*args, **kwargs)
    finally:
        own.set_state(cpu.get_state())
        cpu.set_state(before)
