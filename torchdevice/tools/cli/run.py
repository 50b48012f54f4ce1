"""``torchdevice run``: run a program in a scope, as ``python`` would run it.

The command replaces the interpreter's own start: it sets ``sys.argv``, ``sys.path[0]`` and
``__main__``, and executes the program as the last thing the process does. Whatever the program
raises goes on to the interpreter, which prints it, runs the handlers of ``atexit``, and chooses the
exit status. The scope is never left, as under ``TORCHDEVICE=1``, so that handlers and destructors
at shutdown find CUDA too.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import textwrap
import types
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from torchdevice.kernel import feature
from torchdevice.kernel.python import garbage_collection, run_folder
from torchdevice.kernel.python.environment import SWITCH, switched_off
from torchdevice.kernel.python.logs import configure_logging
from torchdevice.kernel.python.uncaught_errors import (
    note_program_line,
    show_notes,
    trim,
    without_ours,
)
from torchdevice.scope import collected_options as _options
from torchdevice.tools.cli import programs, rank_summary
from torchdevice.tools.cli.parsing import CommandParser, CommandTexts, add_command, refusals
from torchdevice.tools.cli.programs import Program
from torchdevice.tools.cli.report import add_report_flag, show_report, show_verified

if TYPE_CHECKING:
    from torchdevice.report import Report
    from torchdevice.scope.scope import Scope


_TEXTS = CommandTexts(
    description="Run a program as python does, in a scope: another device stands in for CUDA.",
    usage=(
        "torchdevice run [options] SCRIPT [args ...]\n"
        "       torchdevice run [options] -m MODULE [args ...]\n"
        "       torchdevice run [options] -c CODE [args ...]\n"
        "       torchdevice run [options] - [args ...]\n"
        "       torchdevice run [options] COMMAND [args ...]"
    ),
    epilog=(
        "A COMMAND is torchrun, pytest, accelerate, python, or any other command that starts "
        "Python "
        "programs.\n"
        "\n"
        "examples:\n"
        "  torchdevice run train.py --epochs 3\n"
        "  torchdevice run --report train.py\n"
        "  torchdevice run --target simulated:cuda:2 pytest test_project.py\n"
        "  torchdevice run --report=report.html torchrun --nproc-per-node 2 train.py\n"
        "  torchdevice run --target simulated:cuda:2 --memory 8GiB -m package.train\n"
        "  torchdevice run --target simulated:cuda --ranks 4 train_ddp.py"
    ),
    arguments={
        "--ranks": {
            "metavar": "N",
            "help": (
                "start the SCRIPT or MODULE N times, as torchrun does on one machine; each rank "
                "has a device, unless --devices or the target sets their number"
            ),
        }
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    take_program(add_command(commands, "run", start, _TEXTS, ranks=programs.number))


def take_program(parser: CommandParser, without: Collection[str] = ()) -> None:
    """Let a parser take the options of a scope, and a program after them.

    Args:
        parser: The parser, whose own flags stand among the common ones.
        without: Options that make no sense for the command.
    """
    common, *others = _options.groups().items()
    parser._optionals.title = common[0]
    _options.add_flags(parser.add_argument, names=common[1])
    add_report_flag(parser.add_argument)
    parser.add_argument(
        "--quiet", action="store_true", help="print no message (variable: TORCHDEVICE_LOG=ERROR)"
    )
    for heading, names in others:
        shown = [name for name in names if name not in without]
        _options.add_flags(parser.add_argument_group(heading).add_argument, names=shown)
    parser.set_defaults(**dict.fromkeys(without))
    parser.set_defaults(plan=None, ranks=None, interrupted=None)  # of the command that has none
    # The SystemExit of a program that ended with a status other than 0.
    parser.set_defaults(exited=None)
    parser.ends_in_program = True


def start(options: argparse.Namespace) -> int:
    """Run the program that the options name."""
    if options.quiet:
        os.environ["TORCHDEVICE_LOG"] = "ERROR"
    if not options.rest:
        options.parser.error(
            "which program? Name a SCRIPT, -m MODULE, -c CODE, - for stdin, or a COMMAND"
        )
    with refusals():
        program = programs.named(
            options.rest if options.ranks is None else programs.launched(options)
        )
    if program.interpreter:  # again, in an interpreter with these flags
        command = ["-m", "torchdevice", *options.parser.prog.split()[1:]]
        return _become(
            [
                *program.interpreter,
                *([*command, *options.own, *program.argv] if program.argv else []),
            ]
        )
    if program.is_command:
        if options.plan:
            options.parser.error(
                f"a plan follows a program of Python, and {program.argv[0]!r} is none. Name the "
                "SCRIPT that it starts, and for one of several ranks --world-size N"
            )
        return _start_command(options, program)
    if isinstance(program.source, bytes) and not _is_valid(program.source):
        # Python words an error in a file differently from one in text that it is given to compile.
        if not program.path:
            _put_back_on_stdin(program.source)
        return _become([*subprocess._args_from_interpreter_flags(), *program.argv])  # type: ignore[attr-defined]
    _run_here(program, options)
    return 0


def _put_back_on_stdin(source: bytes) -> None:
    """Let the next interpreter read the same text from stdin."""
    with tempfile.TemporaryFile() as file:
        file.write(source)
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _run_here(program: Program, options: argparse.Namespace) -> None:
    """Run a program of Python's in this process."""
    sys.argv[:] = program.argv
    _import_beside(program, options)
    _set_first_path(program)
    main = _new_main(program)
    with refusals(), garbage_collection.paused():
        _activate(options, program)
    with rank_summary.shown(options.ranks):
        try:
            _execute(program, main, options.interrupted)
        except SystemExit as exited:
            options.exited = exited if exited.code else None
            if not exited.code:
                _hint_at_native_kernels()
            raise
    _hint_at_native_kernels()


