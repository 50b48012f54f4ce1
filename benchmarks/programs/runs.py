"""Checking programs out, and running them as separate processes."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.programs.program import OWN, Program

INPUTS = Path(__file__).with_name("inputs.py")

DRIVERS = Path(__file__).with_name("drivers")


class Run(NamedTuple):
    """How a program ran.

    Attributes:
        name: Of the program.
        target: The target, or ``program.OWN``.
        torch: The release of torch.
        commit: Of the program.
        outcome: "finished", "failed" or "stopped", which is at the limit of time.
        loss: As the program printed it; empty if it printed none.
        result: Likewise.
        seconds: Of processor time, of all its processes.
        error: The last line of what a program printed that failed.
    """

    name: str
    target: str
    torch: str
    commit: str
    outcome: str
    loss: str = ""
    result: str = ""
    seconds: float = 0.0
    error: str = ""


def check_out(program: Program, folder: Path, sources: Path | None, interpreter: str) -> None:
    """Put the files of a program's commit, or of its release on PyPI, into a folder.

    Args:
        program: The program.
        folder: A folder that does not exist yet.
        sources: A folder with bare git directories named ``owner+name/repo``; None for GitHub.
        interpreter: The python whose pip chooses the wheel of a release.
    """
    if "/" not in program.repository:
        return _unpack(f"{program.repository}=={program.commit}", folder, interpreter)
    if sources is None:
        clone = ["--filter=blob:none", f"https://github.com/{program.repository}"]
    else:
        clone = ["--shared", str(sources / program.repository.replace("/", "+") / "repo")]
    _quietly("git", "clone", "--quiet", "--no-checkout", *clone, str(folder))
    if program.parts:
        _quietly("git", "-C", str(folder), "sparse-checkout", "set", "--no-cone", *program.parts)
    _quietly("git", "-C", str(folder), "checkout", "--quiet", program.commit)


def _unpack(release: str, folder: Path, interpreter: str) -> None:
    """Unpack the wheel of a release, without what it depends on."""
    with tempfile.TemporaryDirectory() as downloads:
        options = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", downloads)
        _quietly(interpreter, "-m", "pip", "download", *options, release)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def _quietly(*words: str, **options: Any) -> None:
    """Run a command, and show what it printed only if it fails."""
    done = subprocess.run(
        words, capture_output=True, text=True, errors="replace", check=False, **options
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")


def command_of(program: Program, target: str, interpreter: str) -> list[str]:
    """Return the words that run a program on a target."""
    words = [word.replace("{drivers}", str(DRIVERS)) for word in shlex.split(program.command)]
    if target == OWN:
        return [interpreter, *words, *shlex.split(program.own or "")]
    return [interpreter, "-m", "torchdevice", "run", "--target", target, *words]


def run(program: Program, target: str, interpreter: str, folder: Path, limit: float) -> Run:
    """Run a program in a checkout.

    Args:
        program: The program.
        target: Of torchdevice, or ``program.OWN``.
        interpreter: The python of an environment with torch, torchdevice and what the program
            needs.
        folder: The checkout. The run takes place in a copy beside it, which stays, with what the
            run printed.
        limit: How many seconds it may take.
    """
    version, base = _facts(interpreter)
    place = folder.with_name(re.sub(r"\W", "-", f"{folder.name}-{target}"))
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    environment = _environment(program, place, (str(Path(interpreter).parent), f"{base}/bin"))
    cwd = place / program.folder
    if program.inputs:
        _quietly(interpreter, str(INPUTS), program.inputs, cwd=cwd, env=environment)
    log = place.with_suffix(".log")
    outcome, seconds = _process(
        command_of(program, target, interpreter), cwd, environment, log, limit
    )
    printed = log.read_text(errors="replace")
    written = "".join(path.read_text(errors="replace") for path in _files(cwd, program.log))
    loss, result = (_last(pattern, printed + written) for pattern in (program.loss, program.result))
    if program.digest:
        result = _digest(_files(cwd, program.digest))
    if outcome == "finished" and (bool(program.loss) > bool(loss) or not loss + result):
        outcome = "failed"
    error = "" if outcome == "finished" else _error(printed)
    return Run(
        program.name,
        target,
        version,
        program.commit,
        outcome,
        loss,
        result,
        round(seconds, 1),
        error,
    )


@functools.cache
def _facts(interpreter: str) -> tuple[str, str]:
    """Return an interpreter's torch release, and its environment's base Python's folder."""
    code = "import sys, torch; print(torch.__version__, sys.base_prefix)"
    version, base = subprocess.run(
        [interpreter, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    return version, base


def _files(cwd: Path, pattern: str) -> list[Path]:
    return sorted(path for path in cwd.glob(pattern) if path.is_file()) if pattern else []


def _digest(files: list[Path]) -> str:
    """Return a text that is the same for equal files; empty if there are none."""
    together = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return f"{len(files)} files, {together.hexdigest()[:8]}" if files else ""


def _environment(program: Program, place: Path, programs: tuple[str, ...]) -> dict[str, str]:
    """Return a run's variables: no downloads, one thread, caches in the run's own folder.

    Args:
        program: The program.
        place: The folder in which it runs.
        programs: Folders whose programs it finds first.
    """
    home = place.with_suffix(".home")
    home.mkdir(exist_ok=True)
    paths = [str(place / path) for path in program.paths]
    fixed = {
        "HOME": home,
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "XDG_CACHE_HOME": home / "cache",
        "TORCHINDUCTOR_CACHE_DIR": home / "inductor",
        "TRITON_CACHE_DIR": home / "triton",
        "MPLCONFIGDIR": home / "matplotlib",
        "HF_HOME": home / "huggingface",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHDEVICE", "PYTHON"))
    }
    return {**kept, **{name: str(value) for name, value in fixed.items()}, **program.environment}


def _process(
    words: list[str], cwd: Path, environment: Mapping[str, str], log: Path, limit: float
) -> tuple[str, float]:
    """Run a command. Return its outcome, and the processor time with that of its children."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        try:
            # wait4 instead of Popen.wait: it returns the processor time of this child alone.
            _, status, used = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    outcome = "stopped" if stopped.is_set() else "failed" if process.returncode else "finished"
    return outcome, used.ru_utime + used.ru_stime


def _last(pattern: str, text: str) -> str:
    matches = re.findall(pattern, text) if pattern else []
    return matches[-1] if matches else ""


def _error(printed: str) -> str:
    """Return the last line that names an error, or the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    found = re.compile(r"(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)")
    errors = [
        match[1]
        for match in map(found.match, lines)
        if match and "ChildFailedError" not in match[1]
    ]
    # Paths of the environment say nothing about the program.
    return re.sub(r"/\S*/(?=site-packages)", "", (errors or lines or ["it printed nothing"])[-1])[
        :300
    ]


if sys.platform == "win32":
    raise ImportError("benchmarks.programs needs os.wait4, which Windows lacks")
