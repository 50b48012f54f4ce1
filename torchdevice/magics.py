"""The magic commands of IPython and notebooks: ``%torchdevice`` for the session, ``%%torchdevice`` for a cell."""

from __future__ import annotations

import argparse
import ast
import shlex
from typing import Any, NoReturn

from torchdevice import activation
from torchdevice import options as _options
from torchdevice.scope import Scope

_NAME = "torchdevice"

_OFF = "off"


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the session."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. Use %{_NAME} TARGET, with options such as --memory 8GiB, or %{_NAME} {_OFF}.")


def add(ipython: Any) -> None:
    """Add the commands to a session.

    Args:
        ipython: The ``InteractiveShell``.
    """

    def torchdevice(line: str, cell: str | None = None) -> Any:
        """Run the rest of the session, or with ``%%`` the rest of the cell, in a scope.

        ``%torchdevice simulated:cuda:2 --memory 8GiB`` enters it, in place of one before; ``%torchdevice off`` leaves
        it.
        """
        if cell is None:
            return _for_session(line)
        with Scope(_chosen(line)):
            return _run(ipython, cell)

    ipython.register_magic_function(torchdevice, "line_cell", _NAME)


def remove(ipython: Any) -> None:
    """Leave the scope of ``%torchdevice``, and remove the commands."""
    _leave()
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop(_NAME, None)


def _for_session(line: str) -> Scope | None:
    if line.strip() == _OFF:
        _leave()
        return None
    return activation.enable_again(_chosen(line), propagate=True)


def _leave() -> None:
    if activation.is_enabled():
        activation.disable()


def _run(ipython: Any, cell: str) -> Any:
    """Run a cell, and return the value of its last line where that is an expression."""
    code = ipython.transform_cell(cell)
    name = ipython.compile.cache(code)  # so that tracebacks show the lines
    tree = ipython.compile.ast_parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), ipython.user_ns)
    return None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), ipython.user_ns)


def _chosen(line: str) -> _options.Options:
    """Return the options that a line gives: the target first or by its flag, and the others by their flags."""
    parser = _Parser(prog=f"%{_NAME}", add_help=False, allow_abbrev=False)
    parser.add_argument("first", nargs="?", metavar="TARGET")
    _options.add_flags(parser.add_argument)
    given = vars(parser.parse_args(shlex.split(line)))
    first = given.pop("first")
    if first is not None and given["target"] is not None:
        parser.error(f"{first!r} and {given['target']!r} are both given as the target")
    given["target"] = first if first is not None else given["target"]
    found: _options.Options = _options.chosen(given)
    return found
