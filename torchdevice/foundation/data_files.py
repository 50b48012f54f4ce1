"""Tables that lie beside the code that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(code: str, name: str) -> Any:
    """Return what the JSON file ``name`` holds in the folder of a file of code, ``__file__``."""
    return json.loads(Path(code).with_name(name).read_text(encoding="utf-8"))
