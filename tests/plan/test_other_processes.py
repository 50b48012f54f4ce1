"""Plans of programs that start others, or that use no GPU, or that catch the lack of memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

from torchdevice.plan import other_processes, rendering

pytestmark = pytest.mark.one_engine

GIB = 1 << 30

CHILD = """
import torch

def use(number):
    kept = torch.empty(3 << 30, dtype=torch.uint8, device=f"cuda:{number}")

if __name__ == "__main__":
    use(0)
"""

STARTS = {
    "subprocess": "subprocess.run([sys.executable, 'child.py'], check=True)",
    "spawned": "multiprocessing.spawn(child.use, nprocs=2)",
}

PROGRAM = """
import subprocess, sys, torch, child
from torch import multiprocessing
from torch.utils.data import DataLoader

if __name__ == "__main__":
    own = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    {}
"""


def plan(folder: Path, text: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status of a plan, and its data."""
    (folder / "child.py").write_text(CHILD)
    (folder / "program.py").write_text(text)
    done = run_command("plan", "--json", *words, "program.py", cwd=folder)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def fits(found: dict[str, Any]) -> dict[str, str]:
    return {each["model"]: each["fits"] for each in found["fits"]}


def test_a_child_on_the_same_gpu(tmp_path: Path) -> None:
    status, found = plan(tmp_path, PROGRAM.format(STARTS["subprocess"]))
    (child,) = found["other processes"]
    assert status == 0 and found["finished"]
    sizes = {"cuda:0": 3 * GIB}
    assert child == {"name": "child.py", "ended": True, "devices": sizes, "allocated": sizes}
    assert found["at least"] == 3 * GIB + found["context"]
    assert 4 * GIB < found["needs"] - 2 * found["context"] < 4.1 * GIB
    # One after the other they would fit the first, at once they would not.
    said = fits(found)
    assert (said["a100-1g.5gb"], said["rtx4060"]) == ("unknown", "yes")


@pytest.mark.sampled(1, of="processes of a plan")
def test_children_on_gpus_of_their_own(tmp_path: Path) -> None:
    words = ("--target", "simulated:cuda:2", "--memory", "1TiB")
    _, found = plan(tmp_path, PROGRAM.format(STARTS["spawned"]), *words)
    devices = [each["devices"] for each in found["other processes"]]
    assert devices == [{"cuda:0": 3 * GIB}, {"cuda:1": 3 * GIB}]
    assert 4 * GIB < found["needs"] - 2 * found["context"] < 4.1 * GIB


def test_workers_without_memory_of_a_gpu(tmp_path: Path) -> None:
    text = PROGRAM.format(
        "loader = DataLoader(torch.arange(8), num_workers=1, persistent_workers=True)\n"
        "    print([each.cuda() for each in loader])"
    )
    _, found = plan(tmp_path, text)
    assert found["other processes"] == [] and fits(found)["t4"] == "yes"


ONLY_CHILD = "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)\n"


def test_a_program_whose_child_alone_uses_a_gpu(tmp_path: Path) -> None:
    status, found = plan(tmp_path, ONLY_CHILD, "--fits", "t4")
    assert status == 0 and found["devices"] == [] and found["at least"] > 3 * GIB
    assert fits(found)["t4"] == "yes"


RESETS = """
import torch

first = torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
del first
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_child_that_resets_its_peaks(tmp_path: Path) -> None:
    (tmp_path / "resets.py").write_text(RESETS)
    status, found = plan(tmp_path, ONLY_CHILD.replace("child.py", "resets.py"), "--fits", "t4")
    (child,) = found["other processes"]
    assert child["devices"] == child["allocated"] == {"cuda:0": 20 * GIB}
    assert status == 1 and fits(found)["t4"] == "no"


FRAGMENTS = """
import torch

first = torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
del first
kept = torch.empty(11 << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_child_needs_no_more_than_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "fragments.py").write_text(FRAGMENTS)
    _, found = plan(tmp_path, ONLY_CHILD.replace("child.py", "fragments.py"))
    (child,) = found["other processes"]
    assert (child["devices"], child["allocated"]) == ({"cuda:0": 21 * GIB}, {"cuda:0": 11 * GIB})
    assert found["at least"] == 11 * GIB + found["context"]
    assert found["needs"] > 21 * GIB + found["context"] and fits(found)["t4"] == "unknown"
    assert next(rendering.answer(found)).startswith("It needs 21.52 GiB, with 512.00 MiB for CUDA")


def test_a_child_that_was_killed_is_not_counted_as_fitting(tmp_path: Path) -> None:
    text = ONLY_CHILD.replace("check=True", "check=False")
    (tmp_path / "child.py").write_text("")
    killed = CHILD + "    import os; os.kill(os.getpid(), 9)\n"
    (tmp_path / "killed.py").write_text(killed)
    status, found = plan(tmp_path, text.replace("child.py", "killed.py"), "--fits", "t4")
    assert status == 1 and fits(found)["t4"] == "unknown" and found["smallest"] is None
    assert found["judged"][0]["said"].startswith("The plan does not show that it fits")


