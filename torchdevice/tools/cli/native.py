"""``torchdevice native``: builds the kernels of simulated devices in C++, and removes them."""

from __future__ import annotations

import argparse
from typing import Any

from torchdevice.kernel.python import printable
from torchdevice.kernel.python.environment import switched_off
from torchdevice.tools.cli.parsing import add_command, refusals


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "native", _native)


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
