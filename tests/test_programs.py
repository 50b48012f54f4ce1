"""The command for public programs, on a repository made here, and its page of runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT, benchmark, page_maker

pytestmark = pytest.mark.one_engine

TRAIN = """
import sys
import torch
device = "cpu" if "--cpu" in sys.argv else "cuda"
assert open("word.txt").read() == "given" and torch.get_num_threads() == 1
model = torch.nn.Linear(4, 1).to(device)
torch.manual_seed(1)
torch.nn.init.normal_(model.weight.data.cpu())
for parameter in model.parameters():
    parameter.data.fill_(0.5)
print("loss", 7.0)
loss = model(torch.ones(2, 4, device=device)).square().mean()
print(f"loss {loss.item():.3f} on {loss.device.type}")
open("written.bin", "wb").write(b"%d" % loss)
"""

BROKEN = """
import torch
torch.ones(2, device="cuda")
raise ModuleNotFoundError("No module named 'kernels_of_nvcc'")
"""


def _repository(sources: Path) -> str:
    """Make a bare repository ``owner/name`` with one commit, and return the commit."""
    work = sources / "work"
    (work / "inner").mkdir(parents=True)
    (work / "inner" / "train.py").write_text(TRAIN)
    (work / "broken.py").write_text(BROKEN)
    (work / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    (work / "silent.py").write_text("print('nothing that a pattern finds')\n")

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        return subprocess.run(
            ["git", *identity, *words], cwd=work, capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    first = git("rev-parse", "HEAD")
    (work / "inner" / "train.py").write_text("raise SystemExit('a later commit')\n")
    git("commit", "-q", "-a", "-m", "later")
    git("clone", "-q", "--bare", ".", str(sources / "owner+name" / "repo"))
    return first


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the command, whose catalog and record are those of the test."""
    command = benchmark("programs.__main__")
    runs = benchmark("programs.runs")
    (tmp_path / "inputs.py").write_text("import sys\nopen('word.txt', 'w').write(sys.argv[1])\n")
    monkeypatch.setattr(runs, "INPUTS", tmp_path / "inputs.py")
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results.json")
    return command


def page_of_record(programs: Any) -> str:
    """Return the page of what the command recorded."""
    recorded = [programs.Run(**each) for each in json.loads(programs.RESULTS.read_text())]
    return programs.page.page(recorded, programs.PROGRAMS)


def _program(programs: Any, name: str, commit: str, command: str, **fields: Any) -> Any:
    return programs.Program(name, "vision", "owner/name", commit, command, "little", **fields)


