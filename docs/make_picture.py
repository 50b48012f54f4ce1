"""Run README.md's commands and draw docs/images/terminal.svg, or compare it (--check).

The picture shows what the commands really print. All of it can be read from the first frame on,
because many viewers show only that one; the commands then light up one after the other. It is
narrow, so that a phone shows it in letters that can be read. Numbers differ from run to run and are
not compared.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from generated import write_or_check

ROOT = Path(__file__).parent.parent

PICTURE = ROOT / "docs" / "images" / "terminal.svg"

STORY = {
    "A script written for CUDA, without a GPU:": (
        "python examples/demo_network.py 2>&1 | tail -n 1"
    ),
    "The same script with torchdevice:": "torchdevice run --quiet examples/demo_network.py",
    "The GPU that it would fit:": "torchdevice plan examples/demo_network.py | grep smallest",
    "A mistake, found on two simulated GPUs:": (
        "torchdevice run --target simulated:cuda:2 examples/two_devices_mixed_up.py 2>&1 | "
        "tail -n 1"
    ),
}
"""What is said of each command -> the command. ``tail -n 1`` keeps the last line, and ``grep WORD``
the lines that contain the word.
"""

COLUMNS = 46

_WIDTH, _ROW, _SIZE, _MARGIN = 440, 20, 15, 18
"""In pixels: the picture's width, a line's height, a letter's height, and the space around the
text.
"""

_LETTER = (_WIDTH - 2 * _MARGIN) / COLUMNS
"""The width of a letter in pixels. ``textLength`` stretches each line to it, whatever font there
is.
"""

_COLOURS = {"said": "#79c0ff", "command": "#ffffff", "text": "#c9d1d9", "error": "#ff7b72"}

_DIM = 0.6
"""How much of a line is seen before it lights up: enough to read it."""

_STEP, _LINE = 2.5, 0.15
"""Seconds between two commands, and between two lines of an output."""


class Line(NamedTuple):
    """A line of the picture.

    Attributes:
        kind: ``"said"``, ``"command"``, ``"text"`` or ``"error"``.
        text: What stands there.
        at: When it lights up, in seconds.
    """

    kind: str
    text: str
    at: float


def output_of(command: str) -> str:
    """Return what a command prints, run with this Python in the folder of the project."""
    program, *after = command.split(" | ")
    joined = program.endswith(" 2>&1")
    first, *arguments = shlex.split(program.removesuffix(" 2>&1"))
    start = [sys.executable, *(["-m", "torchdevice"] if first == "torchdevice" else [])]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")
    }
    result = subprocess.run(
        [*start, *arguments],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "TORCHDEVICE_TARGET": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else None,
        text=True,
        timeout=300,
        check=False,
    )
    if not joined and result.returncode != 0:
        raise SystemExit(f"{command!r} failed with status {result.returncode}")
    lines = result.stdout.splitlines()
    if after == ["tail -n 1"]:
        lines = lines[-1:]
    elif after:
        lines = [line for line in lines if after[0].removeprefix("grep ") in line]
    if not lines:
        raise SystemExit(
            f"{command!r} prints nothing, and the picture would show a command without an answer"
        )
    return "\n".join(lines)


def lines() -> Iterator[Line]:
    """Yield the lines of the picture; an empty text is a gap."""
    at = 0.0
    for said, command in STORY.items():
        if at:
            yield Line("text", "", at)
        yield Line("said", f"# {said}", at)
        wrapped = textwrap.wrap(
            f"$ {command}", COLUMNS - 2, subsequent_indent="    ", break_on_hyphens=False
        )
        for text in wrapped[:-1]:
            yield Line("command", f"{text} \\", at)
        yield Line("command", wrapped[-1], at)
        printed = output_of(command)
        kind = "error" if "Error" in printed else "text"
        for count, text in enumerate(printed.splitlines()):
            for part in textwrap.wrap(text, COLUMNS, break_on_hyphens=False, drop_whitespace=True):
                yield Line(kind, part, at + 1 + count * _LINE)
        at += _STEP


def picture() -> str:
    """Return the picture."""
    found = list(lines())
    height = 2 * _MARGIN + len(found) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        'role="img">',
        f"<title>{escape(', '.join(STORY.values()))}</title>",
        "<style>",
        f"text {{ font: {_SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; "
        f"white-space: pre }}",
        *(f".{kind} {{ fill: {colour} }}" for kind, colour in _COLOURS.items()),
        ".command { font-weight: bold }",
        f"@keyframes light {{ from {{ opacity: {_DIM} }} to {{ opacity: 1 }} }}",
        "@media (prefers-reduced-motion: no-preference) { text { animation: light .3s backwards } "
        "}",
        "</style>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for row, line in enumerate(found):
        if line.text:
            length = f'textLength="{len(line.text) * _LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
            place = f'x="{_MARGIN}" y="{_MARGIN + row * _ROW + _SIZE}" {length}'
            delay = f'style="animation-delay: {line.at:.2f}s"'
            parts.append(f'<text class="{line.kind}" {place} {delay}>{escape(line.text)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def without_numbers(text: str) -> str:
    """Return a picture without what differs from run to run."""
    return re.sub(r"[0-9.]+", "0", text)


def main() -> int:
    """Draw the picture. With --check, return 1 if the file differs by more than numbers."""
    return write_or_check(PICTURE, picture(), without_numbers)


if __name__ == "__main__":
    sys.exit(main())
