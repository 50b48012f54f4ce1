"""The page of published measurements, and the rows that it is made of."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from places import ROOT, page_maker

make_published = page_maker("make_published")

pytestmark = pytest.mark.one_engine


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(make_published.RESULTS.read_text(encoding="utf-8"))
    return found


def test_the_page_and_its_picture_are_up_to_date() -> None:
    page = (ROOT / "docs" / "published-memory.md").read_text()
    assert make_published.page() == page, "run python docs/make_published.py"
    assert make_published.picture() == make_published.PICTURE.read_text()


def test_a_miss_of_more_than_two_percent_is_explained() -> None:
    for found in kept().values():
        for row in found["rows"]:
            percent = make_published.difference(row)
            assert percent is None or abs(percent) <= 2 or row["why"], row


def test_readme_has_the_figures_of_the_page() -> None:
    rows = [row for found in kept().values() for row in found["rows"]]
    misses = [abs(each) for each in map(make_published.difference, rows) if each is not None]
    said = (
        f"Others measured {len(misses)} peaks on GPUs and published them. `plan` is within "
        f"{statistics.mean(misses):.2f} % of them on average, and within {max(misses):.1f} % at "
        "most"
    )
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_the_summary_counts_what_ran_out_of_memory() -> None:
    rows = [
        {"measured": 100, "planned": 101},
        {"measured": 100, "planned": 97},
        {"measured": None, "planned": None},
    ]
    said = make_published.summary(rows)
    assert said.startswith(
        "2 measured peaks: the plan differs by 2.00 % on average, and by 3.00 % at most."
    )
    assert said.endswith("Of 1 runs that ran out of memory, 1 run out of memory in the plan.")
