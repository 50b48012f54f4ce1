"""What Dynamo and Inductor know of a device: torch's ``DeviceInterface``, for each device of the context.

``torch.cuda`` answers for the target in a scope, so the interface of a target is that of CUDA under another name, told
the truth about Triton. It is registered for as long as scopes are active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.devices.runtime import Runtime
from torchdevice.patching import Replaced
from torchdevice.torch_internals import require


class Interfaces:
    """The interfaces that torch has registered, with those of active scopes among them: a reversible change."""

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._exchanges: list[Replaced] = []

    def install(self) -> None:
        registry = _registry()
        with thread_state.suspended():
            if not require(registry, "_device_initialized"):
                require(registry, "init_device_reg")()
        if self._before is None:
            self._before = dict(require(registry, "device_interfaces"))
        # Bound when Dynamo was imported, to functions that only raise in a build without CUDA.
        if not self._exchanges:
            self._exchanges = [Replaced(registry.CudaInterface, name, _late(name)) for name in _EXCHANGES]
        for patch in self._exchanges:
            patch.install()

    def remove(self) -> None:
        for patch in self._exchanges:
            patch.remove()
        before = self._before  # read once: whoever comes between two lines may undo the change himself
        if before is not None:
            interfaces = _registry().device_interfaces
            for name in interfaces.keys() - before.keys():
                interfaces.pop(name, None)
            interfaces.update(before)
            self._before = None

    def add(self, runtime: Runtime, devices: int) -> None:
        """Register what a scope has: its target, plain and by index, and as many CUDA devices as it advertises."""
        registry = _registry()
        cuda = registry.CudaInterface
        target = registry.device_interfaces.get(runtime.device_type) or stand_in(runtime)
        for kind, interface, count in ((runtime.device_type, target, runtime.device_count()), ("cuda", cuda, devices)):
            for name in (kind, *(f"{kind}:{index}" for index in range(count))):
                if name not in registry.device_interfaces:
                    registry.register_interface_for_device(name, interface)


_EXCHANGES = ("exchange_device", "maybe_exchange_device")


def _late(name: str) -> Callable[[Any], Any]:
    """Return what makes a function of ``torch.cuda`` looked up when it is called."""

    def make(original: Any) -> Any:
        return staticmethod(lambda device: getattr(torch.cuda, f"_{name}")(device))

    return make


def _registry() -> Any:
    return torch._dynamo.device_interface


@functools.cache
def stand_in(runtime: Runtime) -> type:
    """Return the interface of a device for which torch has none."""
    cuda = _registry().CudaInterface

    class StandInInterface(cuda):  # type: ignore[misc, valid-type]
        class Worker(cuda.Worker):  # type: ignore[misc, name-defined]
            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return torch.cuda.get_device_properties(device)

        @staticmethod
        def is_available() -> bool:
            return runtime.is_available()

        @staticmethod
        def device_count() -> int:
            return runtime.device_count()

        @staticmethod
        def get_raw_stream(device_idx: int) -> int:
            return 0

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

        @classmethod
        def raise_if_triton_unavailable(cls, device: Any = None) -> None:
            raise RuntimeError(f"Triton makes no code for {runtime.device_type!r}. Use backend='aot_eager' or the CPU.")

    StandInInterface.__name__ = f"{runtime.device_type.capitalize()}Interface"
    return StandInInterface
