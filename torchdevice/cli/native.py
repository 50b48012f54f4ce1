"""``torchdevice native``: builds the kernels of simulated devices in C++, and removes them."""

from __future__ import annotations

import argparse
import time
from typing import Any

from torchdevice.cli.usage_errors import refusals
from torchdevice.foundation.environment import switched_off

_EXAMPLES = """Simulated devices compute by kernels in Python, or several times faster by kernels in C++ that are
built once for each torch and Python. Scopes use them where they are built; the option native= says otherwise.

examples:
  torchdevice native build
  torchdevice native clean"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "native",
        help="build or remove the kernels of simulated devices in C++",
        description="Build or remove the kernels of simulated devices in C++.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("step", choices=("build", "clean"), help="what to do")
    parser.set_defaults(action=_native)


def _native(options: argparse.Namespace) -> int:
    with refusals(), switched_off():
        from torchdevice.simulation.native import building

        if options.step == "clean":
            for path in building.clean():
                print(f"removed {path}")
            return 0
        found = building.path()
        if found.is_file():
            print(f"already built: {found}")
            return 0
        print("compiling, which takes half a minute to two minutes ...", flush=True)
        start = time.monotonic()
        building.build()
        print(f"built in {time.monotonic() - start:.0f} s: {found}")
    return 0
