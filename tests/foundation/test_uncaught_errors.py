"""What users see of errors that nobody catches."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import run_command, run_python

import torchdevice

PROGRAM = """
import threading
import torch
import torchdevice

torchdevice.enable("simulated:cuda", engine="{engine}")


def fail():
    torch.ones(2, device="cuda") + torch.ones(2)


thread = threading.Thread(target=fail)
thread.start()
thread.join()
fail()
"""

RANKS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
torch.ones(2, device="cuda") + torch.ones(2)
"""

OURS = os.path.join("torchdevice", "simulation")


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.one_engine
def test_errors_after_enable_end_at_the_line_of_the_program(engine: str) -> None:
    done = run_python("-c", PROGRAM.format(engine=engine))
    assert done.stderr.count("cuda:0 and cpu!") == 2 and done.returncode == 1
    assert f"{os.sep}torchdevice{os.sep}" not in done.stderr


@pytest.mark.one_engine
def test_all_frames_where_they_are_asked_for() -> None:
    done = run_python("-c", PROGRAM.format(engine="mode"), TORCHDEVICE_TRACEBACKS="full")
    assert done.stderr.count(OURS) > 1


NESTED = """
import torch
from torch import nn

model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Softmax(-1))))
x = torch.ones(1, 1, 3072, 1024, device="cuda")
{call}
"""


def last_lines(folder: Path, call: str) -> list[str]:
    (folder / "train.py").write_text(NESTED.format(call=call))
    words = ("run", "--target", "simulated:cuda", "--memory", "16MiB", "train.py")
    return run_command(*words, cwd=folder).stderr.splitlines()


@pytest.mark.one_engine
def test_the_programs_line_is_shown_below_many_of_libraries(tmp_path: Path) -> None:
    *_, error, line = last_lines(tmp_path, "model(x)")
    assert error.startswith("torch.OutOfMemoryError"), error
    assert line == "The program's line is train.py:7: model(x)"
    *_, line = last_lines(tmp_path, "model[0][0](x)")
    assert line.startswith("torch.OutOfMemoryError"), "the program's line stands right above"


@pytest.mark.one_engine
def test_frames_of_torch_that_a_kernel_calls_are_left_out(tmp_path: Path) -> None:
    *frames, error = last_lines(tmp_path, "nn.functional.scaled_dot_product_attention(x, x, x)")
    assert error.startswith("torch.OutOfMemoryError"), error
    assert "_ops.py" not in "".join(frames)


@pytest.mark.one_engine
def test_disable_puts_the_hooks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook, threading.excepthook
    torchdevice.enable("cpu")
    assert sys.excepthook is not before[0]
    torchdevice.enable("cpu", strict=True)
    torchdevice.disable()
    assert (sys.excepthook, threading.excepthook) == before

    def own(*args: Any) -> None: ...

    torchdevice.enable("cpu")
    monkeypatch.setattr(sys, "excepthook", own)
    torchdevice.disable()
    assert sys.excepthook is own and threading.excepthook is before[1]
    sys.excepthook = before[0]


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
def test_ranks_that_fail_alike_show_one_traceback(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(RANKS)
    done = run_command("run", "--target", "simulated:cuda", "--ranks", "3", str(program))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert re.match(r"torchdevice: rank \d failed first at train\.py:7:\nTraceback", done.stderr), (
        done.stderr
    )
    # Each rank names its own device, and has a line of its own.
    others = re.findall(
        r"(?m)^torchdevice: rank \d: (?:failed at train\.py:7: RuntimeError|ended by)", done.stderr
    )
    assert len(others) == 2 and "ChildFailedError" not in done.stderr
