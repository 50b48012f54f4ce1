"""Templates of Jinja2 that lie beside the code that fills them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def filled(code: str, name: str, **values: Any) -> str:
    """Return the template ``name`` in the folder of a file of code, ``__file__``, with these values in it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape  # few processes fill one

    environment = Environment(
        loader=FileSystemLoader(Path(code).parent),
        autoescape=select_autoescape(),
        # A misspelt name raises instead of showing nothing.
        undefined=StrictUndefined,
        # Blocks leave no empty lines.
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name).render(values)
