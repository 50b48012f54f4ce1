"""Memory of a device without an allocator: that of the storages which operators return.

An :class:`OperatorWatcher` does not see the memory that a kernel needs while it runs, nor earlier
allocations.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer


class OperatorWatcher(TorchDispatchMode):
    """Tells an observer of each new storage on a type of device that operators here return."""

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
                self._known[block.address] = weakref.ref(
                    storage, functools.partial(self._ended, block.address)
                )
                self._observer.allocated(block)
        return result

    def _ended(self, address: int, storage: Any) -> None:
        if self._known.pop(address, None) is not None:
            self._observer.freed(address)

    def stop(self) -> None:
        """Stop telling. May be called below modes that came later, and from another thread."""
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
