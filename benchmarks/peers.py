"""Other ways to run a CUDA program on a CPU, measured too: ``python -m benchmarks --peers``.

Each way runs in a process of its own (:mod:`benchmarks.one_way`), and each figure is a ratio to the
program edited by hand for the CPU, measured in the same process. Each package is installed into a
temporary environment, which takes torch and everything else from the environment that runs the
command. A package that PyPI lacks, or a checkout, is named by ``--peer-source NAME=FOLDER``, where
``FOLDER`` contains the package that is imported.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import one_way
from benchmarks.progress import track

ROOT = Path(__file__).parent.parent


class Peer(NamedTuple):
    """A package that does the same work.

    Attributes:
        module: What a program imports to have its effect.
        requirement: What pip installs; None where PyPI does not have it.
    """

    module: str
    requirement: str | None


PEERS = {
    "mpsify": Peer("mpsify", "mpsify"),
    "torchada": Peer("torchada", "torchada"),
    "TorchDevice": Peer("TorchDevice", None),
    "transfer_to_npu": Peer("torch_npu.contrib.transfer_to_npu", "torch_npu"),
}

WAYS = (one_way.EDITED, one_way.CONTEXT, *one_way.OURS, *PEERS)

_LOSS = 1.05
"""The ratio from which this package counts as slower than the program edited by hand."""

Results = dict[str, Any]


def measure(
    ways: Sequence[str],
    sources: Mapping[str, str],
    *,
    rounds: int = 15,
    only: str = "",
    repeats: int = 3,
) -> dict[str, Results]:
    """Measure ways to run a CUDA program on a CPU.

    Args:
        ways: Names in ``WAYS``; all of them if empty.
        sources: Name of a peer -> folder that contains its package.
        rounds: Measurements of each case in each process.
        only: Measure only cases whose name contains this.
        repeats: How many processes measure each way. The ways take turns, so that a slow moment
            slows all of them.

    Returns:
        Way -> case -> median of the ratios, or the text of the error, as :func:`one_way.measure`
        gives them.
    """
    with tempfile.TemporaryDirectory() as folder:
        chosen = ways or WAYS
        # One for each: transformers imports what lies in its environment, torch_npu for example.
        pythons = {way: _environment(Path(folder, way)) for way in chosen}
        errors = {way: _provide(way, pythons[way], sources) for way in chosen}
        turns = [way for _ in range(repeats) for way in chosen if errors[way] is None]
        measured: dict[str, list[Results]] = {}
        for way in track(turns, "ways"):
            measured.setdefault(way, []).append(_run(way, pythons[way], sources, rounds, only))
    return {
        way: _median(measured[way]) if way in measured else {"error": errors[way]} for way in chosen
    }


def _environment(folder: Path) -> Path:
    """Make an environment with this one's packages and this checkout. Return its Python."""
    venv.create(folder, symlinks=os.name != "nt")
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    own.joinpath("after.pth").write_text(
        "\n".join([*(path for path in sys.path if "site-packages" in path), str(ROOT)])
    )
    return Path(sysconfig.get_path("scripts", "venv", paths)) / Path(sys.executable).name


def _provide(way: str, python: Path, sources: Mapping[str, str]) -> str | None:
    """Install the package of a way if it has one. Return why it cannot be had, or None."""
    peer = PEERS.get(way)
    if peer is None or way in sources:
        return None
    if peer.requirement is None:
        return f"not on PyPI; measured with `--peer-source {way}=FOLDER`"
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "1",
        "--timeout",
        "15",
        "--quiet",
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        *options,
        peer.requirement,
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    return None if ran.returncode == 0 else f"pip could not install it: {_last_line(ran.stderr)}"


def _run(way: str, python: Path, sources: Mapping[str, str], rounds: int, only: str) -> Results:
    environment = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": sources.get(way, ""),
    }
    module = PEERS[way].module if way in PEERS else way
    cases = [part for name in one_way.CASES if only in name for part in ("--case", name)]
    command = [str(python), "-m", "benchmarks.one_way", module, "--rounds", str(rounds), *cases]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=python.parent
    )
    if ran.returncode:
        return {"error": f"the process ended with {ran.returncode}: {_last_line(ran.stderr)}"}
    results: Results = json.loads(ran.stdout)
    return results


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "no output")


def _median(repeated: list[Results]) -> Results:
    """Return the median of each figure; what is text is the same each time."""
    first = repeated[0]
    return {
        name: value
        if isinstance(value, str)
        else statistics.median(results[name] for results in repeated)
        for name, value in first.items()
    }


# ---- the table -----------------------------------------------------------------------------------


def table(measured: Mapping[str, Results], only: str) -> str:
    """Return the figures in Markdown, with losses against peers in bold and failures below."""
    cases = ["import", *(name for name in one_way.CASES if only in name)]
    reasons: dict[str, int] = {}
    rows = [
        [way, *(_cell(way, case, results, reasons) for case in cases)]
        for way, results in measured.items()
    ]
    lines = [["", *cases], ["---"] * (len(cases) + 1), *rows]
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(
        ["| " + " | ".join(line) + " |" for line in lines] + ([""] if notes else []) + notes
    )


def _cell(way: str, case: str, results: Results, reasons: dict[str, int]) -> str:
    """Return a ratio, or the number of the reason without one, and the ratio for ``cpu`` lines."""
    found = results.get(case, results.get("error"))
    if isinstance(found, float):
        return f"**{found:.2f}**" if way in one_way.OURS and found >= _LOSS else f"{found:.2f}"
    number = reasons.setdefault(str(found), len(reasons) + 1)
    edited = results.get(f"{case}, cpu")
    return f"fails ({number})" + (f", `cpu` {edited:.2f}" if edited else "")
