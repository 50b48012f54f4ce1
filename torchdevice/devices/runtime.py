"""The interface of a device that can stand in.

Differences between devices are described here and nowhere else: the rest of the package asks a :class:`Runtime`.
Ordinals are those of the target: 0 .. ``device_count() - 1``. Sizes are bytes, times are milliseconds.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from torchdevice.devices.allocation_events import (
    Block,
    Observer,
    OperatorWatcher,
    Part,
    PrivatePools,
    Segment,
    held_by_python,
)

HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes of half precision."""

_LARGE = 1 << 20
"""``kSmallSize`` of CUDA's caching allocator, in bytes: larger blocks belong to the large pool."""

MEMORY_FRACTION = "memory fraction"
"""With an ordinal, the key in ``Context.settings`` of the fraction of a device's memory that the process may have."""


class Mark(Protocol):
    """A point in a device's work, as an event records it."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


class HostMark:
    """A point in time on the host, for devices that have finished the work when a call returns."""

    def __init__(self) -> None:
        self._time = time.perf_counter_ns()

    def synchronize(self) -> None:
        """Return at once: the work is done."""

    def query(self) -> bool:
        """Return True: the work is done."""
        return True

    def elapsed_time(self, end: HostMark) -> float:
        """Return the milliseconds from this mark to ``end``."""
        return (end._time - self._time) / 1e6


class Memory(NamedTuple):
    """Memory figures of one device, in bytes."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class Stat(NamedTuple):
    """One statistic of an allocator: its current value, its peak, and the sums of what was allocated and freed."""

    current: int
    peak: int
    allocated: int
    freed: int


