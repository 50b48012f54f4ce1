"""Errors made text in a scope: by program, logger, loader's worker or another process."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import torch
from processes import run_program

import torchdevice

WAYS = {
    "printed": "try:\n    fail(0)\nexcept RuntimeError:\n    traceback.print_exc()",
    "logged": "try:\n    fail(0)\nexcept RuntimeError:\n    logging.exception('failed')",
    "of a cause": (
        "try:\n    fail(0)\nexcept RuntimeError as error:\n    raise ValueError from error"
    ),
    "of a worker": "list(torch.utils.data.DataLoader(Data(), num_workers=1))",
    "of a process": "torch.multiprocessing.spawn(fail)",
}

PROGRAM = """
    import logging
    import traceback
    import torch

    def fail(index):
        torch.zeros(-1, device="cuda")

    class Data(torch.utils.data.Dataset):
        def __len__(self): return 1
        def __getitem__(self, index): fail(index)

    if __name__ == "__main__":
"""

OURS = f"{os.sep}torchdevice{os.sep}"


@pytest.mark.sampled(1)
@pytest.mark.one_engine
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("way", WAYS)
def test_texts_end_at_the_line_of_the_program(tmp_path: Path, way: str, engine: str) -> None:
    lines = "".join(f"\n        {line}" for line in WAYS[way].splitlines())
    done = run_program(
        tmp_path, PROGRAM.rstrip() + lines, options=("--target", "cpu", "--engine", engine)
    )
    assert 'torch.zeros(-1, device="cuda")' in done.stderr and "must be non-negative" in done.stderr
    assert f"{OURS}engines" not in done.stderr


def test_frames_that_a_program_chose_stay(target: str) -> None:
    with torchdevice.portable(target):
        try:
            torch.zeros(-1, device="cuda")
        except RuntimeError as error:
            whole = error.__traceback__
            chosen = traceback.TracebackException(
                type(error), error, whole.tb_next if whole else None
            )
            found = traceback.TracebackException(type(error), error, whole)
    assert [frame.name for frame in found.stack] == ["test_frames_that_a_program_chose_stay"]
    assert len(chosen.stack) == 0 or chosen.stack[0].filename != __file__


def test_nothing_is_left_after_a_scope() -> None:
    before = traceback.TracebackException.__init__
    with torchdevice.portable("cpu"):
        assert traceback.TracebackException.__init__ is not before
    assert traceback.TracebackException.__init__ is before
