"""What ranks are told of a rank that has ended, and what a user sees of it."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import run_command

from torchdevice.kernel.python import rank_notes
from torchdevice.kernel.python.environment import COLLECTED
from torchdevice.tools.cli import rank_summary
from torchdevice.torch_modules.distributed import gloo_waits, nccl_group

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
    if sys.argv[1] == "at once":
        os._exit(7)
    assert sys.argv[1] != "assertion"
dist.all_reduce(x)
"""

TOLD = {
    "exit": (
        "all_reduce of the group 'default_pg' of 3 ranks cannot end: rank 2 ended at ranks.py:15 "
        "with exit code 0."
    ),
    "error": "cannot end: rank 2 failed at ranks.py:17 with ValueError: no data.",
    "killed": "cannot end: rank 2 was killed by SIGKILL, as the system does where memory runs out.",
    "at once": "cannot end: rank 2 ended with exit code 7.",
    "assertion": "cannot end: rank 2 failed at ranks.py:22 with AssertionError. The other ranks",
    "sizes": (
        "Only the sizes differ. Give tensors with as many elements on every rank, padded to the "
        "largest."
    ),
}


def test_no_rank_leaves_a_group_to_which_others_still_connect() -> None:
    """A rank that ended meanwhile would give the others gloo's error about a connection."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=30)
    with futures.ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # a second group of the same store
            early = [pool.submit(gloo_waits.wait_for_all, store, 3, timeout) for _ in range(2)]
            assert not futures.wait(early, 0.2).done
            gloo_waits.wait_for_all(store, 3, timeout)
            assert [each.result(30) for each in early] == [None, None]


def test_the_line_of_another_rank_has_the_cause_that_nccl_gives_last() -> None:
    error = nccl_group._DUPLICATE_GPU.format(version="2.27.3", rank=1, other=0, bus=0x1000)
    note = rank_notes.Failure(
        1, 0.0, "ranks.py:8", f"torch.distributed.DistBackendError: {error}", "Traceback"
    )
    cause = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    assert rank_summary._of_other(note, None, "") == f"failed at ranks.py:8: {cause}"
    assert rank_summary._line(note._replace(error="Error: calls:\n  rank 0")) == "Error: calls"
    note = note._replace(error="ValueError: no data\nat all")
    assert rank_summary._of_other(note, None, "") == "failed at ranks.py:8: ValueError: no data"
    elsewhere = note._replace(rank=0, place="ranks.py:6")
    assert rank_summary._of_other(note, elsewhere, "") == "failed at ranks.py:8 with the same error"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", TOLD)
def test_ranks_are_told_which_rank_ended_and_how(case: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(PROGRAM)
    done = run_command(
        "run", "--target", "simulated:cuda", "--ranks", "3", "ranks.py", case, cwd=tmp_path
    )
    assert done.returncode == 1 and TOLD[case] in done.stderr, done.stderr
    assert "Connection closed" not in done.stderr and "torchdevice/torch_apis" not in done.stderr
    assert "contextlib.py" not in done.stderr, (
        "nor frames of Python's that only this package enters"
    )
    assert "torch/distributed/elastic" not in done.stderr, "the launcher's own log"
    first = re.match(r"torchdevice: rank (\d) failed first(.*)\n", done.stderr)
    assert first is not None and (case in ("exit", "sizes") or first[1] == "2"), done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == (
        0 if case in ("killed", "at once") else 1
    ), "that of the first"
    others = re.findall(r"(?m)^torchdevice: (ranks?) [\d, ]+: failed at ranks\.py:\d+", done.stderr)
    assert others == (["rank"] if case == "exit" else ["ranks"]), done.stderr
    assert done.stderr.count("do not fit together") == (case == "sizes"), "once for all ranks"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", ["error", "killed"])
def test_torchruns_own_text_is_followed_by_the_lines_of_the_program(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "ranks.py").write_text(PROGRAM)
    words = ("torchrun", "--nproc-per-node=3", "ranks.py", case)
    done = run_command("run", "--target", "simulated:cuda:3", *words, cwd=tmp_path)
    torchs, _, ours = done.stderr.partition("\ntorchdevice: rank 2 failed first")
    assert done.returncode == 1 and "Root Cause (first observed failure)" in torchs, done.stderr
    assert case != "error" or torchs.count("]: Traceback") == 1, "that of the cause"
    first, others = ours.splitlines()
    assert (
        first
        == {
            "error": " at ranks.py:17: ValueError: no data",
            "killed": ": killed by SIGKILL, as the system does where memory runs out.",
        }[case]
    )
    assert others.startswith("torchdevice: ranks 0, 1: failed at ranks.py:23: "), done.stderr
    assert TOLD[case] in others


HANGING = """
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
rank = dist.get_rank()
torch.cuda.set_device(rank)
x = torch.ones(2 + (sys.argv[1] == "uneven" and rank), device="cuda")
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"


