"""NCCL's refusal of two ranks on one GPU, at the first collective of a group.

Source of the text: ``C10D_NCCL_CHECK`` (torch/csrc/distributed/c10d/NCCLUtils.hpp) and NCCL (src/init.cc).

Ranks tell each other on which device they are: the machine, as NCCL tells machines apart, and the device's ordinal
without ``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from torchdevice.core.context import visible_ordinals
from torchdevice.foundation.torch_texts import text

_BITS = 16


def check(rank: int, index: int, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse a group of which two ranks are on one device.

    Args:
        rank: The rank of this process.
        index: The ordinal of the device of this rank's tensors.
        gather: Returns the values of all ranks, of shape (ranks,), for the value of this rank, of shape (1,).

    Raises:
        torch.distributed.DistBackendError: Another rank is on the device of this one. The text is NCCL's.
    """
    mine = _identity(index)
    devices = gather(torch.tensor([mine], dtype=torch.int64, device="cpu")).tolist()
    for other, device in enumerate(devices):
        if other != rank and device == mine:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            # NCCL shows a bus id, whose last 12 bits are the device and function on the bus. Buses count from 1 here.
            bus = (mine % (1 << _BITS) + 1) << 12
            raise dist.DistBackendError(text("duplicate GPU", version=version, rank=rank, other=other, bus=bus))


def _identity(index: int) -> int:
    """Return a number for the device that all processes agree on. Nodes of a launcher on one machine count as
    different."""
    # As NCCL does: the variable comes first, then the name of the machine.
    host = os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    visible = visible_ordinals() or []
    return zlib.crc32(host.encode()) << _BITS | (visible[index] if index < len(visible) else index)
