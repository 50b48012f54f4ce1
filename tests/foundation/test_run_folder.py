"""The folder that the processes of a run share, as its first process and as the others see it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from torchdevice.foundation import run_folder

pytestmark = pytest.mark.one_engine


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    return process.pid


def belong_to(pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process belong to the run that a process began, and return the folder of the run."""
    shared = folder / f"torchdevice-run-{pid}-0123456789abcdef"
    monkeypatch.setenv(run_folder.VARIABLE, str(shared))
    return shared


def test_one_process_of_a_run_is_the_first_to_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = belong_to(os.getppid(), tmp_path, monkeypatch)
    assert run_folder.path() == folder and not run_folder.leads() and not folder.exists()
    assert [run_folder.claim("this"), run_folder.claim("this"), run_folder.claim("that")] == [True, False, True]


def test_the_first_process_writes_nothing_and_finds_what_others_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = belong_to(os.getpid(), tmp_path, monkeypatch)
    assert run_folder.leads() and run_folder.claim("this") and run_folder.claim("this") and not folder.exists()
    (folder / "this").mkdir(parents=True)
    assert not run_folder.claim("this") and run_folder.claim("that")


def test_a_run_whose_first_process_has_ended_is_none(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = belong_to(ended, tmp_path, monkeypatch)
    assert run_folder.path() is None and run_folder.claim("this") and run_folder.claim("this")
    assert not folder.exists()


def test_where_nothing_can_be_written_every_process_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    belong_to(os.getppid(), tmp_path / "file", monkeypatch)
    assert run_folder.claim("this") and run_folder.claim("this")


def test_a_run_begins_and_removes_what_killed_runs_left(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(run_folder.VARIABLE, "")
    left = [tmp_path / f"torchdevice-run-{pid}" for pid in (f"{ended}-0a", f"{os.getppid()}-0a", "mine")]
    for each in left:
        (each / "part").mkdir(parents=True)
    run_folder.begin()
    assert [each.exists() for each in left] == [False, True, True]
    assert run_folder.leads() and run_folder.path() == Path(os.environ[run_folder.VARIABLE])
    assert run_folder.path().parent == tmp_path  # type: ignore[union-attr]


def test_without_a_temporary_folder_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.delenv(run_folder.VARIABLE, raising=False)
    run_folder.begin()
    assert run_folder.VARIABLE not in os.environ and run_folder.path() is None and run_folder.claim("this")


def test_a_process_that_ended_unnoticed_does_not_run(ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not run_folder.is_running(ended) and run_folder.is_running(os.getppid())
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as process:
        process.stdout.read()  # type: ignore[union-attr]
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            pass
        assert not run_folder.is_running(process.pid)

    def refuse(process: Any) -> NoReturn:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "status", refuse)
    assert run_folder.is_running(os.getppid()), "it is somebody else's, and may run"