def load():
    while True:
        time.sleep(0.1)


if sys.argv[1] == "uneven":
    dist.all_gather([torch.empty(2, device="cuda") for _ in range(2)], x)
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
    if rank == 1:
        raise ValueError("no data")
    model(x).sum().backward()
if sys.argv[1] == "restart" and not again:
    if rank == 1:
        raise ValueError("no data")
    dist.all_reduce(x)
print("ready", flush=True)
if rank == 1:
    load()
dist.all_reduce(x)
"""


def ended(folder: Path, case: str, seconds: float) -> str:
    (folder / "ranks.py").write_text(HANGING)
    words = ("run", "--target", "simulated:cuda", "--ranks", "2", "ranks.py", case, str(seconds))
    done = run_command(*words, cwd=folder)
    assert done.returncode == 1, done.stderr
    return done.stderr


@pytest.mark.sampled(1)
def test_an_uneven_all_gather_shows_the_ranks_once(tmp_path: Path) -> None:
    said = ended(tmp_path, "uneven", 60)
    assert (
        "rank 1 of the group calls all_gather of float32[3], into [2, 2], at "
        f"{tmp_path}/ranks.py:24" in said
    )
    assert said.count("Only the sizes differ.") == 1 and "must match the size" not in said


@pytest.mark.sampled(1)
def test_a_failure_in_ddp_stands_at_the_programs_line(tmp_path: Path) -> None:
    said = ended(tmp_path, "ddp", 60)
    assert said.startswith("torchdevice: rank 1 failed first at ranks.py:28:\nTraceback")
    assert re.search(
        r"(?m)^torchdevice: rank 0: failed at ranks\.py:29: .*all_reduce .*ValueError: no data",
        said,
    ), said


@pytest.mark.sampled(1)
def test_the_end_of_a_timeout_shows_where_each_rank_is(tmp_path: Path) -> None:
    said = ended(tmp_path, "hang", 3)
    assert re.search(
        r"cannot end\. Timed out waiting 3000ms:\n  rank 0 waits for \d+ s in all_reduce of "
        r"float32\[2\], SUM, at",
        said,
    )
    assert re.search(
        r"\n  rank 1 does not wait\n(.*\n)*torchdevice: rank 1: ended by the launcher at "
        r"ranks\.py:20 in load",
        said,
    )


CTRL_C = {
    "ranks": ["--ranks", "2", "ranks.py", "hang", "60"],
    "torchrun": ["torchrun", "--nproc-per-node=2", "--max-restarts=1", "ranks.py", "restart", "60"],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("launcher", CTRL_C)
def test_ctrl_c_shows_where_each_rank_is(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(HANGING)
    words = ["run", "--target", "simulated:cuda:2", *CTRL_C[launcher]]
    with subprocess.Popen(
        [sys.executable, "-m", "torchdevice", *words],
        cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        # Two ranks may print into one line.
        assert (
            "".join(process.stdout.readline() for _ in range(2)).replace("\n", "") == "readyready"
        )
        until = time.monotonic() + 60
        name = "*-00000001.waits" if launcher == "ranks" else "*-01000001.waits"
        while not [*tmp_path.glob(f"torchdevice-run-*/{name}")] and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    told, ended, places = said.partition("torchdevice: ended by Ctrl-C. Where the ranks were:\n")
    assert ended and "no data" not in places, said
    if launcher == "ranks":
        assert not told, said
    else:
        assert "ValueError: no data" in told, "the error of the first attempt"
    assert "KeyboardInterrupt" not in said and "SignalException" not in said, said
    assert re.match(
        r"  rank 0: waiting for \d s in all_reduce of float32\[2\], SUM, at .*ranks\.py:\d+ in "
        r"<module>\n",
        places,
    ), said
    assert places.endswith("  rank 1: at ranks.py:20\n"), "and no traceback"


def test_notes_of_the_last_attempt_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COLLECTED, rank_notes.SIGNALS)
    monkeypatch.setattr(rank_notes.run_folder, "path", lambda: tmp_path)
    monkeypatch.setattr(rank_notes.run_folder, "leads", lambda: False)
    monkeypatch.setenv("RANK", "3")
    assert not rank_notes.leave_failure("a.py:1", "KeyboardInterrupt", interrupted=True)
    assert not [*tmp_path.iterdir()], "nobody shows it: no launcher has started this process"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    rank_notes.leave_wait("all_reduce", 5.0)
    assert not rank_notes.leave_failure("a.py:1", "ValueError"), "the rank shows its error itself"
    assert [*rank_notes.waits()] == [*rank_notes.failures()] == [3]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert rank_notes.leave_failure("a.py:2", "KeyboardInterrupt", interrupted=True)
    assert rank_notes.failures()[3].place == "a.py:2" and not rank_notes.waits()
