"""Write docs/matrix.md, features by devices, from runs of the checks of ``torchdevice doctor --selftest``.

With --check one of the devices, drawn by --seed, is run, and its column is compared.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from generated import write_or_check

from torchdevice.cli import selftest

PAGE = Path(__file__).with_name("matrix.md")

TARGETS = ("cpu", "simulated:cuda", "simulated:mps", "mps-on-simulated")

HEADER = """# Features by device

Made by `python docs/make_matrix.py`; do not edit. Each cell is the result of a check of
`torchdevice doctor --selftest` on the device: whether it passed, and whether calls in it ran on the CPU because the
device cannot make them. `mps-on-simulated` is the runtime of MPS on [a simulated Mac](mps.md). No column is of a real
accelerator, because none has run ([where it has run](platforms.md)).

"""


def column(target: str) -> dict[str, str]:
    """Run the checks on a target, and return a cell for each feature."""
    return {result.feature: _cell(result) for result in selftest.run(target)}


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
