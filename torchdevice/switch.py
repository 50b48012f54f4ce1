"""The variables that say what ``import torch`` does. Nothing is imported here that torch may not import."""

from __future__ import annotations

import os

SWITCH = "TORCHDEVICE"

REPORT_FOLDER = "TORCHDEVICE_REPORT_FOLDER"
"""The variable that names where the processes of a run leave their parts of its report."""


def switched_on() -> bool:
    """Return whether the environment asks ``import torch`` to enable a scope."""
    return os.environ.get(SWITCH, "").lower() not in ("", "0", "false", "no", "off")
