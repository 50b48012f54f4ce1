"""Where a command writes its report, and ``torchdevice report``, which shows such files."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdevice.kernel.python import printable
from torchdevice.kernel.python.logs import logger
from torchdevice.tools.cli.parsing import CommandTexts, add_command, refusals

if TYPE_CHECKING:
    from torchdevice.report import Report


def output_file(*endings: str) -> Callable[[str], str]:
    """Return an argparse type for a file to be written, with one of two endings."""

    def checked(path: str) -> str:
        if not path.endswith(endings):
            raise argparse.ArgumentTypeError(f"{path!r} is neither FILE{' nor FILE'.join(endings)}")
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise argparse.ArgumentTypeError(f"{path!r}: there is no folder {folder!r}")
        return os.path.abspath(path)

    return checked


def add_report_flag(add: Callable[..., Any], flag: str = "--report") -> None:
    """Add a report's flag by ``add_argument`` of argparse or ``addoption`` of pytest."""
    add(
        flag,
        type=output_file(".html", ".json"),
        nargs="?",
        const=True,
        metavar="FILE",
        help=(
            "print a report of rewritten calls at the end; with =FILE write a page (FILE.html) or "
            "data (FILE.json)"
        ),
    )


def show_report(file: str | bool, report: Report) -> None:
    """Print a report on stderr, or write it to a file if one is named."""
    if not isinstance(file, str):
        report.show(sys.stderr)
    else:
        _write(file, report.to_html() if file.endswith(".html") else report.to_json(), "the report")


def show_verified(file: str | bool, report: Report, *, quiet: bool) -> None:
    """Print the findings of ``verify=`` on stderr, and write them to a file if one is named.

    Args:
        file: The file.
        report: The report of the run.
        quiet: Whether to print nothing, because the report is printed too.
    """
    if isinstance(file, str):
        _write(file, json.dumps(report.verification, indent=1), "what was verified")
    if not quiet and logger.isEnabledFor(logging.WARNING):
        from torchdevice.report import formatting, rendering

        said = f"torchdevice: {formatting.verified(report)}", *rendering.findings(report)
        print(*map(printable.line, said), sep="\n", file=sys.stderr)


def _write(file: str, text: str, what: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"torchdevice: {what} could not be written: {error}", file=sys.stderr)
    else:
        if logger.isEnabledFor(logging.WARNING):
            print(f"torchdevice: {what} is in {file}", file=sys.stderr)


_TEXTS = CommandTexts(
    description="Show reports that 'torchdevice run --report=FILE.json' wrote, several as one.",
    epilog=(
        "examples:\n  torchdevice report monday.json\n  torchdevice report monday.json "
        "tuesday.json --html both.html"
    ),
    arguments={
        "files": {
            "nargs": "+",
            "metavar": "FILE.json",
            "help": "files that 'run --report=FILE.json' wrote",
        },
        "--html": {"metavar": "FILE", "help": "write one page instead of printing"},
        "--json": {"metavar": "FILE", "help": "write data instead of printing"},
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "report", _report, _TEXTS)


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
            f"{path!r} is not a report of torchdevice. Name a file that 'torchdevice run "
            "--report=FILE.json' wrote."
        ) from None
