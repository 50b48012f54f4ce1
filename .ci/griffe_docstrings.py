"""What the page of the Python API reads in docstrings otherwise than Python, by an extension of Griffe."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import torchdevice

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):(?=`)")
"""The part of a reference, as in :class:`Scope`, that Markdown shows as text and Griffe takes for the end of a type."""


class Docstrings(griffe.Extension):
    """Takes roles away, and shows the options of the functions that take them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give a function with options the signature and the docstring that ``help`` shows; take roles away."""
        if obj.docstring is None:
            return
        if isinstance(obj, griffe.Function) and "**options: See below." in obj.docstring.value:
            there = getattr(torchdevice, obj.name)
            obj.parameters = griffe.Parameters(*map(_parameter, inspect.signature(there).parameters.values()))
            obj.docstring.value = inspect.cleandoc(there.__doc__)
        obj.docstring.value = _ROLE.sub("", obj.docstring.value)


def _parameter(found: inspect.Parameter) -> griffe.Parameter:
    kind = griffe.ParameterKind(found.kind.description)
    return griffe.Parameter(found.name, annotation=found.annotation, kind=kind, default=repr(found.default))
