"""``torchdevice report``: show reports that ``torchdevice run --report=FILE.json`` wrote."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torchdevice.cli.parsing import add_command
from torchdevice.cli.usage_errors import refusals


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "report", _report)


def _report(options: argparse.Namespace) -> int:
    with refusals():
        from torchdevice.report import Report

        first, *others = [_read(Report, path) for path in options.files]
        report = first.joined(others)
        if options.html:
            Path(options.html).write_text(report.to_html(), encoding="utf-8")
        if options.json:
            Path(options.json).write_text(report.to_json(), encoding="utf-8")
    if not options.html and not options.json:
        report.show()
    return 0


def _read(kind: Any, path: str) -> Any:
    try:
        return kind.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{path!r} is not a report of torchdevice. Name a file that 'torchdevice run --report=FILE.json' wrote."
        ) from None
