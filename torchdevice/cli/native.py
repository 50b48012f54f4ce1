"""``torchdevice native``: builds the kernels of simulated devices in C++, and removes them."""

from __future__ import annotations

import argparse
from typing import Any

from torchdevice.cli.parsing import add_command
from torchdevice.cli.usage_errors import refusals
from torchdevice.foundation.environment import switched_off

_EXAMPLES = """Simulated devices compute by kernels in Python, or several times faster by kernels in C++ that are
built once for each torch and Python. Scopes use them where they are built; the option native= says otherwise.

examples:
  torchdevice native build
  torchdevice native clean"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = add_command(
        commands, "native", "Build or remove the kernels of simulated devices in C++.", _EXAMPLES, _native
    )
    parser.add_argument("step", choices=("build", "clean"), help="what to do")


def _native(options: argparse.Namespace) -> int:
    with refusals(), switched_off():
        from torchdevice.simulation.native import building

        if options.step == "clean":
            print("".join(f"removed {path}\n" for path in building.clean()), end="")
            return 0
        if not building.path().is_file():
            print("compiling, which takes half a minute to two minutes ...", flush=True)
        print(f"built: {building.build()}")
    return 0
