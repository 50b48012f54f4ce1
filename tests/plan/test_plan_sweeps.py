"""``torchdevice plan --sweep``: plans for several values of flags and variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

from torchdevice.plan import fitting, sweeping
from torchdevice.plan.sweeping import Sweep

pytestmark = pytest.mark.one_engine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("batch-size=1,2, 4", "batch-size", ("1", "2", "4")),
        ("--batch_size=8", "batch_size", ("8",)),
        ("LAYERS=2,", "LAYERS", ("2",)),
    ],
)
def test_what_a_sweep_says(text: str, name: str, values: tuple[str, ...]) -> None:
    assert Sweep.parsed(text) == Sweep(name, values)


@pytest.mark.parametrize("text", ["batch", "batch=", "=1,2", "batch size=1", ""])
def test_what_is_no_sweep(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"is not a name with values. Write one such as batch-size=1,2,4"
    ):
        Sweep.parsed(text)


@pytest.mark.parametrize(
    ("words", "values", "expected", "variables"),
    [
        (["t.py"], {"batch-size": "2"}, ["t.py", "--batch-size", "2"], {}),
        (
            ["t.py", "--batch_size", "1", "x"],
            {"batch-size": "2"},
            ["t.py", "--batch_size", "2", "x"],
            {},
        ),
        (["t.py", "--batch-size=1"], {"batch_size": "2"}, ["t.py", "--batch-size=2"], {}),
        (["t.py", "-b", "1"], {"b": "2"}, ["t.py", "-b", "2"], {}),
        (["t.py", "{n}", "--file=a{n}"], {"n": "2"}, ["t.py", "2", "--file=a2"], {}),
        (["t.py"], {"LAYERS": "2", "lr": "3"}, ["t.py", "--lr", "3"], {"LAYERS": "2"}),
        (["t.py", "--LAYERS", "1"], {"LAYERS": "2"}, ["t.py", "--LAYERS", "2"], {}),
    ],
)
def test_where_a_value_goes(
    words: list[str], values: Any, expected: list[str], variables: Any
) -> None:
    assert sweeping.words_with(words, values) == (expected, variables)


def plan(need: int, *, finished: bool = True) -> dict[str, Any]:
    fits = [*fitting.fits(need * GIB, need * GIB, evidence=fitting.Evidence(finished))]
    found = {
        "devices": [{}],
        "other processes": [],
        "finished": finished,
        "ended": "" if finished else "ValueError at t.py:1",
        "fits": fits,
    }
    return {
        **found,
        "needs": need * GIB,
        "at least": need * GIB,
        "smallest": (fitting.smallest(fits) or {}).get("model"),
    }


def test_the_largest_value_that_fits_each_gpu() -> None:
    sweeps = [Sweep("batch", ("8", "16", "32", "64"))]
    # A larger batch may need less, where the program chooses another way for it.
    found = sweeping.data(
        sweeps, {0: plan(10), 1: plan(9), 2: plan(20), 3: plan(30, finished=False)}
    )
    assert found["largest"]["t4"] == {"batch": "16"} and found["largest"]["h100"] == {"batch": "32"}
    assert found["largest"]["rtx3060ti"] is None
    (_, rows), (_, largest) = sweeping.tables(found)
    assert rows[1] == ("8", f"{'10.00 GiB':>11}", "rtx2080ti")
    assert rows[-1] == ("64", f"{'30.00 GiB':>11}", "at least, not finished: ValueError at t.py:1")
    assert [row[0] for row in largest] == ["batch", "none", "16", "32"]


def test_of_several_names_the_values_that_need_the_most_count() -> None:
    sweeps = [Sweep("batch", ("1", "2")), Sweep("LAYERS", ("1", "2"))]
    found = sweeping.data(sweeps, {0: plan(5), 1: plan(12), 2: plan(8), 3: plan(40)})
    assert found["largest"]["t4"] == {"batch": "1", "LAYERS": "2"}
    assert found["largest"]["h100"] == {"batch": "2", "LAYERS": "2"}
    assert len(sweeping.data(sweeps, {0: plan(5)})["plans"]) == 1, "those that ended before Ctrl-C"
    found = sweeping.data(sweeps, {0: plan(5), 1: plan(8), 2: plan(5), 3: plan(8)})
    assert found["largest"]["t4"] == {"batch": "2", "LAYERS": "2"}, "the larger of equal needs"


def test_as_many_plans_run_at_once_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    both, own = threading.Barrier(2), sweeping.wait
    running: list[int] = []

    def made(job: sweeping.Job, source: bytes, running: Any) -> dict[str, Any]:
        both.wait(60)  # for the other one that runs
        return {}

    def wait(futures: Any, *rest: Any) -> Any:
        running.append(len(futures))
        return own(futures, *rest)

    monkeypatch.setattr(sweeping, "_plan", made)
    monkeypatch.setattr(sweeping, "wait", wait)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    jobs = [sweeping.Job([], [str(number)], {}) for number in range(6)]
    assert sorted(number for number, _ in sweeping.planned(jobs)) == [*range(6)]
    assert max(running) == 2


def test_a_plan_that_waits_leaves_its_core_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [threading.Event() for _ in range(3)]
    waiting: list[int] = []

    def made(job: sweeping.Job, source: bytes, running: Any) -> dict[str, Any]:
        number = int(job.words[0])
        if number < 2:  # each waits for the next one
            waiting.append(number)
            assert ended[number + 1].wait(60)
            waiting.remove(number)
        ended[number].set()
        return {}

    monkeypatch.setattr(sweeping, "_plan", made)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    jobs = [sweeping.Job([], [str(number)], {}) for number in range(3)]
    found = {number for number, _ in sweeping.planned(jobs, lambda: len(waiting))}
    assert found == {0, 1, 2}


PROGRAM = """
import os, sys, torch
if sys.argv[2] == "3":
    sys.exit("no data")
