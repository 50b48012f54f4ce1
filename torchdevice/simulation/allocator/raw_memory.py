"""The memory of simulated devices by addresses: raw allocations, and checkpoints of private pools.

A raw allocation has a block of the device's memory, and values at the address that the program gets. It stays until the
program deletes it, also after the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.devices.private_pools import PoolId
from torchdevice.simulation import policy
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.caching_allocator import Device
from torchdevice.simulation.allocator.memory_blocks import Block
from torchdevice.simulation.allocator.pool_checkpoints import Checkpoint
from torchdevice.simulation.allocator.storages import Raw, raw


def allocate(index: int, size: int, stream: int) -> int:
    """Return the address of new memory of ``size`` bytes. ``compute="meta"`` has no values there."""
    device = storages.device(index)
    block = device.allocate(size, stream)
    context = thread_state.state.context
    if context is not None and context.options.compute == "meta":
        # The block's address: no process has memory there, so nobody can take it for values.
        raw[block.address] = Raw(device, block)
        return block.address
    # The mode must not see this tensor, which is no tensor of the program.
    with torch._C.DisableTorchFunction():
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        # The program gets the address of real memory, which it may read and write by ctypes.
        raw[memory.data_ptr()] = Raw(device, block, memory)
        return memory.data_ptr()


def delete(address: int) -> bool:
    """Free memory that no storage has. Return whether there was such memory at the address."""
    found = raw.pop(address, None)
    if found is not None:
        # Freed by the next allocation, as the block of a storage that has ended.
        found.on.freed.append(found.block)
    return found is not None


def storage_at(index: int, original: Callable[..., Any], address: int, size: int) -> Any:
    """Return a storage of ``size`` bytes with the memory at an address, which the storage does not free."""
    storage = original(address, torch.device(policy.DEVICE_TYPE, index), size)
    storages.take_memory_at(storage, index, address)
    return storage


def checkpoint(index: int, owner: PoolId) -> Checkpoint:
    """Return which blocks of a private pool are in use."""
    device = storages.device(index)
    return device.checkpoint(owner, storages.blocks(device))


def live(index: int, owner: PoolId) -> set[int]:
    """Return the addresses of the blocks of a private pool that are in use."""
    device = storages.device(index)
    blocks = device.in_use(owner)
    known = storages.blocks(device)
    return {known.get(each, each.address) for each in blocks}


def restore(index: int, checkpoint: Checkpoint, stale: Collection[int], adopting: Collection[int]) -> None:
    """Let the blocks of a private pool be in use that were so at a checkpoint, and no others."""
    device = storages.device(index)
    dropped = set(device.in_use(checkpoint.owner))
    # As CUDA's check: blocks that the checkpoint lacks must be those of tensors that are named stale.
    if len({block.address for block in dropped} - checkpoint.in_use()) > len(set(stale)):
        raise RuntimeError("Any stale tensors which are being manually freed must be passed to set checkpoint")
    for address in [address for address, each in raw.items() if each.block in dropped]:
        del raw[address]
    losing = [owner for owner in storages.owners_of(device) if owner.block in dropped]
    restored = device.restore(checkpoint)
    _hand_over(losing, restored, stale)
    _adopt(device, restored, adopting)
    # Blocks that no storage took over are in use all the same, as raw memory.
    raw.update({address: Raw(device, block) for block, address in restored.items()})


def _hand_over(losing: Iterable[Any], restored: dict[Block, int], stale: Collection[int]) -> None:
    """Give storages whose blocks were freed the restored blocks with the same addresses, but none to stale ones."""
    at = {block.address: block for block in restored}
    for owner in losing:
        storage = owner()
        # `_cdata` is the address of the storage in C++, by which torch names stale storages.
        is_stale = storage is not None and storage._cdata in stale
        owner.block = None if is_stale else at.get(owner.block.address)
        restored.pop(owner.block, None)  # what a storage has is no raw block


def _adopt(device: Device, restored: dict[Block, int], adopting: Collection[int]) -> None:
    at = {address: block for block, address in restored.items()}
    for owner in storages.owners_of(device, with_block=False):
        storage = owner()
        if storage is not None and storage._cdata in adopting and owner.address in at:
            owner.block = at[owner.address]
            del restored[owner.block]
