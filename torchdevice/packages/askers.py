"""Who gets a stand-in: a program that imports a package, and not a library that can do without it.

The importing frame is the innermost one outside Python's own machinery of imports. A program always
gets the package, whether it imports it or looks for it first. A library that looks first has a way
without the package, and keeps it. So does a library that imports the package in a ``try`` statement
whose handler goes on. A library that imports it unconditionally, or raises an error of its own,
demands it.

:data:`ON_BEHALF` has the functions of libraries that ask for what a program named.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

from torchdevice.kernel.journal import callers

ON_BEHALF: dict[tuple[str, str], str] = {
    ("transformers.dynamic_module_utils", "check_imports"): "the imports of remote modelling code",
    (
        "timm.optim._optim_factory",
        "_import_class",
    ): "an optimizer that the program named, such as fusedadam",
    ("detectron2.layers.deform_conv", "<module>"): "a layer that the program named",
}
"""Module and function of a library that asks for a package because of the program -> for what it
asks.
"""

_MACHINERY = (
    *(
        os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep
        for module in (importlib, importlib.metadata)
    ),
    os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "pkgutil.py"),
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)

_CATCHING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


class Asker(NamedTuple):
    """The code that imports a package.

    Attributes:
        frame: The line that asks.
        looks: Whether it only looks whether the package is there.
        names_it: Whether an ``import`` statement has the package's name, and not a call with a
            text.
    """

    frame: FrameType
    looks: bool
    names_it: bool


def asker() -> Asker | None:
    """Return the code that imports a package in this thread; None where no frame does."""
    looks, names_it = True, True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame):
        name = frame.f_code.co_name
        if name == "_find_and_load":
            looks = False
        elif name == "import_module":
            names_it = False
        frame = frame.f_back
    return None if frame is None else Asker(frame, looks, names_it)


def _is_machinery(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen importlib") or file.startswith(_MACHINERY)


def gets_stand_in(who: Asker) -> bool:
    """Return whether code that imports a package gets its stand-in."""
    place = str(who.frame.f_globals.get("__name__")), who.frame.f_code.co_name
    if callers.kind_of(who.frame) == callers.PROGRAM or place in ON_BEHALF:
        return True
    if who.looks:
        return False
    return not _goes_on_without(who.frame.f_code.co_filename, who.frame.f_lineno)


@functools.lru_cache(maxsize=1024)
def _goes_on_without(file: str, line: int) -> bool:
    """Return whether a library's import stands in a ``try`` whose handler does not raise."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # not a file of Python's
        return False
    return any(_handles(statement) for statement in _tries_around(tree, line))


def _tries_around(tree: ast.AST, line: int) -> Iterator[ast.Try | ast.With]:
    """Yield the ``try`` and ``with`` statements whose bodies contain a line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Try, ast.With)):
            first, last = node.body[0], node.body[-1]
            if first.lineno <= line <= (last.end_lineno or last.lineno):
                yield node


def _handles(statement: ast.Try | ast.With) -> bool:
    if isinstance(statement, ast.With):
        items = (item.context_expr for item in statement.items)
        return any(
            "suppress" in ast.unparse(item) and not _CATCHING.isdisjoint(_words(item))
            for item in items
        )
    for handler in statement.handlers:
        if handler.type is None or not _CATCHING.isdisjoint(_words(handler.type)):
            return not any(isinstance(each, ast.Raise) for each in handler.body)
    return False


def _words(expression: ast.expr) -> set[str]:
    """Return the names in an expression, of ``a.b`` both."""
    nodes = list(ast.walk(expression))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
