"""Imports every module of a package, for the drivers that use one."""

from __future__ import annotations

import contextlib
import importlib
import io
from pathlib import Path


def imported(package: str) -> str:
    """Import all modules of a package in the current folder, and return how many succeeded."""
    files = [
        file.with_suffix("")
        for file in sorted(Path(package).rglob("*.py"))
        if file.stem != "__main__"
    ]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    with contextlib.redirect_stdout(io.StringIO()):
        good = sum(map(_importable, names))
    return f"{good} of {len(names)} modules"


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException:  # what a module of tests raises to be skipped is no Exception
        return False
    return True
