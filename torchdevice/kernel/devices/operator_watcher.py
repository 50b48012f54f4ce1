"""Memory of a device without an allocator: that of the storages which operators return.

:func:`watch` does not see the memory that a kernel needs while it runs, nor earlier allocations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer


def watch(device_type: str, observer: Observer) -> Callable[[], None]:
    """Tell an observer of each new storage that operators of this thread return.

    Args:
        device_type: The type of the devices whose storages count.
        observer: Its ``allocated`` and ``freed`` are called.

    Returns:
        A function that ends this. It may be called again, below modes that came later, and from
        another thread, on whose stack the mode stays without telling the observer.
    """
    storages = _NewStorages(device_type, observer)
    mode = dispatch_modes.Operators(storages)
    dispatch_modes.enter(mode)

    def stop() -> None:
        storages.stop()
        dispatch_modes.leave(mode)

    return stop


class _NewStorages(Observer):
    """Runs operators as kernels, and tells another observer of the storages that they make."""

    def __init__(self, device_type: str, observer: Observer):
        self._device_type = device_type
        self._observer = observer
        self._known: dict[int, weakref.ref[Any]] = {}
        self._stopped = False

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = kernel(*args, **kwargs)
        if self._stopped:
            return result
        given: set[int] | None = None
        for storage, block in _memory(result, self._device_type):
            if not block.size or block.address in self._known:
                continue
            if given is None:
                given = {each.address for _, each in _memory((args, kwargs), self._device_type)}
            if block.address not in given:
                self._known[block.address] = weakref.ref(
                    storage, functools.partial(self._ended, block.address)
                )
                self._observer.allocated(block)
        return result

    def _ended(self, address: int, storage: Any) -> None:
        if self._known.pop(address, None) is not None:
            self._observer.freed(address)

    def stop(self) -> None:
        """Tell of nothing more, neither of storages that end."""
        self._known.clear()
        self._stopped = True


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
        # Most results are one tensor, for which `tree_leaves` makes six calls.
        for leaf in (tree,) if type(tree) in _PLAIN else pytree.tree_leaves(tree):
            if (
                type(leaf) in _PLAIN
                and leaf.layout is torch.strided
                and leaf.device.type == device_type
            ):
                # Wrapped by a transform of torch.func; the memory is that of the innermost tensor.
                while torch._C._functorch.is_functorch_wrapped_tensor(leaf):
                    leaf = torch._C._functorch.get_unwrapped(leaf)
                storage = leaf.untyped_storage()
                try:
                    address, size = storage.data_ptr(), storage.nbytes()
                except RuntimeError:
                    # A compiler's tensor, which stands for the one that a graph will make.
                    continue
                if not torch._is_functional_tensor(leaf):  # the same
                    yield storage, Block(leaf.device.index or 0, address, size, size)


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
