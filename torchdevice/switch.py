"""The variables that say what ``import torch`` does. Nothing is imported here that torch may not import."""

from __future__ import annotations

import os

SWITCH = "TORCHDEVICE"

REPORT = "TORCHDEVICE_REPORT"
"""The variable that has the processes of a run leave their parts of its report."""

SAID = "TORCHDEVICE_SAID"
"""The variable that names what a process has said already, so that its children do not say it again."""


def switched_on() -> bool:
    """Return whether the environment asks ``import torch`` to enable a scope."""
    return os.environ.get(SWITCH, "").lower() not in ("", "0", "false", "no", "off")
