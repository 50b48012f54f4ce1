"""One report of a run's processes: each writes its part to the run's folder, the first joins them.

A process that asks for an accelerator notes that it began, so that the first one can tell which
were killed before they could report.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import current_process, util
from pathlib import Path

from torchdevice.kernel.journal.journal import Journal
from torchdevice.kernel.python import forks, run_folder
from torchdevice.kernel.python.environment import REPORT
from torchdevice.kernel.python.uncaught_errors import told_failure
from torchdevice.report.content import MAIN, Process
from torchdevice.report.discrepancies import findings_of
from torchdevice.report.rendering import Report

Describe = Callable[[], Report]
"""Returns the report of this process alone."""


def lead(journal: Journal, describe: Describe, show: Callable[[Report], None]) -> None:
    """Let the processes of the run that this one leads report to it, and show all of it at the end.

    Args:
        journal: The journal of this process.
        describe: Returns the report of this process.
        show: The function that gets the report of all processes.
    """
    os.environ[REPORT] = "1"
    member = _Member(journal, describe)
    util.Finalize(None, lambda: show(member.joined()), exitpriority=_LAST)


def follow(journal: Journal, describe: Describe) -> None:
    """Let this process report to the run that it belongs to."""
    # The first process has become another program, and nobody is left to read.
    if run_folder.leads():
        del os.environ[REPORT]
        return
    util.Finalize(None, _Member(journal, describe).end, exitpriority=_LAST)


_LAST = -100
"""The priority with which multiprocessing calls what is to run after its processes were waited for.
"""

_members: list[_Member] = []


class _Member:
    """This process as one of a run.

    Multiprocessing calls finalizers at the end of its own processes too, which run no handlers of
    ``atexit``.
    """

    def __init__(self, journal: Journal, describe: Describe):
        self._journal = journal
        self._describe = describe
        self._token = secrets.token_hex(4)
        journal.began = self.begin
        _members.append(self)  # multiprocessing holds it weakly
        forks.in_child(self._forked)
        util.register_after_fork(self, _Member._started)

    def begin(self) -> None:
        """Note that this process has something to report."""
        run_folder.leave(".begun", json.dumps({"name": _name(), "pid": os.getpid()}), self._token)

    def end(self) -> None:
        """Write this process's part. May be called again, to replace the part by a later one."""
        folder = None if run_folder.leads() else run_folder.path()
        if folder is None:
            self._forget()
        elif len(self._journal) or findings_of(self._journal).compared:
            text = self._described(_name()).to_json(indent=None)
            if run_folder.leave(".json", text, self._token):
                self._take_back(folder)

    def _forget(self) -> None:
        """Undo, as the folder's last process, the notes for a first process that was killed."""
        folder = os.environ.get(run_folder.VARIABLE)
        if folder and not run_folder.leads():
            self._take_back(Path(folder))
            with contextlib.suppress(OSError):
                if not any(path.is_file() for path in Path(folder).iterdir()):
                    run_folder.remove(folder)

    def joined(self) -> Report:
        """Return the report of all processes."""
        own = self._described(MAIN)
        reports = [Report.from_dict(json.loads(text)) for text in run_folder.left(".json")]
        begun = [Process(**json.loads(text)) for text in run_folder.left(".begun")]
        if not reports and not begun:
            return own
        ends = ["running" if run_folder.is_running(each.pid) else "lost" for each in begun]
        lost = [dataclasses.replace(each, end=end) for each, end in zip(begun, ends, strict=True)]
        reports.sort(key=lambda report: report.processes[0].name)
        return own.joined(_told_apart(reports), lost)

    def _described(self, name: str) -> Report:
        return self._describe().renamed(name, failure=told_failure())

    def _take_back(self, folder: Path) -> None:
        with contextlib.suppress(OSError):  # the folder is gone where the first process has ended
            (folder / f"{os.getpid()}-{self._token}.begun").unlink(missing_ok=True)

    def _forked(self) -> None:
        """Count anew in a forked process. Unless multiprocessing's, it runs ``atexit`` handlers."""
        self._token = secrets.token_hex(4)
        self._journal.clear()
        atexit.register(self.end)

    def _started(self) -> None:
        """Report at the end of a process of multiprocessing, which is just beginning."""
        util.Finalize(None, self.end, exitpriority=_LAST)


def _name() -> str:
    """Return a name for this process."""
    parts = [f"rank {os.environ['RANK']}"] if os.environ.get("RANK") else []
    if current_process().name != "MainProcess":
        parts.append(current_process().name)
    return ", ".join(parts) or os.path.basename(sys.argv[0] if sys.argv else "") or "python"


def _told_apart(reports: list[Report]) -> Iterator[Report]:
    """Yield one-process reports, with process numbers where several have the same name."""
    names = Counter(report.processes[0].name for report in reports)
    for report in reports:
        process = report.processes[0]
        yield (
            report.renamed(f"{process.name} ({process.pid})") if names[process.name] > 1 else report
        )
