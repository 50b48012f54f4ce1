"""Write docs/matrix.md, features by devices, from runs of the checks of ``torchdevice doctor --selftest``.

With --check one of the devices, drawn by --seed, is run, and its column is compared.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

from generated import write_or_check

from torchdevice.cli import selftest

PAGE = Path(__file__).with_name("matrix.md")

OUT_OF_TREE = "npu_like"
"""A backend of the tests, for which torch has one place in a process: it runs in a process of its own."""

TARGETS = ("cpu", "simulated:cuda", "simulated:mps", "mps-on-simulated", OUT_OF_TREE)

HEADER = """# Features by device

Made by `python docs/make_matrix.py`; do not edit. Each cell is the result of a check of
`torchdevice doctor --selftest` on the device: whether it passed, and whether calls in it ran on the CPU because the
device cannot make them. `mps-on-simulated` is the runtime of MPS on [a simulated Mac](mps.md). `npu_like` is the
runtime of [PrivateUse1 backends](runtimes.md) on a backend of the tests, which computes in CPU memory. No column is of
a real accelerator, because none has run ([where it has run](platforms.md)).

"""


def column(target: str) -> dict[str, str]:
    """Run the checks on a target, and return a cell for each feature."""
    results = _run_out_of_tree() if target == OUT_OF_TREE else selftest.run(target)
    return {result.feature: _cell(result) for result in results}


def _run_out_of_tree() -> list[selftest.Result]:
    folder = PAGE.parents[1] / "tests" / "out_of_tree"
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "torchdevice", "doctor", "--selftest", "--json", "--target", OUT_OF_TREE]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(f"the checks on {OUT_OF_TREE!r} did not run: {done.stderr}")
    return [selftest.Result(**result) for result in json.loads(done.stdout)["results"]]


def _cell(result: selftest.Result) -> str:
    if result.error:
        return "**failed**"
    return "in part on the CPU" if result.on_cpu else "passed"


def page(columns: dict[str, dict[str, str]]) -> str:
    """Return the page with these columns."""
    lines = [f"| feature | {' | '.join(f'`{target}`' for target in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for feature in next(iter(columns.values())):
        lines.append(f"| {feature} | {' | '.join(cells[feature] for cells in columns.values())} |")
    return HEADER + "\n".join(lines) + "\n"


def columns_of(text: str) -> dict[str, dict[str, str]]:
    """Return the columns of a page."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    names = [name.strip("`") for name in rows[0][1:]]
    return {name: {row[0]: row[place + 1] for row in rows[2:]} for place, name in enumerate(names)}


def main() -> int:
    """Write the page. With --check, return 1 if the column of one device differs from its page."""
    if "--check" not in sys.argv[1:]:
        return write_or_check(PAGE, page({target: column(target) for target in TARGETS}))
    seed = re.search(r"--seed[= ](\d+)", " ".join(sys.argv[1:]))
    drawn = random.Random(int(seed[1]) if seed else 0).choice(TARGETS)
    known = columns_of(PAGE.read_text())
    return write_or_check(PAGE, page({**known, drawn: column(drawn)}))


if __name__ == "__main__":
    sys.exit(main())