@pytest.mark.sampled(8, of="long programs")
def test_programs_run_in_processes_and_are_recorded(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = _repository(tmp_path / "sources")
    loss = r"loss ([\d.]+)"
    train = {"own": "--cpu", "folder": "inner", "inputs": "given", "loss": loss}
    catalog = (
        _program(programs, "good", commit, "train.py", digest="*.bin", **train),
        _program(
            programs,
            "broken",
            commit,
            "broken.py",
            own=None,
            loss=loss,
            faults={"nvcc": "the program's"},
        ),
    )
    monkeypatch.setattr(programs, "PROGRAMS", catalog)
    assert programs.main(["--sources", str(tmp_path / "sources"), "--write"]) == 0
    recorded = json.loads((tmp_path / "results.json").read_text())
    known = [(run["name"], run["target"], run["outcome"], run["loss"]) for run in recorded]
    assert known == [
        ("good", "its own CPU mode", "finished", "6.250"),
        ("good", "cpu", "finished", "6.250"),
        ("good", "simulated:cuda", "finished", "6.250"),
        ("broken", "cpu", "failed", ""),
        ("broken", "simulated:cuda", "failed", ""),
    ]
    assert all(run["seconds"] > 0.2 and run["torch"] == torch.__version__ for run in recorded)
    assert all(run["commit"] == commit for run in recorded)
    assert {run["result"] for run in recorded[:3]} == {"1 files, e7f6c011"}
    page = page_of_record(programs)
    assert f"| good | {torch.__version__} | simulated:cuda | 6.250 | 6.250 |" in page
    assert (
        "Fails with `ModuleNotFoundError: No module named 'kernels_of_nvcc'`: the program's."
        in page
    )


def test_a_failure_that_the_catalog_does_not_explain_fails_the_command(
    programs: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commit = _repository(tmp_path / "sources")
    own = {"own": "", "targets": (), "loss": r"loss ([\d.]+)"}
    catalog = (
        _program(programs, "slow", commit, "slow.py", **own),
        _program(programs, "silent", commit, "silent.py", **own),
    )
    monkeypatch.setattr(programs, "PROGRAMS", catalog)
    sources = str(tmp_path / "sources")
    assert (
        programs.main(["--sources", sources, "--limit", "2", "--keep", str(tmp_path / "kept")]) == 1
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["slow", "on", "its", "own", "CPU", "mode:", "stopped", "begun"]
    assert said[1].startswith("silent on its own CPU mode: failed") and said[1].endswith(
        "that a pattern finds"
    )
    assert (tmp_path / "kept" / "0-name-its-own-CPU-mode.log").read_text() == "begun\n"
    assert not (tmp_path / "results.json").exists()
    assert programs.main(["--only", "unknown"]) == 2


def test_a_release_on_pypi_is_unpacked_from_its_wheel(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny_program-1.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_program/__main__.py", TRAIN)
        wheel.writestr(
            "tiny_program-1.5.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-program\nVersion: 1.5",
        )
        wheel.writestr(
            "tiny_program-1.5.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    ran = {"own": None, "inputs": "given", "loss": r"loss ([\d.]+)"}
    program = programs.Program(
        "tiny", "vision", "tiny-program", "1.5", "-m tiny_program", "little", **ran
    )
    monkeypatch.setattr(programs, "PROGRAMS", (program,))
    assert programs.main(["--write", "--target", "cpu"]) == 0
    page = page_of_record(programs)
    assert (
        "| cpu | 6.250 |" in page and "[`1.5`](https://pypi.org/project/tiny-program/1.5)" in page
    )


def test_only_the_parts_that_a_program_names_are_checked_out(programs: Any, tmp_path: Path) -> None:
    commit = _repository(tmp_path / "sources")
    check_out = benchmark("programs.runs").check_out
    program = _program(programs, "part", commit, "x", parts=("/inner/", "/slow.py"))
    check_out(program, tmp_path / "part", tmp_path / "sources", sys.executable)
    files = {str(file.relative_to(tmp_path / "part")) for file in (tmp_path / "part").rglob("*.py")}
    assert files == {"inner/train.py", "slow.py"}


def test_a_run_replaces_that_of_the_same_program_target_and_torch(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        programs, "PROGRAMS", tuple(_program(programs, name, "c", "x") for name in ("b", "a"))
    )
    rows = [
        programs.Run(name, target, version, "c", "finished", "1.0")
        for name in ("b", "a")
        for version in ("2.13.0+cpu", "2.15.0+cu132")
        for target in ("its own CPU mode", "cpu")
    ]
    assert programs.record([*rows[::-1], rows[0]._replace(name="gone")]) == rows
    later = rows[3]._replace(loss="2.0")
    assert programs.record([later]) == [*rows[:3], later, *rows[4:]]


def test_the_catalog_is_whole(programs: Any) -> None:
    names = [program.name for program in programs.PROGRAMS]
    made = benchmark("programs.inputs").INPUTS
    drivers = ROOT / "benchmarks" / "programs" / "drivers"
    assert len(set(names)) == len(names)
    for program in programs.PROGRAMS:
        assert (len(program.commit) == 40) == (program.repository.count("/") == 1)
        assert not program.inputs or program.inputs in made
        assert program.loss or program.result or program.digest
        for word in program.command.split():
            if word.startswith("{drivers}"):
                assert (drivers / word.removeprefix("{drivers}/")).exists(), word


def test_links_lead_to_a_commit_or_a_release() -> None:
    links = re.findall(r"\]\((https://[^)]*)\)", page_maker("make_reference").programs())
    place = (
        r"https://(github\.com/[\w.-]+/[\w.-]+/tree/[0-9a-f]{40}|pypi\.org/project/[\w.-]+/[\w.]+)"
    )
    assert len(links) > 70
    assert [link for link in links if not re.fullmatch(place, link)] == []
