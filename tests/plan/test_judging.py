"""Baselines of plans, and the GPU that a program is to fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from places import ROOT
from processes import run_command

from torchdevice.plan import fitting, judging

pytestmark = pytest.mark.one_engine

GIB = 1 << 30

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}


def plan_of(need: float, *, finished: bool = True) -> dict[str, Any]:
    size = int(need * GIB)
    return {
        "program": "train.py",
        "devices": [{}],
        "finished": finished,
        "needs": size,
        "at least": size,
        "versions": VERSIONS,
        "fits": [*fitting.fits(size, size, evidence=fitting.Evidence(finished))],
    }


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    judging.write(path, plan_of(10))
    assert judging.read(path) == {"needs": 10 * GIB, "versions": VERSIONS}


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"needs": "much", "versions": {}}', '{"needs": 1, "versions": 3}']
)
def test_what_is_no_baseline(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"is no baseline of a plan\. Write it with --write-baseline"
    ):
        judging.read(str(tmp_path / "plan.json"))
    with pytest.raises(ValueError, match="cannot be read: No such file or directory"):
        judging.read(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("need", "grow", "failed"),
    [(10, 0, False), (10.05, 1, False), (10.2, 1, True), (10.2, 3, False), (9, 0, False)],
)
def test_growth_beyond_what_is_allowed_fails(need: float, grow: float, failed: bool) -> None:
    before = {"needs": 10 * GIB, "versions": VERSIONS | {"transformers": "5.12.0"}}
    (found,) = judging.judged(plan_of(need), before, grow, None)
    assert found["failed"] is failed
    assert (
        f"The baseline needs 10.00 GiB, and this {need:.2f} GiB: {10 * need - 100:+.2f} %"
        in found["said"]
    )
    assert "Versions differ: transformers 5.12.0 -> 5.24.0." in found["said"]


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (40.5, "this at least 40.50 GiB: +305.00 %, of +1 % allowed."),
        (0.5, "this at least 512.00 MiB. The plan does not show how much more it needs."),
    ],
)
def test_a_program_that_did_not_finish_may_have_grown(need: float, said: str) -> None:
    plan = plan_of(need, finished=False) | {"needs": GIB // 2}
    (found,) = judging.judged(plan, {"needs": 10 * GIB, "versions": VERSIONS}, 1, None)
    assert found == {"said": f"The baseline needs 10.00 GiB, and {said}", "failed": True}


@pytest.mark.parametrize(
    ("plan", "failed", "said"),
    [
        (plan_of(12), False, "It fits the 14.56 GiB of Tesla T4, with 17.6 % left."),
        (plan_of(15), True, "It does not fit the 14.56 GiB of Tesla T4."),
        (
            plan_of(12, finished=False),
            True,
            "The plan does not show that it fits the 14.56 GiB of Tesla T4.",
        ),
    ],
)
def test_a_gpu_that_the_program_is_to_fit(plan: dict[str, Any], failed: bool, said: str) -> None:
    assert [*judging.judged(plan, None, 1, "t4")] == [{"said": said, "failed": failed}]


def test_names_of_gpus() -> None:
    assert judging.checked_model("RTX 3090") == "rtx3090"
    with pytest.raises(
        ValueError, match=r"'t44' is not the name of a GPU. Did you mean 't4'\? docs/gpus.md"
    ):
        judging.checked_model("t44")


PROGRAM = """
import sys, torch
print("said by the program")
x = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
"""


def test_the_status_says_whether_a_program_grew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    written = run_command(
        "plan", "--baseline", "b.json", "--write-baseline", "train.py", "8", cwd=tmp_path
    )
    assert (
        written.returncode == 0
        and json.loads((tmp_path / "b.json").read_text())["needs"] == 8.5 * GIB
    )
    words = ["plan", "--markdown", "--baseline=b.json", "--grow", "5", "--fits", "T4", "train.py"]
    done = run_command(*words, "10", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("### Memory of `train.py 10`\n")
    assert (
        "\nFailed: The baseline needs 8.50 GiB, and this 10.50 GiB: +23.53 %, of +5 % allowed.\n"
        in done.stdout
    )
    assert "\nIt fits the 14.56 GiB of Tesla T4, with 27.9 % left.\n" in done.stdout
    assert "said by the program" not in done.stdout and "said by the program" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="the steps are for bash")
def test_the_action_of_a_workflow(tmp_path: Path) -> None:
    *_, step = yaml.safe_load((ROOT / ".github" / "actions" / "plan" / "action.yml").read_text())[
        "runs"
    ]["steps"]
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "torchdevice").write_text(f'#!/bin/sh\nexec {sys.executable} -m torchdevice "$@"\n')
    (tmp_path / "torchdevice").chmod(0o755)
    summary = tmp_path / "summary.md"
    assert set(step["env"]) == {"PROGRAM", "GPU", "BASELINE", "GROW", "OPTIONS"}
    given = dict.fromkeys(step["env"], "") | {"GROW": "1", "PROGRAM": "train.py 20", "GPU": "t4"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **given, "PATH": path, "GITHUB_STEP_SUMMARY": str(summary)}
    done = subprocess.run(
        ["bash", "-c", step["run"]], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert (
        done.stdout == summary.read_text()
        and "Failed: It does not fit the 14.56 GiB of Tesla T4." in done.stdout
    )


def test_a_baseline_that_is_missing_is_refused(tmp_path: Path) -> None:
    done = run_command("plan", "--baseline", "b.json", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "'b.json' cannot be read" in done.stderr


@pytest.mark.parametrize("words", [["--fits", "t4"], ["--baseline", "b.json", "--write-baseline"]])
def test_a_judged_plan_has_its_report(words: list[str], tmp_path: Path) -> None:
    program = ["-c", "import torch; torch.zeros(1 << 20, device='cuda')"]
    done = run_command("plan", *words, "--report=page.html", *program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "It needs 532.00 MiB" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "words", [["--sweep", "batch=1,2"], ["--try"], ["--interval"], ["--world-size=2", "--rank=all"]]
)
def test_several_plans_have_no_report(words: list[str], tmp_path: Path) -> None:
    done = run_command("plan", *words, "--report=page.html", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "--report shows one plan" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows ends processes without a signal")
def test_a_plan_ends_with_its_command() -> None:
    # Ended by its parent, as by `timeout`; the program is in a session of its own.
    script = "import os, sys, time; print(os.getpid(), file=sys.stderr, flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "torchdevice", "plan", "--fits", "t4", "-c", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        program = psutil.Process(int(process.stderr.readline()))
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    program.wait(timeout=30)
