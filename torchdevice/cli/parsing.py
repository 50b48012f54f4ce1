"""How the command line is parsed, beyond what argparse does."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: it refuses what it does not know itself, with its own usage.

    Attributes:
        split: Divides the words of a command that ends in somebody else's: into its own, and the rest, which becomes
            ``rest`` in the namespace.
    """

    split: Callable[[Sequence[str]], tuple[list[str], list[str]]] | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        # A flag must be spelled out, so that a new one never takes the meaning from an old one that was shortened.
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command, and refuse the words that it does not know."""
        rest: list[str] = []
        if self.split is not None:
            args, rest = self.split(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if self.split is not None:
            found.own, found.rest = args, rest
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage of this command and what is wrong, and exit with status 2."""
        invalid = re.search(r"invalid choice: '(\S+)' \(choose from (.*)\)$", message)
        if invalid:
            message += did_you_mean(invalid[1], re.findall(r"[\w-]+", invalid[2]))
        super().error(message)


def add_command(commands: Any, name: str, description: str, epilog: str, action: Callable[[Any], int]) -> CommandParser:
    """Add a command to a command line.

    Args:
        commands: The commands of the command line.
        name: The command.
        description: What it does, in sentences. The list of commands shows the first one.
        epilog: What its help says last.
        action: Runs it with what was parsed, and returns the exit status.
    """
    help = (description[0].lower() + description[1:]).partition(". ")[0].rstrip(".")
    parser: CommandParser = commands.add_parser(name, help=help, description=description, epilog=epilog)
    parser.set_defaults(action=action)
    return parser


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` for a word that resembles a known one, else ``""``."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""
