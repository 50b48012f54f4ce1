"""The ``torchdevice`` command: run a program in a scope, or say what this machine has."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from collections.abc import Sequence

import torch

from torchdevice import __version__, _propagation, _target
from torchdevice._device import TorchDevice
from torchdevice._journal import Journal
from torchdevice._scope import Scope
from torchdevice.errors import TorchDeviceError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments after the command's name; None takes ``sys.argv``.

    Returns:
        The exit status: 0, or 2 for a command that could not be understood or carried out.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.action(parser, options)
    except TorchDeviceError as error:
        print(f"torchdevice: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchdevice", description="Run CUDA-written PyTorch programs where there is no CUDA."
    )
    parser.add_argument("--version", action="version", version=f"torchdevice {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a Python program in a scope",
        usage="torchdevice run [options] SCRIPT [args ...]\n       torchdevice run [options] -m MODULE [args ...]",
    )
    run.add_argument(
        "--target", help="device that stands in: cpu, mps, xpu, simulated:cuda, ... (default: the best there is)"
    )
    run.add_argument("--devices", type=int, help="number of accelerators the program sees")
    run.add_argument("--identity", choices=("target", "cuda"), default="target", help="what tensors say they are on")
    run.add_argument("--memory", type=int, help="bytes of memory of each simulated device")
    run.add_argument(
        "--written-for",
        choices=("cuda", "mps", "xpu"),
        default="cuda",
        help="the accelerator that the program is told is available",
    )
    run.add_argument("--engine", choices=("mode", "wrap"), help="see every torch call, or only what can carry a device")
    run.add_argument("--strict", action="store_true", help="raise instead of approximating")
    run.add_argument("--report", action="store_true", help="print what was rewritten when the program ends")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("program", metavar="SCRIPT", help="path of the program")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="args", help="arguments of the program")
    run.set_defaults(action=_run)

    doctor = commands.add_parser("doctor", help="say which device would stand in here")
    doctor.set_defaults(action=_doctor)
    return parser


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if not options.module and not os.path.exists(options.program):
        # Python's own words for it.
        reason = "[Errno 2] No such file or directory"
        print(f"{sys.executable}: can't open file {os.path.abspath(options.program)!r}: {reason}", file=sys.stderr)
        return 2
    try:
        scope = Scope(
            options.target,
            devices=options.devices,
            identity=options.identity,
            strict=options.strict,
            memory=options.memory,
            written_for=options.written_for,
            engine=options.engine,
        )
    except ValueError as error:
        parser.error(str(error))
    with scope:
        _propagation.to_children(scope)
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
        code = compile(file.read(), program, "exec")
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


def _doctor(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    print(f"torchdevice {__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"would stand in: {TorchDevice()!r}")
    for name in _target.known():
        available = _target.runtime(name).is_available()
        print(f"  {name}: {'available' if available else 'not available'}")
    print("  simulated:cuda, simulated:mps, simulated:strict: available anywhere")
    return 0
