"""One report of all processes of a run: each writes its part into a folder, and the first one joins them at its end.

The environment names the folder. Nothing of it exists until a process other than the first asks for an accelerator;
such a process notes that it began, so that the first one can tell which were killed before they could report. The first
process removes the folder. Where the first process is killed, the last of the others does, or else the next run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import current_process, util
from pathlib import Path

import psutil

from torchdevice.journal import Journal
from torchdevice.report.content import Process
from torchdevice.report.report import Report
from torchdevice.switch import REPORT_FOLDER

_NAME = re.compile(r"torchdevice-report-([0-9]+)-[0-9a-f]+")

Describe = Callable[[], Report]
"""Returns the report of this process alone."""


def lead(journal: Journal, describe: Describe, show: Callable[[Report], None]) -> None:
    """Begin a run in this process: processes that follow report to it, and at its end all of it is shown.

    Args:
        journal: What this process counts.
        describe: Returns the report of this process.
        show: What becomes of the report of all processes.
    """
    _remove_what_killed_runs_left()
    name = f"torchdevice-report-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[REPORT_FOLDER] = os.path.join(tempfile.gettempdir(), name)
    member = _Member(Path(os.environ[REPORT_FOLDER]), journal, describe)
    util.Finalize(None, lambda: show(member.joined()), exitpriority=_LAST)


def follow(journal: Journal, describe: Describe) -> None:
    """Let this process report to the run that it belongs to, if any."""
    folder = os.environ.get(REPORT_FOLDER)
    if not folder:
        return
    member = _Member(Path(folder), journal, describe)
    if member.leads:  # the first process has become another program, and nobody is left to read
        del os.environ[REPORT_FOLDER]
        return
    util.Finalize(None, member.end, exitpriority=_LAST)


_LAST = -100
"""The priority with which multiprocessing calls what is to run after its processes were waited for."""

_members: list[_Member] = []


class _Member:
    """This process as one of a run.

    Multiprocessing calls finalizers at the end of its own processes too, which run no handlers of ``atexit``.
    """

    def __init__(self, folder: Path, journal: Journal, describe: Describe):
        self._folder = folder
        self._journal = journal
        self._describe = describe
        self._token = secrets.token_hex(4)
        name = _NAME.fullmatch(folder.name)
        self._leader = int(name[1]) if name else 0
        journal.began = self.begin
        _members.append(self)  # multiprocessing holds it weakly
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forked)
        util.register_after_fork(self, _Member._started)

    @property
    def leads(self) -> bool:
        """Whether this process is the first of the run."""
        return self._leader == os.getpid()

    def begin(self) -> None:
        """Note that this process has something to report."""
        if not self.leads and _runs(self._leader):
            with contextlib.suppress(OSError):  # a run must not fail for its report
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._own(".begun").write_text(json.dumps({"name": _name(), "pid": os.getpid()}))

    def end(self) -> None:
        """Write what this process did. May be called again, when it has done more."""
        if self.leads or not len(self._journal) or not self._folder.is_dir():
            return
        with contextlib.suppress(OSError):
            if _runs(self._leader):
                unfinished = self._own(".part")
                unfinished.write_text(self._describe().renamed(_name()).to_json(indent=None))
                unfinished.replace(self._own(".json"))
            self._own(".begun").unlink(missing_ok=True)
            if not _runs(self._leader):
                self._folder.rmdir()  # raises unless this process is the last

    def joined(self) -> Report:
        """Return the report of all processes, and remove the folder."""
        own = self._describe()
        if not self._folder.is_dir():
            return own
        reports = [Report.from_dict(json.loads(path.read_text())) for path in sorted(self._folder.glob("*.json"))]
        lost = [Process(**json.loads(path.read_text())) for path in sorted(self._folder.glob("*.begun"))]
        shutil.rmtree(self._folder, ignore_errors=True)
        lost = [Process(each.name, each.pid, "running" if _runs(each.pid) else "lost") for each in lost]
        reports.sort(key=lambda report: report.processes[0].name)
        return own.joined(_told_apart(reports), lost)

    def _own(self, suffix: str) -> Path:
        return self._folder / f"{os.getpid()}-{self._token}{suffix}"

    def _forked(self) -> None:
        """Count anew in a forked process. One that multiprocessing did not start runs the handlers of ``atexit``."""
        self._token = secrets.token_hex(4)
        self._journal.clear()
        atexit.register(self.end)

    def _started(self) -> None:
        """Report at the end of a process of multiprocessing, which is just beginning."""
        util.Finalize(None, self.end, exitpriority=_LAST)


def _name() -> str:
    """Return what to call this process."""
    parts = [f"rank {os.environ['RANK']}"] if os.environ.get("RANK") else []
    if current_process().name != "MainProcess":
        parts.append(current_process().name)
    return ", ".join(parts) or os.path.basename(sys.argv[0] if sys.argv else "") or "python"


def _told_apart(reports: list[Report]) -> Iterator[Report]:
    """Yield reports of one process each, with the number of the process where several have the same name."""
    names = Counter(report.processes[0].name for report in reports)
    for report in reports:
        process = report.processes[0]
        yield report.renamed(f"{process.name} ({process.pid})") if names[process.name] > 1 else report


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _remove_what_killed_runs_left() -> None:
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            found = _NAME.fullmatch(path.name)
            if found and not _runs(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)