def _hint_at_native_kernels() -> None:
    from torchdevice.scope import activation
    from torchdevice.tools.cli import native_hint

    scope = activation.current()
    if scope is not None:  # the program may have called disable()
        native_hint.give(scope)


def _become(arguments: Sequence[str]) -> int:
    """Replace this process by an interpreter with the given arguments."""
    words = [sys.executable, *arguments]
    if os.name == "nt":  # where another process would not replace this one
        return subprocess.call(words)
    os.execv(sys.executable, words)


def _is_valid(source: bytes) -> bool:
    """Return whether Python can compile a script, which may be compiled already."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not source.startswith(importlib.util.MAGIC_NUMBER):
                compile(source, "", "exec", dont_inherit=True)
    except Exception:  # also a MemoryError, for too many parentheses
        return False
    return True


def _start_command(options: argparse.Namespace, program: Program) -> int:
    """Run a command that is not Python's, with the variables for Python processes below it."""
    with refusals():
        from torchdevice.scope import activation

        configure_logging()
        wanted = activation.Scope(_chosen(options))  # type: ignore[attr-defined]
        _options.set_environment(activation.variables_of(wanted))
        _begin_run(options, wanted)
    process = subprocess.Popen(program.argv)
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the command had it, too, and decides
            status = process.wait()
            return status if status >= 0 else 128 - status  # as a shell reports a signal


def _chosen(options: argparse.Namespace) -> _options.Options:
    from torchdevice.scope import activation

    return activation.chosen_in_rank(
        {name: getattr(options, name) for name in _options.declarations()}
    )


def _import_beside(program: Program, options: argparse.Namespace) -> None:
    """Import this package with Python's own modules, if a program's file shadows one's name.

    The program gets its own module of that name, as under Python. torch, which is imported here,
    gets the standard one.
    """
    hidden = _hidden_modules(_first_folder(program)) - sys.modules.keys()
    if not hidden:
        return
    wanted = ["torchdevice.scope.activation", "torchdevice.torch_modules.apis.sanitizer"]
    if options.report is not None or options.verify or options.plan:
        wanted += ["torchdevice.report.processes"]
    if isinstance(options.report, str):
        wanted += ["jinja2"]
    if options.plan:
        wanted += ["torchdevice.plan.peaks"]
    first, sanitized = sys.path[:1], os.environ.pop(_SANITIZER, None)
    del sys.path[:1]  # the folder of this command, which may be the program's
    with refusals(), switched_off():
        for name in wanted:
            importlib.import_module(name)
    sys.path[:0] = first
    if sanitized is not None:
        os.environ[_SANITIZER] = sanitized
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden - _NEEDED]:
        del sys.modules[name]


