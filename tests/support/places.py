"""Where the tests find the files that they read and run."""

import importlib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"


def benchmark(name: str) -> Any:
    """Import a module of ``benchmarks/``, which stands beside the tests and is not installed with the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module(f"benchmarks.{name}")
