"""``torchdevice check`` of many files, which processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchdevice.check import RULES, Target, check_file, check_files
from torchdevice.kernel.python.styled_text import counted
from torchdevice.tools.cli.main import main

SOURCES = [
    'import torch\ntorch.ones(3, device="cuda")\n',
    "import deepspeed\n",
    "def broken(:\n",
    "x = 1\n",
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for number in range(120):
        (tmp_path / f"source{number:03}.py").write_text(SOURCES[number % len(SOURCES)])
    return [str(path) for path in sorted(tmp_path.iterdir())]


def test_processes_find_what_one_process_finds(files: list[str]) -> None:
    target = Target.named("cpu")
    rules = [{*RULES}, {*RULES} - {"device"}]
    asked = [(file, rules[number % 2]) for number, file in enumerate(files)]
    found = list(check_files(asked, target))
    assert found == [check_file(file, target, chosen) for file, chosen in asked]
    assert list(check_files(asked[:8], target)) == found[:8]


def test_the_command_lists_files_in_their_order(
    files: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(Path(files[0]).parent)]) == 1
    shown = capfd.readouterr()
    assert "120 files checked" in shown.out
    listed = [line for line in shown.out.splitlines() if line.endswith(".py")]
    assert listed == sorted(listed) and len(listed) == 60
    assert not shown.err  # which is no terminal


def test_progress_is_shown_on_a_terminal_and_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(counted("ab", 2, "files checked")) == ["a", "b"]
    shown = capsys.readouterr()
    assert shown.err == "\r1 of 2 files checked\r2 of 2 files checked\r\033[K" and not shown.out
