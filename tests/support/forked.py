"""Processes ``fork_server.py`` forks on request: tests' own, and torchrun's ranks in them."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_START = re.compile(r"(PYTHON|TORCH_|PYTORCH_|LD_|OMP_|MKL_|KMP_|GLOO_|TP_|COV_|COVERAGE).*")
"""The names of variables that the interpreter, torch or its libraries read once."""

_LATER = {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""Those that are read later: torchrun sets this one for its ranks."""


def read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process must have had when it started."""
    return {
        name: value
        for name, value in variables.items()
        if _START.fullmatch(name) and name not in _LATER
    }


class Forked:
    """A forked process of a server, with the part of ``subprocess.Popen`` that torchrun uses.

    Args:
        place: The server's socket.
        request: The arguments, variables and folder. With ``session`` the process leads a session
            of its own, and with ``unbuffered`` it writes its output at once.
        files: The numbers of the files for its output and its errors.
    """

    def __init__(self, place: str, request: Mapping[str, Any], files: Sequence[int]):
        self.args = [sys.executable, *request["arguments"]]
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(place)
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._connection, [text], list(files))
        self._connection.sendall(text[sent:])
        self.pid = int(self._line())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: It has not ended after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._line())
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def _line(self) -> str:
        line = b""
        # Byte by byte, because the next line may come with this one.
        while not line.endswith(b"\n"):
            byte = self._connection.recv(1)
            if not byte:
                raise ConnectionError("the fork server has ended")
            line += byte
        return line.decode()


def fork_ranks(place: str) -> None:
    """Let torchrun, in processes that are forked from this one, ask the server for its ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    start = SubprocessHandler._popen

    def started(
        handler: SubprocessHandler, words: tuple[str, ...], variables: dict[str, str]
    ) -> Any:
        python, flag, *arguments = words
        if (python, flag) != (sys.executable, "-u") or read_at_start(variables) != read_at_start(
            os.environ
        ):
            return start(handler, words, variables)
        request = {
            "arguments": arguments,
            "variables": variables,
            "folder": os.getcwd(),
            "session": True,
            "unbuffered": True,
        }
        files = [1 if handler._stdout is None else handler._stdout.fileno()]
        files.append(2 if handler._stderr is None else handler._stderr.fileno())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return Forked(place, request, files)

    SubprocessHandler._popen = started
