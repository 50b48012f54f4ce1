"""``torchdevice native``: builds the kernels of simulated devices in C++, and removes them."""

from __future__ import annotations

import argparse
from typing import Any

from torchdevice.kernel.python import printable
from torchdevice.kernel.python.environment import switched_off
from torchdevice.tools.cli.parsing import CommandTexts, add_command, refusals

_TEXTS = CommandTexts(
    description="Build or remove the kernels of simulated devices in C++.",
    epilog=(
        "Simulated devices compute by kernels in Python, or several times faster by kernels in "
        "C++. "
        "These are built\n"
        "once for each torch and Python. Scopes use them unless --native never is given.\n"
        "\n"
        "examples:\n"
        "  torchdevice native build\n"
        "  torchdevice native clean"
    ),
    arguments={
        "step": {"choices": ("build", "clean"), "metavar": "build|clean", "help": "what to do"}
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "native", _native, _TEXTS)


def _native(options: argparse.Namespace) -> int:
    with refusals(), switched_off():
        from torchdevice.native import building

        if options.step == "clean":
            for path in building.clean():
                print(printable.line(f"removed {path}"))
            return 0
        if not building.is_built():
            print("compiling, which takes half a minute to two minutes ...", flush=True)
        print(printable.line(f"built: {building.build()}"))
    return 0
