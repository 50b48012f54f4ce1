"""The configurations of docs/using.md parse, and their commands, variables and flags exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from places import ROOT
from processes import run_python

from torchdevice.kernel.python.environment import SWITCH
from torchdevice.scope import collected_options as options
from torchdevice.tools.cli import main

pytestmark = pytest.mark.one_engine

TEXT = (ROOT / "docs" / "using.md").read_text()

BLOCKS = {
    language: re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)
    for language in ("json", "dockerfile")
}

KNOWN = {SWITCH, *map(options.variable_of, options.declarations())}

SHOW = "import torch; print(torch.ones(1).cuda().device, torch.cuda.device_count())"


def configurations() -> list[dict]:
    return [json.loads(text) for text in BLOCKS["json"]]


def test_variables_exist_and_have_valid_values() -> None:
    docker = dict(
        word.split("=")
        for line in re.findall(r"^ENV (.*)", BLOCKS["dockerfile"][0], re.M)
        for word in line.split()
    )
    container = configurations()[0]["containerEnv"]
    assert docker and container and docker.keys() | container.keys() <= KNOWN
    for variables in (docker, container):
        assert options.from_environment(variables)["target"] == "simulated:cuda:2"


def test_the_container_runs_a_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    (text,) = BLOCKS["dockerfile"]
    (command,) = (json.loads(line) for line in re.findall(r"^CMD (.*)", text, re.M))
    (variables,) = re.findall(r"^ENV (.*)", text, re.M)
    environment = dict(word.split("=") for word in shlex.split(variables))
    assert command[0] == "python"
    assert run_python(*command[1:], cwd=tmp_path, **environment).stdout == "cuda:0 2\n"


def test_the_editor_launches_a_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    (launch,) = configurations()[1]["configurations"]
    words = [word.replace("${file}", str(tmp_path / "train.py")) for word in launch["args"]]
    assert run_python("-m", launch["module"], *words).stdout == "cuda:0 2\n"
    assert main.parser().parse_args(words).target == "simulated:cuda:2"


def test_the_editors_tests_are_in_a_scope(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\ndef test():\n    assert torch.cuda.device_count() == 2\n"
    )
    (arguments,) = (
        each["python.testing.pytestArgs"]
        for each in configurations()
        if "python.testing.pytestArgs" in each
    )
    assert (
        run_python("-m", "pytest", "-p", "no:cacheprovider", *arguments, cwd=tmp_path).returncode
        == 0
    )
