"""Parsing of the command line beyond argparse's, and commands' tables and endings."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from torchdevice.errors import TorchDeviceError
from torchdevice.kernel.python import printable
from torchdevice.kernel.python.interrupt_safe_exit import block


@block
def refusals() -> Iterator[None]:
    """Turn an error of the options or of the installation into one line on stderr.

    Raises:
        SystemExit: With status 2, for every such error.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (TorchDeviceError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"torchdevice: {printable.line(' '.join(str(error).split()))}", file=sys.stderr)
        raise SystemExit(2) from None


@block
def output() -> Iterator[None]:
    """End a command quietly if its output is closed, as by ``head``.

    Raises:
        SystemExit: With status 1, where nobody reads on.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        # Python flushes what is left at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


class CommandTexts(NamedTuple):
    """The help of a command, and its arguments.

    Attributes:
        description: One or more sentences. The list of commands shows the first one.
        usage: How the command is called; None to show all its arguments.
        epilog: The text below the arguments.
        arguments: Argument -> its keyword arguments in ``add_argument``.
        headings: Heading of the help -> the arguments below it. Others stand among the common
            options.
    """

    description: str
    usage: str | None = None
    epilog: str | None = None
    arguments: Mapping[str, Mapping[str, Any]] = {}
    headings: Mapping[str, Sequence[str]] = {}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the terminal's width, except those with indented lines: examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filler = textwrap.TextWrapper(
            width, initial_indent=indent, subsequent_indent=indent, break_long_words=False
        )
        filler.break_on_hyphens = False  # a flag stays one word
        filled = []
        for paragraph in text.split("\n\n"):
            has_examples = "\n  " in paragraph
            filled.append(
                textwrap.indent(paragraph, indent) if has_examples else filler.fill(paragraph)
            )
        return "\n\n".join(filled)


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: it rejects unknown words itself, with its own usage.

    Attributes:
        ends_in_program: Whether the command ends in words of a program, which become ``rest`` in
            the namespace.
    """

    ends_in_program = False

    def __init__(self, *args: Any, **kwargs: Any):
        # A flag must be spelled out, so that a new flag never changes an abbreviation's meaning.
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command, and refuse the words that it does not know."""
        rest: Sequence[str] = []
        if self.ends_in_program:
            args, rest = self._split(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            meant = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if self.ends_in_program:
            found.own, found.rest = args, rest
        return found, unknown

    def _split(self, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
        """Return the words of this command, and those from the program on."""
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] != "-":
            if words[index][:2] in ("-m", "-c"):
                break
            if words[index] == "--":
                return words[:index], words[index + 1 :]
            flag = self._option_string_actions.get(words[index])
            following = words[index + 1 : index + 2]
            # A flag with an optional value takes it behind '='. Without this, the page or the data
            # would be run.
            if (
                flag is not None
                and flag.nargs == "?"
                and following
                and following[0].endswith((".html", ".json"))
            ):
                self.error(
                    f"{following[0]!r} is not a program; write {words[index]}={following[0]}"
                )
            index += 2 if flag is not None and flag.nargs is None else 1
        return words[:index], words[index:]

    def error(self, message: str) -> NoReturn:
        """Print the usage of this command and the error, and exit with status 2."""
        invalid = re.search(r"invalid choice: '(\S+)' \(choose from (.*)\)$", message)
        if invalid:
            is_program = invalid[1].endswith(".py") or os.path.isfile(invalid[1])
            run = f" (did you mean `{self.prog} run {invalid[1]}`?)"
            message += (
                run if is_program else did_you_mean(invalid[1], re.findall(r"[\w-]+", invalid[2]))
            )
        super().error(printable.lines(message))


def add_command(
    commands: Any, name: str, action: Callable[[Any], int], texts: CommandTexts, **types: Any
) -> CommandParser:
    """Add a command. The list of commands shows the first sentence of its description.

    Args:
        commands: The commands of the command line.
        name: The command.
        action: Runs it with the parsed arguments, and returns the exit status. ``parser`` in the
            namespace is its parser.
        texts: Its help and its arguments.
        **types: Argument -> the function that makes its value from a text.
    """
    help = (texts.description[0].lower() + texts.description[1:]).partition(". ")[0].rstrip(".")
    parser: CommandParser = commands.add_parser(
        name, help=help, description=texts.description, usage=texts.usage, epilog=texts.epilog
    )
    places: dict[str, argparse._ActionsContainer] = {}
    for heading, arguments in texts.headings.items():
        places |= dict.fromkeys(arguments, parser.add_argument_group(heading))
    for argument, more in texts.arguments.items():
        name = argument.lstrip("-").replace("-", "_")
        kind = {"type": types[name]} if name in types else {}
        places.get(argument, parser).add_argument(argument, **more, **kind)
    parser.set_defaults(action=action, parser=parser)
    return parser


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean ...?)"`` for a word that resembles a known one, else ``""``."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


_LEAST = 30
"""The least width of the last column."""


def show_columns(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Print rows as columns. The last one is wrapped between words, unless output is a file."""
    rows = [[printable.line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    screen = shutil.get_terminal_size((1 << 20, 0)).columns
    for row in rows:
        cells = (f"{cell:{width}}  " for cell, width in zip(row, widths, strict=False))
        first = indent + "".join(cells)
        wrapper = textwrap.TextWrapper(max(screen, len(first) + _LEAST), first, " " * len(first))
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        print(wrapper.fill(row[-1]).rstrip() or first.rstrip())
