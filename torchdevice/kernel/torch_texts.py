"""torch's own texts, word for word: errors and warnings of code that only a build for the accelerator has."""

from __future__ import annotations

from typing import Any

from torchdevice.kernel.python import data_files

_TEXTS: dict[str, str] = data_files.read(__file__, "torch_texts.json")


def text(name: str, /, *places: Any, **values: Any) -> str:
    """Return the text of that name in ``torch_texts.json``, with its values."""
    return _TEXTS[name].format(*places, **values)
