"""Templates of Jinja2 that lie beside the code that fills them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


def filled(code: str, name: str, **values: Any) -> str:
    """Return the template ``name`` in the folder of a file of code, ``__file__``, with these values in it."""
    return _environment(Path(code).parent).get_template(name).render(values)


@functools.cache  # so that a template is compiled once
def _environment(folder: Path) -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape  # few processes fill one

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
