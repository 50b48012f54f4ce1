"""``torch.cuda``: one file for each file of it, with its supplied names, its patches and its stand-in types."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    from torchdevice.foundation import pypi_conflict

    if name != pypi_conflict.NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    pypi_conflict.explain()
    return pypi_conflict.refuse