_NEEDED = frozenset({"multiprocessing"})
"""Standard modules that this package imports again, later."""


def _hidden_modules(folder: str) -> set[str]:
    """Return the names of the standard modules that files in a folder hide."""
    try:
        found = set(os.listdir(folder or "."))
    except OSError:  # an archive
        return set()
    packages = {
        name
        for name in found & sys.stdlib_module_names
        if os.path.exists(os.path.join(folder, name, "__init__.py"))
    }
    return packages | {name for name in sys.stdlib_module_names if f"{name}.py" in found}


def _first_folder(program: Program) -> str:
    """Return the folder in which the program's own modules are looked for first."""
    if program.module is not None:
        return os.getcwd()
    if program.source is not None:
        return os.path.dirname(os.path.realpath(program.path)) if program.path else ""
    return program.path


def _set_first_path(program: Program) -> None:
    """Replace this command's folder, put first in ``sys.path`` by Python, with the program's.

    This comes before the import of torch, so that the program's own modules hide others from torch
    as they do under Python. Under ``-P`` the interpreter adds no folder, except one that is run
    itself.
    """
    added = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if added:
        del sys.path[0]
    if program.module is None and program.source is None:
        added = True
    if added:
        sys.path.insert(0, _first_folder(program))


def _new_main(program: Program) -> dict[str, Any]:
    """Put a new ``__main__`` in place of this command's own, and return its globals.

    Functions of the program pickle as ``__main__.name``, and from worker processes as
    ``__mp_main__.name``, which is another name that multiprocessing gives to ``__main__``. This
    comes before the import of torch, which imports multiprocessing.
    """
    _replaced.append(sys.modules["__main__"])
    before = vars(_replaced[-1])
    main = types.ModuleType("__main__")
    new = vars(main)
    if "__annotations__" in before:  # up to Python 3.13
        new["__annotations__"] = {}
    new["__builtins__"] = builtins
    if program.source is not None:
        new["__loader__"] = _loader(program.path, program.source)
    if isinstance(program.source, bytes):  # not for -c
        new["__file__"] = program.file
        if "__cached__" in before:  # up to Python 3.14
            new["__cached__"] = None
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    return new


_replaced: list[types.ModuleType] = []
"""This command's own ``__main__``. At the end the interpreter writes into its globals, without a
reference to them.
"""


def _loader(path: str, source: bytes | str) -> Any:
    if not path or isinstance(source, str):
        return importlib.machinery.BuiltinImporter  # as Python has it
    compiled = source.startswith(importlib.util.MAGIC_NUMBER)
    kind = (
        importlib.machinery.SourcelessFileLoader
        if compiled
        else importlib.machinery.SourceFileLoader
    )
    return kind("__main__", path)


def _activate(options: argparse.Namespace, program: Program) -> None:
    """Enable the scope here and in children, and arrange for the report if requested."""
    os.environ.pop(SWITCH, None)  # otherwise the import of torch below would enable another scope
    # It makes the import fail in a build without CUDA.
    sanitized = os.environ.pop(_SANITIZER, None) is not None
    from torchdevice.scope import activation
    from torchdevice.torch_modules.apis import sanitizer

    enabled = activation.enable_chosen(_chosen(options), propagate=True, shows_errors=False)
    if program.source is not None and not program.path and options.report is not None:
        from torchdevice.report import source

        text = (
            program.source
            if isinstance(program.source, str)
            else program.source.decode(errors="replace")
        )
        source.remember(program.file, text)
    if sanitized:
        sanitizer.enable()
    _begin_run(options, enabled)


_SANITIZER = "TORCH_CUDA_SANITIZER"
"""torch's variable for ``torch.cuda._sanitizer``."""


