"""Devices: how many, which is current, what they are. For ``torch/cuda/__init__.py``."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

from torchdevice._journal import Fidelity
from torchdevice._spelling import Spelling
from torchdevice.bindings import answers, memory, supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope


@dataclasses.dataclass(frozen=True, repr=False)
class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` answers: the fields of torch's own ``_CudaDeviceProperties``.

    Attributes:
        name: The name of the device that stands in.
        major: Compute capability, major; as set for the scope.
        minor: Compute capability, minor.
        total_memory: Bytes of memory of the device that stands in.
        multi_processor_count: Units that compute in parallel; on a CPU, torch's threads.
        L2_cache_size: Bytes; 0 where it is not known.
        uuid: Stable for a name and ordinal; not a GPU's.
    """

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: uuid.UUID
    is_integrated: int = 1
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 166912
    shared_memory_per_multiprocessor: int = 167936
    clock_rate: int = 0
    memory_clock_rate: int = 0
    memory_bus_width: int = 0
    L2_cache_size: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size // 2**20}MB)"
        )


SETTABLE = frozenset(field.name for field in dataclasses.fields(DeviceProperties)) - {"major", "minor"}
"""The fields that a scope's ``properties`` may set."""


@supplies("_cuda_getDeviceCount")
def get_device_count(scope: Scope) -> int:
    """The number of devices the scope advertises; 0 to a program that is written for another accelerator."""
    return scope.device_count if scope.written_for == "cuda" else 0


@supplies("_cuda_init")
def init(scope: Scope) -> None:
    """Nothing to initialise."""


@supplies("_cuda_isInBadFork")
def is_in_bad_fork(scope: Scope) -> bool:
    """False: a stand-in survives a fork."""
    return False


@supplies("_cuda_getDevice")
def get_device(scope: Scope) -> int:
    """The current device of this thread."""
    return scope.thread.device_index


@supplies("_cuda_setDevice")
def set_device(scope: Scope, device: int) -> None:
    """Set the current device of this thread."""
    scope.thread.device_index = device if 0 <= device < scope.device_count else scope.ordinal(Spelling("cuda", device))


@supplies(["_cuda_exchangeDevice", "torch.cuda._exchange_device"])
def exchange_device(scope: Scope, device: int) -> int:
    """Set the current device and return the one before; -1 for a negative one."""
    if device < 0:
        return -1
    thread = scope.thread
    previous = thread.device_index
    if device != previous:
        set_device(scope, device)
    return previous


@supplies(["_cuda_maybeExchangeDevice", "torch.cuda._maybe_exchange_device"])
def maybe_exchange_device(scope: Scope, device: int) -> int:
    """The same: there is no device context to avoid creating."""
    return exchange_device(scope, device)


@supplies("_cuda_hasPrimaryContext")
def has_primary_context(scope: Scope, device: int) -> bool:
    """True for every advertised device."""
    return 0 <= device < scope.device_count


@supplies("_cuda_canDeviceAccessPeer")
def can_device_access_peer(scope: Scope, device: int, peer_device: int) -> bool:
    """True: tensors can be copied between any two."""
    return device != peer_device


@supplies("_cuda_getArchFlags")
def get_arch_flags(scope: Scope) -> str:
    """The architecture of the scope's compute capability."""
    return "sm_{}{}".format(*scope.capability)


@supplies("_cuda_synchronize")
def synchronize(scope: Scope) -> None:
    """Wait for the target's work."""
    scope.runtime.synchronize(scope.device(scope.thread.device_index).index or 0)


@supplies("_cuda_sleep")
def sleep(scope: Scope, cycles: int) -> None:
    """Wait as long as a 1 GHz clock takes for that many cycles."""
    import time

    time.sleep(cycles / 1e9)


@supplies("_cuda_lock_mutex", Fidelity.INERT, note="there is no allocator to lock")
def lock_mutex(scope: Scope) -> None:
    """Nothing to lock."""


@supplies("_cuda_unlock_mutex", Fidelity.INERT, note="there is no allocator to unlock")
def unlock_mutex(scope: Scope) -> None:
    """Nothing to unlock."""


@supplies("_cuda_ipc_collect", Fidelity.INERT, note="no memory is shared by CUDA IPC")
def ipc_collect(scope: Scope) -> None:
    """Nothing to collect."""


def properties(scope: Scope, device: int) -> DeviceProperties:
    """Return the properties of one of the program's devices."""
    index = scope.device(device).index or 0
    name = scope.properties.get("name") or scope.runtime.name(index)
    measured = DeviceProperties(
        name=name,
        major=scope.capability[0],
        minor=scope.capability[1],
        total_memory=memory.total(scope, device),
        multi_processor_count=scope.runtime.multiprocessor_count(),
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"{name}:{device}"),
    )
    return dataclasses.replace(measured, **scope.properties)


@answers("torch._C._CudaDeviceProperties")
def cuda_device_properties(scope: Scope) -> type:
    """The class of what ``get_device_properties`` returns."""
    return DeviceProperties


@answers("torch.cuda._CudaDeviceProperties")
def cuda_cuda_device_properties(scope: Scope) -> type:
    """The same, under the name that ``torch.cuda`` has for it."""
    return DeviceProperties


@answers("torch._C._has_cuda")
def has_cuda(scope: Scope) -> bool:
    """True, so that ``torch.backends.cuda.is_built()`` is."""
    return True
