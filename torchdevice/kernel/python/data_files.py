"""Tables and templates that lie beside the code that uses them."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def read(code: str, name: str) -> Any:
    """Return the content of the JSON file ``name`` in the folder of a module's ``__file__``."""
    return json.loads(Path(code).with_name(name).read_text(encoding="utf-8"))


def toml(text: str) -> dict[str, Any]:
    """Parse a text in TOML.

    Raises:
        ValueError: The text is not TOML.
    """
    # Imported here, since few processes read any, and by name, since Python has had it since 3.11.
    parser = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return parser.loads(text)  # type: ignore[no-any-return]


def filled(code: str, name: str, **values: Any) -> str:
    """Return the Jinja2 template ``name`` beside a code file ``__file__``, filled with values."""
    return _environment(Path(code).parent).get_template(name).render(values)


@functools.cache  # so that a template is compiled once
def _environment(folder: Path) -> Any:
    # Few processes fill one.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=select_autoescape(),
        # A misspelt name raises instead of showing nothing.
        undefined=StrictUndefined,
        # Blocks leave no empty lines.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
