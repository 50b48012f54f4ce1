"""The interface of a device that can stand in.

Differences between devices are described here and nowhere else: all other parts of the package ask
a :class:`Runtime`. Ordinals are those of the target: 0 .. ``device_count() - 1``. Sizes are bytes,
times are milliseconds.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from torchdevice.kernel.devices.device_memory import DeviceMemory
from torchdevice.kernel.devices.supplied import SuppliedDevice

HALF = frozenset({torch.float16, torch.bfloat16})
"""The dtypes of half precision."""

MEMORY_FRACTION = "memory fraction"
"""With an ordinal, the key in ``Context.settings`` of the fraction of a device's memory that the
process may have.
"""


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


class TorchSupport(NamedTuple):
    """Torch's parts for a type of device.

    Attributes:
        compiles_flex_backward: Whether Inductor has code for the backward of ``flex_attention`` on
            the device.
        makes_kernels: Whether Inductor's code for the device is written in Triton.
        is_torch_accelerator: Whether torch itself reports this device in ``torch.accelerator``.
        float16_autocast_is_finite: Whether float16 autocast computes exp, softmax and sums in
            float32, as CUDA's does.
        autocast_key: The dispatch key of torch's kernels for autocast of the device, where these
            follow other lists of operators than CUDA's; None where they follow CUDA's, or the
            device has its own.
        synchronizes_batch_norm: Whether torch allows ``SyncBatchNorm`` on the device, and has its
            kernels.
        has_addresses: Whether other code can use memory by the address that torch has for it.
        lacks_in_module: Names of ``torch.cuda`` that the device's module lacks, and torch itself
            asks of any module.
    """

    compiles_flex_backward: bool = True
    makes_kernels: bool = False
    is_torch_accelerator: bool = True
    float16_autocast_is_finite: bool = True
    autocast_key: str | None = None
    synchronizes_batch_norm: bool = True
    has_addresses: bool = True
    lacks_in_module: frozenset[str] = frozenset()


class KernelFallback:
    """Which kernels of torch are made good for a type of device.

    Attributes:
        corrected_key: The dispatch key under which operators without a kernel get one that runs on
            the CPU, and kernels that give wrong results are guarded; None where there are none, or
            torch or the device does that.
        lacks_kernel: Says of an operator whether the device lacks it; None where torch's
            registrations show that.
        refusing_key: The dispatch key under which operators of ``backward`` are looked at for
            refusals, see :meth:`refuses`; None where kernels refuse no call that the CPU's do not.
    """

    corrected_key: str | None = None
    lacks_kernel: Callable[[str], bool] | None = None
    refusing_key: str | None = None

    def refuses(self, error: BaseException) -> bool:
        """Return whether an error shows that a device's kernel cannot do what the CPU's can."""
        return False


class Runtime(DeviceMemory, KernelFallback):
    """The abilities of a type of device. The base class finishes work before each call returns.

    Attributes:
        support: Torch's parts for the device type.
        compiles: Whether Inductor makes code for the device.
        unsupported_dtypes: Dtypes the device cannot hold.
        pins_memory: Whether torch can allocate page-locked memory for this device.
        blocking_copies_only: Whether ``non_blocking=True`` must be dropped to get whole data.
        shares_host_memory: Whether a tensor of the device is a CPU tensor, so that a move moves
            nothing.
        takes_device_ids: Whether ``DistributedDataParallel(device_ids=[i])`` is accepted.
        is_asynchronous: Whether calls return before the device has done the work.
        is_integrated: Whether the device computes in the host's memory.
        degraded_notice: The warning that is logged, once in a run, when the program first asks for
            its accelerator, because the device is slower than that accelerator. Empty for no
            warning.
    """

    support = TorchSupport()
    compiles = True
    unsupported_dtypes: frozenset[torch.dtype] = frozenset()
    pins_memory = False
    blocking_copies_only = False
    shares_host_memory = False
    takes_device_ids = False
    is_asynchronous = False
    is_integrated = True
    degraded_notice = ""

    @functools.cached_property
    def supplied(self) -> SuppliedDevice:
        """The differences of a device that this package supplies itself."""
        return SuppliedDevice(self)

    @property
    def target(self) -> str:
        """The value of ``target`` that chooses this device in another process."""
        return self.device_type

    @property
    def family(self) -> str:
        """The device type whose names in torch, such as ``torch.mps``, are those of this device."""
        return self.device_type

    @property
    def slow_product_dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes whose matrix products take the device longer than those of float32."""
        return frozenset()

    @property
    def rewriters(self) -> Mapping[Any, Any]:
        """The rewriters by torch function of this device, besides those for all devices."""
        return {}

    def obstacle(self, gm: torch.fx.GraphModule, context: Any) -> str:
        """Return why a graph of Dynamo's runs operator by operator; "" where it is compiled.

        Args:
            gm: The graph.
            context: The context of the scope.
        """
        return "" if self.compiles else f"Inductor makes no code for {self.target!r}"

    @abc.abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine and torch build have the device."""

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def device(self, index: int) -> torch.device:
        """Return the device of an ordinal, as ``tensor.device`` of a tensor on it."""
        return device_of(self.device_type, index)

    def name(self, index: int) -> str:
        """Return the name of the device for ``torch.cuda.get_device_name``."""
        return f"{self.device_type}:{index}"

    def synchronize(self, index: int) -> None:
        """Wait until the device has finished its work."""

    def mark(self, index: int, *, timing: bool) -> Mark:
        """Record a point in the device's work."""
        return HostMark()

    @abc.abstractmethod
    def default_generator(self, index: int) -> torch.Generator:
        """Return the generator that the device's random functions draw from."""

    def multiprocessor_count(self) -> int:
        """Return the number of units that compute in parallel."""
        return torch.get_num_threads()

    def supports_bfloat16(self) -> bool:
        """Return whether the device computes in bfloat16."""
        return True


@functools.cache
def device_of(device_type: str, index: int | None) -> torch.device:
    """Return a cached device. A mode would rewrite ``torch.device(...)`` in a scope."""
    with torch._C.DisableTorchFunction():
        return torch.device(device_type) if index is None else torch.device(device_type, index)
