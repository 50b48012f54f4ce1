"""Shared by scripts that make files: they write a file, or compare it with ``--check``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def require_release(release: str) -> None:
    """End the process unless a torch release is installed: some files differ by release."""
    if not torch.__version__.startswith(release):
        sys.exit(
            f"torch {torch.__version__} is installed, and the file is made with {release}. Install "
            "that release."
        )


def seed_of_check() -> int | None:
    """Return the seed of ``--check``'s draws, given by ``--seed``; None when writing."""
    given = re.search(r"--seed[= ](\d+)", " ".join(sys.argv[1:]))
    return None if "--check" not in sys.argv[1:] else int(given[1]) if given else 0


def write_or_check(path: Path, text: str, compared: Callable[[str], Any] = str) -> int:
    """Write a file. With --check on the command line, return 1 if the file has another text.

    Args:
        path: The file.
        text: What it should contain.
        compared: Returns what of a text is compared.
    """
    if "--check" not in sys.argv[1:]:
        path.write_text(text)
        return 0
    if path.exists() and compared(path.read_text()) == compared(text):
        return 0
    shown, script = (
        each.relative_to(Path(__file__).parents[1]) for each in (path, Path(sys.argv[0]).resolve())
    )
    print(f"{shown} is out of date: run python {script}", file=sys.stderr)
    return 1
