"""What ``verify=`` costs, against the same scope without it. Needs the [hf] extra."""

from __future__ import annotations

from typing import Any

import torchdevice
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track
from benchmarks.simulation import CASES

WITHOUT = "without verify"

OPTIONS: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    "verify": {"verify": True},
    "every tenth call": {"verify": True, "verify_sample": 0.1},
    "every hundredth call": {"verify": True, "verify_sample": 0.01},
    "only addmm": {"verify": True, "verify_only": "addmm"},
}


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return times by what is verified for each target and case named with ``only``."""
    found = {}
    for target, device in (("cpu", "cpu"), ("simulated:cuda", "cuda")):
        scopes = {
            name: torchdevice.portable(target, **options) for name, options in OPTIONS.items()
        }
        conditions: dict[str, Any] = {
            name: lambda scope=scope: scope for name, scope in scopes.items()
        }
        for case in track(
            [case for case in CASES if only in f"{case.name}, {target}"], f"cases on {target}"
        ):
            with scopes[WITHOUT]:
                calls = dict.fromkeys(OPTIONS, case.prepare(device))
            found[f"{case.name}, {target}"] = compare(
                conditions, calls, rounds=rounds, seconds=case.seconds
            )
    return found
