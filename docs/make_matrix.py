"""Write docs/matrix.md, features by devices, from runs of the tests of ``torchdevice_selftest``.

With --check one of the devices, drawn by --seed, is run, and its column is compared.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from generated import seed_of_check, write_or_check

PAGE = Path(__file__).with_name("matrix.md")

OUT_OF_TREE = "npu_like"
"""A backend of the tests."""

TARGETS = ("cpu", "simulated:cuda", "simulated:mps", OUT_OF_TREE)

HEADER = """# Features by device

<!-- Made by python docs/make_matrix.py; do not edit. -->

Each cell is the result of a test of
`pytest --pyargs torchdevice_selftest` on the device: whether it passed, and whether calls in it ran on the CPU because
the device cannot make them. `simulated:mps` is the runtime of MPS on [a simulated Mac](mps.md). `npu_like` is the
runtime of [PrivateUse1 backends](contributing.md#a-backend-of-your-own) on a backend of the tests, which computes in
CPU memory. No column is of a real accelerator, because none has run ([where it has run](platforms.md)).

"""


def column(target: str, tests: str = "torchdevice_selftest") -> dict[str, str]:
    """Run the tests on a target, in a process of their own, and return a cell for each feature."""
    folders = [str(PAGE.parents[1] / "tests" / "out_of_tree")] if target == OUT_OF_TREE else []
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "results.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            tests,
            f"--junitxml={file}",
            "-p",
            "no:cacheprovider",
        ]
        variables = {**os.environ, "PYTHONPATH": path, "TORCHDEVICE_TARGET": target}
        done = subprocess.run(
            command, env=variables, cwd=scratch, capture_output=True, text=True, check=False
        )
        if not file.exists():
            raise RuntimeError(f"the tests on {target!r} did not run: {done.stderr}")
        cases = ElementTree.parse(file).iter("testcase")
        return dict(_cell(case) for case in cases if case.find("skipped") is None)


def _cell(case: ElementTree.Element) -> tuple[str, str]:
    found = {each.get("name"): each.get("value") for each in case.iter("property")}
    if case.find("failure") is not None or case.find("error") is not None:
        return str(found.get("feature", case.get("name"))), "**failed**"
    return str(found["feature"]), "passed" if found["on_cpu"] == "0" else "in part on the CPU"


def page(columns: dict[str, dict[str, str]]) -> str:
    """Return the page with these columns."""
    lines = [
        f"| feature | {' | '.join(f'`{target}`' for target in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for feature in next(iter(columns.values())):
        lines.append(f"| {feature} | {' | '.join(cells[feature] for cells in columns.values())} |")
    return HEADER + "\n".join(lines) + "\n"


def columns_of(text: str) -> dict[str, dict[str, str]]:
    """Return the columns of a page."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    names = [name.strip("`") for name in rows[0][1:]]
    return {name: {row[0]: row[place + 1] for row in rows[2:]} for place, name in enumerate(names)}


def main() -> int:
    """Write the page. With --check, return 1 if the column of one device differs from its page."""
    seed = seed_of_check()
    if seed is None:
        return write_or_check(PAGE, page({target: column(target) for target in TARGETS}))
    drawn = random.Random(seed).choice(TARGETS)
    known = columns_of(PAGE.read_text())
    return write_or_check(PAGE, page({**known, drawn: column(drawn)}))


if __name__ == "__main__":
    sys.exit(main())
