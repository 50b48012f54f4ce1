"""``torchdevice completion``: a script by which a shell completes the words of this command.

The scripts are templates: ``completion.bash`` and its like.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchdevice.foundation import templates

_EXAMPLES = """examples:
  torchdevice completion bash >> ~/.bashrc
  torchdevice completion zsh >> ~/.zshrc
  torchdevice completion fish > ~/.config/fish/completions/torchdevice.fish"""


class _Flag(NamedTuple):
    """A long flag of a command: its values where they are few, and the first sentence of its help."""

    name: str
    choices: list[str]
    help: str


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "completion",
        help="print what lets a shell complete this command",
        description="Print what lets a shell complete the commands, flags and values of torchdevice.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(action=lambda options: _complete(options.shell, commands.choices))


def _complete(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    # Some commands end in the words of a program, behind flags that may be followed by a value.
    found = {name: parser for name, parser in parsers.items() if getattr(parser, "split", None) is not None}
    actions = [action for parser in found.values() for action in parser._actions if action.nargs is None]
    script = templates.filled(
        __file__,
        f"completion.{shell}",
        commands=[
            {"name": name, "flags": list(_flags(parser)), "words": list(_words(parser))}
            for name, parser in parsers.items()
        ],
        splitting=list(found),
        valued=[flag for action in actions for flag in action.option_strings],
    )
    print(script, end="")
    return 0


def _flags(parser: argparse.ArgumentParser) -> Iterator[_Flag]:
    for action in parser._actions:
        choices = list(map(str, action.choices or str(action.metavar or "").split("|")))
        said = (action.help or "").partition(".")[0].replace("%%", "%")
        for name in action.option_strings:
            if name.startswith("--"):
                yield _Flag(name, choices if len(choices) > 1 else [], said)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the values of a command's arguments, where they are few."""
    for action in parser._actions:
        yield from () if action.option_strings else action.choices or ()
