"""``torchdevice doctor``: which device will be used on this machine and why, and what to fix."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torchdevice.kernel.python.environment import switched_off
from torchdevice.tools.cli.parsing import CommandTexts, add_command, refusals, show_columns
from torchdevice.version import versions

_TEXTS = CommandTexts(
    description="Show which device will be used on this machine and why, and what to fix.",
    epilog=(
        "Each line is ok, a warning or a problem, with the remedy below it. The status is 1 for a "
        "problem.\n"
        "\n"
        "examples:\n"
        "  torchdevice doctor\n"
        "  torchdevice doctor --target simulated:mps\n"
        "  torchdevice doctor --target mps --report\n"
        "  torchdevice doctor --json"
    ),
    arguments={
        "--target": {
            "help": "such as mps, cpu or simulated:mps; left out, the one that would be chosen"
        },
        "--report": {
            "nargs": "?",
            "const": True,
            "metavar": "FILE",
            "help": (
                "run the tests of torchdevice_selftest on the target, in about a minute, and print "
                "a text to send; with =FILE write it. Needs pytest"
            ),
        },
        "--json": {"action": "store_true", "help": "print data"},
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "doctor", _doctor, _TEXTS)


def _doctor(options: argparse.Namespace) -> int:
    if options.json and options.report is not None:
        options.parser.error("--report is a text, and --json asks for data. Leave one of them out.")
    # A broken installation is one line. In a scope torch would show what the scope shows.
    with refusals(), switched_off():
        from torchdevice.scope.target_selection import known_targets
        from torchdevice.tools.cli import diagnostics, doctor_report
    found = diagnostics.examine(options.target)
    well = all(finding.status != "problem" for finding in found)
    # A target that is not there runs no tests: the findings below name the missing parts.
    has_device = any(
        finding.subject == "device" and finding.status != "problem" for finding in found
    )
    if options.report is not None and has_device:
        with refusals(), switched_off():
            target = diagnostics.target_of(options.target)
            print(
                f"torchdevice: running the tests of {doctor_report.TESTS} on {target}",
                file=sys.stderr,
            )
            results = doctor_report.results(target)
        _write(doctor_report.text(target, found, results), options.report)
        print(f"torchdevice: {doctor_report.where_to_send()}", file=sys.stderr)
        return int(not well or any(result.outcome == "failed" for result in results))
    if options.json:
        listed = [each._asdict() for each in found]
        data = {"ok": well, "versions": versions(), "targets": known_targets(), "findings": listed}
        print(json.dumps(data, indent=1))
        return int(not well)
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    rows = []
    for finding in found:
        rows.append((finding.status, finding.subject, finding.said))
        rows += [("", "", f"-> {finding.remedy}")] if finding.remedy else []
    show_columns(rows, indent="  ")
    return int(not well)


def _write(text: str, file: str | bool) -> None:
    """Print a report, or write it to the file that the flag names."""
    if isinstance(file, str):
        with refusals():
            Path(file).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
