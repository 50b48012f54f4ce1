"""``torchdevice doctor``: which device will be used on this machine and why, and what to fix."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torchdevice.kernel.python.environment import switched_off
from torchdevice.tools.cli.parsing import CommandTexts, add_command, refusals, show_columns
from torchdevice.version import versions

_TEXTS = CommandTexts(
    description="Show which device will be used on this machine and why, and what to fix.",
    epilog=(
        "A line says ok, warning or problem; what to do about it stands below. The status is 1 for "
        "a problem.\n"
        "\n"
        "examples:\n"
        "  torchdevice doctor\n"
        "  torchdevice doctor --target simulated:mps\n"
        "  torchdevice doctor --json"
    ),
    arguments={
        "--target": {"help": "such as mps, cpu or simulated:mps; left out, the one that would be chosen"},
        "--json": {"action": "store_true", "help": "print data"},
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "doctor", _doctor, _TEXTS)


def _doctor(options: argparse.Namespace) -> int:
    # A broken installation is said in one line. In a scope torch would show what the scope shows.
    with refusals(), switched_off():
        from torchdevice.tools.cli import diagnostics
    found = diagnostics.examine(options.target)
    well = all(finding.status != "problem" for finding in found)
    if options.json:
        data = {"ok": well, "versions": versions(), "findings": [each._asdict() for each in found]}
        print(json.dumps(data, indent=1))
        return int(not well)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    rows = []
    for finding in found:
        rows.append((finding.status, finding.subject, finding.said))
        rows += [("", "", f"-> {finding.remedy}")] if finding.remedy else []
    show_columns(rows, indent="  ")
    return int(not well)
