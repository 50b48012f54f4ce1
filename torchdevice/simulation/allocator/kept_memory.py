"""Memory of blocks whose address a program has read with ``Tensor.data_ptr``.

CUDA's allocator gives a block's memory to the next tensor that gets the block, so two tensors have
one address if, and only if, they got the same memory. Here a block's values are in memory of the
host, whose allocator goes its own ways. So the memory of a block with a known address is kept when
the block is freed, and the next tensor in the block gets it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchdevice.kernel.stand_ins import extent
from torchdevice.kernel.torch_internals import storage_use_count

MOST_BYTES, MOST_BLOCKS = 64 << 20, 256
"""The most memory that a device keeps. The memory that was freed first is given up first."""

Kept = dict[int, torch.UntypedStorage]
"""Address of a free block -> the memory on the CPU that it had."""


def keep(kept: Kept, address: int, memory: torch.UntypedStorage) -> None:
    """Keep the memory of a freed block, and drop the oldest beyond the limit."""
    kept.pop(address, None)  # so that it becomes the last one
    kept[address] = memory
    size = sum(each.nbytes() for each in list(kept.values()))
    for other in list(kept):
        if size <= MOST_BYTES and len(kept) <= MOST_BLOCKS:
            break
        given_up = kept.pop(other, None)  # None where another thread was faster
        if given_up is not None:
            size -= given_up.nbytes()


def moved(
    result: torch.Tensor, kept: Kept, address: int, put: Callable[..., torch.Tensor]
) -> torch.Tensor | None:
    """Return a CPU tensor in the memory that was kept for a block; None where there is none.

    Args:
        result: The CPU tensor whose values are moved.
        kept: The memory that the device keeps.
        address: The address of the block.
        put: ``Tensor.set_`` with a storage.
    """
    memory = kept.pop(address, None)
    size = extent(result) * result.itemsize
    # A view that somebody else has would show the new values.
    if memory is None or memory.nbytes() < size or storage_use_count(memory._cdata) != 1:
        return None
    start = result.storage_offset() * result.itemsize
    # As bytes: elements may overlap, and a negative bit stays what it is.
    written = put(_nothing(torch.uint8), memory, 0, (size,), (1,))
    written.copy_(put(_nothing(torch.uint8), result.untyped_storage(), start, (size,), (1,)))
    return put(_nothing(result.dtype), memory, 0, result.shape, result.stride())


def _nothing(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")
