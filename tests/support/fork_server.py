"""A Python process that imported torch, perhaps the package, and forks on request.

An interpreter takes a second and a half of a core to import torch; a fork takes some milliseconds.
The process that a fork makes is what ``python ARGUMENTS`` would be: its own arguments, variables,
folder, output and exit status, and no frame of this file in its tracebacks. Only what happens
before the first line of a program differs, so tests of that start an interpreter
(:func:`processes.run_fresh_python`).

One request is one connection to a Unix socket: a line of JSON with the arguments, variables and
folder, and the files for the output. The answer is the process's number, and its exit status when
it has ended. torchrun, where it runs in such a process, starts its ranks by requests too: each rank
imports torch otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any


class Server:
    """Forks a process for each request until its end of the connection to the test process closes.

    Args:
        place: The socket's path.
    """

    def __init__(self, place: str):
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(place)
        self.listening.listen(64)
        self.of_process: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.wakes, self.woken_by = socket.socketpair()
        for each in (self.wakes, self.woken_by):
            each.setblocking(False)

    def serve(self) -> dict[str, Any] | None:
        """Serve requests, and return one of them in each process that is forked for it.

        Returns:
            The request in a forked process; None in the server, after the test process has ended.
        """
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakes.fileno())
        self.selector.register(self.listening, selectors.EVENT_READ)
        self.selector.register(self.woken_by, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                # The test process holds the other end, and writes nothing.
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is self.woken_by:
                    self.woken_by.recv(4096)
                    self.report_ended()
                else:
                    request = self.fork()
                    if request is not None:
                        return request

    def fork(self) -> dict[str, Any] | None:
        """Take one request, and return it in the process that is forked for it."""
        connection, _ = self.listening.accept()
        text, files, _, _ = socket.recv_fds(connection, 1 << 22, 2)
        while not text.endswith(b"\n"):
            text += connection.recv(1 << 22)
        number = os.fork()
        if number == 0:
            self.leave(connection)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for place, file in enumerate(files, 1):
                os.dup2(file, place)
                os.close(file)
            return json.loads(text)
        for file in files:
            os.close(file)
        self.of_process[number] = connection
        connection.sendall(f"{number}\n".encode())
        return None

    def leave(self, connection: socket.socket) -> None:
        """Close in a forked process what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        for each in (
            connection,
            self.listening,
            self.wakes,
            self.woken_by,
            *self.of_process.values(),
        ):
            each.close()

    def report_ended(self) -> None:
        """Send ended processes' exit status, negative for signals, as in ``subprocess``."""
        while self.of_process:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == 0:
                return
            with self.of_process.pop(number) as connection:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def standard_streams(unbuffered: bool) -> None:
    """Make the standard streams anew, for the files that the request has put in their places."""
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        raw = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            errors=errors,
            line_buffering=name == "stderr",
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def become(request: dict[str, Any]) -> Callable[[], int]:
    """Make this process one that was just started with the arguments of a request.

    Returns:
        The interpreter's own function for what the arguments say. It prints errors, ends the
        process at SystemExit, and returns 0 after a program that had neither.
    """
    arguments, folder = request["arguments"], request["folder"]
    if request.get("session"):
        os.setsid()
    standard_streams(request.get("unbuffered", False))
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder
    tempfile.tempdir = None
    sys.orig_argv[:] = [sys.executable, *arguments]
    random.seed()
    numpy.random.seed()
    # The command takes the variable before it imports torch.
    if arguments[:2] != ["-m", "torchdevice"]:
        # As the import of torch does, where a variable asks for a scope.
        torchdevice_autoload.activate()
    first, *others = arguments
    if first in ("-c", "-m"):
        sys.argv[:] = [first, *others[1:]]
        sys.path.insert(0, "" if first == "-c" else folder)
        text = (
            others[0]
            if first == "-c"
            else f"import runpy; runpy._run_module_as_main({others[0]!r})"
        )
        return functools.partial(ctypes.pythonapi.PyRun_SimpleStringFlags, text.encode(), None)
    sys.argv[:] = arguments
    path = os.path.abspath(first)  # as Python has it in tracebacks
    sys.path.insert(0, os.path.dirname(path))
    opened = ctypes.CDLL(None).fopen
    opened.restype = ctypes.c_void_p
    file = ctypes.c_void_p(opened(path.encode(), b"rb"))
    return functools.partial(ctypes.pythonapi.PyRun_SimpleFileExFlags, file, path.encode(), 1, None)


def run(call: Callable[[], int]) -> None:
    """Empty ``__main__``, which the program gets, run the program, and end the process."""
    names = vars(sys.modules["__main__"])
    kept = {
        "__name__",
        "__doc__",
        "__package__",
        "__loader__",
        "__spec__",
        "__annotations__",
        "__builtins__",
    }
    for name in names.keys() - kept:
        del names[name]
    if call() != 0:
        raise SystemExit(1)  # the package sees calls of sys.exit, and this is none of the program's


if __name__ == "__main__":
    import forked

    del sys.path[0]  # this folder
    import numpy
    import torch

    import torchdevice_autoload

    if sys.argv[2] == "package":
        forked.fork_ranks(sys.argv[1])
        for part in ("scope.activation", "tools.cli.main", "report"):
            importlib.import_module(f"torchdevice.{part}")
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that collections in forked processes copy none of these objects' pages
    server = Server(sys.argv[1])
    print("ready", flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    wanted = server.serve()
    if wanted is not None:
        run(become(wanted))
    else:
        os.unlink(sys.argv[1])
        os.rmdir(os.path.dirname(sys.argv[1]))
