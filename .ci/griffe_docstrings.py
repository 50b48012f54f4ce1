"""What the page of the Python API reads in docstrings otherwise than Python, by an extension of
Griffe.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[1]))

# Not from torchdevice itself, whose functions need torch. The site is built without it.
from torchdevice.scope.collected_options import Options, declarations

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):(?=`)")
"""The part of a reference, as in :class:`Scope`, that Markdown shows as text and Griffe takes for
the end of a type.
"""

_OPTIONS = re.compile(r"( *)\*\*options: See below\.")

_KINDS = list(griffe.ParameterKind)


class Docstrings(griffe.Extension):
    """Takes roles away, and shows the options of the functions that take them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give a function with options the signature and the docstring that ``help`` shows; take
        roles away.
        """
        if obj.docstring is None:
            return
        if isinstance(obj, griffe.Function) and _OPTIONS.search(obj.docstring.value):
            # As @takes_options(without=("target", "devices")) says.
            without = re.findall(
                r"'(\w+)'|\"(\w+)\"", " ".join(str(each.value) for each in obj.decorators)
            )
            _show_options(obj, {single or double for single, double in without})
        obj.docstring.value = _ROLE.sub("", obj.docstring.value)


def _show_options(function: griffe.Function, without: Collection[str]) -> None:
    taken = [
        each for each in dataclasses.fields(Options) if each.metadata and each.name not in without
    ]
    replaced = {"options", *(each.name for each in taken)}
    own = [each for each in function.parameters if each.name not in replaced]
    parameters = [*own, *map(_parameter, taken)]
    function.parameters = griffe.Parameters(
        *sorted(parameters, key=lambda each: _KINDS.index(each.kind))
    )
    lines = [f"{each.name}: {declarations()[each.name].text}" for each in taken]
    text = _OPTIONS.sub(
        lambda found: "\n".join(found[1] + line for line in lines), function.docstring.value
    )
    function.docstring.value = text


def _parameter(option: dataclasses.Field) -> griffe.Parameter:
    kind = (
        griffe.ParameterKind.keyword_only
        if option.kw_only
        else griffe.ParameterKind.positional_or_keyword
    )
    return griffe.Parameter(
        option.name, annotation=str(option.type), kind=kind, default=repr(option.default)
    )
