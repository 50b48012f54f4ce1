"""The program of a command line, and ``--ranks N``: N processes of it by torchrun's launcher.

A command line names a script, a module, code, stdin, or a command such as ``torchrun``.
"""

from __future__ import annotations

import argparse
import io
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torchdevice.kernel.options import variable_of

_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+t?)?)?(?:\.exe)?")

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Flags of the interpreter that take the next word, too."""


class Program(NamedTuple):
    """A program, and its ``sys.argv``.

    Attributes:
        argv: The program's ``sys.argv``, as Python sets it before the program begins.
        module: The name of a module that is to be run; else None.
        path: The absolute path of a script, or of a folder or archive that holds a ``__main__.py``;
            or empty.
        source: The program, as bytes or text, which may be compiled already; None for a program
            that runpy has to find.
        interpreter: Flags of Python, for which another interpreter must be started.
        is_command: Whether this is no program of Python's, and is to be started as a process.
    """

    argv: list[str]
    module: str | None = None
    path: str = ""
    source: bytes | str | None = None
    interpreter: tuple[str, ...] = ()
    is_command: bool = False

    @property
    def file(self) -> str:
        """The name of the source's file in tracebacks."""
        return self.path or ("<string>" if self.argv[0] == "-c" else "<stdin>")


def named(words: Sequence[str]) -> Program:
    """Return the program of a command line: a script, ``-m``, ``-c``, Python itself, a command.

    Raises:
        SystemExit: With status 2, as Python does, if the file cannot be read.
        ValueError: A flag lacks its argument.
    """
    first, *arguments = words
    flag, attached = first[:2], first[2:]
    if flag in ("-m", "-c"):
        return _module_or_code(flag, [attached, *arguments] if attached else arguments)
    if first == "-":
        return Program([first, *arguments], source=sys.stdin.buffer.read())
    if _is_this_python(first):
        flags = _taken_flags(arguments)
        return Program(arguments, interpreter=tuple(flags)) if flags else named(arguments or ["-"])
    is_path = os.path.dirname(first) or os.path.exists(first)
    found = None if is_path else _command(first)
    if found is None:
        return _script(first, arguments)
    if _is_python_script(found):
        return _script(found, arguments)
    return Program([found, *arguments], is_command=True)


def _module_or_code(flag: str, words: list[str]) -> Program:
    """Return the program of ``-m`` or ``-c``, given the words after it."""
    is_module = flag == "-m"
    if not words:
        raise ValueError(f"{flag} needs {'a module' if is_module else 'code'} after it.")
    what, *rest = words
    if is_module:
        return Program([flag, *rest], module=what)
    return Program([flag, *rest], source=what + "\n")  # Python adds the end of the line, too


def _taken_flags(arguments: list[str]) -> list[str]:
    """Remove the interpreter's flags, with values, from the words' beginning; return them."""
    flags: list[str] = []
    while arguments and re.match(r"-(?![mc]|$)", arguments[0]):
        flags.append(arguments.pop(0))
        if flags[-1] in _WITH_VALUE and arguments:
            flags.append(arguments.pop(0))
    return flags


def _script(path: str, arguments: list[str]) -> Program:
    absolute = os.path.join(os.getcwd(), path)  # not normalized, as Python does not
    argv = [path, *arguments]
    if pkgutil.get_importer(absolute) is not None:
        return Program(argv, path=absolute)
    try:
        with io.open_code(absolute) as file:
            return Program(argv, path=absolute, source=file.read())
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"  # Python's own words
        print(f"{sys.executable}: can't open file {absolute!r}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None


def _command(name: str) -> str | None:
    """Return a command's path, first from this interpreter's environment, activated or not."""
    # Here, because the program may have a file of this name, see `run._import_beside`.
    import sysconfig

    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def _is_this_python(word: str) -> bool:
    """Return whether a word is the interpreter: its name, or a path to the running one."""
    if not _PYTHON.fullmatch(os.path.basename(word)):
        return False
    if os.path.dirname(word):
        return os.path.realpath(word) == os.path.realpath(sys.executable)
    return not os.path.exists(word)


def _is_python_script(path: str) -> bool:
    with open(path, "rb") as file:
        first = file.readline(200)
    return first.startswith(b"#!") and b"python" in first


def launched(options: argparse.Namespace) -> list[str]:
    """Return the words that start a program in the requested ranks, each with a device.

    Raises:
        ValueError: The program is one that the launcher cannot start.
    """
    # The program sees a device for each rank, unless a number is named.
    if options.devices is None and variable_of("devices") not in os.environ:
        from torchdevice.simulation.model_lookup import count_of  # only ranks need it

        if count_of(options.target or os.environ.get(variable_of("target"), "")) is None:
            options.devices = options.ranks
    if options.ranks > 1:  # else the launcher prints five lines on setting one thread
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.ranks))
        )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return [*launcher, *_program(options.rest)]


def number(text: str) -> int:
    """Return a number of ranks."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks. Use a whole number from 1."
        )
    return int(text)


def _program(words: Sequence[str]) -> list[str]:
    first, *arguments = words
    if first.startswith("-m"):
        return [*words] if first == "-m" else ["-m", first[2:], *arguments]
    if first.startswith("-") or not os.path.isfile(first):
        raise ValueError(
            f"--ranks cannot start {first!r} in each rank. Name a SCRIPT, or -m MODULE."
        )
    return [*words]