class Runtime(abc.ABC):
    """What a type of device can do. The base class describes a device that has finished the work when a call returns.

    Attributes:
        device_type: The device type, as torch itself reports it in ``torch.device.type``.
        simulated_by: The context of the simulated machine that the device belongs to; None for one of this machine.
        shown_as: The device type that tensors say they are on; None for ``device_type``.
        unsupported_dtypes: Dtypes the device cannot hold.
        pins_memory: Whether torch can allocate page-locked memory for this device.
        blocking_copies_only: Whether ``non_blocking=True`` must be dropped to get whole data.
        shares_host_memory: Whether a tensor of the device is a CPU tensor, so that a move moves nothing.
        takes_device_ids: Whether ``DistributedDataParallel(device_ids=[i])`` is accepted.
        exact_memory: Whether the memory figures are those of the device's own allocator.
        is_torch_accelerator: Whether torch itself reports this device in ``torch.accelerator``.
        is_asynchronous: Whether calls return before the device has done the work.
        is_integrated: Whether the device computes in the host's memory.
        float16_autocast_is_finite: Whether float16 autocast computes exp, softmax and sums in float32, as CUDA's does.
        autocast_key: The dispatch key of torch's kernels for autocast of the device, where these follow other lists of
            operators than CUDA's; None where they follow CUDA's, or the device has its own.
        compiles: Whether Inductor makes code for the device.
        compiles_flex_backward: Whether Inductor has code for the backward of ``flex_attention`` on the device.
        synchronizes_batch_norm: Whether torch allows ``SyncBatchNorm`` on the device, and has its kernels.
        compile_graph: What compiles a graph of ATen operators by Inductor, of which it is given the function, the
            graph, the example inputs and options; None where Inductor has code for the device.
        makes_triton_code: Whether Inductor's code for the device is written in Triton.
        torch_knows_current: Whether torch completes a device without an ordinal by the thread's current device.
        folds_ordinals: Whether an ordinal beyond the last device means the first device, where the option ``devices``
            is not given. Otherwise such an ordinal raises CUDA's error.
        shared_by_processes: Whether several ranks of one process group may be on one device, and a process may use the
            device that was forked from one that had used it.
        has_handles: Whether streams and events have numbers as handles, which are no addresses.
        draws_on_cpu: Whether the device's generators are CPU generators, so that the CPU draws the same numbers from a
            state.
        generator_type: The class of the device's generators: ``torch.Generator`` or a subclass.
        has_peaks: Whether the device's own figures include peaks; else see :meth:`note_memory`.
        lacks_in_module: Names of ``torch.cuda`` that the device's module lacks, and torch itself asks of any module.
        corrected_key: The dispatch key under which operators without a kernel get one that runs on the CPU, and kernels
            that give wrong results are guarded; None where there are none, or torch or the device does that.
        lacks_kernel: Says of an operator whether the device lacks it; None where torch's registrations say that.
        run_for_others: Runs an operator for scopes on other devices with that key; None where there are none.
        refusing_key: The dispatch key under which operators of ``backward`` are looked at for refusals, see
            :meth:`refuses`; None where kernels refuse no call that the CPU's do not.
        degraded_notice: The warning that is logged, once in a run, when the program first asks for its accelerator,
            because the device is slower than that accelerator. Empty for no warning.
    """

    device_type: str
    simulated_by: Any = None
    shown_as: str | None = None
    unsupported_dtypes: frozenset[torch.dtype] = frozenset()
    pins_memory = False
    blocking_copies_only = False
    shares_host_memory = False
    takes_device_ids = False
    exact_memory = True
    is_torch_accelerator = True
    is_asynchronous = False
    is_integrated = True
    float16_autocast_is_finite = True
    autocast_key: str | None = None
    compiles = True
    compiles_flex_backward = True
    synchronizes_batch_norm = True
    compile_graph: Callable[..., Any] | None = None
    makes_triton_code = False
    torch_knows_current = True
    folds_ordinals = True
    shared_by_processes = True
    has_handles = False
    draws_on_cpu = False
    generator_type: type[torch.Generator] = torch.Generator
    has_peaks = True
    lacks_in_module: frozenset[str] = frozenset()
    corrected_key: str | None = None
    lacks_kernel: Callable[[str], bool] | None = None
    run_for_others: Callable[..., Any] | None = None
    refusing_key: str | None = None
    degraded_notice = ""

    @property
    def target(self) -> str:
        """The option ``target`` by which another process chooses this device."""
        return self.device_type

    @property
    def family(self) -> str:
        """The device type whose names in torch, such as ``torch.mps``, are those of this device."""
        return self.device_type

    @property
    def location_tag(self) -> str:
        """The device type that ``torch.save`` writes for storages of this device."""
        return self.device_type

    @property
    def slow_product_dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes whose matrix products take the device longer than those of float32."""
        return frozenset()

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        """Torch function -> the rewriter that it needs on this device, in addition to those for all devices."""
        return {}

    def obstacle(self, gm: torch.fx.GraphModule, *, computes: bool) -> str:
        """Return why a graph of Dynamo's runs operator by operator; "" where it is compiled.

        Args:
            gm: The graph.
            computes: Whether tensors have values; else the scope computes shapes only.
        """
        return "" if self.compiles else f"Inductor makes no code for {self.target!r}"

    def runs_on_host(self) -> bool:
        """Return whether this thread runs compiled code with the host's tensors in the place of the device's."""
        return False

    def call_by_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that Inductor has compiled for CPU tensors, with tensors of the device."""
        return function(*args, **kwargs)

    def host_alias(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CPU tensor with the memory of one of the device or of the CPU; None where there is none."""
        return tensor if tensor.device.type == "cpu" else None

    def enter_thread(self, entry: Any) -> None:
        """Prepare this thread for an entry of a scope on the device.

        May be called again for an entry, after an interrupt. The second call must change nothing.
        """

    def leave_thread(self, entry: Any) -> None:
        """Undo :meth:`enter_thread` for an entry, also if that was interrupted, or undone before."""

    def after_backward(self) -> None:
        """Prepare this thread for the next call of the autograd engine."""

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine and torch build have the device."""

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def kernels(self, option: str) -> str:
        """Return which kernels compute with ``native=option``, in a few words; empty where there is no choice."""
        return ""

    def device(self, index: int) -> torch.device:
        """Return the device of an ordinal, as ``tensor.device`` of a tensor on it."""
        return device_of(self.device_type, index)

    def name(self, index: int) -> str:
        """Return the name of the device for ``torch.cuda.get_device_name``."""
        return f"{self.device_type}:{index}"

    def total_memory(self, index: int) -> int:
        """Return the size of the device's memory."""
        import psutil  # here, since its import takes longer than that of any module here

        return psutil.virtual_memory().total

    def free_memory(self, index: int) -> int:
        """Return how much of the device's memory is free."""
        import psutil

        return psutil.virtual_memory().available

    @abc.abstractmethod
    def memory(self, index: int) -> Memory:
        """Return the memory figures of this process on the device."""

    def note_memory(self) -> None:
        """Look at the figures for the sake of the peaks, after a call that allocates much."""

    @abc.abstractmethod
    def reset_peak_memory(self, index: int) -> None:
        """Reset the peaks to the current figures."""

    def statistics(self, index: int) -> Mapping[str, Any]:
        """Return further figures of the device's allocator, under the keys of ``torch.cuda.memory_stats``.

        A value is a number, a :class:`Stat`, or one for each of ``"all"``, ``"small_pool"`` and ``"large_pool"``.
        """
        return {}

    def reset_accumulated_memory(self, index: int) -> None:
        """Reset to 0 the sums in :meth:`statistics` of what was allocated and freed."""

    def blocks(self, index: int) -> list[Block]:
        """Return the blocks of the device's tensors that are alive."""
        return held_by_python(self.device_type, self.device(index).index or 0)

    def segments(self, index: int) -> list[Segment]:
        """Return the segments of the device's allocator. The base class makes one of each block."""
        blocks = sorted(self.blocks(index))
        parts = [Part(each.address, each.size, each.requested, "active_allocated", each.address) for each in blocks]
        pairs = zip(blocks, parts, strict=True)
        return [Segment(block.device, 0, block.size > _LARGE, False, (0, 0), (part,)) for block, part in pairs]

    def watch_allocations(self, observer: Observer, context: Any) -> Callable[[], None]:
        """Call an observer for each allocation of a context from now on.

        The base class watches the operators of this thread.

        Returns:
            A function that ends this. It may be called again.
        """
        return OperatorWatcher(self.device_type, observer).stop

    def watch_host_waits(self, context: Any) -> None:
        """Call the stream observers of a context for each operator at which the host waits, such as ``item()``.

        The base class does nothing. May be called again for a context.
        """

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        """Limit allocations to a fraction of the device's memory, from 0 to 1; None lifts the limit.

        Returns:
            Whether the device enforces the limit.
        """
        return False

    def empty_cache(self) -> None:
        """Release cached memory that is not in use."""

    def private_pools(self, index: int) -> PrivatePools | None:
        """Return the private pools of a device's allocator; None where it has none."""
        return None

    def same_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor with the memory of ``tensor``, which does not keep that memory from being freed.

        Where the device's allocator cannot tell the two, the other tensor keeps it.
        """
        return tensor.detach()

    def copy_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` that is no memory of the device, where the device has an allocator."""
        return tensor.clone()

    def set_allocator(self, text: str) -> bool:
        """Change the settings of the device's allocator. Return whether it has CUDA's settings.

        Raises:
            ValueError: A setting is wrong. The text is torch's.
        """
        return False

    def allocator_settings(self) -> Mapping[str, Any]:
        """Return the settings of the device's allocator, under the keys of ``torch.cuda.memory._snapshot``."""
        return {}

    def initialize(self) -> None:
        """Check what the accelerator checks when the program first uses it.

        Raises:
            ValueError: A setting in the environment is wrong.
        """

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished its work."""

    def mark(self, index: int, *, timing: bool) -> Mark:
        """Record a point in the device's work."""
        return HostMark()

    @abc.abstractmethod
    def default_generator(self, index: int) -> torch.Generator:
        """Return the generator that the device's random functions draw from."""

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        """Return a new generator for the device, of torch's class or of a subclass of it."""
        return torch._C.Generator.__new__(cls, self.device(index))  # type: ignore[call-arg]

    def numbers_of(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator that draws the numbers for a generator which may share its state with others."""
        return generator

    def random_state(self, generator: torch.Generator) -> torch.Tensor:
        """Return the state from which the CPU would draw what a generator draws next, where ``draws_on_cpu``."""
        return generator.get_state()

    def can_use_attention(self, kernel: str, params: Any, debug: bool) -> bool:
        """Return whether one of CUDA's kernels could compute attention: "flash", "mem_efficient" or "cudnn"."""
        return False

    def serve_reducer(self, model: Any) -> None:
        """Prepare the device for what a ``DistributedDataParallel`` asks of it in C++."""

    def new_storage(self, original: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        """Return a new ``torch.UntypedStorage`` on a device of this type; ``original`` is torch's own constructor."""
        return original(*args, device=device, **kwargs)

    def multiprocessor_count(self) -> int:
        """Return the number of units that compute in parallel."""
        return torch.get_num_threads()

    def supports_bfloat16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return True

    def refuses(self, error: BaseException) -> bool:
        """Return whether an error says that a kernel of the device cannot do what the CPU's can."""
        return False

    def out_of_memory(self, error: BaseException) -> str | None:
        """Return the text for an out-of-memory message if ``error`` says that memory ran out, else None."""
        return None


@functools.cache
def device_of(device_type: str, index: int | None) -> torch.device:
    """Return a cached device. In a scope, ``torch.device(...)`` is a torch call that a mode would rewrite."""
    with torch._C.DisableTorchFunction():
        return torch.device(device_type) if index is None else torch.device(device_type, index)
