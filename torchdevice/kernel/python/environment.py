"""Variables that configure ``import torch``. Imports nothing that torch may not import."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping

SWITCH = "TORCHDEVICE"

COLLECTED = "TORCHDEVICE_COLLECTED"
"""The variable that is set if the first process of the run shows the tracebacks of ranks."""

REPORT = "TORCHDEVICE_REPORT"
"""The variable that has the processes of a run leave their parts of its report."""

SAID = "TORCHDEVICE_SAID"
"""The variable with the messages that a process has logged, so that its children do not repeat
them.
"""


def keys_of(names: Iterable[str]) -> dict[str | bytes, str]:
    """Return a table for :func:`set_of`: names of variables by those of the operating system."""
    return {os.environ.encodekey(name): name for name in names}


def set_of(names: Mapping[str | bytes, str]) -> Mapping[str, str]:
    """Return the variables of a table that are set, perhaps among others."""
    # The table behind `os.environ`, which calls four functions in Python for each name.
    table = getattr(os.environ, "_data", None)
    if table is None:
        return os.environ
    found = names.keys() & table.keys()
    return {names[key]: os.environ[names[key]] for key in found} if found else {}


def switched_on() -> bool:
    """Return whether the environment asks ``import torch`` to enable a scope."""
    return os.environ.get(SWITCH, "").lower() not in ("", "0", "false", "no", "off")


# Not our own block: every import of torch loads this file, and should load no other.
@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Let ``import torch`` enable no scope meanwhile."""
    before = os.environ.pop(SWITCH, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[SWITCH] = before
