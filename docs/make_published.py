"""Write docs/published-memory.md from benchmarks/published_memory/results.json, or check it
(--check).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import write_or_check

DOCS = Path(__file__).parent

PAGE = DOCS / "published-memory.md"

RESULTS = DOCS.parent / "benchmarks" / "published_memory" / "results.json"

HEADER = """# Plans beside published measurements

<!-- Made by python docs/make_published.py from benchmarks/published_memory/results.json; do not edit. -->

What others measured on GPUs by `torch.cuda.max_memory_allocated()` and published with the program, beside what
`torchdevice plan` predicts for it. Nothing is calibrated: a plan knows no measurement. `python -m
benchmarks.published_memory` plans the rows again.
"""


def difference(row: dict[str, Any]) -> float | None:
    """Return by how many percent a plan differs from the measurement; None where memory ran out in
    one of them.
    """
    if row["measured"] is None or row["planned"] is None:
        return None
    return float(100 * (row["planned"] / row["measured"] - 1))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the sentence on all rows."""
    found = [abs(each) for each in map(difference, rows) if each is not None]
    mean, worst = statistics.mean(found), max(found)
    if len(found) == 1:
        said = f"1 measured peak: the plan differs by {worst:.2f} %."
    else:
        said = (
            f"{len(found)} measured peaks: the plan differs by {mean:.2f} % on average, and by "
            f"{worst:.2f} % at most."
        )
    full = [each for each in rows if each["measured"] is None]
    if full:
        right = sum(each["planned"] is None for each in full)
        said += (
            f" Of {len(full)} runs that ran out of memory, {right} run out of memory in the plan."
        )
    return said


def _size(figure: int | None) -> str:
    return "out of memory" if figure is None else f"{figure / 2**30:.3f} GiB"


def _section(found: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {found['title']}\n\n"
    yield f"Source: {found['source']}. {summary(found['rows'])}\n\n"
    yield "| program | GPU | measured | planned | difference |\n|---|---|---|---|---|\n"
    for each in found["rows"]:
        percent = difference(each)
        shown = "" if percent is None else f"{percent:+.2f} %"
        cells = (each["case"], each["gpu"], _size(each["measured"]), _size(each["planned"]), shown)
        yield f"| {' | '.join(cells)} |\n"
    notes = dict.fromkeys(each["why"] for each in found["rows"] if each["why"])
    yield from (f"\n{note}\n" for note in notes)
    versions = dict.fromkeys(json.dumps(each["versions"], sort_keys=True) for each in found["rows"])
    for each in versions:
        yield f"\nPlanned with {', '.join(f'{name} {version}' for name, version in json.loads(each).items())}.\n"


def page() -> str:
    """Return the page."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [row for found in kept.values() for row in found["rows"]]
    parts = [HEADER, f"\n**{summary(rows)}**\n"]
    for found in kept.values():
        parts += _section(found)
    return "".join(parts)


def main() -> int:
    """Write the page. With --check, return 1 if the file differs from the page."""
    return write_or_check(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
