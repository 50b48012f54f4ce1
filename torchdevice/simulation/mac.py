"""The runtime of MPS on a simulated Mac: a real one's, with tensors of a simulated device.

A simulated Mac is a scope on the profile ``mps`` for a program written for MPS: there ``torch.mps``
answers, and tensors report ``mps``. A scope inside it that targets MPS for a program written for
CUDA asks :class:`MacRuntime`, and so :class:`MpsRuntime`, which calls the simulated Mac's
``torch.mps``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.mps_runtime import MpsRuntime
from torchdevice.kernel.devices.supplied import SuppliedDevice
from torchdevice.kernel.journal.journal import Journal
from torchdevice.kernel.options import Options
from torchdevice.kernel.registered_kernels import overload
from torchdevice.simulation import backend, device_generators, model_lookup, policy
from torchdevice.simulation.profiles import PROFILES
from torchdevice.simulation.simulated_runtime import SimulatedRuntime
from torchdevice.simulation.simulated_runtime import runtime as simulated


class MacRuntime(SuppliedDevice, MpsRuntime):
    """MPS on a simulated Mac.

    The overrides change how torch reaches a simulated device. The answers to a program come from
    :class:`MpsRuntime`.

    Args:
        machine: The context of the simulated Mac.
    """

    device_type = policy.DEVICE_TYPE
    shown_as = family = location_tag = kind = "mps"  # type: ignore[assignment]
    target = model_lookup.SIMULATED_MAC[0]  # type: ignore[assignment]
    is_mac = True
    torch_knows_current = False
    compiles = False
    generator_type = device_generators.Generator
    draws_on_cpu = True
    support = MpsRuntime.support._replace(autocast_key=None)
    corrected_key = "PrivateUse1"
    refusing_key = "PrivateUse1"

    def __init__(self, machine: Context):
        super().__init__(self)
        self.supplied = self
        self._machine = weakref.ref(machine)
        backend.register()

    @property
    def answered_by(self) -> Context:  # type: ignore[override]
        found = self._machine()
        assert found is not None, "a context keeps its machine"
        return found

    @property
    def _simulated(self) -> SimulatedRuntime:
        runtime: Any = self.answered_by.runtime
        return runtime

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        return self._simulated.rewriters

    @staticmethod
    def lacks_kernel(operator: str) -> bool:
        is_of_torch = operator.startswith("aten::")
        return is_of_torch and PROFILES["mps"].missing(overload(operator)) is not None

    def out_of_memory(self, error: BaseException) -> str | None:
        # The machine's memory is the host's, whose allocator may fail first. The machine then words
        # the error as MPS.
        return self._simulated.out_of_memory(error) or super().out_of_memory(error)


def _by_machine(name: str) -> Callable[..., Any]:
    def method(self: MacRuntime, *args: Any, **named: Any) -> Any:
        return getattr(self._simulated, name)(*args, **named)

    return method


# The machine's own runtime serves its tensors, threads and generators.
for _name in (
    "host_alias",
    "enter_thread",
    "leave_thread",
    "begin_autocast",
    "after_error_in_backward",
    "serve_reducer",
    "generator",
    "numbers_of",
    "new_storage",
):
    setattr(MacRuntime, _name, _by_machine(_name))

_runtimes: weakref.WeakKeyDictionary[Context, MacRuntime] = weakref.WeakKeyDictionary()


def runtime_on(machine: Context) -> MacRuntime:
    """Return the runtime of MPS on a simulated Mac, one object for each."""
    found = _runtimes.get(machine)
    return _runtimes.setdefault(machine, MacRuntime(machine)) if found is None else found


@functools.lru_cache
def standing(options: Options, memory: int | None) -> Context:
    """Return the context of a simulated Mac with so many bytes of memory that no scope has made."""
    return Context(options, simulated(PROFILES["mps"], 1, memory), Journal(), _join_none)


def _join_none(context: Context, forced_cpu: bool) -> Any:
    raise AssertionError("no thread enters a machine")
