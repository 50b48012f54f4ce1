"""The journal and the log: what was asked for, what was done, where and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logs import logged
from processes import run_program, run_torch_python

import torchdevice
from torchdevice.kernel.journal.journal import Journal

pytestmark = pytest.mark.one_engine


def test_entries_are_aggregated_by_line(target: str, kind: str) -> None:
    with torchdevice.portable(target) as scope:
        for _ in range(5):
            torch.zeros(1, device="cuda")
        torch.zeros(1, device="cuda:0")
    by_request = {entry.requested: entry for entry in scope.journal.entries}
    entry = by_request["cuda"]
    assert (entry.count, entry.fidelity) == (5, torchdevice.Fidelity.EXACT)
    assert entry.done == ("cpu" if kind == "cpu" else f"{kind}:0")
    assert (
        entry.site.file == __file__ and "test_entries_are_aggregated_by_line" in entry.site.function
    )
    assert by_request["cuda:0"].site.line != entry.site.line
    assert "6 calls at 2 sites" in repr(scope.journal)


def test_degraded_entries(target: str) -> None:
    with torchdevice.portable(target) as scope:
        torch.cuda.utilization()
        torch.zeros(1, device="cuda")
    assert [entry.fidelity for entry in scope.journal.degraded] == [
        torchdevice.Fidelity.APPROXIMATE
    ]


def test_memory_is_bounded() -> None:
    journal = Journal(max_entries=10)
    for index in range(100):
        journal.record(f"cuda:{index}", "cpu", torchdevice.Fidelity.EXACT)
    assert len(journal) == 10 and journal.overflow == 90
    journal.record("cuda:0", "cpu", torchdevice.Fidelity.EXACT)
    assert len(journal) <= 11


def test_a_full_journal_looks_no_line_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a line's number reads the line table, so it ends when nothing more is kept."""
    journal = Journal(max_entries=1)
    journal.record("cuda:0", "cpu", torchdevice.Fidelity.EXACT)
    monkeypatch.setattr(
        "torchdevice.kernel.journal.journal.site_of",
        lambda frame: pytest.fail("a line was looked up"),
    )
    assert journal.record("cuda:1", "cpu", torchdevice.Fidelity.EXACT) is None
    assert journal.overflow == 1


def test_nested_scopes_have_their_own(target: str) -> None:
    with torchdevice.portable(target) as outer:
        with torchdevice.portable(target) as inner:
            torch.zeros(1, device="cuda")
        assert len(inner.journal) == 1 and len(outer.journal) == 0


def test_an_approximation_is_logged_once_per_line(target: str) -> None:
    with logged() as messages, torchdevice.portable(target):
        for _ in range(4):
            torch.cuda.utilization()
    lines = [message for message in messages if "utilization" in message]
    assert len(lines) == 1 and __file__ in lines[0]


def test_the_library_is_silent_but_for_one_warning(tmp_path: Path) -> None:
    result = run_program(
        tmp_path,
        """
        import torch
        for _ in range(3):
            x = torch.zeros(2, device="cuda").cuda()
        torch.cuda.memory_allocated(); torch.cuda.empty_cache()
        """,
    )
    assert result.returncode == 0 and result.stdout == ""
    notice = (
        "torchdevice: no accelerator is in use: what the program asks of CUDA runs on the CPU\n"
    )
    assert result.stderr == notice


PROGRAM = """
import torch
torch.cuda.memory_allocated()
"""


def test_log_level_variable(tmp_path: Path) -> None:
    result = run_program(tmp_path, PROGRAM, TORCHDEVICE_LOG="INFO")
    assert "torchdevice: torch.cuda.memory_stats" in result.stderr
    assert "program.py:3" in result.stderr


def test_log_file_variable(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    run_program(tmp_path, PROGRAM, TORCHDEVICE_LOG_FILE=str(path))
    assert "torchdevice: torch.cuda.memory_stats" in path.read_text()


def test_importing_prints_nothing_and_changes_nothing(tmp_path: Path) -> None:
    program = """
import sys, torch
before = {name: id(value) for module in (torch, torch._C, torch.cuda) for name, value in vars(module).items()}
kinds = [type(m) for m in (torch, torch._C, torch.cuda)]
import torchdevice
after = {name: id(value) for module in (torch, torch._C, torch.cuda) for name, value in vars(module).items()}
assert before == after and kinds == [type(m) for m in (torch, torch._C, torch.cuda)]
assert "rich" not in sys.modules and "torch._dynamo" not in sys.modules
"""
    result = run_torch_python("-c", program, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
