"""Texts from outside that are printed: none of them may command the terminal or forge a line."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command, run_python

import torchdevice
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.python import logs, printable, rank_notes, styled_text
from torchdevice.report import Report
from torchdevice.tools.cli import main, parsing, rank_summary

pytestmark = pytest.mark.one_engine

EVIL = "\x1b[2J\x1b]0;title\x07\r\x08\x9b31m\u202egnp\u2066"
"""Clears the screen, sets the title, goes back to the first column, and turns a text round."""


def commands(text: str) -> list[str]:
    """Return the characters of a text that are not shown, but obeyed."""
    return [each for each in text if not each.isprintable() and each not in "\n\t"]


def test_every_control_character_is_escaped() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = printable.lines(every)
    obeyed = set(commands(shown)) - {each for each in every if each.isspace()}
    # What is left has no shape or no meaning yet, and no terminal obeys it: unassigned or private.
    assert not [each for each in obeyed if ord(each) < 0xA0 or 0xD800 <= ord(each) <= 0xDFFF]
    assert not obeyed & set(EVIL)
    assert (
        "\n" in shown and "\n" not in printable.line(every) and "é\t中" in printable.line("é\t中")
    )


def made_evil(data: Any) -> Any:
    """Return plain data with the characters after each text but keys and names of kinds."""
    if isinstance(data, dict):
        kept = {"fidelity", "end", "written_for", "group"}
        return {key: each if key in kept else made_evil(each) for key, each in data.items()}
    if isinstance(data, list):
        return [made_evil(each) for each in data]
    return f"{data}{EVIL}" if isinstance(data, str) else data


@pytest.fixture(scope="module")
def foreign() -> Report:
    with torchdevice.portable("cpu") as scope:
        torch.ones(2, device="cuda").cpu()
    return Report.from_dict(made_evil(scope.report().to_dict()))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_foreign_report(
    foreign: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "\\x1b[2J" in str(foreign) and not commands(str(foreign))
    terminal = Terminal()
    foreign.show(terminal)
    coloured = terminal.getvalue()
    assert (
        "\\x1b[2J" in coloured
        and "\x1b[2J" not in coloured
        and "\u202e" not in coloured
        and "\r" not in coloured
    )
    (tmp_path / "evil.json").write_text(foreign.to_json())
    assert main.main(["report", str(tmp_path / "evil.json")]) == 0
    assert not commands(capsys.readouterr().out)


def test_a_line_stays_one() -> None:
    assert styled_text.plain(["name\nforged", (("a\n", ""), ("b", ""))]) == "name\\nforged\na\\nb"


def test_names_and_sources_that_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    (folder / f"a{EVIL}.py").write_text("import torch\ntorch.cuda.synchronize()  # \x1b[2J\u202e\n")
    (folder / f"b{EVIL}.py").write_bytes(b"\xff")
    (folder / f"c{EVIL}.py").symlink_to(__file__)
    assert main.main(["check", "--all", str(folder)]) == 1
    shown = capsys.readouterr()
    assert "\\x1b[2J" in shown.out and not commands(shown.out)
    assert "\\x1b[2J" in shown.err and not commands(shown.err)
    with pytest.raises(SystemExit):
        main.main(["check", f"{folder}/no{EVIL}"])
    with pytest.raises(SystemExit):
        main.main(["check", f"--{EVIL}"])
    assert not commands(capsys.readouterr().err)


def _refuse() -> None:
    with pytest.raises(SystemExit), parsing.refusals():
        raise NotSupportedError(EVIL, "")


def _show_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    note = rank_notes.Failure(0, 0.0, EVIL, EVIL, f"Traceback:\n{EVIL}\n")
    monkeypatch.setattr(rank_notes, "failures", lambda: {0: note})
    error = type("ChildFailedError", (Exception,), {"failures": {0: None}})
    with pytest.raises(SystemExit), rank_summary.shown(1):
        raise error


def _log() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logs._attach(handler)
    try:
        logs.logger.warning("%s is odd", EVIL)
    finally:
        logs.logger.removeHandler(handler)
    print(stream.getvalue(), file=sys.stderr)


PRINTED: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "an error of a command": lambda patch: _refuse(),
    "a table": lambda patch: (
        parsing.show_columns([(EVIL, "x", EVIL)]),
        print("\\x1b[2J", file=sys.stderr),
    ),
    "tracebacks of ranks": _show_failures,
    "a log": lambda patch: _log(),
}


@pytest.mark.parametrize("what", PRINTED)
def test_what_is_printed(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.environ.copy()
    PRINTED[what](monkeypatch)
    os.environ.clear()
    os.environ.update(before)
    shown = capsys.readouterr()
    assert "\\x1b[2J" in shown.err and not commands(shown.err) and not commands(shown.out)


def test_a_plan_of_a_program_that_fails() -> None:
    done = run_command("plan", "-c", f"raise type({EVIL!r}, (Exception,), {{}})")
    assert "did not finish: \\x1b[2J" in done.stdout and not commands(done.stdout)


def test_a_process_that_cannot_have_a_scope() -> None:
    done = run_python(
        "-c", "import torch", TORCHDEVICE="1", TORCHDEVICE_TARGET=EVIL.replace("\r", "")
    )
    assert "\\x1b[2J" in done.stderr and not commands(done.stderr)
