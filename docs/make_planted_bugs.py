"""Write the tables of bugs into docs/tested.md by running them, or compare them (--check)."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from generated import write_or_check

PAGE = Path(__file__).with_name("tested.md")

sys.path.insert(0, str(PAGE.parents[1] / "tests" / "support"))

from corpus import CASES, FIRST_PART, SECOND_PART_END, SILENT_AT_FIRST, Case  # noqa: E402
from planted_bugs import BUGS, Planted  # noqa: E402

BEGIN, END = "<!-- Made by docs/make_planted_bugs.py: begin -->\n", "<!-- end -->\n"

_CORPUS = """
Of {count} bugs that people had on GPUs and on Macs, {found} end as on the real device, with its text or with
wrong data, or with the race that makes the data wrong there. Of their correct twins {wrong} fail.
They are in `tests/support/corpus.py` with their sources.

{later} of them, a second part, were written down, with the text that a real device gives, before any of them ran here.
Of these, {at_first} were found when they first ran, and {now} are found now. Of the {mended} between, some are found
since the simulation was mended, and some since the case was, because torch's own text is another.
`SILENT_AT_FIRST` in that file says which.

| class | bugs | found | correct programs that fail |
|---|---|---|---|
{rows}
"""

_TABLE = """
Of {count} bugs that were planted after their detectors, {found} are found, and of their correct twins {wrong}
raise. They are in `tests/support/planted_bugs.py`.

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


def rates() -> str:
    """Return the table of found bugs by class, with the names of those not found."""
    warnings.simplefilter("ignore")
    found = {case.name: case.caught() for case in CASES}
    wrong = {case.name: case.run(True) is not None for case in CASES}
    kinds = dict.fromkeys(case.kind for case in CASES)
    rows = "\n".join(
        _rate([case for case in CASES if case.kind == kind], found, wrong) for kind in kinds
    )
    failing = sum(wrong.values()) or "none"
    second = CASES[FIRST_PART:SECOND_PART_END]
    part = {
        "later": len(second),
        "now": sum(found[case.name] for case in second),
        "mended": len(SILENT_AT_FIRST),
    }
    part["at_first"] = part["now"] - part["mended"]
    return _CORPUS.format(
        count=len(CASES), found=sum(found.values()), wrong=failing, rows=rows, **part
    )


def _rate(cases: list[Case], found: dict[str, bool], wrong: dict[str, bool]) -> str:
    missed = ", ".join(f"`{case.name}`" for case in cases if not found[case.name])
    count = f"{sum(found[case.name] for case in cases)}{f' (not {missed})' if missed else ''}"
    return (
        f"| {cases[0].kind} | {len(cases)} | {count} | {sum(wrong[case.name] for case in cases)} |"
    )


def page() -> str:
    """Return the page with a new table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + rates() + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
