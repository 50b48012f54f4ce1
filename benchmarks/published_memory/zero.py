"""ZeroRedundancyOptimizer and Adam on two ranks: PyTorch's recipe, with four peaks of rank 0 each.

Source: https://github.com/pytorch/tutorials at commit 01c63024,
``recipes_source/zero_redundancy_optimizer.rst``: twenty linear layers, DDP, one step. The recipe
names no GPU, and prints whole megabytes, rounded down. It is of torch 1.8, whose Adam went from
parameter to parameter, so ``foreach=False`` is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.published_memory.rows import Row

TITLE = "ZeroRedundancyOptimizer on two ranks, by PyTorch's recipe"

_FILE = "https://github.com/pytorch/tutorials/blob/01c63024/recipes_source/zero_redundancy_optimizer.rst"

SOURCE = f"[PyTorch's recipe]({_FILE})"

IMPORTS = ("torch.distributed.optim",)
"""What takes long to import."""

VERSIONS = {"torch": "1.8"}

_MODEL, _DDP, _BACKWARD, _STEP = "the model", "DDP", "backward", "the optimizer's step"


def _trained(checkout: Path, *, sharded: bool, until: str) -> Callable[[], object]:
    from torch import distributed, nn
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def steps() -> object:
        distributed.init_process_group("gloo", rank=0, world_size=2)
        model = nn.Sequential(*[nn.Linear(2000, 2000).to(0) for _ in range(20)])
        if until == _MODEL:
            return model
        parallel = DistributedDataParallel(model, device_ids=[0])
        if until == _DDP:
            return parallel
        optimizer: torch.optim.Optimizer
        if sharded:
            parameters, adam = parallel.parameters(), torch.optim.Adam
            optimizer = ZeroRedundancyOptimizer(
                parameters, optimizer_class=adam, lr=0.01, foreach=False
            )
        else:
            optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, foreach=False)
        outputs = parallel(torch.randn(20, 2000).to(0))
        labels = torch.randn(20, 2000).to(0)
        nn.MSELoss()(outputs, labels).backward()
        if until == _STEP:
            optimizer.step()
        return parallel, optimizer, outputs, labels

    return steps


_WORKSPACES = (
    "ZeroRedundancyOptimizer: the plan has two workspaces of cuBLAS, 17 MB, which torch 1.8 did "
    "not take from its "
    "allocator."
)


def _row(optimizer: str, until: str, megabytes: int, why: str = "") -> Row:
    work = functools.partial(_trained, sharded=optimizer != "Adam", until=until)
    return Row(
        f"{optimizer}, after {until}",
        "not named",
        megabytes * 10**6,
        10**6,
        work,
        (7, 0),
        ranks=2,
        why=why,
    )


ROWS = [
    _row("ZeroRedundancyOptimizer", _MODEL, 335),
    _row("ZeroRedundancyOptimizer", _DDP, 656),
    _row("ZeroRedundancyOptimizer", _BACKWARD, 992),
    _row("ZeroRedundancyOptimizer", _STEP, 1361, _WORKSPACES),
    _row("Adam", _STEP, 1697),  # up to its step the program with Adam is the same
]