x = torch.empty(int(os.environ["SIZE"]) * int(sys.argv[2]) << 30, dtype=torch.uint8, device="cuda")
"""


def test_a_program_with_several_values(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ["plan", "--json", "--sweep", "size=1,3", "--sweep=SIZE=6", "train.py", "--size", "8"]
    done = run_command(*words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == ["size", "SIZE"]
    one, three = found["plans"]
    assert (
        one["values"] == {"size": "1", "SIZE": "6"}
        and one["devices"][0]["peak"] == 6 * GIB
        and one["finished"]
    )
    assert three["ended"] == "exit status 1 at train.py:4 (no data)"
    assert found["largest"]["t4"] == {"size": "1", "SIZE": "6"}


def test_a_sweep_that_says_nothing_is_refused() -> None:
    done = run_command("plan", "--sweep", "batch", "train.py")
    assert done.returncode == 2 and "'batch' is not a name with values" in done.stderr
    done = run_command("plan", "--sweep", "batch=1", "--fits", "t4", "train.py")
    assert done.returncode == 2 and "--sweep makes several plans" in done.stderr


def test_plans_of_a_program_on_stdin(tmp_path: Path) -> None:
    program = "import sys, torch; torch.zeros(int(sys.argv[1]) << 20, device='cuda')"
    command = [sys.executable, "-m", "torchdevice", "plan", "--sweep", "n=64,128", "-", "{n}"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "768.00 MiB" in done.stdout and "1024.00 MiB" in done.stdout


def test_what_a_program_said_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "import sys, torch\n"
        "if sys.argv[2] == '1': raise ValueError('one\\nof several lines')\n"
        "if sys.argv[2] == '2': sys.exit('two')\n"
    )
    done = run_command("plan", "--sweep", "n=1,2,3", "t.py", cwd=tmp_path)
    assert done.returncode == 1
    rows = [" ".join(line.split()) for line in done.stdout.splitlines()[2:5]]
    assert rows == [
        "1 not finished: ValueError at t.py:2 (one)",
        "2 not finished: exit status 1 at t.py:3 (two)",
        "3 the program asked for no memory of a GPU",
    ]
    assert "fits each GPU" not in done.stdout
