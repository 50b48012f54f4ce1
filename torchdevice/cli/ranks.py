"""``torchdevice run --ranks N``: a program in N processes, started by torchrun's own launcher."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchdevice.devices.device_models import TARGET
from torchdevice.foundation import run_folder
from torchdevice.foundation.environment import COLLECTED
from torchdevice.foundation.interrupt_safe_exit import block
from torchdevice.options import variable_of


def launched(options: argparse.Namespace) -> list[str]:
    """Return the words that start a program in the ranks that were asked for, and give each rank a device.

    Raises:
        ValueError: The program is one that the launcher cannot start.
    """
    # The program sees a device for each rank, where nothing says how many it sees.
    if options.devices is None and variable_of("devices") not in os.environ:
        simulated = TARGET.fullmatch(options.target or os.environ.get(variable_of("target"), ""))
        if simulated is None or simulated[2] is None:
            options.devices = options.ranks
    if options.ranks > 1:  # else the launcher says in five lines that it sets one thread
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return [*launcher, *_program(options.rest)]


@block
def failing() -> Iterator[None]:
    """Say in a few lines which ranks failed, in place of the launcher's traceback, and show theirs below.

    Raises:
        SystemExit: With status 1, where a rank failed.
    """
    os.environ[COLLECTED] = "1"
    # What the launcher logs of signals and exit codes is said below, in one line for all ranks that agree.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        failures = getattr(error, "failures", None)
        if type(error).__name__ != "ChildFailedError" or not failures:
            raise
        print(*_told(failures), sep="\n", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        print(*run_folder.left(".failed"), sep="", end="", file=sys.stderr)


def _told(failures: Mapping[int, Any]) -> Iterator[str]:
    """Yield a line for the rank that failed first, and one for each way in which others ended."""
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    yield f"torchdevice: rank {first} failed first: {_end(failures[first])}."
    others = defaultdict(list)
    for rank in sorted(failures.keys() - {first}):
        others[_end(failures[rank])].append(str(rank))
    for end, ranks in others.items():
        yield f"torchdevice: {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}: {end}."


def _end(failure: Any) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    name = signal.Signals(-failure.exitcode).name
    return f"ended by {name}" + (", which the launcher sends to the others" if name == "SIGTERM" else "")


def number(text: str) -> int:
    """Return a number of ranks."""
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
