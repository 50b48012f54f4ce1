"""Write the table of planted bugs into docs/simulation.md by running them, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from generated import write_or_check

PAGE = Path(__file__).with_name("simulation.md")

sys.path.insert(0, str(PAGE.parents[1] / "tests"))

from planted_bugs import BUGS, Planted  # noqa: E402

BEGIN, END = "<!-- Made by docs/make_planted_bugs.py: begin -->\n", "<!-- end -->\n"

_TABLE = """
Of {count} planted bugs {found} are found, and of their correct twins {wrong} raise. They are in
`tests/planted_bugs.py`.

| kind | bug | found by | as |
|---|---|---|---|
{rows}
"""


def _row(planted: Planted, error: BaseException | None) -> str:
    options = ", ".join(f"`{name}={value!r}`" for name, value in planted.options.items())
    return f"| {planted.kind} | {planted.mistake} | {options or 'default'} | {_named(error)} |"


def _named(error: BaseException | None) -> str:
    if error is None:
        return "not found"
    return "wrong data" if isinstance(error, AssertionError) else f"`{type(error).__name__}`"


def table() -> str:
    """Return the table of what happened to each bug."""
    warnings.simplefilter("ignore")
    found = [planted.run(False) for planted in BUGS]
    twins = [planted.run(True) for planted in BUGS]
    rows = "\n".join(_row(planted, error) for planted, error in zip(BUGS, found, strict=True))
    caught = sum(error is not None for error in found)
    wrong = sum(error is not None for error in twins)
    return _TABLE.format(count=len(BUGS), found=caught, wrong=wrong or "none", rows=rows)


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
