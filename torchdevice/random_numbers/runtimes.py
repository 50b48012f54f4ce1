"""The runtime of a target that is no simulated GPU, for scopes that draw a GPU's numbers on it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from torchdevice.calls import interruptions
from torchdevice.kernel import thread_state
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.devices.supplied import SuppliedDevice
from torchdevice.random_numbers import drawn_calls
from torchdevice.random_numbers.generators import GpuGenerator, default_generator

interruptions.handles_calls(__file__)


class _WithGpuNumbers(Runtime):
    """Adds generators of a GPU's numbers, and calls that draw them, to a runtime's class."""

    _own_rewriters: Mapping[Any, Any]

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        return self._own_rewriters

    def default_generator(self, index: int) -> torch.Generator:
        context = thread_state.innermost()
        targets = super().default_generator(index)  # type: ignore[safe-super]  # of the target's class
        if context is None:
            return targets
        return default_generator(context, index, None if self.shares_host_memory else targets)


class _SuppliesGpuNumbers(SuppliedDevice):
    """Puts generators of a GPU's numbers into the class of a supplied device."""

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        # A program's own class draws the target's numbers.
        return GpuGenerator(index) if cls is torch._C.Generator else super().generator(index, cls)


def _sharing(of: Any, kind: type, **members: Any) -> Any:
    """Return an object that shares the state of another, of a class that has ``kind`` in front."""
    base = type(of)
    made: Any = object.__new__(type(base.__name__, (kind, base), members))
    made.__dict__ = of.__dict__
    return made


_made: weakref.WeakKeyDictionary[Runtime, Runtime] = weakref.WeakKeyDictionary()


def with_gpu_numbers(runtime: Runtime) -> Runtime:
    """Return the runtime that shares another's state and draws a GPU's numbers, one for each."""
    found = _made.get(runtime)
    if found is None:
        supplied = _sharing(runtime.supplied, _SuppliesGpuNumbers)
        # A property, because the state that is shared has the runtime's own.
        shown = property(lambda self: supplied)
        rewriters = {**runtime.rewriters, **drawn_calls.REWRITERS}
        made = _sharing(runtime, _WithGpuNumbers, _own_rewriters=rewriters, supplied=shown)
        found = _made.setdefault(runtime, made)
    return found
