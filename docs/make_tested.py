"""Write the table of the lines and branches that the tests run into docs/tested.md.

``make_tested.py FILE`` reads what ``coverage json`` has written.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tested.md")
BEGIN, END = "<!-- Made by docs/make_tested.py: begin -->\n", "<!-- end -->\n"

PACKAGE = "torchdevice/"

ENOUGH = 95
"""Files with fewer percent of their lines run are named."""

Counts = tuple[int, int, int, int]
"""Lines that ran, lines, branches that were taken, branches."""

_TABLE = """
Measured with {version}, {date}:

| part | files | lines | run | branches | taken |
|---|---|---|---|---|---|
{rooms}

Files with fewer than {enough} % of their lines run:

| file | lines | run | branches | taken |
|---|---|---|---|---|
{files}
"""


def _counts(summary: Mapping[str, int]) -> Counts:
    lines, branches = summary["num_statements"], summary["num_branches"]
    return summary["covered_lines"], lines, summary["covered_branches"], branches


def _sum(counts: Iterable[Counts]) -> Counts:
    ran, lines, taken, branches = map(sum, zip(*counts, strict=True))
    return ran, lines, taken, branches


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 100


def _cells(counts: Counts) -> str:
    ran, lines, taken, branches = counts
    return (
        f"{lines:,} | {_percent(ran, lines):.1f} % | {branches:,} | "
        f"{_percent(taken, branches):.1f} %"
    )


def _is_low(counts: Counts) -> bool:
    return _percent(*counts[:2]) < ENOUGH


def table(measured: Mapping[str, Any]) -> str:
    """Return the table for the content of a file of ``coverage json``."""
    found = {
        path.rpartition(PACKAGE)[2]: _counts(each["summary"])
        for path, each in measured["files"].items()
        if PACKAGE in path
    }
    rooms: dict[str, list[Counts]] = defaultdict(list)
    for name, counts in found.items():
        rooms[PACKAGE + "/".join(name.split("/")[:-1])].append(counts)
    rows = [(f"`{room.rstrip('/')}`", all_) for room, all_ in sorted(rooms.items())] + [
        ("all", list(found.values()))
    ]
    low = sorted(name for name, counts in found.items() if _is_low(counts))
    return _TABLE.format(
        version=f"coverage {measured['meta']['version']}",
        date=measured["meta"]["timestamp"][:10],
        rooms="\n".join(f"| {room} | {len(all_)} | {_cells(_sum(all_))} |" for room, all_ in rows),
        enough=ENOUGH,
        files="\n".join(f"| `{name}` | {_cells(found[name])} |" for name in low)
        or "| none | | | | |",
    )


def page(measured: Mapping[str, Any]) -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table(measured) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(Path(sys.argv[1]).read_text())))
