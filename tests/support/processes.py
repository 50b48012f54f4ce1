"""Processes of tests: Python, the ``torchdevice`` command, ``torchdevice run``."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from forked import Forked, read_at_start

SECONDS = 300
"""How long a process may take."""


def run_program(
    folder: Path, program: str, *arguments: str, options: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program's text under ``torchdevice run`` in a process of its own."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    return run_command("run", *options, str(path), *arguments, cwd=folder, **environment)


def run_command(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the ``torchdevice`` command."""
    return run_python("-m", "torchdevice", *arguments, cwd=cwd, **environment)


def run_python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with one torch thread, forked from a process with torch and the package."""
    return _run("package", arguments, cwd, environment)


def run_torch_python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python forked from a process with torch alone, to test the package's import."""
    return _run("torch", arguments, cwd, environment)


def _run(
    imported: str, arguments: tuple[str, ...], cwd: Path | None, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Fork a process where that may be.

    Flags of the interpreter, and variables that Python or torch read when they start, lead to a new
    interpreter. Tests of what happens before torch is imported call :func:`run_fresh_python`.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    is_flag = arguments[0].startswith("-") and arguments[0] not in ("-c", "-m")
    # Elsewhere a process that has loaded torch's libraries may not be forked safely, or not at all.
    if (
        is_flag
        or sys.platform != "linux"
        or read_at_start(variables) != read_at_start(_of_server())
    ):
        return run_fresh_python(*arguments, cwd=cwd, **environment)
    return _without_gloo(_forked(imported, arguments, variables, cwd))


def run_fresh_python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter with one thread for torch."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return _without_gloo(done)


def _without_gloo(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Take out of a process's output what gloo prints in torch 2.10."""
    done.stdout = _PRINTED_BY_GLOO.sub("", done.stdout)
    return done


_PRINTED_BY_GLOO = re.compile(
    r"\[Gloo\] Rank |[0-9]+ is connected to [0-9]+ peer ranks\. Expected number of connected peer "
    r"ranks is : [0-9]+\n"
)
"""Several ranks print into each other's lines."""


def free_port() -> str:
    """Return a TCP port that is free now, for processes to connect by."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


# ---- processes forked by fork_server.py ----------------------------------------------------------


@functools.cache
def _of_server() -> dict[str, str]:
    """Return the server's variables: this process's, when first asked, without the package's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")}
    return {**kept, "OMP_NUM_THREADS": "1"}


@functools.cache
def _server(imported: str) -> str:
    """Start the server with torch, or the package too; return its socket. It ends with us."""
    folder = tempfile.mkdtemp(prefix="fork")
    place = os.path.join(folder, "socket")
    words = [sys.executable, str(Path(__file__).with_name("fork_server.py")), place, imported]
    server = subprocess.Popen(
        words,
        env=_of_server(),
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdout is not None
    ready = server.stdout.readline()
    assert ready == b"ready\n", "the fork server did not start"
    _kept.append(server)
    return place


_kept: list[subprocess.Popen[bytes]] = []
"""The server, whose standard input closes when this process ends."""


def _forked(
    imported: str, arguments: Sequence[str], variables: Mapping[str, str], cwd: Path | None
) -> subprocess.CompletedProcess[str]:
    """Let the server fork a process, and return what it printed and how it ended."""
    request = {
        "arguments": arguments,
        "variables": variables,
        "folder": os.path.abspath(cwd or os.getcwd()),
    }
    printed: dict[str, str] = {}
    ends = [os.pipe(), os.pipe()]
    process = Forked(_server(imported), request, [write for _, write in ends])
    readers = []
    for name, (read, write) in zip(("stdout", "stderr"), ends, strict=True):
        os.close(write)
        readers.append(threading.Thread(target=_read, args=(read, printed, name), daemon=True))
        readers[-1].start()
    try:
        status = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        raise
    for reader in readers:  # the processes that it started may go on, and print
        reader.join(SECONDS)
    return subprocess.CompletedProcess(process.args, status, printed["stdout"], printed["stderr"])


def _read(file: int, printed: dict[str, str], name: str) -> None:
    with open(file, errors="strict") as opened:
        printed[name] = opened.read()
