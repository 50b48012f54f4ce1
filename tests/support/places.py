"""Where the tests find the files that they read and run."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
PROGRAMS = TESTS / "programs"
