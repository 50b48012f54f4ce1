"""What pytest says at its end: what the tests asked of the accelerator and what was done, in all workers of xdist."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from torchdevice.cli.reports import show_report

if TYPE_CHECKING:
    from torchdevice import Report, Scope

_KEY = "torchdevice"


class Summary:
    """The part of the plugin that reports, for a run of pytest in one scope.

    Args:
        scope: The scope of ``--torchdevice``.
        shown: What the flag ``--torchdevice-report`` says: None for totals, True for the whole report, else a file.
    """

    def __init__(self, scope: Scope, shown: str | bool | None):
        self._scope = scope
        self._shown = shown
        self._of_workers: list[Report] = []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what a worker did to the process that started it."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            name = session.config.workerinput["workerid"]  # type: ignore[attr-defined]
            output[_KEY] = self._scope.report().renamed(name).to_json(indent=None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker did. A worker that was killed sends nothing."""
        from torchdevice.report import Report

        sent = getattr(node, "workeroutput", {}).get(_KEY)
        if sent:
            self._of_workers.append(Report.from_dict(json.loads(sent)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the totals, or the report if it was asked for."""
        if hasattr(terminalreporter.config, "workerinput"):  # this is a worker
            return
        report = self._scope.report().joined(self._of_workers)
        if self._shown:
            show_report(self._shown, report)
        elif report.rows and terminalreporter.verbosity >= 0:
            from torchdevice.report import plain_text

            terminalreporter.section("torchdevice")
            for line in plain_text.heading(report)[1:]:
                terminalreporter.line(line)
            terminalreporter.line("  --torchdevice-report says which, --torchdevice-report=FILE.html writes a page")
