"""The variable that makes ``import torch`` enable a scope. Nothing is imported here that torch may not import."""

from __future__ import annotations

import os

SWITCH = "TORCHDEVICE"


def switched_on() -> bool:
    """Return whether the environment asks ``import torch`` to enable a scope."""
    return os.environ.get(SWITCH, "").lower() not in ("", "0", "false", "no", "off")
