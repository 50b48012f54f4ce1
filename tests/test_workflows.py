"""CI workflows parse, and call existing files, tests, commands and flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT, benchmark

from torchdevice.scope import target_selection
from torchdevice.simulation import targets
from torchdevice.tools.cli import main

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

ACTION = ROOT / ".github" / "actions" / "check" / "action.yml"

HOOKS = ROOT / ".pre-commit-hooks.yaml"


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


def commands() -> list[tuple[str, list[str]]]:
    """Return each command of the workflows, as words, with the file that has it."""
    found = []
    for path in WORKFLOWS:
        for step in steps(path):
            for line in step.get("run", "").splitlines():
                line = re.sub(r"\$\{\{.*?\}\}", "1", line)
                found.append((path.name, shlex.split(line, comments=True)))
    return [(name, words) for name, words in found if words]


def test_there_is_one_for_each_kind_of_machine() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert all(
        word in text
        for word in ("ubuntu-latest", "macos-", "windows-latest", "cron:", "nightly/cpu")
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_does_something(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["name"] and workflow[True]  # YAML reads the key "on" as a truth value
    assert all(job["runs-on"] for job in workflow["jobs"].values())
    assert all(("run" in step) is not ("uses" in step) for step in steps(path))


def test_the_files_that_they_name_exist() -> None:
    named = [
        word
        for _, words in commands()
        for word in words
        if re.fullmatch(r"(tests|\.ci|torchdevice|docs)/[\w./]+", word)
    ]
    assert named and [word for word in named if not (ROOT / word).exists()] == []


def test_pytest_has_their_flags(pytestconfig: pytest.Config) -> None:
    flags = [
        word
        for _, words in commands()
        if words[0] == "pytest"
        for word in words
        if word.startswith("--")
    ]
    assert flags
    for flag in flags:
        pytestconfig.getoption(flag)  # raises ValueError for a flag that is not there


def test_the_command_line_takes_their_arguments() -> None:
    runs = [step["run"] for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]]
    of_action = [shlex.split(re.sub(r"\$\{TARGET.*?\}", "--target mps", run)) for run in runs]
    of_hooks = [
        [*shlex.split(hook["entry"]), "train.py"] for hook in yaml.safe_load(HOOKS.read_text())
    ]
    given = [*(words for _, words in commands()), *of_action, *of_hooks]
    calls = [
        [word.replace("$SARIF", "out.sarif") for word in words[1:]]
        for words in given
        if words[0] == "torchdevice"
    ]
    assert len(calls) >= 2
    for arguments in calls:
        given = main.parser().parse_args(arguments)
        target = getattr(given, "target", None)
        assert (
            target is None
            or targets.is_simulated(target)
            or target in (*target_selection.target_names(), "simulated:mps")
        )


def test_the_table_of_platforms_has_every_environment() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "platforms.yml").read_text())
    rows = workflow["jobs"]["linux"]["strategy"]["matrix"]["include"]
    assert [f"{row['python']}:{row['torch']}" for row in rows] == list(
        benchmark("platforms").ENVIRONMENTS
    )
