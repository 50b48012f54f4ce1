"""The page of the command line, made from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from torchdevice.kernel.options import COMMON
from torchdevice.tools.cli.main import parser
from torchdevice.tools.cli.parsing import CommandParser

HEADER = """# Command line

The commands and their flags. `torchdevice COMMAND --help` prints the same.
"""


def commands() -> Iterator[tuple[str, CommandParser]]:
    """Yield each command and its parser."""
    for action in parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def usage(name: str, command: CommandParser) -> str:
    """Return a command's usage line, which argparse would break at the terminal's width."""
    if command.usage:
        return "\n".join(line.strip() for line in command.usage.splitlines())
    words = [
        f"{value(action)} ..." if action.nargs == "+" else value(action)
        for action in positionals(command)
    ]
    return " ".join(["torchdevice", name, "[options]", *words])


def positionals(command: CommandParser) -> list[argparse.Action]:
    """Return the arguments that are no flags."""
    return [action for action in command._actions if not action.option_strings]


def value(action: argparse.Action) -> str:
    """Return how the value of an argument is called."""
    name = (
        "|".join(map(str, action.choices))
        if action.choices
        else str(action.metavar or action.dest.upper())
    )
    return f"[{name}]" if not action.option_strings and action.nargs == "?" else name


def row(action: argparse.Action) -> str:
    """Return the row of an argument."""
    shown = {0: "", "?": f"[={value(action)}]"}.get(action.nargs, f" {value(action)}")  # type: ignore[arg-type]
    names = [f"`{name}{shown}`" for name in action.option_strings] or [f"`{value(action)}`"]
    cells = [", ".join(names), str(action.help)]
    return "".join(f"| {cell.replace('|', chr(92) + '|')} " for cell in cells) + "|\n"


def section(name: str, command: CommandParser) -> str:
    """Return the section of a command."""
    called = f"```text\n{usage(name, command)}\n```"
    return f"\n## {name}\n\n{command.description}\n\n{called}\n\n{''.join(tables(command))}{epilog(command)}"


def tables(command: CommandParser) -> Iterator[str]:
    """Yield a table per heading of a command's help; commands with few arguments get one."""
    groups = [(group.title, described(group._group_actions)) for group in command._action_groups]
    if not any(title == COMMON for title, _ in groups):
        groups = [("argument", described(command._actions))]
    for title, actions in groups:
        if actions:
            yield f"| {title} | what it does |\n|---|---|\n" + "".join(map(row, actions)) + "\n"


def described(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    """Return the arguments that the page describes."""
    return [action for action in actions if action.help and action.dest != "help"]


def epilog(command: CommandParser) -> str:
    """Return what stands below a command's arguments: text, and examples."""
    text, found, examples = (command.epilog or "").partition("example")
    lines = [
        line.strip() for line in examples.partition("\n")[2].splitlines() if line.startswith("  ")
    ]
    after = [
        line
        for line in examples.partition("\n")[2].splitlines()
        if line and not line.startswith("  ")
    ]
    shown = "```sh\n" + "\n".join(lines) + "\n```\n" if found else ""
    return "\n\n".join(part for part in (text.strip(), shown, "\n".join(after)) if part)


def page() -> str:
    """Return the page."""
    return HEADER + "".join(section(name, command) for name, command in commands())
