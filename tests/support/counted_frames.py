"""The frames of Python that a call takes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Return files and names of the functions of Python that a call enters, with its own."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    enabled = gc.isenabled()
    gc.disable()  # destructors and callbacks of a collection are no part of the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return found
