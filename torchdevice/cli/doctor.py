"""``torchdevice doctor``: which device would stand in on this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from torchdevice import __version__
from torchdevice.cli.refusals import refusals


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser("doctor", help="say which device would stand in here")
    parser.set_defaults(action=_doctor)


@refusals()
def _doctor(options: argparse.Namespace) -> int:
    # Imported here, so that a broken installation is refused in one line.
    import torch

    from torchdevice import choosing
    from torchdevice.devices.registry import runtime

    print(f"torchdevice {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"would stand in: {choosing.TorchDevice()!r}")
    for name in choosing.target_names():
        print(f"  {name}: {'available' if runtime(name).is_available() else 'not available'}")
    print("  simulated:cuda, simulated:mps, simulated:strict: available anywhere")
    return 0
