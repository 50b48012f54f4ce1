"""``torchdevice run``: run a program in a scope, as ``python`` would run it.

The command takes the place of the interpreter's own start: it sets ``sys.argv``, ``sys.path[0]`` and ``__main__``, and
executes the program as the last thing the process does. Whatever the program raises goes on to the interpreter, which
prints it, runs the handlers of ``atexit``, and chooses the exit status. The scope is never left, as under
``TORCHDEVICE=1``, so that handlers and destructors at shutdown find CUDA too.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdevice import options as _options
from torchdevice.cli.refusals import refusals
from torchdevice.switch import SWITCH
from torchdevice.tracebacks import trim, without_ours

if TYPE_CHECKING:
    from torchdevice.journal import Journal


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "run",
        help="run a Python program in a scope",
        usage="torchdevice run [options] SCRIPT [args ...]\n       torchdevice run [options] -m MODULE [args ...]",
    )
    _options.add_flags(parser.add_argument)
    parser.add_argument("--report", action="store_true", help="print what was rewritten when the program ends")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("program", metavar="SCRIPT", help="path of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="args", help="arguments of the program")
    parser.set_defaults(action=_run)


class _Program(NamedTuple):
    """The program that the command line names.

    Attributes:
        module: The name of a module, or None for a path.
        path: The absolute path of a script, or of a folder or archive that holds a ``__main__.py``.
        source: The bytes of a script, as text or compiled; None for a module, folder or archive, which runpy reads.
    """

    module: str | None
    path: str = ""
    source: bytes | None = None


def _run(options: argparse.Namespace) -> int:
    program = _Program(options.program) if options.module else _found(options.program)
    sys.argv[:] = ["-m" if options.module else options.program, *options.arguments]
    _set_first_path(program)
    main = _new_main(program)
    with refusals():
        _activate(options)
    _execute(program, main)
    return 0


def _found(path: str) -> _Program:
    """Return the program at a path.

    Raises:
        SystemExit: With status 2, as Python does, if the file cannot be read.
    """
    absolute = os.path.join(os.getcwd(), path)  # not normalized, because Python does not normalize it either
    if pkgutil.get_importer(absolute) is not None:
        return _Program(None, absolute)
    try:
        with io.open_code(absolute) as file:
            return _Program(None, absolute, file.read())
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"  # Python's own text
        print(f"{sys.executable}: can't open file {absolute!r}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None


def _set_first_path(program: _Program) -> None:
    """Replace the folder of this command, which the interpreter put first in ``sys.path``, by the program's.

    This comes before the import of torch, so that the program's own modules hide others from torch as they do under
    Python. Under ``-P`` the interpreter adds no folder, except one that is run itself.
    """
    added = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if added:
        del sys.path[0]
    if program.module is not None:
        first = os.getcwd()
    elif program.source is not None:
        first = os.path.dirname(os.path.realpath(program.path))
    else:
        first, added = program.path, True
    if added:
        sys.path.insert(0, first)


def _new_main(program: _Program) -> dict[str, Any]:
    """Put a new ``__main__`` in place of this command's own, and return its globals.

    Functions of the program pickle as ``__main__.name``, and from worker processes as ``__mp_main__.name``, which is
    another name that multiprocessing gives to ``__main__``. This comes before the import of torch, which imports
    multiprocessing.
    """
    before = vars(sys.modules["__main__"])
    main = types.ModuleType("__main__")
    new = vars(main)
    if "__annotations__" in before:  # up to Python 3.13
        new["__annotations__"] = {}
    new["__builtins__"] = builtins
    if program.source is not None:
        new["__loader__"] = _loader(program.path, program.source)
        new["__file__"] = program.path
        if "__cached__" in before:  # up to Python 3.14
            new["__cached__"] = None
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    return new


def _loader(path: str, source: bytes) -> Any:
    compiled = source.startswith(importlib.util.MAGIC_NUMBER)
    kind = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    return kind("__main__", path)


def _activate(options: argparse.Namespace) -> None:
    """Enable the scope for this process and those it starts, and have the report printed if that was asked for."""
    os.environ.pop(SWITCH, None)  # otherwise the import of torch below would enable another scope
    from torchdevice import scope

    given = {name: getattr(options, name) for name in _options.declarations()}
    enabled = scope.enable_chosen(_options.chosen(given), propagate=True)
    if options.report:
        atexit.register(_print_report, enabled.journal)  # before the program's handlers are, so it runs after them


def _execute(program: _Program, main: dict[str, Any]) -> None:
    try:
        # Frames of runpy stay in tracebacks, because Python shows them too. No other frame may come between this
        # function and the program.
        if program.module is not None:
            runpy._run_module_as_main(program.module)
        elif program.source is None:
            runpy._run_module_as_main("__main__", alter_argv=False)
        else:
            code = pkgutil.read_code(io.BytesIO(program.source))
            exec(code or compile(program.source, program.path, "exec", dont_inherit=True), main)
    except SystemExit:
        raise
    except BaseException as error:
        trim(error.__cause__ or error.__context__)
        _show_from(error, without_ours(error))
        raise


def _show_from(error: BaseException, frames: types.TracebackType | None) -> None:
    """Let the interpreter print an uncaught exception without the frames above the given ones.

    The interpreter also chooses the exit status and ends the process, so the exception must reach it. On its way the
    exception collects frames of this command, and they are taken off when the interpreter calls its hook.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None) -> None:
        sys.excepthook = hook
        if value is error:
            traceback = sys.last_traceback = value.__traceback__ = frames
        hook(kind, value, traceback)

    sys.excepthook = show


def _print_report(journal: Journal) -> None:
    print("\ntorchdevice: what was rewritten or supplied", file=sys.stderr)
    for entry in journal.entries:
        print(
            f"  {entry.count:>8} x {entry.requested} -> {entry.done} [{entry.fidelity.value}]  {entry.site}",
            file=sys.stderr,
        )