def test_a_program_that_uses_no_gpu_fits_none_and_writes_no_baseline(tmp_path: Path) -> None:
    text = "import torch\nprint(torch.ones(3))\n"
    words = ("--fits", "t4", "--baseline", "plan.json", "--write-baseline")
    status, found = plan(tmp_path, text, *words)
    assert status == 1 and found["smallest"] is None and set(fits(found).values()) == {"unknown"}
    assert not (tmp_path / "plan.json").exists()


CATCHES = """
import torch
size = 64 << 30
while size:
    try:
        kept = torch.empty(size, dtype=torch.uint8, device="cuda")
        break
    except torch.cuda.OutOfMemoryError:
        size //= 2
"""


def test_a_program_that_halves_what_it_asks_for(tmp_path: Path) -> None:
    status, found = plan(tmp_path, CATCHES, "--target", "t4")
    assert status == 0 and found["ran out"] == [
        {"lines": [f"{tmp_path / 'program.py'}:6"], "times": 3}
    ]
    yes = {model for model, said in fits(found).items() if said == "yes"}
    assert yes == {"t4"} and found["smallest"] == "t4"


GIVES_UP = """
import torch
kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
try:
    kept.repeat(30)
except torch.cuda.OutOfMemoryError as error:
    print("too large", error)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise RuntimeError('no') from None"])
def test_a_program_that_gives_up_did_not_fit(end: str, tmp_path: Path) -> None:
    # Elsewhere in the program, where the error is one of its own.
    _, found = plan(tmp_path, GIVES_UP + end, "--target", "t4")
    assert not found["finished"] and found["at least"] == (31 << 30) + found["context"]
    said = fits(found)
    assert said["t4"] == said["a10g"] == "no" and said["h100"] == "unknown"
    if not end:
        assert re.fullmatch(r"memory ran out at \S*program.py:5, .* no more", found["ended"])


def test_one_that_goes_on_is_not_said_to_need_what_it_was_refused(tmp_path: Path) -> None:
    _, found = plan(tmp_path, GIVES_UP + "kept = kept + 1\n", "--target", "t4")
    assert found["finished"] and found["needs"] < 3 * GIB
    assert fits(found)["t4"] == "yes" and fits(found)["h100"] == "unknown"


FAILS = """
import os, sys, torch
from torch import multiprocessing

def use(how):
    kept = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    if how == "killed":
        os.kill(os.getpid(), 9)
    if how == "status":
        sys.exit(3)
    if how == "memory":
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    raise ValueError("no data")

if __name__ == "__main__":
    started = multiprocessing.Process(target=use, args=(sys.argv[1],), name="worker")
    started.start()
    started.join()
    own = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
"""


@pytest.mark.sampled(1, of="processes of a plan")
@pytest.mark.parametrize("how", ["killed", "status", "memory", "error"])
def test_a_process_that_fails_while_the_program_goes_on(how: str, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    done = run_command("plan", "--json", "--target", "t4", "fails.py", how, cwd=tmp_path)
    found = json.loads(done.stdout)
    (child,) = found["other processes"]
    assert done.returncode == 0 and not child["ended"] and not found["finished"]
    assert found["ended"] == "worker did not finish"
    # Of one that is killed nothing is known.
    assert bool(child["devices"]) is (how != "killed")
    assert set(fits(found).values()) <= {"no", "unknown"}


def test_the_sum_is_that_of_each_device() -> None:
    own = [{"device": "cuda:0", "peak": 5}, {"device": "cuda:1", "peak": 1}]
    first = {"devices": {"cuda:1": 7}, "allocated": {"cuda:1": 6}}
    second = {"devices": {"cuda:1": 2, "cuda:0": 1}, "allocated": {"cuda:1": 2, "cuda:0": 1}}
    others = [first, second]
    assert other_processes.most(own, others, 10) == 1 + 7 + 2 + 30
    assert other_processes.most(own, others, 10, 100) == 1 + 7 + 2 + 30 + 200
    assert other_processes.least(others, 10) == 16 and other_processes.most([], [], 10) == 10
    assert other_processes.are_on_one_device([], others)
    assert not other_processes.are_on_one_device(own[:1], [first])


RANK = """
import os, torch, torch.distributed as dist

def train(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29777")
    kept = torch.empty(6 << 30, dtype=torch.uint8, device=f"cuda:{rank}")
    raise ValueError("no data")

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""


@pytest.mark.sampled(1, of="processes of a plan")
def test_ranks_of_a_launcher_that_fail(tmp_path: Path) -> None:
    words = ("--target", "simulated:cuda:2", "--memory", "1TiB")
    status, found = plan(tmp_path, RANK, *words)
    assert status == 1 and found["advice"].endswith("'torchdevice plan --world-size N SCRIPT'.")
    assert found["at least"] > 6 * GIB
    said = fits(found)
    assert (said["a100-1g.5gb"], said["t4"]) == ("no", "unknown")
    shown = list(rendering.answer(found))
    assert any(each.startswith("It needs at least 6.50 GiB") for each in shown)
