"""Where the simulation is wrong: ``benchmarks.conformance --device cuda --write``, on a GPU.

Runs each bug of the corpus (``tests/support/corpus.py``) and its correct twin on the device, each
in a process of its own, because an assertion of CUDA's ends all that follows, and asks the device
for the facts of
``tests/support/device_facts.py``.
``--write`` records how the programs ended and what the device answered, with the device, its driver
and torch, in
``conformance.json``, and the tests compare it with the corpus and the simulation. ``--device
simulated`` asks that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent

FILE = Path(__file__).with_name("conformance.json")
"""The latest run on each device with each release of torch."""

sys.path.insert(0, str(ROOT / "tests" / "support"))

from corpus import CASES, MACS, Case  # noqa: E402
from device_facts import FACTS, answers  # noqa: E402
from planted_bugs import error_of  # noqa: E402

import torchdevice  # noqa: E402

SECONDS = 300
"""How long one program may take."""


def fits(case: Case, device: str) -> bool:
    """Return whether a device can show a case, by release and number, with no memory limit."""
    if device == "simulated":
        return True
    if (
        case.since > torch.__version__
        or "memory" in case.options
        or (case.kind == MACS) != (device == "mps")
    ):
        return False
    asks_of_gpus = (
        "profile" in case.options or case.options.get("count", 1) > torch.cuda.device_count()
    )
    return device == "mps" or not asks_of_gpus


def outcome(name: str, correct: bool, device: str) -> dict[str, str] | None:
    """Run a program in this process, and return its error's class and text; None without one."""
    case = next(each for each in CASES if each.name == name)
    torch.manual_seed(0)
    if device == "simulated":
        error = case.run(correct)
    else:
        error = error_of(case.program, correct) or error_of(
            lambda _: torch.accelerator.synchronize(), correct
        )
    return (
        None
        if error is None
        else {"error": type(error).__name__, "text": str(error).split("\n")[0]}
    )


def fact(name: str, device: str) -> Any:
    """Ask the device for a fact, in this process."""
    simulated = torchdevice.simulate("h100", random="device")
    with simulated if device == "simulated" else contextlib.nullcontext():
        return answers(name)


def _answer(end: Connection, run: Callable[..., Any], *args: Any) -> None:
    end.send(run(*args))


def apart(run: Callable[..., Any], *args: Any) -> Any:
    """Call a function in another process, used by nothing else, that has imported torch."""
    # Apple's libraries do not survive a fork.
    processes = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    processes.set_forkserver_preload(["corpus", "device_facts"])
    ours, end = processes.Pipe()
    process = processes.Process(target=_answer, args=(end, run, *args))
    process.start()
    end.close()
    try:
        return (
            ours.recv()
            if ours.poll(SECONDS)
            else {"error": "TimeoutExpired", "text": f"{SECONDS} s"}
        )
    except EOFError:
        process.join()
        return {"error": "exit", "text": str(process.exitcode)}
    finally:
        process.kill()


def described(device: str) -> dict[str, str]:
    """Return the device, its driver and torch."""
    found = {"device": device, "driver": "", "torch": torch.__version__}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(
            asked, capture_output=True, text=True, check=True
        ).stdout.split()[0]
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
                yield (
                    f"{case.name}: {case.error or 'wrong data'!r} was expected, and the bug ended "
                    f"with {bug}"
                )


def main() -> int:
    """Run the cases, print the differences, and record the outcomes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "mps", "simulated"), default="cuda")
    parser.add_argument("--only", nargs="*", help="names of cases and facts")
    parser.add_argument(
        "--write",
        nargs="?",
        const=FILE,
        type=Path,
        help="a file; conformance.json if none is named",
    )
    given = parser.parse_args()
    if not is_there(given.device):
        parser.error(
            f"torch {torch.__version__} finds no {given.device} device here: run this where there "
            "is one"
        )
    only = set(given.only or ())
    cases = [
        each.name for each in CASES if fits(each, given.device) and (not only or each.name in only)
    ]
    names = [name for name in FACTS if given.device != "mps" and (not only or name in only)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        asked = {name: pool.submit(apart, fact, name, given.device) for name in names}
        ran = {
            name: {
                kind: pool.submit(apart, outcome, name, kind == "twin", given.device)
                for kind in ("bug", "twin")
            }
            for name in cases
        }
        outcomes = {
            name: {kind: each.result() for kind, each in two.items()} for name, two in ran.items()
        }
        facts = {name: each.result() for name, each in asked.items()}
    wrong = list(differences(outcomes))
    print(*wrong, f"{len(outcomes)} cases, {len(wrong)} differences", sep="\n")
    if given.write:
        about = described(given.device)
        known = json.loads(given.write.read_text()) if given.write.exists() else []
        known = [each for each in known if {name: each[name] for name in about} != about]
        given.write.write_text(
            json.dumps([*known, {**about, "outcomes": outcomes, "facts": facts}], indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
