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

from torchdevice.kernel.python import run_folder

pytestmark = pytest.mark.one_engine


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    return process.pid


def belong_to(pid: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process belong to the run that a process began, and return the folder of the run."""
    shared = folder / f"torchdevice-run-{run_folder._here()}-{pid}-0123456789abcdef"
    monkeypatch.setenv(run_folder.VARIABLE, str(shared))
    return shared


def test_one_process_of_a_run_is_the_first_to_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = belong_to(os.getppid(), tmp_path, monkeypatch)
    assert run_folder.path() == folder and not run_folder.leads() and not folder.exists()
    assert [run_folder.claim("this"), run_folder.claim("this"), run_folder.claim("that")] == [
        True,
        False,
        True,
    ]


def test_the_first_process_writes_nothing_and_finds_what_others_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = belong_to(os.getpid(), tmp_path, monkeypatch)
    assert (
        run_folder.leads()
        and run_folder.claim("this")
        and run_folder.claim("this")
        and not folder.exists()
    )
    (folder / "this").mkdir(parents=True)
    assert not run_folder.claim("this") and run_folder.claim("that")


def test_a_run_whose_first_process_has_ended_is_none(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = belong_to(ended, tmp_path, monkeypatch)
    assert run_folder.path() is None and run_folder.claim("this") and run_folder.claim("this")
    assert not folder.exists()


def test_where_nothing_can_be_written_every_process_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    belong_to(os.getppid(), tmp_path / "file", monkeypatch)
    assert run_folder.claim("this") and run_folder.claim("this")


def test_a_run_begins_and_removes_what_killed_runs_left(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(run_folder.VARIABLE, "")
    here = run_folder._here()
    names = (f"{here}-{ended}-0a", f"{here}-{os.getppid()}-0a", f"00000000-{ended}-0a", "mine")
    left = [tmp_path / f"torchdevice-run-{name}" for name in names]
    for each in left:
        (each / "01234567").mkdir(parents=True)
        (each / "12-01234567.begun").touch()
    run_folder.begin()
    assert [each.exists() for each in left] == [False, True, True, True]
    assert run_folder.leads() and run_folder.path() == Path(os.environ[run_folder.VARIABLE])
    assert run_folder.path().parent == tmp_path  # type: ignore[union-attr]


def test_without_a_temporary_folder_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    monkeypatch.delenv(run_folder.VARIABLE, raising=False)
    run_folder.begin()
    assert (
        run_folder.VARIABLE not in os.environ
        and run_folder.path() is None
        and run_folder.claim("this")
    )


def test_a_process_that_ended_unnoticed_does_not_run(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_first_process_of_another_host_may_run(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number means nothing here, whether a process of this host has it or not."""
    for pid in (ended, os.getpid()):
        shared = tmp_path / f"torchdevice-run-00000000-{pid}-0a"
        monkeypatch.setenv(run_folder.VARIABLE, str(shared))
        assert (
            run_folder.path() == shared and not run_folder.leads() and run_folder.claim("01234567")
        )


@pytest.mark.skipif(
    sys.platform != "linux", reason="containers number processes by namespaces of Linux"
)
def test_a_container_is_another_place() -> None:
    ask = "from torchdevice.kernel.python import run_folder; print(run_folder._here())"
    again = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert again == run_folder._here()
    unshare = ["unshare", "--fork", "--pid", "--mount-proc", "--map-root-user"]
    contained = subprocess.run(
        [*unshare, sys.executable, "-c", ask], capture_output=True, text=True, check=False
    )
    if contained.returncode:
        pytest.skip(f"no namespaces here: {contained.stderr.strip()}")
    assert contained.stdout.strip() != again


def test_only_what_a_run_made_is_removed(tmp_path: Path) -> None:
    folder, other = tmp_path / "torchdevice-run-00000000-1-0a", tmp_path / "other"
    for each in (folder, other):
        (each / "01234567").mkdir(parents=True)
        (each / "12-01234567.json").touch()
    (folder / "89abcdef").symlink_to(other)
    (folder / "mine.txt").touch()
    link = tmp_path / "torchdevice-run-00000000-2-0a"
    link.symlink_to(other)
    for each in (folder, other, link):
        run_folder.remove(each)
    assert [each.name for each in folder.iterdir()] == ["mine.txt"]
    assert len(list(other.iterdir())) == 2 and link.is_symlink()
    (folder / "mine.txt").unlink()
    run_folder.remove(folder)
    assert not folder.exists()


def test_a_file_is_seen_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda unfinished, path: None)
    monkeypatch.setattr(run_folder, "path", lambda: tmp_path)
    assert run_folder.leave(".begun", "{}", "01234567")
    assert [each.name for each in tmp_path.iterdir()] == [f"{os.getpid()}-01234567.part"]
