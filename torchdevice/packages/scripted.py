"""Stand-ins in programs that compile with TorchScript, which calls them as Python's functions.

The compiler gets a text that calls the stand-in, which tells it the types and the defaults of the
arguments. Such a program cannot be saved, because a file has no Python functions.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch.jit.annotations import ann_to_type

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD

_AS_TEXTS = annotations.compiler_flag
"""Leaves the types in a text unread: they are in the compiler's spelling."""


def called_by_scripts(function: Callable[..., Any], called: Any) -> None:
    """Let TorchScript call a stand-in.

    Args:
        function: The stand-in.
        called: The function that the program calls, which reports the call.
    """
    called.__prepare_scriptable__ = functools.cache(lambda: _text_that_calls(function, called))


def module_in_scripts(kind: type) -> None:
    """Let TorchScript call the ``forward`` of a module that is stood in for.

    It compiles torch's own ``forward`` where the module inherits that.
    """
    kind.__annotations__ = typing.get_type_hints(kind)
    owner = next(each for each in kind.__mro__ if "forward" in each.__dict__)
    if owner.__module__.partition(".")[0] == "torch":
        return
    forward: Any = owner.__dict__["forward"]
    forward.__annotations__ = typing.get_type_hints(forward)
    torch.jit.ignore(forward)


def _text_that_calls(function: Callable[..., Any], called: Any) -> Callable[..., Any]:
    """Return a function whose text calls another one, with its signature."""
    types = typing.get_type_hints(function)

    parameters = inspect.signature(function).parameters

    def stand_in(*args: Any) -> Any:
        return called(**dict(zip(parameters, args, strict=True)))

    torch.jit.ignore(stand_in)
    stand_in.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, _POSITIONAL, annotation=types[name]) for name in parameters],
        return_annotation=types["return"],
    )
    arguments = ", ".join(f"{name}: {_text(types[name])}" for name in parameters)
    text = (
        f"def {called.__name__}({arguments}) -> {_text(types['return'])}:\n"
        f"    return stand_in({', '.join(parameters)})\n"
    )
    file = f"<torchdevice's stand-in for {called.__module__}.{called.__name__}>"
    # Where the compiler looks for the text.
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    space = {"__name__": called.__module__, "stand_in": stand_in}
    exec(compile(text, file, "exec", _AS_TEXTS), space)
    made: Any = space[called.__name__]
    given = [each.default for each in parameters.values()]
    made.__defaults__ = tuple(each for each in given if each is not inspect.Parameter.empty)
    return made


def _text(kind: Any) -> str:
    """Return a type as the compiler spells it."""
    return ann_to_type(kind, None).annotation_str
