"""A run by day takes a sample of the attacks, which take seconds each. ``--sweep=full`` takes all of them."""

from __future__ import annotations

import pytest

BY_DAY = 30
"""How many functions of this folder a run takes, with one case each."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("sampled") is None:
        item.add_marker(pytest.mark.sampled(BY_DAY, of="attacks"))
