"""``torchdevice plan --sweep`` and ``--baseline``: what is done with plans that other processes of the command make."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torchdevice.kernel.python import printable, styled_text
from torchdevice.tools.cli.parsing import show_columns

_OF_PARENT = {"--sweep": 1, "--json": 0, "--markdown": 0, "--report": 0}
"""The command's flags that the other processes do not get, and the number of words after each."""


def sweep(options: argparse.Namespace) -> int:
    """Plan a program for each combination of the values that ``--sweep`` names, and show one table.

    Returns:
        The exit status: 1 if a plan did not finish.
    """
    from torchdevice.plan import sweeping

    sweeps = options.sweep
    combinations = sweeping.combinations(sweeps)
    plans: dict[int, dict[str, Any]] = {}
    ended = sweeping.planned(_words_of_children(options.own), options.rest, combinations)
    try:
        plans.update(styled_text.counted(ended, len(combinations), "plans made"))
    except sweeping.Interrupted:
        print(f"torchdevice: interrupted after {len(plans)} of {len(combinations)} plans", file=sys.stderr)
    found = sweeping.data(sweeps, plans)
    _show(options, found, sweeping.tables(found), " ".join(options.rest))
    return int(len(plans) < len(combinations) or not all(each["finished"] for each in plans.values()))


def _words_of_children(own: Sequence[str]) -> list[str]:
    """Return the command's words without the flags that only the process in front has."""
    found: list[str] = []
    left_out = 0
    for word in own:
        flag, equals, _ = word.partition("=")
        if left_out:
            left_out -= 1
        elif flag in _OF_PARENT:
            left_out = 0 if equals else _OF_PARENT[flag]
        else:
            found.append(word)
    return found


def _show(options: argparse.Namespace, found: Any, tables: Iterable[tuple[str, Any]], program: str) -> None:
    """Print a sweep as text, JSON or Markdown."""
    from torchdevice.plan import rendering

    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"### Memory of `{program}`" if options.markdown else printable.line(f"torchdevice: plans of {program}"))
    for heading, rows in tables:
        if heading:
            print(f"\n{rendering.sentence(heading)}:" if options.markdown else f"\n{heading}")
        if options.markdown:
            print("", *map(printable.line, rendering.markdown_table(rows)), sep="\n")
        else:
            show_columns(rows, indent="  ")
