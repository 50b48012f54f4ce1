"""``torchdevice run``: run a program in a scope, as ``python`` would run it."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from typing import Any

from torchdevice import options as _options
from torchdevice import scope as _scope
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


def _run(options: argparse.Namespace) -> int:
    if not options.module and not os.path.exists(options.program):
        # Python's own words for it.
        reason = "[Errno 2] No such file or directory"
        print(f"{sys.executable}: can't open file {os.path.abspath(options.program)!r}: {reason}", file=sys.stderr)
        return 2
    given = {name: getattr(options, name) for name in _options.declarations() if getattr(options, name) is not None}
    scope = _scope.Scope(_options.Options(**{**_options.from_environment(), **given}))
    with scope:
        _options.set_environment(_scope.variables_of(scope))
        try:
            _run_as_main(options.program, options.arguments, module=options.module)
        except Exception as error:
            # What Python does with an exception that nobody caught, without the frames of this file.
            frames = _program_frames(error)
            sys.excepthook(type(error), error.with_traceback(frames), frames)
            return 1
        finally:
            if options.report:
                _print_report(scope.journal)
    return 0


def _run_as_main(program: str, arguments: list[str], *, module: bool) -> None:
    """Run a program as ``python program arguments`` would: its own ``sys.argv``, ``sys.path[0]`` and ``__main__``."""
    sys.argv[:] = [program, *arguments]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if os.path.isdir(program) or program.endswith((".zip", ".pyz")):
        runpy.run_path(program, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
    main_module = types.ModuleType("__main__")
    main_module.__file__ = program
    main_module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    with open(program, "rb") as file:
        code = compile(file.read(), program, "exec", dont_inherit=True)
    # Functions of the program pickle as __main__.name, also for worker processes, so it must be the real __main__.
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def _program_frames(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an exception from the program's first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def _print_report(journal: Journal) -> None:
    print("\ntorchdevice: what was rewritten or supplied", file=sys.stderr)
    for entry in journal.entries:
        print(
            f"  {entry.count:>8} x {entry.requested} -> {entry.done} [{entry.fidelity.value}]  {entry.site}",
            file=sys.stderr,
        )