def _begin_run(options: argparse.Namespace, scope: Scope) -> None:
    """Begin a run that has messages and a report in common, or take part in the one around it."""
    if feature.is_there("torchdevice.packages.management_command"):
        from torchdevice.packages import management_command

        management_command.offer(scope.options, scope.runtime)
    is_reported = options.report is not None or run_folder.path() is None
    # Without the feature there is no option.
    verify = getattr(scope.options, "verify", None) if is_reported else None
    if options.report is not None or verify or options.plan:
        from torchdevice.report import processes

        run_folder.begin()
        options.plan = options.plan and options.plan()  # from here on what shows it
        processes.lead(scope.journal, scope.report, functools.partial(_show, options, verify))
    else:
        from torchdevice.scope import activation

        activation.take_part(scope)


def _show(options: argparse.Namespace, verify: str | bool | None, report: Report) -> None:
    """Print the summaries at a run's end: of ``verify=``, and of the report."""
    if options.ranks is not None:  # what the user typed, not the launcher's words
        report = dataclasses.replace(report, program=tuple(options.rest))
    if verify:
        show_verified(verify, report, quiet=options.report is True)
    if options.plan:
        report = dataclasses.replace(report, plan=options.plan(report, options.exited))
    if options.report is not None:
        show_report(options.report, report)


def _execute(
    program: Program, main: dict[str, Any], interrupted: Callable[[], object] | None
) -> None:
    """Execute a program, and call a function as soon as Ctrl-C has ended it."""
    try:
        # Frames of runpy stay in tracebacks, because Python shows them too. No other frame may come
        # between this function and the program.
        if program.module is not None:
            runpy._run_module_as_main(program.module)  # type: ignore[attr-defined]
        elif program.source is None:
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        elif isinstance(program.source, str):
            # As Python does.
            text = (
                textwrap.dedent(program.source) if sys.version_info >= (3, 14) else program.source
            )
            exec(compile(text, program.file, "exec", dont_inherit=True), main)
        else:
            code = pkgutil.read_code(io.BytesIO(program.source))
            exec(code or compile(program.source, program.file, "exec", dont_inherit=True), main)
            _forget_file(program, main)
    except SystemExit as error:
        if isinstance(error.code, str):
            _note_comparison(error, without_ours(error))
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and interrupted is not None:
            interrupted()
        _word_as_cuda(error)
        note_program_line(error)
        trim(error.__cause__ or error.__context__)
        frames = without_ours(error)
        _note_comparison(error, frames)
        _show_from(error, frames, functools.partial(_forget_file, program, main))
        raise


def _word_as_cuda(error: BaseException) -> None:
    """Give memory that ran out, and types of the target's tensors, CUDA's words."""
    import torch

    from torchdevice.calls import error_texts
    from torchdevice.kernel.thread_state import state

    with contextlib.suppress(Exception):  # the program's error is what is to be seen
        # The text changes where an error is handled and the name of the class is read.
        _ = torch.cuda.OutOfMemoryError
        error_texts.name_types(state.context, error)


def _note_comparison(error: BaseException, frames: types.TracebackType | None) -> None:
    from torchdevice.scope import activation
    from torchdevice.tools.cli import identity_hint

    with contextlib.suppress(Exception):  # the program's error is what is to be seen
        identity_hint.add_to(error, frames, activation.current())


def _forget_file(program: Program, main: dict[str, Any]) -> None:
    """Remove the file's name from a script's globals, as Python does before exit handlers."""
    for name in ("__file__", "__cached__") if isinstance(program.source, bytes) else ():
        main.pop(name, None)


def _show_from(
    error: BaseException, frames: types.TracebackType | None, then: Callable[[], None]
) -> None:
    """Let the interpreter print an uncaught exception without the frames above the given ones.

    The interpreter also chooses the exit status and ends the process, so the exception must reach
    it. On its way the exception collects frames of this command, and they are taken off when the
    interpreter calls its hook.
    """
    hook = getattr(sys, "excepthook", sys.__excepthook__)

    def show(
        kind: type[BaseException], value: BaseException, traceback: types.TracebackType | None
    ) -> None:
        sys.excepthook = hook
        if value is error:
            traceback = sys.last_traceback = value.__traceback__ = frames
        try:
            hook(kind, value, traceback)
        except BaseException as raised:
            raised.__traceback__ = without_ours(raised)
            raise
        show_notes(value)
        then()

    sys.excepthook = show
