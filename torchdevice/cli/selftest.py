"""``torchdevice doctor --selftest``: the core of the contract tests on one's own device, and a text for an issue."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

from torchdevice import activation, target_selection
from torchdevice import options as _options
from torchdevice.cli import mps_probes
from torchdevice.cli.progress import track
from torchdevice.cli.selftest_checks import CHECKS
from torchdevice.devices.mps_runtime import MpsRuntime
from torchdevice.errors import PortabilityWarning
from torchdevice.version import versions


class Result(NamedTuple):
    """What a check found.

    Attributes:
        feature: What was checked.
        error: The error, "" where the check passed.
        seconds: How long it took.
        on_cpu: How many calls ran on the CPU, because the device cannot make them.
    """

    feature: str
    error: str
    seconds: float
    on_cpu: int


def run(target: str | None) -> Iterator[Result]:
    """Run each check in a scope of its own on a target; None for the one that a scope would choose."""
    for feature, check in track(list(CHECKS.items()), "selftest"):
        start, error = time.perf_counter(), ""
        scope = activation.portable(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PortabilityWarning)
            try:
                with scope:
                    check()
            except Exception as raised:
                error = f"{type(raised).__name__}: {str(raised).strip() or 'no text'}"
        fell_back = sum(entry.count for entry in scope.journal.degraded if entry.fidelity.value == "fell back")
        yield Result(feature, error, time.perf_counter() - start, fell_back)


def selftest(target: str | None, *, as_json: bool) -> int:
    """Run all checks and experiments, show them, and return the status: 1 where a check failed."""
    found = target_selection.resolve(_options.chosen({"target": target}))[0]
    results = list(run(target))
    is_mac = isinstance(found, MpsRuntime) and found.simulated_by is None
    answers = dict(mps_probes.decide()) if is_mac else {}
    failed = [result for result in results if result.error]
    if as_json:
        about = {"target": found.target, "device": found.name(0), "platform": platform.platform()}
        print(
            json.dumps(
                {
                    "ok": not failed,
                    "versions": versions(),
                    **about,
                    "results": [result._asdict() for result in results],
                    "experiments": answers,
                },
                indent=1,
            )
        )
    else:
        print(_text(found.target, found.name(0), results, answers))
    return int(bool(failed))


def _text(target: str, name: str, results: list[Result], answers: dict[str, str]) -> str:
    """Return what a user pastes into an issue."""
    failed = sum(bool(result.error) for result in results)
    lines = [
        "torchdevice selftest",
        f"platform: {platform.platform()}",
        ", ".join(f"{package} {version}" for package, version in versions().items())
        + f", torch build {torch.version.git_version}",
        f"target: {target} ({name})",
        f"{len(results) - failed} passed, {failed} failed, in {sum(result.seconds for result in results):.0f} s",
        "",
    ]
    for result in results:
        on_cpu = f" ({result.on_cpu} calls on the CPU)" if result.on_cpu else ""
        lines.append(f"  {'FAILED' if result.error else 'passed'}  {result.feature}{on_cpu}")
        lines += [f"          {line}" for line in result.error.splitlines()[:5]]
    lines += ["", *(f"  {question} {answer}" for question, answer in answers.items())] if answers else []
    return "\n".join(lines)
