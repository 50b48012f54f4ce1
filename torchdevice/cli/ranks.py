"""``torchdevice run --ranks N``: a program in N processes, started by torchrun's own launcher."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from torchdevice.devices.device_models import TARGET
from torchdevice.options import variable_of


def add(parser: argparse.ArgumentParser) -> argparse.Action:
    """Add the flag to a command line."""
    return parser.add_argument(
        "--ranks",
        metavar="N",
        type=_number,
        help="start the SCRIPT or MODULE N times, as torchrun does on one machine; each rank has a device, unless "
        "--devices or the target says how many there are",
    )


def launched(options: argparse.Namespace) -> list[str]:
    """Return the words that start a program in the ranks that were asked for, and give each rank a device.

    Raises:
        ValueError: The program is one that the launcher cannot start.
    """
    _give_devices(options)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return [*launcher, *_program(options.rest)]


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks. Use a whole number from 1.")
    return int(text)


def _program(words: Sequence[str]) -> list[str]:
    first, *arguments = words
    if first.startswith("-m"):
        return [*words] if first == "-m" else ["-m", first[2:], *arguments]
    if first.startswith("-") or not os.path.isfile(first):
        raise ValueError(f"--ranks cannot start {first!r} in each rank. Name a SCRIPT, or -m MODULE.")
    return [*words]


def _give_devices(options: argparse.Namespace) -> None:
    """Let the program see a device for each rank, where nothing says how many it sees."""
    if options.devices is not None or variable_of("devices") in os.environ:
        return
    simulated = TARGET.fullmatch(options.target or os.environ.get(variable_of("target"), ""))
    if simulated is None or simulated[2] is None:
        options.devices = options.ranks
