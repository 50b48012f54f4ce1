"""`.ci/mutants.py` against `cosmic-ray exec`, on a small project."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

pytestmark = pytest.mark.one_engine

mutating = pytest.importorskip("cosmic_ray.mutating", reason="pip install cosmic-ray coverage")
work_db = pytest.importorskip("cosmic_ray.work_db", reason="pip install cosmic-ray coverage")

SCRIPT = ROOT / ".ci" / "mutants.py"

SOURCE = """
import functools

LIMIT = 3


def clipped(number):
    if number > LIMIT:
        return LIMIT
    return number


def adding(half):
    step = half + half

    def add(number):
        return number + step

    return add


add_two = adding(1)


class Counter:
    step = 2

    @functools.lru_cache
    def total(self, *numbers):
        return sum(clipped(each) + self.step for each in numbers)

    def until(self, end):
        at = 0
        while at < end:
            at += self.step
        return at

    def never_called(self):
        return self.step == 0
"""

TESTS = """
import pytest
from small import Counter, add_two, clipped


@pytest.mark.parametrize(("given", "wanted"), [(1, 1), (3, 3), (7, 3)])
def test_clipped(given, wanted):
    assert clipped(given) == wanted


def test_add_two():
    assert add_two(1) == 3


def test_total():
    assert Counter().total(1, 7) == 8


def test_until():
    assert Counter().until(5) == 6
"""

CONFIGURATION = """
[cosmic-ray]
module-path = ["small.py"]
excluded-modules = []

[cosmic-ray.tests]
"small.py" = ["test_small.py"]
"""


def run(*arguments: str) -> str:
    """Run Python, and return what it prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mutants of the project, which is in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(SOURCE)
    Path("test_small.py").write_text(TESTS)
    Path("mutation.toml").write_text(CONFIGURATION)
    run("-m", "cosmic_ray.cli", "init", "mutation.toml", "mutants.sqlite")
    return "mutants.sqlite"


def judged(database: str) -> list[tuple[Any, str]]:
    """Return the mutations that were tried, and what became of each."""
    with work_db.use_db(database, work_db.WorkDB.Mode.open) as found:
        completed = found.completed_work_items
    return [
        (item.mutations, result.test_outcome.value)
        for item, result in completed
        if result.test_outcome
    ]


def test_a_fork_judges_as_an_interpreter_does(database: str) -> None:
    run(str(SCRIPT), "mutation.toml", database)
    command = shlex.join([sys.executable, "-m", "pytest", "-x", "-q", "test_small.py"])
    survivors = []
    for mutations, outcome in judged(database):
        assert mutating.mutate_and_test(mutations, command, 60).test_outcome.value == outcome
        if outcome == "survived":
            survivors.append(mutations[0].definition_name)
    # The decorator only saves time.
    assert sorted(survivors) == ["Counter", "never_called", "never_called"]


def test_the_source_must_pass_its_tests(database: str) -> None:
    with open("test_small.py", "a") as file:
        file.write("\n\ndef test_wrong():\n    assert clipped(1) == 2\n")
    with pytest.raises(AssertionError, match=r"this fails: test_small\.py::test_wrong"):
        run(str(SCRIPT), "mutation.toml", database)
    assert judged(database) == []
