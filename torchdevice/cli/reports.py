"""Where a command says what was rewritten: on a stream, or in a file."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import TYPE_CHECKING

from torchdevice.logs import logger

if TYPE_CHECKING:
    from torchdevice.report import Report


def report_file(path: str) -> str:
    """Return a path that a report can be written to.

    Raises:
        argparse.ArgumentTypeError: It cannot.
    """
    if not path.endswith((".html", ".json")):
        raise argparse.ArgumentTypeError(f"{path!r} is neither FILE.html nor FILE.json")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{path!r}: there is no folder {folder!r}")
    return os.path.abspath(path)


def show_report(file: str | bool, report: Report) -> None:
    """Print a report on stderr, or write it to a file if one is named."""
    if not isinstance(file, str):
        report.show(sys.stderr)
        return
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(report.to_html() if file.endswith(".html") else report.to_json())
    except OSError as error:
        print(f"torchdevice: the report could not be written: {error}", file=sys.stderr)
    else:
        if logger.isEnabledFor(logging.WARNING):
            print(f"torchdevice: the report is in {file}", file=sys.stderr)
