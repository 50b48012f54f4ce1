"""``torchdevice plan``: how much memory of a GPU a program needs, and which GPUs have that much."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from torchdevice.kernel.python import printable
from torchdevice.tools.cli import plans, programs, run
from torchdevice.tools.cli.parsing import add_command, show_columns

if TYPE_CHECKING:
    from torchdevice.report import Report


def add(commands: Any) -> None:
    """Add the command to a command line."""
    run.take_program(add_command(commands, "plan", _plan, world_size=programs.number, sweep=_sweep))


def _sweep(text: str) -> Any:
    from torchdevice.plan.sweeping import Sweep  # here, because most commands need none

    try:
        return Sweep.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _plan(options: argparse.Namespace) -> int:
    if options.sweep and options.rest:
        return plans.sweep(options)
    file, form = None, _form(options)
    if form != "text":
        file = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    options.plan = functools.partial(_begin, options.world_size, form, file)
    if options.target is None:
        options.target, options.memory = "simulated:cuda", options.memory or 1 << 40
    if options.world_size is not None:
        rank = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(options.world_size))
        os.environ.update(rank | size | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    options.compute, options.values = "meta", "assume"
    return run.start(options)


def _form(options: argparse.Namespace) -> str:
    """Return how a plan is written: as text, JSON or Markdown."""
    if options.json:
        return "json"
    return "markdown" if options.markdown else "text"


def _begin(ranks: int | None, form: str, file: TextIO | None) -> Callable[[Report, SystemExit | None], Any]:
    """Follow the memory of the devices from now on, and return what prints the plan at the end and returns it."""
    from torchdevice.plan import peaks

    found = peaks.Peaks()
    found.follow(ranks)

    def show(report: Report, exited: SystemExit | None) -> dict[str, Any]:
        plan = peaks.data(found, report, exited)
        _show(plan, form, file)
        return {**plan, "over time": {f"cuda:{index}": found.timeline(index) for index in sorted(found.devices)}}

    return show


def _show(plan: dict[str, Any], form: str, file: TextIO | None) -> None:
    """Print a plan, to the given file where it is not a text for a person."""
    from torchdevice.plan import rendering

    if form == "json":
        print(json.dumps(plan, indent=1), file=file, flush=True)
    elif form == "markdown":
        print(*map(printable.line, rendering.markdown(plan)), sep="\n", file=file, flush=True)
    else:
        print(f"torchdevice: plan of {plan['program']}")
        print(*map(printable.line, rendering.answer(plan)), sep="\n")
        for heading, table in rendering.tables(plan):
            print(f"\n{heading}" if heading else "")
            show_columns(table, indent="  ")
