"""What a runtime says of a device's memory: figures, statistics, blocks, and who observes what takes and frees them.

A device with an allocator of its own calls an :class:`Observer` for each block. For other devices an
:class:`OperatorWatcher` calls the observer for the storages that operators of one thread return. The watcher does not
see the memory that a kernel needs while it runs, nor earlier allocations.
"""

from __future__ import annotations

import abc
import functools
import importlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.python import forks


def _machine() -> Any:
    """Return the machine's memory. psutil is imported here because that takes longer than any module here."""
    return importlib.import_module("psutil").virtual_memory()


# A child could not end an import that another thread had begun.
forks.at_fork(before=_machine)


class Block(NamedTuple):
    """A block of memory in use.

    Attributes:
        device: The index of the device.
        address: The address of the memory.
        size: The size of the block in bytes.
        requested: The bytes that were requested of it.
        place: The address that the device's allocator gives the block, where that is a model; otherwise None.
    """

    device: int
    address: int
    size: int
    requested: int
    place: int | None = None


class Part(NamedTuple):
    """A block of a segment.

    Attributes:
        address: The address of the block.
        size: The size in bytes.
        requested_size: The bytes that were requested of it.
        state: The state in the words of ``torch.cuda.memory_snapshot``.
        data_ptr: The address of its values; 0 for a block that is not in use.
    """

    address: int
    size: int
    requested_size: int
    state: str
    data_ptr: int


class Segment(NamedTuple):
    """A range of memory that an allocator has from the driver.

    Attributes:
        device: The index of the device.
        stream: The id of the stream that it belongs to.
        is_large: Whether it belongs to a pool of large blocks.
        is_expandable: Whether it can grow.
        segment_pool_id: The id of the private pool that it belongs to; (0, 0) for none.
        parts: Its blocks, without gaps.
    """

    device: int
    stream: int
    is_large: bool
    is_expandable: bool
    segment_pool_id: tuple[int, int]
    parts: tuple[Part, ...]


class Observer(Protocol):
    """Called at each allocation and at each deallocation, and at each change of a segment."""

    def allocated(self, block: Block) -> None: ...

    def freed(self, address: int) -> None: ...

    def segment_changed(self, action: str, segment: Block, stream: int) -> None:
        """A segment got memory from the driver or gave it back; ``action`` is the word of CUDA's memory history."""


class OperatorWatcher(TorchDispatchMode):
    """Calls an observer for each new storage on a kind of device that an operator of this thread returns."""

    def __init__(self, device_type: str, observer: Observer):
        super().__init__()
        self._device_type = device_type
        self._observer = observer
        self._known: dict[int, weakref.ref[Any]] = {}
        self._stopped = False
        dispatch_modes.enter(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = dispatch_modes.run(func, args, kwargs)
        if self._stopped:
            return result
        given: set[int] | None = None
        for storage, block in _memory(result, self._device_type):
            if not block.size or block.address in self._known:
                continue
            if given is None:
                given = {each.address for _, each in _memory((args, kwargs), self._device_type)}
            if block.address not in given:
                self._known[block.address] = weakref.ref(storage, functools.partial(self._ended, block.address))
                self._observer.allocated(block)
        return result

    def _ended(self, address: int, storage: Any) -> None:
        if self._known.pop(address, None) is not None:
            self._observer.freed(address)

    def stop(self) -> None:
        """Call the observer no more. May be called below modes that were entered later, and from another thread."""
        self._known.clear()
        self._stopped = True
        dispatch_modes.leave(self)


def held_by_python(device_type: str, index: int) -> list[Block]:
    """Return the blocks of the tensors of a device that exist as Python objects."""
    import gc

    found: dict[int, Block] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            for _, block in _memory(each, device_type):
                if block.size and block.device == index:
                    found[block.address] = block
    return list(found.values())


def _memory(tree: Any, device_type: str) -> Iterator[tuple[torch.UntypedStorage, Block]]:
    """Yield the storages of a pytree's tensors on a kind of device, and where they are."""
    with torch._C.DisableTorchFunction():
        for leaf in pytree.tree_leaves(tree):
            if type(leaf) in _PLAIN and leaf.layout is torch.strided and leaf.device.type == device_type:
                # Wrapped by a transform of torch.func; the memory is that of the innermost tensor.
                while torch._C._functorch.is_functorch_wrapped_tensor(leaf):
                    leaf = torch._C._functorch.get_unwrapped(leaf)
                storage = leaf.untyped_storage()
                try:
                    address, size = storage.data_ptr(), storage.nbytes()
                except RuntimeError:  # a compiler's tensor, which stands for the one that a graph will make
                    continue
                if not torch._is_functional_tensor(leaf):  # the same
                    yield storage, Block(leaf.device.index or 0, address, size, size)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


# ---- private pools, as `torch.cuda.MemPool` and graphs use them ------------------------------------------------------

PoolId = tuple[int, int]
"""The id of a private pool: (0, n) for one of the program's own, (n, 0) for one that a graph made."""

_pool_ids = itertools.count(1)


def new_id(*, for_graph: bool = False) -> PoolId:
    """Return an id that no pool of this process has."""
    number = next(_pool_ids)
    return (number, 0) if for_graph else (0, number)


PrivatePools = Any
"""The private pools of one device, which ``simulation/allocator/caching_allocator.py`` has: ``keep_private``,
``release_private``, ``uses_of``, ``empty_private``, ``route`` and ``unroute``.
"""


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


class DeviceMemory(abc.ABC):
    """The memory of a type of device. The base class describes a device whose allocator says nothing.

    Attributes:
        device_type: The device type, as torch itself reports it in ``torch.device.type``.
        exact_memory: Whether the memory figures are those of the device's own allocator.
        has_peaks: Whether the device's own figures include peaks; else see :meth:`note_memory`.
    """

    device_type: str
    exact_memory = True
    has_peaks = True

    def total_memory(self, index: int) -> int:
        """Return the size of the device's memory."""
        return int(_machine().total)

    def free_memory(self, index: int) -> int:
        """Return how much of the device's memory is free."""
        return int(_machine().available)

    @abc.abstractmethod
    def memory(self, index: int) -> Memory:
        """Return the memory figures of this process on the device."""

    def note_memory(self) -> None:
        """Look at the figures for the sake of the peaks, after a call that allocates much."""

    @abc.abstractmethod
    def reset_peak_memory(self, index: int) -> None:
        """Reset the peaks to the current figures."""

    def limit_memory(self, index: int, fraction: float | None) -> bool:
        """Limit allocations to a fraction of the device's memory, from 0 to 1; None lifts the limit.

        Returns:
            Whether the device enforces the limit.
        """
        return False

    def empty_cache(self) -> None:
        """Release cached memory that is not in use."""

    def out_of_memory(self, error: BaseException) -> str | None:
        """Return the text for an out-of-memory message if ``error`` says that memory ran out, else None."""
        return None
