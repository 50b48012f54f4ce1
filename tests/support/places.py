"""Where the tests find the files that they read and run."""

import importlib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"


def benchmark(name: str) -> Any:
    """Import a module of ``benchmarks/``, which is not installed with the package."""
    return _beside(f"benchmarks.{name}", ROOT)


def page_maker(name: str) -> Any:
    """Import a script of ``docs/`` that makes pages."""
    return _beside(name, ROOT / "docs")


def _beside(module: str, folder: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return importlib.import_module(module)
