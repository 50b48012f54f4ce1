"""``torch.cuda``: one file for each file of it, with its supplied names, its patches and its stand-in types."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from torchdevice import namesake

    if name != namesake.NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    namesake.explain()
    return namesake.refuse
