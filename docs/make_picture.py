"""Run the commands of README.md's picture and draw docs/images/terminal.svg, or check that it is up to date (--check).

The picture shows what the commands really print. Numbers differ from run to run and are not compared.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from generated import write_or_check
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent

PICTURE = ROOT / "docs" / "images" / "terminal.svg"

COMMANDS = (
    "python examples/demo_network.py 2>&1 | tail -n 1",
    "torchdevice run --quiet examples/demo_network.py",
    "torchdevice run --target simulated:cuda:2 examples/two_devices_mixed_up.py 2>&1 | tail -n 1",
)
"""What the picture shows. ``2>&1 | tail -n 1`` keeps the last line of all output."""

_TAIL = " 2>&1 | tail -n 1"


def output_of(command: str) -> str:
    """Return what a command prints, run with this Python in the folder of the project."""
    tail = command.endswith(_TAIL)
    first, *arguments = shlex.split(command.removesuffix(_TAIL))
    start = [sys.executable, *(["-m", "torchdevice"] if first == "torchdevice" else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")}
    result = subprocess.run(
        [*start, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT), "TORCHDEVICE_TARGET": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if tail else None,
        text=True,
        timeout=300,
        check=False,
    )
    if not tail and result.returncode != 0:
        raise SystemExit(f"{command!r} failed with status {result.returncode}")
    lines = result.stdout.splitlines()
    return "\n".join(lines[-1:] if tail else lines)


def picture() -> str:
    """Return the picture."""
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for index, command in enumerate(COMMANDS):
        if index:
            console.print()
        console.print(Text("$ ", style="green") + Text(command, style="bold white"), soft_wrap=False)
        text = output_of(command)
        console.print(Text(text, style="bright_red" if "Error" in text else ""))
    return console.export_svg(title="torchdevice").rstrip() + "\n"


def without_numbers(text: str) -> str:
    """Return a picture without what differs from run to run."""
    return re.sub(r"[0-9.]+", "0", text)


def main() -> int:
    """Draw the picture. With --check, return 1 if the file shows something else, apart from numbers."""
    return write_or_check(PICTURE, picture(), without_numbers)


if __name__ == "__main__":
    sys.exit(main())
