"""``torchdevice doctor``: what would stand in on this machine and why, and what is in the way."""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

from torchdevice.cli import check, columns
from torchdevice.cli.usage_errors import refusals
from torchdevice.foundation.environment import switched_off
from torchdevice.version import versions

_EXAMPLES = """With PATHs this is 'torchdevice check', for the device that would be chosen.
A line says ok, warning or problem; what to do about it stands below. The status is 1 for a problem.

examples:
  torchdevice doctor
  torchdevice doctor --target simulated:mps
  torchdevice doctor train.py
  torchdevice doctor --json"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "doctor",
        help="say what would stand in here and why, and what is in the way",
        description="Say what would stand in on this machine and why, and what is in the way.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="check these sources, as 'torchdevice check'")
    check.add_flags(parser, None)
    parser.set_defaults(action=functools.partial(_doctor, parser))


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.paths:
        return _check(options)
    if options.select or options.ignore or options.sarif:
        parser.error("--select, --ignore and --sarif need a PATH")
    # A broken installation is said in one line. In a scope torch would show what the scope shows.
    with refusals(), switched_off():
        from torchdevice.cli import diagnostics
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
    columns.show(rows, indent="  ")
    return int(not well)


def _check(options: argparse.Namespace) -> int:
    """Check sources for the device that would be chosen."""
    with refusals(), switched_off():
        from torchdevice import options as _options
        from torchdevice import target_selection

        asked = _options.chosen({"target": options.target})
        options.target = asked.target or target_selection.resolve(asked)[0].target
    return check.check(options.paths, options)
