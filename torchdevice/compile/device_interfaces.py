"""Registers torch's ``DeviceInterface``, through which Dynamo and Inductor ask about a device, for a scope's devices.

``torch.cuda`` answers for the target in a scope. So a target for which torch has no interface gets that of CUDA, except
for the answers about Triton. The interfaces are registered while scopes are active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.core import Replaced, thread_state
from torchdevice.devices.runtime import Runtime


class Interfaces:
    """The patch that adds the interfaces of active scopes to torch's registry."""

    def __init__(self) -> None:
        self._added: dict[str, Any] = {}

    def install(self) -> None:
        registry = _registry()
        # Outside the scope: torch registers an interface for each device that `torch.cuda` counts.
        with thread_state.suspended():
            if not registry._device_initialized:
                registry.init_device_reg()

    def remove(self) -> None:
        for name, interface in list(self._added.items()):
            # Not one that the program has registered in its place.
            if _registry().device_interfaces.get(name) is interface:
                _registry().device_interfaces.pop(name, None)
            self._added.pop(name, None)

    def add(self, runtime: Runtime, devices: int) -> None:
        """Register the target of a scope, and the ``devices`` CUDA devices it advertises, without and with an index."""
        registry = _registry()
        cuda = registry.CudaInterface
        target = registry.device_interfaces.get(runtime.device_type) or stand_in(runtime)
        # `dict.fromkeys` drops a family that is the device type itself, and keeps the order.
        own = [(kind, target, runtime.device_count()) for kind in dict.fromkeys((runtime.device_type, runtime.family))]
        for kind, interface, count in (*own, ("cuda", cuda, devices)):
            for name in (kind, *(f"{kind}:{index}" for index in range(count))):
                if name not in registry.device_interfaces:
                    # A name that is there belongs to torch or the program.
                    self._added[name] = interface
                    registry.register_interface_for_device(name, interface)


def exchanges() -> list[Replaced]:
    """Return the patches of methods that torch bound when Dynamo was imported; without CUDA in the build they raise."""
    cuda = _registry().CudaInterface
    return [Replaced(cuda, name, _late(name)) for name in ("exchange_device", "maybe_exchange_device")]


def _late(name: str) -> Callable[[Any], Any]:
    """Return the ``make`` of a patch whose method looks ``torch.cuda._<name>`` up when it is called."""

    # Looked up at each call, since the scope supplies `torch.cuda._exchange_device` only while it is active.
    return lambda original: staticmethod(lambda device: getattr(torch.cuda, f"_{name}")(device))


def _registry() -> Any:
    return torch._dynamo.device_interface


@functools.cache
def stand_in(runtime: Runtime) -> type:
    """Return the interface of a device for which torch has none."""
    cuda = _registry().CudaInterface

    # CUDA's answers hold, because `torch.cuda` answers for the target in a scope; the rest is overridden.
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
            return 0  # compiled code passes it to kernels, which have no streams here

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

        @classmethod
        def raise_if_triton_unavailable(cls, device: Any = None) -> None:
            raise RuntimeError(f"Triton makes no code for {runtime.target!r}. Use backend='aot_eager' or the CPU.")

    StandInInterface.__name__ = f"{runtime.device_type.capitalize()}Interface"  # shown in Dynamo's logs and errors
    return StandInInterface
