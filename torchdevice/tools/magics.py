"""Magics of IPython and notebooks: ``%torchdevice`` per session, ``%%torchdevice`` per cell."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

from torchdevice.errors import TorchDeviceError
from torchdevice.scope import activation, target_selection
from torchdevice.scope import collected_options as _options
from torchdevice.scope.scope import Scope
from torchdevice.simulation import policy

_NAME = "torchdevice"

_ON = "on"
_OFF = "off"
_STATUS = "status"
_HELP = "--help"

_USAGE = f"""\
%{_NAME} TARGET [options]    run the rest of the session in a scope, in place of one before
       %%{_NAME} TARGET [options]   run the rest of the cell in a scope
       %{_NAME} {_ON}                  use the best device here: MPS, XPU or the CPU
       %{_NAME} {_STATUS}              show the scope that is active
       %{_NAME} {_OFF}                 leave the scope of the session, or that of TORCHDEVICE=1"""


def add(ipython: Any) -> None:
    """Add the commands, and the name of the package, to a session.

    Args:
        ipython: The ``InteractiveShell``.
    """

    def torchdevice(line: str, cell: str | None = None) -> Any:
        """Run the rest of the session, or with ``%%`` the rest of the cell, in a scope.

        ``%torchdevice simulated:cuda:2 --memory 8GiB`` enters it, in place of one before;
        ``%torchdevice off`` leaves it, and ``%torchdevice --help`` lists the options.
        """
        __tracebackhide__ = True  # IPython 8 shows the frame otherwise
        try:
            words = shlex.split(line)
            if _HELP in words:
                print(_parser().format_help())
                return None
            if words == [_STATUS]:
                print(_status())
                return None
            if cell is None:
                policy.replace_lost()  # also where the scope stays as it is
                if words == [_OFF]:
                    return _off()
                return activation.enable(**_given(words), propagate=True)
            scope = Scope(_options.chosen(_given(words)))
            target_selection.resolve(scope.options)
        except (TorchDeviceError, ValueError, TypeError) as error:
            raise UsageError(str(error)) from error  # IPython shows one line
        with scope:
            return _run(ipython, cell)

    ipython.register_magic_function(torchdevice, "line_cell", _NAME)
    ipython.push({_NAME: sys.modules[_NAME]})


def remove(ipython: Any) -> None:
    """Leave the scope of ``%torchdevice``, and remove the commands."""
    if activation.enabled_by_program():
        activation.disable()
    ipython.drop_by_id({_NAME: sys.modules[_NAME]})
    for kind in ("line", "cell"):
        ipython.magics_manager.magics[kind].pop(_NAME, None)


def _status() -> str:
    """Describe the active scope of this session, with its options."""
    scope = activation.current()
    if scope is None:
        return f"torchdevice: no scope is active. %{_NAME} {_ON} begins one."
    plain = _options.Options()
    names = [name for name in _options.declarations() if name != "target"]
    changed = [name for name in names if getattr(scope.options, name) != getattr(plain, name)]
    lines = [scope._described(), *(f"  {scope.options.quoted(name)}" for name in changed)]
    if policy.lost() is not None:
        lines.append(f"  The device is lost, as on a GPU. Run `%{_NAME}` again.")
    return "\n".join(lines)


def _off() -> None:
    # Also the scope of TORCHDEVICE=1, where the session has entered no other.
    if activation.current() is not None:
        activation.disable()


def _run(ipython: Any, cell: str) -> Any:
    """Run a cell, and return the value of its last line where that is an expression."""
    __tracebackhide__ = True
    code = ipython.transform_cell(cell)
    name = ipython.compile.cache(code, ipython.execution_count)  # so that tracebacks show the lines
    tree = ipython.compile.ast_parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), ipython.user_ns)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), ipython.user_ns)


class _Parser(MagicArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.rstrip('.')}. %{_NAME} {_HELP} lists the options.")


def _parser() -> _Parser:
    parser = _Parser(
        prog=f"%{_NAME}", usage=_USAGE.replace("%", "%%"), formatter_class=argparse.HelpFormatter
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "first", nargs="?", metavar="TARGET", help=f"the target, or {_ON}, {_STATUS} or {_OFF}"
    )
    parser.add_argument(
        _HELP, action="store_true", default=argparse.SUPPRESS, help="list the options"
    )
    _options.add_flags(parser.add_argument)
    return parser


def _given(words: list[str]) -> dict[str, Any]:
    """Return a line's options: the target first or by flag, and the others by flag.

    Raises:
        UsageError: An option does not exist, or the target is given twice.
    """
    given = vars(_parser().parse_args(words))
    first = given.pop("first")
    if first is not None and given["target"] is not None:
        raise UsageError(
            f"{first!r} and {given['target']!r} are both given as the target. Name one."
        )
    if first != _ON:
        given["target"] = first or given["target"]
    return given
