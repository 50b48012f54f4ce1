"""The command line: parses the arguments and runs the command."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from torchdevice.scope import features
from torchdevice.tools.cli import demo, doctor, native, report, run
from torchdevice.tools.cli.parsing import CommandParser, output
from torchdevice.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments after the command's name; None takes ``sys.argv``.

    Returns:
        The exit status of the command.

    Raises:
        SystemExit: With status 2 if the command line is invalid or cannot be carried out.
        BaseException: The errors of the program of ``torchdevice run``, ``SystemExit`` included.
    """
    with output():
        options = parser().parse_args(argv)
        if not hasattr(options, "rest"):  # else the output is the program's
            if isinstance(sys.stdout, io.TextIOWrapper):
                # For names of files that are not text.
                sys.stdout.reconfigure(errors="backslashreplace")
            try:
                return options.action(options)
            except KeyboardInterrupt:
                # A traceback would show lines of this package only.
                print("torchdevice: interrupted", file=sys.stderr)
                return 130  # as a shell reports a command that SIGINT ended
    return options.action(options)


def parser() -> CommandParser:
    """Return the parser of the command line, with all commands."""
    found = CommandParser(
        prog="torchdevice",
        description="Run CUDA-written PyTorch programs where there is no CUDA.",
        epilog=(
            "example:\n  torchdevice run train.py --epochs 3\n\n'torchdevice COMMAND --help' shows "
            "a command's flags."
        ),
    )
    found.add_argument("--version", action="version", version=f"torchdevice {__version__}")
    commands = found.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    run.add(commands)
    for feature in features.present():
        if feature.command:
            feature.imported(feature.command).add(commands)
    for command in (doctor, report, native, demo):
        command.add(commands)
    return found
