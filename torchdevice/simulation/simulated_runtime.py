"""The :class:`Runtime` of simulated devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices import registry
from torchdevice.kernel.devices.cpu import bytes_wanted
from torchdevice.kernel.devices.device_memory import Block, Segment
from torchdevice.kernel.devices.mps_runtime import MpsRuntime, says_refused
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.devices.runtime import (
    MEMORY_FRACTION,
    HostMark,
    Mark,
    Runtime,
    TorchSupport,
)
from torchdevice.kernel.devices.stream_order import Stream
from torchdevice.kernel.devices.supplied import SuppliedDevice
from torchdevice.kernel.lowlevel import page_locked
from torchdevice.kernel.options import PerDevice, of_device
from torchdevice.native import building
from torchdevice.simulation import (
    backend,
    device_generators,
    device_guard,
    inductor,
    machine,
    model_lookup,
    policy,
    torch_functions,
)
from torchdevice.simulation import serving as native
from torchdevice.simulation.allocator import allocator_settings, storages
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases, host_alias
from torchdevice.simulation.observe import (
    assumed_values,
    async_copies,
    happens_before,
    meta_kernels,
    races,
)
from torchdevice.simulation.observe.unwritten_memory import Pattern
from torchdevice.simulation.overwritten_outputs import Overwritten
from torchdevice.simulation.profiles import FLOAT8, Profile
from torchdevice.simulation.refusals import attention, watermarks
from torchdevice.torch_modules.apis import sanitizer

_PINS_ON_MPS = torch.__version__ < "2.14"
"""Whether page-locked memory reports ``mps:0`` on a Mac (pytorch/pytorch#181374, mended by
#181720).
"""


def _of_memory(name: str) -> Any:
    """Return the method that is that of a device's memory."""
    return lambda self, index: getattr(storages.device(index), name)()


class SimulatedRuntime(SuppliedDevice, Runtime):
    """A number of simulated devices of one profile, which answer as a supplied device themselves.

    Attributes:
        profile: The kind of device that is simulated.
        memory_limit: The memory of each device in bytes, or None for no limit; the sizes where
            devices differ.
        taken: The bytes of it that CUDA's context takes.
    """

    device_type = policy.DEVICE_TYPE
    takes_device_ids = True
    torch_knows_current = False
    support = TorchSupport(is_torch_accelerator=False, compiles_flex_backward=False)
    generator_type = device_generators.Generator
    has_handles = True
    has_values = staticmethod(storages.has_values)
    host_alias = staticmethod(host_alias)
    draws_on_cpu = True
    compile_graph = staticmethod(inductor.compile_graph)
    copy_outside = staticmethod(storages.copy_of)
    default_generator = staticmethod(device_generators.default_generator)
    kernels = staticmethod(building.said)
    numbers_of = staticmethod(device_generators.numbers_of)
    private_pools = staticmethod(storages.device)
    same_memory = staticmethod(storages.twin)
    serve_reducer = staticmethod(page_locked.serve)
    watch_host_waits = staticmethod(happens_before.watch_host_waits)

    def __init__(
        self, profile: Profile, count: int, memory_limit: int | PerDevice | None, taken: int = 0
    ):
        super().__init__(self)
        self.supplied = self
        self.profile = profile
        self.memory_limit, self.taken = memory_limit, taken
        # For which no other dtype stands in.
        self.unsupported_dtypes = profile.unsupported_dtypes - FLOAT8
        self.folds_ordinals = profile.single
        self.is_mac = profile.accelerator == "mps"
        self.pins_on_device = self.is_mac and _PINS_ON_MPS
        self.is_gpu = profile.stands_for_cuda
        self.shared_by_processes = not profile.stands_for_cuda
        self.refusing_key = "PrivateUse1" if profile.accelerator == "mps" else None
        self._count = count

    @functools.cached_property  # each entry of a scope reads it
    def target(self) -> str:
        several = model_lookup.listed(self.profile.name) is not None
        return f"{self.device_type}:{self.profile.name}" + ("" if several else f":{self._count}")

    def machine(self, context: Context) -> Context | None:
        return context if self.location_tag == context.shown_as == MpsRuntime.device_type else None

    def obstacle(self, gm: torch.fx.GraphModule, context: Any) -> str:
        if context.options.compute == "meta":
            return "Inductor's code needs values, and compute='meta' computes none"
        if self.profile.lacks_anything:
            return f"Inductor's code has what {self.profile.name!r} lacks"
        return inductor.obstacle(gm)

    def runs_on_host(self) -> bool:
        return inductor.thread.calls > 0

    def call_by_host(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return CpuAliases(function).call(args, kwargs)

    @property
    def note_of_full_host(self) -> str:
        if not self.is_gpu or self.memory_limit is not None:
            return ""
        return (
            "This machine's memory ran out. Give the simulated devices their own limit by "
            "memory='8GiB'."
        )

    @property
    def kind(self) -> str:
        return self.profile.name

    @property
    def location_tag(self) -> str:
        return self.profile.accelerator

    @functools.cached_property  # each entry of a scope reads it
    def rewriters(self) -> Mapping[Any, Any]:
        if self.profile.stands_for_cuda:
            return torch_functions.TABLE_OF_CUDA
        return torch_functions.TABLE

    def can_use_attention(self, kernel: str, params: Any, debug: bool) -> bool:
        return self.profile.stands_for_cuda and attention.can_use(kernel, params, debug)

    def enter_thread(self, entry: Any) -> None:
        """Register the device unless it is registered, and give the context its machine."""
        # Registration first: the other steps need the device type.
        backend.register()
        device_guard.renew()
        context = entry.context
        # The context of a scope entered again has a policy, and keeps it while active.
        if context.policy is None:
            machine.enter(context)
            context.policy = policy.Policy(context, self)
            _begin(context)
            native.begin(context)
        context.policy.settle()
        native.follow(thread_state.state.context)
        sanitizer.begin(context)

    def leave_thread(self, entry: Any) -> None:
        # The last entry of the context in all threads.
        if not entry.context.entries.active:
            _end(entry.context)
            sanitizer.end(entry.context)

    def begin_autocast(self) -> None:
        backend.serve_autocast()

    def after_error_in_backward(self) -> None:
        device_guard.renew()

    def is_available(self) -> bool:
        return True

    def initialize(self) -> None:
        # Read at the first use of the accelerator, as CUDA does, and not at entry.
        text, context = allocator_settings.text(), thread_state.state.context
        if text and self.profile.stands_for_cuda:
            self.set_allocator(text)
            fraction = allocator_settings.parsed(text).memory_fraction
            if fraction < 1 and context is not None:
                context.settings.update(
                    {(MEMORY_FRACTION, index): fraction for index in range(self._count)}
                )
        if "MPS" in self.profile.backends:
            ratio = watermarks.high_ratio()
            if ratio and context is not None:  # 0 stands for no limit
                context.settings[MEMORY_FRACTION, 0] = ratio

    def synchronize(self, index: int) -> None:
        policy.check_alive()

    def mark(self, index: int, *, timing: bool) -> Mark:
        context = thread_state.state.context
        if context is None or policy.asking() is not None:  # as after an error of the device
            policy.check_alive()
        return HostMark() if timing else _UNTIMED

    def device_count(self) -> int:
        return self._count

    def name(self, index: int) -> str:
        return f"simulated {self.profile.name} device {index}"

    def total_memory(self, index: int) -> int:
        # Without a limit the device has the memory of this machine.
        return self.limit_of(index) or super().total_memory(index)

    def limit_of(self, index: int) -> int | None:
        """Return the limit of a device's memory, where there is one."""
        context = thread_state.state.context
        if context is None:
            number = index
        else:
            number = (context.names.answered_by or context).devices.machine_number(index)
        limit: int | None = of_device(self.memory_limit, number)
        return limit

    def free_memory(self, index: int) -> int:
        limit = self.limit_of(index)
        if limit is None:
            return super().free_memory(index)
        device = storages.device(index)
        # Never negative: the limit may have been lowered below what is reserved.
        return limit - min(limit, device.figures().reserved + self.taken)

    memory, statistics = _of_memory("figures"), _of_memory("statistics")
    highest_memory = _of_memory("highest")
    reset_peak_memory = _of_memory("reset_peak")
    reset_accumulated_memory = _of_memory("reset_accumulated")

    def blocks(self, index: int) -> list[Block]:
        return [
            storages.shown(index, *each) for each in storages.blocks(storages.device(index)).items()
        ]

    def segments(self, index: int) -> list[Segment]:
        device = storages.device(index)
        return device.segments(storages.blocks(device))

    def watch_allocations(self, observer: Observer, context: Any) -> Callable[[], None]:
        return storages.observe(observer, context.devices.machine)

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        return True

    def empty_cache(self) -> None:
        for index in range(self._count):
            storages.device(index).empty_cache()

    def set_allocator(self, text: str) -> bool:
        settings = allocator_settings.parsed(text)
        for index in range(self._count):
            storages.device(index).configure(settings)
        return True

    def allocator_settings(self) -> Mapping[str, Any]:
        return storages.device(0).settings.shown()

    def generator(self, index: int, cls: type = torch.Generator) -> torch.Generator:
        if cls is torch._C.Generator:
            return device_generators.Generator(index)
        return device_generators.own(cls, index)

    def random_state(self, generator: torch.Generator) -> torch.Tensor | None:
        if device_generators.draws_for_gpu(generator):
            return None
        return device_generators.upcoming(generator).get_state()

    def new_storage(self, original: Any, *args: Any, device: torch.device, **kwargs: Any) -> Any:
        return backend.new_storage(original, *args, device=device, **kwargs)

    def refuses(self, error: BaseException) -> bool:
        return self.refusing_key is not None and says_refused(error)

    def out_of_memory(self, error: BaseException) -> str | None:
        # The device's memory is the host's, so running out of the host's is an error of the device.
        context, wanted = thread_state.state.context, bytes_wanted(error)
        if wanted is None or context is None:
            return None
        index = context.thread.device_index
        total = self.total_memory(index)
        if self.profile.stands_for_cuda:
            return storages.device(index).refusal(wanted, total)
        as_mps = policy.error_of_mps(wanted, self.memory(index).allocated, total, total)
        if as_mps is None:
            return registry.runtime("cpu").out_of_memory(error)
        error.args = as_mps.args  # such a program catches no class of torch's, and reads the text
        return None


_UNTIMED = HostMark()


class StreamUses(Observer):
    """Tells the allocator of streams that use memory, and of the host's waits for devices.

    CUDA's allocator reuses memory that ``record_stream`` names when the other stream has done its
    work. Here that counts as done when the host next waits for a device in any way: a
    synchronisation, an event, a number or a copy that comes to the host.
    """

    def memory_used(self, tensor: Any, stream: Stream) -> None:
        with torch._C.DisableTorchFunction():
            # Sparse tensors have no storage of their own.
            if tensor.layout is torch.strided:
                owner = storages.owner_of(tensor.untyped_storage())
            else:
                owner = None
        if owner is not None and owner.block is not None:
            owner.on.use(owner.block, stream)

    def _wait(self, waited_for: Any) -> None:
        storages.host_waited()

    event_synchronized = stream_synchronized = device_synchronized = _wait  # type: ignore[assignment]
    # A query that says "done" is a wait that took no time.
    event_queried = stream_queried = _wait  # type: ignore[assignment]


def _begin(context: Context) -> None:
    """Follow the order of a context's work, as far as its options ask for that."""
    found: list[Observer] = [StreamUses()]
    if context.options.compute == "meta":
        assume = context.options.values is not None
        found.append(
            assumed_values.AssumedValues(context) if assume else meta_kernels.WithoutValues()
        )
    if context.options.asynchronous:
        found.append(async_copies.InFlight(context))
    if context.options.races:
        found.append(races.Races(context))
    if context.options.uninitialized:
        found.append(Pattern())
    for each in found:
        context.observers.add(each)


def _end(context: Context) -> None:
    """Follow the order no more. May be called again."""
    # First, so that kernels of other threads ask no more.
    if context.policy is not None:
        context.policy.asks = False
    native.end(context)
    for each in [*context.observers.order]:
        if isinstance(each, async_copies.InFlight):
            # The copies end before the observer is gone.
            each.land()
    context.policy = None
    for each in context.observers.end(*_OF_SIMULATION):
        if context.devices.machine is not None:  # also for one that an interrupt left half added
            storages.forget(each, context.devices.machine)
    context.observers.kernels.clear()
    machine.leave(context)


_OF_SIMULATION = (
    Overwritten,
    StreamUses,
    meta_kernels.WithoutValues,
    async_copies.InFlight,
    races.Races,
    Pattern,
    happens_before.HostWaits,
)


runtime = functools.cache(SimulatedRuntime)
"""Returns the runtime of a number of simulated devices, one object for equal arguments."""
