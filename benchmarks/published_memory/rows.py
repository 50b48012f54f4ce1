"""What a published measurement is, and how the same program is planned."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchdevice
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.plan.peaks import Peaks
from torchdevice.plan.workspaces import size
from torchdevice.torch_modules.distributed.process_groups import FakeRanks

MEMORY = 1 << 40
"""The memory of the GPU on which is planned where a row names none."""


class Row(NamedTuple):
    """One published measurement.

    Attributes:
        case: What was run.
        gpu: The GPU on which it was measured.
        measured: The bytes of ``torch.cuda.max_memory_allocated()``; None where memory ran out.
        digits: The bytes by which the published figure is rounded.
        work: Makes the program, and returns the part of it whose peak was measured. It gets the
            checkout.
        capability: The compute capability of the GPU.
        memory: The bytes of the GPU, where running out of them was measured.
        ranks: Of how many ranks this one is the first.
        why: What explains a difference of more than a percent, or what the plan assumes.
        reserved: Whether ``torch.cuda.max_memory_reserved()`` was measured instead.
    """

    case: str
    gpu: str
    measured: int | None
    digits: int
    work: Callable[[Path], Callable[[], object]]
    capability: tuple[int, int]
    memory: int = MEMORY
    ranks: int | None = None
    why: str = ""
    reserved: bool = False


class _Measured(Peaks):
    """Follows one of these figures, including the workspaces of the moment."""

    most = 0

    def __init__(self, workspace: int, *, reserved: bool):
        super().__init__()
        self._workspace = workspace
        self._reserved = reserved

    def allocated(self, block: Block) -> None:
        super().allocated(block)
        self._note()

    def _product(self, args: Any) -> None:
        super()._product(args)
        self._note()

    def segment_changed(self, action: str, segment: Block, stream: int) -> None:
        super().segment_changed(action, segment, stream)
        self._note()

    def _note(self) -> None:
        peak = self.devices[0]
        now = peak._segments if self._reserved else peak._now
        self.most = max(self.most, now + len(peak.handles) * self._workspace)


def planned(row: Row, checkout: Path) -> int | None:
    """Return a row's peak of allocated bytes with cuBLAS's workspaces; None if memory runs out."""
    if row.ranks is not None:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(row.ranks)})
        os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    options: Any = {
        "capability": row.capability,
        "memory": row.memory,
        "compute": "meta",
        "values": "assume",
    }
    options["packages"] = "absent"  # as where the figures were measured
    with torchdevice.simulate("cuda", **options):
        found = _Measured(size(row.capability), reserved=row.reserved)
        found.follow(None if row.ranks is None else FakeRanks(0, row.ranks))
        try:
            run = row.work(checkout)
            found.most = 0
            kept = run()
        except torch.OutOfMemoryError:
            return None
        finally:
            found.stop()
        del kept
        return found.most
