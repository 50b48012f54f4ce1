"""``torchdevice plan``: what a program needs of a GPU's memory, and which GPUs have so much."""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import TYPE_CHECKING, Any, TextIO

from torchdevice.cli import columns, ranks, run
from torchdevice.cli.parsing import CommandParser

if TYPE_CHECKING:
    from torchdevice.report import Report

_USAGE = """torchdevice plan [options] SCRIPT [args ...]
       torchdevice plan [options] -m MODULE [args ...]"""

_EXAMPLES = """The program runs without values on a simulated GPU of 1 TiB: give it one epoch, or a few steps.

examples:
  torchdevice plan train.py --max-steps 2
  torchdevice plan --target simulated:cuda:2 train.py
  torchdevice plan --json train.py > plan.json"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "plan",
        help="say what memory of a GPU a program needs, and which GPUs have it",
        description="Run a program without values, and say what memory it needs of a GPU and which GPUs have it.",
        usage=_USAGE,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print data; what the program prints goes to stderr")
    world_size = parser.add_argument(
        "--world-size",
        metavar="N",
        type=ranks.number,
        help="plan rank 0 of N, for a program that torchrun starts; the other ranks do not run",
    )
    run.take_program(parser, world_size)
    parser.set_defaults(action=functools.partial(_plan, parser), ranks=None)


def _plan(parser: CommandParser, options: argparse.Namespace) -> int:
    options.plan = _Plan(options)
    if options.target is None:
        options.target, options.memory = "simulated:cuda", options.memory or 1 << 40
    if options.world_size is not None:
        rank = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
        size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(options.world_size))
        os.environ.update(rank | size | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    options.compute, options.values = "meta", "assume"
    return run.start(parser, options)


class _Plan:
    """What the command does besides running the program."""

    def __init__(self, options: argparse.Namespace):
        self._file: TextIO | None = None
        self._ranks = options.world_size
        if options.json:
            self._file = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)

    def follow(self) -> None:
        """Follow the memory of the devices from now on."""
        from torchdevice.plan.peaks import Peaks

        self._peaks = Peaks()
        self._peaks.follow(self._ranks)

    def show(self, report: Report) -> None:
        """Print the plan."""
        from torchdevice.plan import answers

        plan = answers.data(self._peaks, report)
        if self._file is not None:
            print(json.dumps(plan, indent=1), file=self._file, flush=True)
            return
        headings = ("", "", f"\nfits, with {plan['context'] / 2**30:g} GiB for CUDA itself", "\nassumed of values")
        print(f"torchdevice: plan of {plan['program']}")
        if plan["error"]:
            print(f"The program ended early, with {plan['error']}")
        if not plan["devices"]:
            print("No memory was asked for in this process. If it starts others, plan what they run.")
        for heading, table in zip(headings, answers.rows(plan), strict=False):
            if table:
                print(*[heading] if heading else [], sep="\n")
                columns.show(table, indent="  ")
