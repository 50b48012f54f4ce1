"""The differences of a device whose tensors, kernels and allocator this package supplies.

The defaults are those of every other device, for which torch and the device's own library do this.
Simulated devices answer otherwise. The names of torch that concern allocators, generators, graphs
and process groups ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from torchdevice.kernel.devices import operator_watcher
from torchdevice.kernel.devices.device_memory import Block, Memory, Part, PrivatePools, Segment
from torchdevice.kernel.devices.observer import Observer

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator, in bytes: larger blocks belong to the large pool."""


class _Device(Protocol):
    device_type: str

    @property
    def target(self) -> str: ...

    def device(self, index: int) -> torch.device: ...

    def memory(self, index: int) -> Memory: ...


class SuppliedDevice:
    """The answers of a type of device that torch or the device's own library supplies.

    Args:
        runtime: The device.

    Attributes:
        answered_by: The context of the simulated machine that the device belongs to; None for one
            of this machine.
        is_mac: Whether the device is that of a simulated Mac.
        pins_on_device: Whether page-locked memory of the host reports the device, for a program
            that is written for it.
        is_gpu: Whether the device is a simulated GPU of NVIDIA's.
        shown_as: The device type that tensors report; None for ``device_type``.
        torch_knows_current: Whether torch completes a device without an ordinal by the thread's
            current device.
        folds_ordinals: Whether an ordinal beyond the last device means the first device, where the
            option ``devices`` is not given. Otherwise such an ordinal raises CUDA's error.
        shared_by_processes: Whether several ranks of one process group may be on one device, and a
            process may use the device that was forked from one that had used it.
        has_handles: Whether streams and events have numbers as handles, which are no addresses.
        draws_on_cpu: Whether the device's generators are CPU generators, so that the CPU draws the
            same numbers from a state.
        generator_type: The class of the device's generators: ``torch.Generator`` or a subclass.
        compile_graph: Compiles a graph of ATen operators, given Inductor's function, the graph, the
            example inputs and options; None where Inductor has code for the device.
    """

    answered_by: Any = None
    is_mac = False
    pins_on_device = False
    is_gpu = False
    shown_as: str | None = None
    torch_knows_current = True
    folds_ordinals = True
    shared_by_processes = True
    has_handles = False
    draws_on_cpu = False
    generator_type: type[torch.Generator] = torch.Generator
    compile_graph: Callable[..., Any] | None = None

    def __init__(self, runtime: _Device):
        self._runtime = runtime

    @property
    def note_of_full_host(self) -> str:
        """The note on an error if this machine's memory ran out and a limit could help, or ""."""
        return ""

    @property
    def kind(self) -> str:
        """The device's name in messages."""
        return self._runtime.target

    @property
    def location_tag(self) -> str:
        """The device type that ``torch.save`` writes for storages of this device."""
        return self._runtime.device_type

    def initialize(self) -> None:
        """Run the checks that the accelerator runs at its first use.

        Raises:
            ValueError: A setting in the environment is wrong.
        """

    def machine(self, context: Any) -> Any:
        """Return the context of the simulated machine that a scope inside ``context`` runs on.

        None where that is this machine.
        """
        return self.answered_by

    def kernels(self, option: str) -> str:
        """Describe the kernels that ``native=option`` chooses; "" if there is no choice."""
        return ""

    def enter_thread(self, entry: Any) -> None:
        """Prepare this thread for an entry of a scope on the device.

        May be called again for an entry, after an interrupt. The second call must change nothing.
        """

    def leave_thread(self, entry: Any) -> None:
        """Undo :meth:`enter_thread`, also if it was interrupted. May be called again."""

    def begin_autocast(self) -> None:
        """Prepare for autocast of the device."""

    def after_error_in_backward(self) -> None:
        """Prepare this thread for the next call of the autograd engine."""

    def runs_on_host(self) -> bool:
        """Return whether this thread runs compiled code on the host's tensors instead."""
        return False

    def call_by_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that Inductor compiled for CPU tensors with the device's tensors."""
        return function(*args, **kwargs)

    def host_alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CPU tensor with the same memory as a tensor; None if there is none."""
        return tensor if tensor.device.type == "cpu" else None

    def can_use_attention(self, kernel: str, params: Any, debug: bool) -> bool:
        """Return whether a kernel, "flash", "mem_efficient" or "cudnn", can compute attention."""
        return False

    def serve_reducer(self, model: Any) -> None:
        """Prepare the device for the C++ of ``DistributedDataParallel``."""

    def new_storage(self, original: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """Return an ``UntypedStorage`` on a device of this type, made by ``original``."""
        return original(*args, device=device, **kwargs)

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        """Return a new generator for the device, of torch's class or of a subclass of it."""
        return torch._C.Generator.__new__(cls, self._runtime.device(index))  # type: ignore[call-arg]

    def numbers_of(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator that draws for another, which may share its state with others."""
        return generator

    def random_state(self, generator: torch.Generator) -> torch.Tensor | None:
        """Return the CPU's state for a generator's next draw, where ``draws_on_cpu``.

        None where no state of the CPU's generator gives these numbers.
        """
        return generator.get_state()

    def highest_memory(self, index: int) -> tuple[int, int]:
        """Return the highest allocated and reserved bytes of this process on the device.

        Only an allocator of this package keeps them when the program resets its peaks.
        """
        memory = self._runtime.memory(index)
        return memory.peak_allocated, memory.peak_reserved

    def statistics(self, index: int) -> Mapping[str, Any]:
        """Return further allocator figures, under the keys of ``torch.cuda.memory_stats``.

        A value is a number, a :class:`Stat`, or one for each of ``"all"``, ``"small_pool"`` and
        ``"large_pool"``.
        """
        return {}

    def reset_accumulated_memory(self, index: int) -> None:
        """Reset to 0 the sums of allocations and releases in :meth:`statistics`."""

    def blocks(self, index: int) -> list[Block]:
        """Return the blocks of the device's tensors that are alive."""
        return operator_watcher.held_by_python(self._runtime.device_type, index)

    def segments(self, index: int) -> list[Segment]:
        """Return the segments of the device's allocator. The base class makes one of each block."""
        blocks = sorted(self.blocks(index))
        parts = [
            Part(each.address, each.size, each.requested, "active_allocated", each.address)
            for each in blocks
        ]
        pairs = zip(blocks, parts, strict=True)
        return [
            Segment(block.device, 0, block.size > _LARGE, False, (0, 0), (part,))
            for block, part in pairs
        ]

    def watch_allocations(self, observer: Observer, context: Any) -> Callable[[], None]:
        """Call an observer for each allocation of a context from now on.

        The base class watches the operators of this thread.

        Returns:
            A function that ends this. It may be called again.
        """
        return operator_watcher.watch(self._runtime.device_type, observer)

    def watch_host_waits(self, context: Any) -> None:
        """Tell a context's observers of operators at which the host waits, such as ``item()``.

        The base class does nothing. May be called again for a context.
        """

    def private_pools(self, index: int) -> PrivatePools | None:
        """Return the private pools of a device's allocator; None where it has none."""
        return None

    def same_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor with the memory of ``tensor`` that does not keep it allocated.

        Where the device's allocator cannot tell the two, the other tensor keeps it.
        """
        return tensor.detach()

    def copy_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` outside the device's memory, if there is an allocator."""
        return tensor.clone()

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a strided tensor has values. A plan computes shapes alone."""
        return True

    def set_allocator(self, text: str) -> bool:
        """Change the settings of the device's allocator. Return whether it has CUDA's settings.

        Raises:
            ValueError: A setting is wrong. The text is torch's.
        """
        return False

    def allocator_settings(self) -> Mapping[str, Any]:
        """Return the allocator's settings, under the keys of ``torch.cuda.memory._snapshot``."""
        return {}
