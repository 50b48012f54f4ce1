"""Counts corpus bugs that another simulation of GPUs shows: ``benchmarks.bugs_elsewhere SETUP``.

SETUP is Python code that starts the other simulation, such as ``import fakegpu;
fakegpu.init(runtime="fakecuda", device_count=2)``. Each bug of ``tests/support/corpus.py`` that is
one of CUDA, and its correct twin, runs in a fork of this process, without a scope. A bug counts as
shown where it ends with the text of a real GPU, or finds wrong data.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

SUPPORT = Path(__file__).parents[1] / "tests" / "support"


class Outcome(NamedTuple):
    """How a program ended: whether by an error, whether as on a GPU, and with which text."""

    failed: bool
    shown: bool
    text: str


def run(case: Any, correct: bool, seconds: int) -> Outcome:
    """Run a program of the corpus in a fork, and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcome.json")
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)  # ends the child
            file.write_text(json.dumps(_outcome(case, correct)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not file.exists():
            return Outcome(
                True, False, f"the process ended with {os.waitstatus_to_exitcode(status)}"
            )
        return Outcome(*json.loads(file.read_text()))


def _outcome(case: Any, correct: bool) -> Outcome:
    import planted_bugs  # type: ignore[import-not-found]
    import torch

    torch.manual_seed(0)
    error = planted_bugs.error_of(case.program, correct)
    if error is None:
        return Outcome(False, False, "")
    kind = type(error).__name__
    return Outcome(True, case.explains(kind, str(error)), f"{kind}: {error}"[:100])


def main() -> None:
    """Print how many bugs are shown, and how many correct programs fail."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("setup", help="Python code that starts the other simulation")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a program (default: 60)")
    options = parser.parse_args()
    exec(options.setup, {})
    sys.path.insert(0, str(SUPPORT))
    import corpus  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    cases = [case for case in corpus.CASES if case.kind != "what MPS refuses"]
    counted: Counter[str] = Counter()
    for case in cases:
        for correct in (False, True):
            outcome = run(case, correct, options.limit)
            counted["twins"] += correct and outcome.failed
            counted["shown"] += not correct and outcome.shown
            print(
                f"{'twin' if correct else 'bug'} {case.name}: {outcome.shown} {outcome.text!r}",
                flush=True,
            )
    print(
        f"{counted['shown']} of {len(cases)} bugs are shown, and {counted['twins']} of their "
        "correct twins fail"
    )


if __name__ == "__main__":
    main()
