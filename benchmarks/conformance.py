"""Where the simulation is wrong: ``python -m benchmarks.conformance --device cuda --write``, where the device is.

Runs each bug of the corpus (``tests/corpus.py``) and its correct twin on the device, each in a process of its own,
because an assertion of CUDA's ends all that follows. ``--write`` records how they ended, with the device, its driver
and torch, in ``conformance.json``, and the tests compare it with the corpus. ``--device simulated`` runs the
simulation.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent

FILE = Path(__file__).with_name("conformance.json")
"""The latest run on each device with each release of torch."""

sys.path.insert(0, str(ROOT / "tests"))

from corpus import CASES, MACS, Case  # noqa: E402
from planted_bugs import error_of  # noqa: E402

SECONDS = 300
"""How long one program may take."""


def fits(case: Case, device: str) -> bool:
    """Return whether a case can be shown on a device: it asks for no other GPU, and for no limit of memory."""
    asks = {"memory"} if device == "mps" else {"memory", "profile"}
    return device == "simulated" or ((case.kind == MACS) == (device == "mps") and asks.isdisjoint(case.options))


def outcome(case: Case, correct: bool, device: str) -> dict[str, str] | None:
    """Run a program in this process, and return the class and the text of its error; None without one."""
    torch.manual_seed(0)
    error = case.run(correct) if device == "simulated" else error_of(case.program, correct)
    return None if error is None else {"error": type(error).__name__, "text": str(error).split("\n")[0]}


def apart(case: Case, correct: bool, device: str) -> Any:
    """Do what :func:`outcome` does in another process."""
    words = ["--device", device, "--only", case.name, "--here", "twin" if correct else "bug"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.conformance", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": "TimeoutExpired", "text": f"{SECONDS} s"}
    lines = ran.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": "exit", "text": str(ran.returncode)}


def described(device: str) -> dict[str, str]:
    """Return the device, its driver and torch."""
    found = {"device": device, "driver": "", "torch": torch.__version__}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    elif device == "mps":
        found["device"], found["driver"] = platform.processor(), f"macOS {platform.mac_ver()[0]}"
    return found


def is_there(device: str) -> bool:
    """Return whether this machine has the device."""
    asked = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    return device == "simulated" or asked[device]()


def differences(outcomes: dict[str, Any]) -> Iterator[str]:
    """Yield what a device did otherwise than the corpus says."""
    for case in CASES:
        if case.name in outcomes:
            bug, twin = outcomes[case.name]["bug"], outcomes[case.name]["twin"]
            if twin is not None:
                yield f"{case.name}: the correct twin ended with {twin['error']}: {twin['text']}"
            if bug is None or not case.explains(bug["error"], bug["text"]):
                yield f"{case.name}: {case.error or 'wrong data'!r} was expected, and the bug ended with {bug}"


def main() -> int:
    """Run the cases, print the differences, and record the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "mps", "simulated"), default="cuda")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--write", nargs="?", const=FILE, type=Path, help="a file; conformance.json if none is named")
    parser.add_argument("--here", choices=("bug", "twin"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not is_there(given.device):
        parser.error(f"torch {torch.__version__} finds no {given.device} device here: run this where there is one")
    cases = [each for each in CASES if fits(each, given.device) and (not given.only or each.name in given.only)]
    if given.here:
        print(json.dumps(outcome(cases[0], given.here == "twin", given.device)))
        return 0
    run = outcome if given.device == "simulated" else apart
    outcomes = {
        each.name: {name: run(each, name == "twin", given.device) for name in ("bug", "twin")} for each in cases
    }
    wrong = list(differences(outcomes))
    print(*wrong, f"{len(cases)} cases, {len(wrong)} differences", sep="\n")
    if given.write:
        about = described(given.device)
        known = json.loads(given.write.read_text()) if given.write.exists() else []
        known = [each for each in known if {name: each[name] for name in about} != about]
        given.write.write_text(json.dumps([*known, {**about, "outcomes": outcomes}], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
