"""What ranks are told of a rank that has ended, and what a user sees of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run_command

pytestmark = pytest.mark.one_engine

PROGRAM = """
import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so the launcher waits until the other ranks have said why they fail
x = torch.ones(2 + (dist.get_rank() if sys.argv[1] == "sizes" else 0), device="cuda")
if dist.get_rank() == 2:
    if sys.argv[1] == "exit":
        sys.exit(0)
    if sys.argv[1] == "error":
        raise ValueError("no data")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x)
"""

TOLD = {
    "exit": "all_reduce of the group 'default_pg' of 3 ranks cannot end: rank 2 ended at ranks.py:15 with exit code 0.",
    "error": "cannot end: rank 2 failed at ranks.py:17 with ValueError: no data.",
    "killed": "cannot end: a rank ended, which could not say how, as one that is killed.",
    "sizes": "Only the sizes differ. Give tensors with as many elements on every rank, padded to the largest.",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", TOLD)
def test_ranks_are_told_which_rank_ended_and_how(case: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(PROGRAM)
    done = run_command("run", "--target", "simulated:cuda", "--ranks", "3", "ranks.py", case, cwd=tmp_path)
    assert done.returncode == 1 and TOLD[case] in done.stderr, done.stderr
    assert "Connection closed" not in done.stderr and "torchdevice/torch_apis" not in done.stderr
    assert "contextlib.py" not in done.stderr, "nor frames of Python's that only this package enters"
    assert "torch/distributed/elastic" not in done.stderr, "the launcher's own log"
    shown = re.findall(r"(?m)^torchdevice: the traceback of rank", done.stderr.partition(" failed first: ")[2])
    assert len(shown) == (2 if case == "error" else 1), "one for the ranks that agree"
    others = re.findall(r"(?m)^\[rank\d\]: rank \d failed at ranks\.py:\d+, as another rank did\.$", done.stderr)
    assert len(others) == (2 if case == "sizes" else 1), done.stderr
