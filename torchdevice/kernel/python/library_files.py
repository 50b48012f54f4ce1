"""Which files are a library's and not the program's: ours, installed ones, and Python's."""

from __future__ import annotations

import functools
import os
import re

import torchdevice

PACKAGE = os.path.join(os.path.abspath(torchdevice.__path__[0]), "")
"""The folder of this package, whose frames are not the program's."""

_INSTALLED = re.compile(r".*[/\\](?:site-packages|dist-packages|lib[/\\]python3\.[0-9]+t?)[/\\]")


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python's libraries."""
    # Here, because this file is imported before a program that may have a file of this name.
    import sysconfig

    return tuple(
        os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")
    )


def is_library(file: str) -> bool:
    """Return whether a file is this package's, an installed package's, or Python's own."""
    return file.startswith((PACKAGE, "<frozen", *_libraries())) or "site-packages" in file


def name_inside(file: str) -> str | None:
    """Return a file's name within its installed package's parent folder; None if it has none."""
    installed = _INSTALLED.match(file)
    return None if installed is None else file[installed.end() :]
