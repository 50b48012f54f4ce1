"""A backend beside the simulated device's: the PrivateUse1 device ``npu_like``, in CPU memory.

``import torch`` loads it through its entry point, as it loads public backends, where this folder is
on the path. Its kernels are those of the simulated device under another name. They ask no scope:
torch runs them for any program, and a scope of the package sees a device that only follows the
conventions of device modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import policy

# The modules below read the name when they are imported.
policy.DEVICE_TYPE = "npu_like"

from torchdevice.kernel.devices.cpu import bytes_wanted  # noqa: E402
from torchdevice.kernel.devices.module import ModuleRuntime  # noqa: E402
from torchdevice.kernel.devices.registry import register_runtime  # noqa: E402
from torchdevice.kernel.devices.supplied import SuppliedDevice  # noqa: E402
from torchdevice.simulation import backend, device_generators, device_guard, storage_resizing  # noqa: E402
from torchdevice.simulation.kernels import handwritten_kernels, pipeline  # noqa: E402


class _Supplied(SuppliedDevice):
    """Generators, for which torch asks a backend in C++ only."""

    generator_type = device_generators.Generator
    draws_on_cpu = True

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        return (
            device_generators.Generator(index)
            if cls is torch._C.Generator
            else device_generators.own(cls, index)
        )

    def numbers_of(self, generator: torch.Generator) -> torch.Generator:
        return device_generators.numbers_of(generator)


class _Runtime(ModuleRuntime):
    """What differs from the convention: generators, and no queue."""

    is_asynchronous = False

    def __init__(self, device_type: str):
        super().__init__(device_type)
        self.supplied = _Supplied(self)


def _in_its_memory(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that raises the device's error where the host's memory runs out."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            wanted = bytes_wanted(error)
            if wanted is None:
                raise
            raise torch.npu_like.out_of_memory(wanted, torch.npu_like.memory_allocated()) from None

    # Tracebacks leave out frames of the package, as there are none of a backend in C++.
    run.__code__ = run.__code__.replace(co_filename=pipeline.__file__)
    return run


def autoload() -> None:
    """Register the device with torch, unless it is registered already."""
    if hasattr(torch, policy.DEVICE_TYPE):
        return
    from npu_like import device_module

    policy.check_scope = lambda: None
    policy.memory_limits = device_module.memory_limits
    policy.error_of_mps = lambda wanted, allocated, *_: device_module.out_of_memory(
        wanted, allocated
    )
    setup: Any = torch.utils.backend_registration._setup_privateuseone_for_python_backend
    setup(policy.DEVICE_TYPE, device_module, device_guard.Hooks(), device_guard.Guard())
    backend._guard_storage()
    storage_resizing.register()
    backend.share_with_processes()
    _register_kernels()
    register_runtime(_Runtime(policy.DEVICE_TYPE))


def _register_kernels() -> None:
    special, make = handwritten_kernels.SPECIAL, pipeline.kernel_of
    special.update(
        {
            name: _in_its_memory(kernel)
            for name, kernel in special.items()
            if name.startswith("empty")
        }
    )
    backend.kernel_of = lambda op: _in_its_memory(make(op))
    backend.run_any = pipeline.fallback(backend.kernel_of)
    backend._register_kernels()
    backend.serve_autocast()
    # So that the simulated device sees that torch's place for a backend is taken.
    backend._registered.clear()
