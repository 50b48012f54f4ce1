"""The report: requests and results by line of the program, of all processes and forms."""

from __future__ import annotations

import dataclasses
import functools
import html.parser
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import logged
from processes import run_command, run_program

import torchdevice
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.journal import callers, journal
from torchdevice.kernel.journal.journal import Journal
from torchdevice.report import Report, content, formatting, source
from torchdevice.report.content import Content, Group, Process, Row
from torchdevice.report.discrepancies import LEFT_OUT
from torchdevice.tools.cli import main
from torchdevice.tools.cli import report as report_command

pytestmark = pytest.mark.one_engine

LIBRARY = """
def ask(journal, times=1):
    for _ in range(times):
        journal.record("cuda", "cpu", EXACT)

def deeper(depth, journal, times=1):
    return deeper(depth - 1, journal, times) if depth else ask(journal, times)
"""

PROGRAM = """
def program(ask, deeper, journal):
    ask(journal, 5)
    deeper(3, journal, 2)
    deeper(9, journal, 2)
    deeper(9, journal)
"""


def defined(text: str, file: str, **names: Any) -> dict[str, Any]:
    exec(compile(text, file, "exec"), names)
    return names


@pytest.fixture
def library() -> dict[str, Any]:
    """Functions of an installed package, which count an event in a journal."""
    return defined(
        LIBRARY, "/env/lib/python3.11/site-packages/package/asking.py", EXACT=Fidelity.EXACT
    )


@pytest.fixture
def program(library: dict[str, Any]) -> Callable[[Journal], None]:
    """A program that calls them from four lines."""
    found = defined(PROGRAM, "/home/me/train.py")["program"]
    return functools.partial(found, library["ask"], library["deeper"])


class TestCallSites:
    def test_each_line_of_the_program_has_its_own_entry(
        self, program: Callable[[Journal], None]
    ) -> None:
        """Also if all of them reach one line of a library, by ways of different lengths."""
        kept = Journal()
        for _ in range(3):
            program(kept)
        assert {(e.site.file, e.site.line): e.count for e in kept.entries} == {
            ("/home/me/train.py", 3): 15,
            ("/home/me/train.py", 4): 6,
            ("/home/me/train.py", 5): 6,
            ("/home/me/train.py", 6): 3,
        }
        assert {(e.library.file[-9:], e.library.line) for e in kept.entries if e.library} == {
            ("asking.py", 4)
        }

    def test_frames_are_looked_for_once(
        self,
        library: dict[str, Any],
        program: Callable[[Journal], None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        looked = []
        original = callers.program_frame
        monkeypatch.setattr(
            journal, "program_frame", lambda frame: looked.append(frame) or original(frame)
        )
        kept = Journal()
        one_line = defined(
            "def one(deeper, journal):\n    deeper(9, journal, 50)\n", "/home/me/one.py"
        )["one"]
        for _ in range(3):
            one_line(library["deeper"], kept)
        assert len(looked) == 1 and [entry.count for entry in kept.entries] == [150]

    def test_where_no_frame_is_the_programs(self, library: dict[str, Any]) -> None:
        import threading

        kept = Journal()
        thread = threading.Thread(target=library["ask"], args=(kept, 4))
        thread.start()
        thread.join()
        (entry,) = kept.entries
        assert entry.site.file.endswith("asking.py") and entry.library is None and entry.count == 4

    @pytest.mark.parametrize(
        ("file", "module", "kind"),
        [
            ("/home/me/train.py", "train", callers.PROGRAM),
            ("/tmp/ipykernel_12/345.py", "__main__", callers.PROGRAM),
            ("<string>", "__main__", callers.PROGRAM),
            ("<stdin>", "__main__", callers.PROGRAM),
            ("<ipython-input-3-abc>", "__main__", callers.PROGRAM),
            ("<string>", "dataclasses_made_this", callers.LIBRARY),
            ("<frozen importlib._bootstrap>", "importlib._bootstrap", callers.LIBRARY),
            ("/usr/lib/python3/dist-packages/accelerate/x.py", "accelerate.x", callers.LIBRARY),
            (json.__file__, "json", callers.LIBRARY),
            (pytest.__file__, "pytest", callers.LIBRARY),
            (torch.nn.__file__, "torch.nn", callers.OURS),
            (torchdevice.__file__, "torchdevice", callers.OURS),
        ],
    )
    def test_whose_a_frame_is(self, file: str, module: str, kind: int) -> None:
        names = defined("import sys\ndef frame(): return sys._getframe()", file, __name__=module)
        assert callers.kind_of(names["frame"]()) == kind

    def test_a_warning_and_the_log_name_the_programs_line(self, meta_target: None) -> None:
        text = "import torch\ndef make(): return torch.ones(1, dtype=torch.float64, device='cuda')"
        make = defined(text, "/env/site-packages/package/making.py", __name__="package.making")[
            "make"
        ]
        caller = defined("def call(make):\n    make()", "/home/me/calls.py", __name__="calls")[
            "call"
        ]
        with logged() as messages, torchdevice.portable("meta"):
            with pytest.warns(torchdevice.errors.PortabilityWarning) as warned:
                caller(make)
        assert (warned[0].filename, warned[0].lineno) == ("/home/me/calls.py", 2)
        (message,) = (each for each in messages if "float64" in each)
        assert message.endswith(
            "at /home/me/calls.py:2, asked for by /env/site-packages/package/making.py:2"
        )


EXAMPLE = '''\
"""An example."""
import torch

def step():
    for _ in range(3):
        x = torch.ones(4, device="cuda"); y = torch.ones(4, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        x + y
    return torch.cuda.utilization()

step()
torch.cuda.nvtx.mark("<script>alert(1)</script> & done")
try:
    torch.cuda.MemPool()
except RuntimeError:
    pass
'''


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """The report of a program with a row of most kinds."""
    path = tmp_path / "example.py"
    path.write_text(EXAMPLE)
    with torchdevice.portable("cpu") as scope:
        runpy.run_path(str(path), run_name="__main__")
    return scope.report()


class TestContent:
    def test_rows(self, report: Report) -> None:
        assert [
            (row.line, row.asked, row.done, row.fidelity.value, row.count) for row in report.rows
        ] == [
            (7, "autocast(torch.float16)", "torch.bfloat16", "downcast", 1),
            (9, "torch.cuda.utilization", "processor utilization", "approximate", 1),
            (6, "cuda", "cpu", "exact", 6),
            (
                12,
                "torch.cuda.nvtx.mark",
                "what torch.profiler shows as record_function",
                "inert",
                1,
            ),
            (14, "torch.cuda.MemPool", "NotSupportedError", "unsupported", 1),
        ]
        assert all(row.file.endswith("example.py") for row in report.rows)
        first = report.rows[0]
        assert (
            first.source == 'with torch.autocast("cuda", dtype=torch.float16):'
            and first.function == "step"
        )
        assert (first.first, len(first.passage)) == (4, 6) and first.passage[
            3
        ].strip() == first.source

    def test_totals(self, report: Report) -> None:
        assert (report.totals.calls, report.totals.lines) == (10, 5)
        assert [(group, len(rows)) for group, rows in report.groups.items()] == [
            (Group.NUMBERS, 2),
            (Group.ELSEWHERE, 1),
            (Group.OTHER, 2),
        ]

    def test_a_line_that_asks_through_libraries(self, program: Callable[[Journal], None]) -> None:
        kept = Journal()
        program(kept)
        found = content.rows_of(kept.entries)
        assert [(row.line, row.count) for row in found] == [(3, 5), (4, 2), (5, 2), (6, 1)]
        assert formatting.libraries(found[0]) == "package/asking.py:4"

    def test_lines_of_libraries_are_one_row(self) -> None:
        kept = Journal()
        for name, times in (("one", 2), ("other", 3)):
            text = LIBRARY + "\nasked = ask"
            asked = defined(text, f"/env/site-packages/{name}.py", EXACT=Fidelity.EXACT)["asked"]
            defined("ask(journal, times)", "/home/me/both.py", ask=asked, journal=kept, times=times)
        (row,) = content.rows_of(kept.entries)
        assert row.count == 5 and [(each.file[-8:], each.count) for each in row.libraries] == [
            ("other.py", 3),
            ("s/one.py", 2),
        ]
        assert formatting.libraries(row) == "other.py:4 and 1 more line"

    def test_data_come_back(self, report: Report) -> None:
        data = json.loads(report.to_json())
        assert Report.from_dict(data) == report and data == report.to_dict()
        assert data["totals"]["calls"] == 10 and data["totals"]["changed numbers"]["lines"] == 2
        with pytest.raises(ValueError, match="not a report of torchdevice"):
            Report.from_dict({"rows": []})

    def test_operators_that_left_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the time they took and the bytes they read and wrote."""
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        with torchdevice.simulate("mps") as scope:
            x = torch.randn(8, 8, device="cuda")
            for _ in range(3):
                torch.linalg.eig(x)
        (row,) = (row for row in scope.report().rows if row.fidelity is Fidelity.FELL_BACK)
        assert row.count == 3 and 0 < row.seconds < 60
        # The matrix, its eigenvalues, its eigenvectors.
        assert row.bytes == 3 * (8 * 8 * 4 + 8 * 8 + 8 * 8 * 8)
        assert list(scope.report().fallbacks) == [row.asked] == ["aten::linalg_eig"]
        assert row.source == "torch.linalg.eig(x)"

    def test_declared_constants_and_downcasts(self, meta_target: None) -> None:
        with (
            torchdevice.portable("meta") as scope,
            pytest.warns(torchdevice.errors.PortabilityWarning),
        ):
            torch.cuda.get_arch_list()
            torch.ones(1, dtype=torch.float64, device="cuda")
        kinds = {row.fidelity: row for row in scope.report().rows}
        assert kinds[Fidelity.DECLARED].done.startswith(
            "the architectures of the devices' compute capabilities"
        )
        assert (kinds[Fidelity.DOWNCAST].asked, kinds[Fidelity.DOWNCAST].done) == (
            "torch.float64",
            "torch.float32",
        )

    def test_what_changes_numbers_is_refused_by_a_strict_scope(self) -> None:
        refused = {fidelity for fidelity in Fidelity if fidelity.changes_numbers}
        assert refused == {Fidelity.APPROXIMATE, Fidelity.DOWNCAST, Fidelity.FELL_BACK}
        with torchdevice.portable("cpu", strict=True) as scope:
            for fidelity in Fidelity:
                if fidelity in refused:
                    with pytest.raises(torchdevice.errors.FidelityError):
                        scope._resolved().report("this", "that", fidelity)
                else:
                    scope._resolved().report("this", "that", fidelity)


class TestText:
    def test_plain(self, report: Report) -> None:
        lines = str(report).splitlines()
        assert lines[0].startswith("torchdevice: report of ") and lines[0].endswith(
            "on cpu in place of cuda"
        )
        assert lines[1:4] == [
            "  changed numbers: 2 calls at 2 lines",
            "  ran elsewhere: 6 calls at 1 line",
            "  other: 2 calls at 2 lines",
        ]
        assert "       6 x cuda -> cpu [exact]" in lines
        place = next(
            number
            for number, line in enumerate(lines)
            if "example.py:6  x = torch.ones(4, dev" in line
        )
        assert lines[place + 1] == "       6 x cuda -> cpu [exact]"
        assert repr(report) == "<torchdevice.Report: 10 calls at 5 lines>"

    def test_nothing(self) -> None:
        with torchdevice.portable("cpu") as scope:
            torch.ones(1)
        assert str(scope.report()).endswith("the program asked for no accelerator")
        assert "asked for no accelerator" in scope.report().to_html()

    @pytest.mark.parametrize("width", [60, 140])
    def test_rich(self, report: Report, width: int) -> None:
        from rich.console import Console

        shown = io.StringIO()
        Console(file=shown, width=width, force_terminal=True).print(report)
        text = re.sub("\x1b\\[[0-9;]*m", "", shown.getvalue())
        assert (
            "Changed numbers" in text
            and "downcast" in text
            and ("autocast(torch.float16)" in text or width == 60)
        )
        assert "\x1b[" in shown.getvalue() and max(map(len, text.splitlines())) <= width
        assert "".join(text.split()) == "".join(str(report).split())

    def test_colours_are_for_terminals(
        self, report: Report, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        plain, coloured, without = io.StringIO(), Terminal(), Terminal()
        report.show(plain)
        assert plain.getvalue() == f"{report}\n"
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        report.show(coloured)
        monkeypatch.setenv("NO_COLOR", "1")
        report.show(without)
        colour = re.compile("\x1b\\[[0-9;]*3[0-9]")
        assert colour.search(coloured.getvalue()) and not colour.search(without.getvalue())

    def test_rich_is_imported_only_where_it_is_shown(self, tmp_path: Path) -> None:
        program = """
            import atexit, sys, torch
            torch.ones(1).cuda()
            atexit.register(lambda: print("rich" in sys.modules))
        """
        for options in (["--report"], ["--report=r.html"], ["--report=r.json"]):
            assert run_program(tmp_path, program, options=options).stdout == "False\n"

    def test_figures(self) -> None:
        times = {
            0: "",
            2e-7: "0.2 µs",
            0.0123456: "12.3 ms",
            1.5: "1.5 s",
            4000: "4,000 s",
            0.9998: "1,000 ms",
        }
        times |= {0.0009998: "1,000 µs", 999.4: "999 s", 999.6: "1,000 s"}
        assert {seconds: formatting.duration(seconds) for seconds in times} == times
        sizes = {
            0: "",
            12: "12 B",
            1536: "1.5 KiB",
            3 << 40: "3,072 GiB",
            1023 << 10: "1,023 KiB",
            1023950: "1,000 KiB",
        }
        assert {count: formatting.size(count) for count in sizes} == sizes


class TestSentences:
    def report(self, **fields: Any) -> Content:
        processes = fields.pop("processes", (Process("main", 1),))
        return Content(("t.py",), "cpu", "cuda", {}, fields.pop("rows", ()), processes, **fields)

    def row(self, *processes: str) -> Row:
        return Row(
            "t.py", 3, "f", 1, [], "cuda", "cpu", Fidelity.EXACT, 1, 0, 0, [], list(processes)
        )

    @pytest.mark.parametrize(
        ("counts", "said"),
        [
            (
                ({"aten::add": 2, "aten::mul": 1}, {}, {}),
                "verified 3 calls of 2 operators: 0 findings",
            ),
            (
                ({"aten::add": 1}, {"aten::rand": 1}, {"aten::other": 2}),
                "verified 1 call of 1 operator, 1 call with random numbers by shape, dtype and "
                "range only; "
                "not compared: 2 calls of 1 operator that the CPU cannot make: 0 findings",
            ),
            (
                ({}, {}, {}, {}, {"my::a": 2, "my::b": 1}, {"aten::set_": 1}),
                "verified 0 calls of 0 operators; not compared: 3 calls of 2 operators of other "
                "libraries; "
                "not compared: 1 call of 1 operator that must not be repeated: 0 findings",
            ),
        ],
    )
    def test_what_was_verified(self, counts: tuple[dict[str, int], ...], said: str) -> None:
        verified = dict(zip(("compared", "random", *LEFT_OUT), counts, strict=False))
        assert (
            formatting.verified(self.report(verified=verified)) == said
            and formatting.verified(self.report()) == ""
        )

    def test_which_processes(self) -> None:
        names = [f"rank {number}" for number in range(6)]
        report = self.report(
            processes=[Process(name, 1, calls=1) for name in names] + [Process("main", 1)]
        )
        said = [formatting.processes(self.row(*names[:count]), report) for count in (1, 4, 5, 6)]
        assert said == ["rank 0", "ranks 0-3", "ranks 0-4", ""]
        others = [f"worker {number}" for number in range(6)]
        assert formatting.processes(self.row(*others), report) == "", "as many as there are"
        assert (
            formatting.processes(self.row(*others[:5]), report)
            == f"{', '.join(others[:4])} and 1 more"
        )
        assert formatting.processes(self.row("main"), self.report()) == "", "there is only one"

    def test_what_is_missing(self) -> None:
        processes = [
            Process("main", 1, calls=1),
            Process("rank 1", 2, "running"),
            Process("rank 2", 3, "lost"),
        ]
        assert formatting.missing(self.report(processes=processes, left_out=1)) == [
            "rank 1 (process 2) is still running; what it did is not in this report.",
            "rank 2 (process 3) was killed before it could say what it did.",
            "The journal's limit was reached: 1 call more, not told apart.",
        ]

    def test_one_simulated_device_has_no_number(self) -> None:
        said = {
            "simulated:t4:1": "simulated:t4",
            "simulated:t4:2": "simulated:t4:2",
            "mine:1": "mine:1",
            "cpu": "cpu",
        }
        for target, shown in said.items():
            assert formatting.target(dataclasses.replace(self.report(), target=target)) == shown

    def test_a_request_that_was_met_as_it_is_stands_once(self) -> None:
        row = self.row("main")
        assert formatting.exchange(row) == "cuda -> cpu"
        assert formatting.exchange(dataclasses.replace(row, done="cuda:0")) == "cuda:0"
        assert (
            formatting.exchange(dataclasses.replace(row, asked="cuda:1", done="cuda:1")) == "cuda:1"
        )
        assert (
            formatting.exchange(dataclasses.replace(row, asked="cuda:1", done="cuda:0"))
            == "cuda:1 -> cuda:0"
        )

    def test_the_launcher_is_not_a_rank(self) -> None:
        ranks = [Process(f"rank {at}", 2 + at, calls=1) for at in range(2)]
        launcher = Process("main", 1)
        assert formatting.participants(self.report()) == ""
        assert formatting.participants(self.report(processes=[launcher, *ranks])) == "2 ranks"
        busy = [dataclasses.replace(launcher, calls=1), *ranks]
        assert formatting.participants(self.report(processes=busy)) == "2 ranks and 1 other process"
        assert (
            formatting.participants(self.report(processes=[launcher, Process("worker", 2)]))
            == "2 processes"
        )

    def test_the_launchers_table_of_failures_is_left_out(self) -> None:
        table = Process(
            "main", 1, failure="failed at torchrun:8 with ChildFailedError: \n=====\nd.py FAILED"
        )
        rank = Process("rank 1", 2, failure="failed at d.py:4 with ValueError: one\n  two")
        assert formatting.missing(self.report(processes=[table, rank])) == [
            "rank 1 failed at d.py:4 with ValueError: one two"
        ]
        assert "torchrun:8" in formatting.missing(self.report(processes=[table]))[0]

    def test_where_the_program_failed(self) -> None:
        processes = [Process("main", 1, failure="failed at a.py:1 with ValueError: x")]
        errors = [
            "b.py:2 with KeyError: 'cuda:0'",
            "b.py:2 with KeyError: 'cuda:1'",
            "b.py:3 with KeyError: 'cuda:2'",
        ]
        processes += [
            Process(f"rank {at}", 2, failure=f"failed at {error}")
            for at, error in enumerate(errors)
        ]
        assert formatting.missing(self.report(processes=processes)) == [
            "the program failed at a.py:1 with ValueError: x",
            "ranks 0-1 failed at b.py:2 with KeyError: 'cuda:0-1'",
            "rank 2 failed at b.py:3 with KeyError: 'cuda:2'",
        ]

    def test_devices_of_ranks_are_one_row(self) -> None:
        asked = [
            ("cuda:0", "mps:0"),
            ("cuda:2", "mps:2"),
            ("cuda:1", "mps:1"),
            ("cuda:1", "cpu"),
            ("x", "y"),
        ]
        given = [
            dataclasses.replace(self.row(f"rank {at}"), asked=a, done=d)
            for at, (a, d) in enumerate(asked)
        ]
        found = {
            (row.asked, row.done): (row.count, len(row.processes)) for row in content.folded(given)
        }
        count = given[0].count
        assert found == {
            ("cuda:0-2", "mps:0-2"): (3 * count, 3),
            ("cuda:1", "cpu"): (count, 1),
            ("x", "y"): (count, 1),
        }
        assert (content.numbers([0, 2]), content.numbers([4])) == ("0, 2", "4")


# ---- the page ------------------------------------------------------------------------------------

VOID = {"meta", "input", "br", "link", "img", "hr"}


class Structure(html.parser.HTMLParser):
    """Checks that tags are balanced, and collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        names = ("src", "href", "data", "action", "poster")
        links = [value for name, value in attrs if tag == "a" and name == "href"]
        assert all(str(each).startswith("vscode://file/") for each in links), (
            "the editor, which fetches nothing"
        )
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in names and tag != "a"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def structure(page: str) -> Structure:
    found = Structure()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


@pytest.fixture
def fallbacks(report: Report, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report joined with those of a process without operators and a killed process."""
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    with torchdevice.simulate("mps") as scope:
        for _ in range(3):
            torch.linalg.eig(torch.randn(8, 8, device="cuda"))
    return report.joined([scope.report().renamed("rank 1")], [Process("rank 2", 4711, "lost")])


class TestPage:
    def test_structure(self, fallbacks: Report) -> None:
        page = fallbacks.to_html()
        found = structure(page)
        assert found.fetched == [] and found.scripts == 1
        assert not re.search(r"url\(|@import|https?:", page)
        text = " ".join(found.text)
        for row in fallbacks.rows:
            assert row.source in text and row.asked in text and row.fidelity.value in text
        assert "rank 2 (process 4711) was killed before it could say what it did." in text
        assert (
            page.count("<rect") == 1
            and "prefers-color-scheme: dark" in page
            and "max-width" in page
        )

    def test_what_a_program_says_is_text(self, report: Report) -> None:
        assert "<script>alert" not in report.to_html() and "&lt;script&gt;alert" in report.to_html()

    def test_in_a_notebook(self, report: Report) -> None:
        frame = report._repr_html_()
        assert structure(frame).open == [] and frame.startswith("<iframe srcdoc=")

    def test_the_plot_draws_the_longest(self, report: Report) -> None:
        off = [
            dataclasses.replace(report.rows[0], asked=f"aten::op{n}", seconds=20 - n)
            for n in range(20)
        ]
        drawn = dataclasses.replace(report, rows=tuple(off)).to_html()
        assert drawn.count("<rect") == 15 and "5 more operators not drawn" in drawn
        widths = [float(width) for width in re.findall(r'width="([0-9.]+)%"', drawn)]
        assert widths[0] == 100 and widths == sorted(widths, reverse=True)


PROBE = """
<script>
const button = (name) => [...document.querySelectorAll("th button")].find((b) => b.textContent === name);
const counts = () => [...document.querySelectorAll("tr.row")].map((row) => +row.cells[3].dataset.value);
const look = getComputedStyle(document.body);
const seen = {background: look.backgroundColor, overflow: document.documentElement.scrollWidth - innerWidth};
seen.before = counts();
button("count").click();
seen.descending = counts();
button("count").click();
seen.ascending = counts();
document.querySelector("input[value=elsewhere]").click();
seen.hidden = document.querySelectorAll("tr.row[hidden]").length;
document.querySelectorAll("details").forEach((each) => each.open = true);
seen.opened = document.documentElement.scrollWidth - innerWidth;
document.body.innerHTML = "<pre id=seen></pre>";
document.getElementById("seen").textContent = JSON.stringify(seen);
</script>
"""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Callable[..., dict[str, Any]]]:
    """A function that opens a page and returns what the probe saw; None without a browser."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        yield None
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def look(page: Path, width: int, dark: bool) -> dict[str, Any]:
            look = [
                f"--window-size={width},900",
                f"--blink-settings=preferredColorScheme={int(not dark)}",
            ]
            command = [
                found,
                *FLAGS.split(),
                f"--user-data-dir={profile}",
                *look,
                "--dump-dom",
                page.as_uri(),
            ]
            shown = subprocess.run(
                command, capture_output=True, text=True, timeout=120, check=True
            ).stdout
            return json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', shown)[1]))

        yield look


@pytest.mark.parametrize("width", [1200, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_page(
    browser: Callable[..., dict[str, Any]] | None,
    fallbacks: Report,
    width: int,
    dark: bool,
    tmp_path: Path,
) -> None:
    """Sorted, filtered, coloured, within the width; without a browser, its parts are checked."""
    page = fallbacks.to_html()
    if browser is None:
        assert (
            structure(page).scripts == 1
            and "addEventListener" in page
            and "@media (max-width" in page
        )
        return
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    seen = browser(path, width, dark)
    counts = [row.count for row in fallbacks.rows]
    assert seen["before"] == counts and seen["descending"] == sorted(counts, reverse=True)
    assert seen["ascending"] == sorted(counts)
    assert seen["hidden"] == len(fallbacks.groups[Group.ELSEWHERE])
    assert seen["overflow"] <= 0 and seen["opened"] <= 0
    assert seen["background"] == ("rgb(20, 23, 26)" if dark else "rgb(251, 251, 250)")


# ---- processes -----------------------------------------------------------------------------------

RANKS = """
    import os, signal, sys, torch, torch.distributed as dist
    dist.init_process_group("nccl")
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        x.cuda()
        if "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
"""

CHILDREN = """
    import os, subprocess, sys, torch, torch.multiprocessing as mp

    def worker(rank):
        torch.ones(rank + 1, device="cuda")

    if __name__ == "__main__":
        torch.zeros(1, device="cuda")
        mp.spawn(worker, nprocs=2)
        for method in ("fork", "forkserver"):
            process = mp.get_context(method).Process(target=worker, args=(0,))
            process.start(); process.join()
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(1).cuda()"])
        code = "import torch\\ntorch.ones(1).cuda()"
        subprocess.run([sys.executable, "-m", "torchdevice", "run", "-"], input=code.encode())
        if hasattr(os, "fork") and os.fork() == 0:
            torch.empty(1, device="cuda")
            sys.exit(0)
        os.wait()
        mp.get_context("fork").Process(target=worker, args=(0,)).start()  # which Python waits for at its end
"""


def reported(folder: Path, program: str, *words: str) -> dict[str, Any]:
    """Run a program with a report, and return its content; nothing else may stay on disk."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    # Not in the test's folder: the name of a socket, as a fork server has one, must be short.
    with tempfile.TemporaryDirectory() as temporary:
        run_command(
            "run", "--target", "cpu", "--report=report.json", *words, cwd=folder, TMPDIR=temporary
        )
        assert [name for name in os.listdir(temporary) if name.startswith("torchdevice")] == []
    return json.loads((folder / "report.json").read_text())


@pytest.mark.sampled(3, of="reports of processes")
class TestProcesses:
    def test_all_kinds_of_children(self, tmp_path: Path) -> None:
        data = reported(tmp_path, CHILDREN, "program.py")
        calls = {(row["line"], row["count"]): row["processes"] for row in data["rows"]}
        assert calls.keys() == {(5, 5), (8, 1), (1, 1), (2, 1), (17, 1)}
        assert len(calls[5, 5]) == 5 and sum("Spawn" in name for name in calls[5, 5]) == 2
        assert sum("Fork" in name for name in calls[5, 5]) == 3
        assert (
            calls[8, 1] == ["main"]
            and calls[17, 1] == ["program.py"]
            and (calls[1, 1], calls[2, 1]) == (["-c"], ["-"])
        )
        assert (
            all(process["end"] == "reported" for process in data["processes"])
            and len(data["processes"]) == 9
        )

    def test_ranks(self, tmp_path: Path) -> None:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
        data = reported(tmp_path, RANKS, *words)
        rows = {row["line"]: row for row in data["rows"] if row["fidelity"] == "exact"}
        assert (rows[4]["count"], rows[4]["processes"]) == (2, ["rank 0", "rank 1"])
        assert (rows[7]["count"], rows[7]["processes"]) == (1, ["rank 1"])

    def test_a_rank_that_was_killed_is_told(self, tmp_path: Path) -> None:
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "program.py",
            "kill",
        ]
        data = reported(tmp_path, RANKS, *words)
        ends = {process["name"]: process["end"] for process in data["processes"]}
        assert ends["rank 1"] == "lost"
        assert "rank 1 (process" in str(Report.from_dict(data)) and "was killed before" in str(
            Report.from_dict(data)
        )

    def test_what_is_still_running_is_told(self, tmp_path: Path) -> None:
        program = """
            import os, subprocess, sys, torch
            text = '''if True:
                import os, time, torch
                torch.ones(1).cuda()
                print("ready", flush=True)
                while os.getppid() == int(os.environ["PARENT"]): time.sleep(0.05)
            '''
            os.environ["PARENT"] = str(os.getpid())
            child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
            child.stdout.readline()
        """
        data = reported(tmp_path, program, "program.py")
        assert [(process["name"], process["end"]) for process in data["processes"]][1:] == [
            ("-c", "running")
        ]

    def test_what_a_killed_run_left_is_removed(self, tmp_path: Path) -> None:
        program = """
            import os, signal, subprocess, sys
            subprocess.run([sys.executable, "-c", "import torch; torch.ones(1).cuda()"])
            os.kill(os.getpid(), signal.SIGKILL)
        """
        (tmp_path / "killed.py").write_text(textwrap.dedent(program))
        run_command("run", "--report", "killed.py", cwd=tmp_path, TMPDIR=str(tmp_path))
        assert len(list(tmp_path.glob("torchdevice-run-*"))) == 1
        run_program(tmp_path, "print(1)", options=["--report"], TMPDIR=str(tmp_path))
        assert list(tmp_path.glob("torchdevice-run-*")) == []

    def test_the_last_process_of_a_killed_run_removes_the_folder(self, tmp_path: Path) -> None:
        program = """
            import os, signal, subprocess, sys
            text = '''if True:
                import os, time, torch
                torch.ones(1).cuda()
                print("ready", flush=True)
                while os.getppid() == int(os.environ["PARENT"]): time.sleep(0.05)
                print(torch.ones(1).item())
            '''
            os.environ["PARENT"] = str(os.getpid())
            child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
            child.stdout.readline()
            os.kill(os.getpid(), signal.SIGKILL)
        """
        import time

        (tmp_path / "killed.py").write_text(textwrap.dedent(program))
        run_command("run", "--report", "killed.py", cwd=tmp_path, TMPDIR=str(tmp_path))
        deadline = time.monotonic() + 60
        while list(tmp_path.glob("torchdevice-run-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(tmp_path.glob("torchdevice-run-*")) == []


class TestCommand:
    def test_of_code(self, tmp_path: Path) -> None:
        """The text of ``-c`` and of stdin is in no file."""
        result = run_command(
            "run", "--report", "-c", "import torch\ntorch.ones(1).cuda()", cwd=tmp_path
        )
        assert "<string>:2  torch.ones(1).cuda()" in result.stderr, result.stderr

    @pytest.mark.parametrize(
        ("file", "message"),
        [
            ("r.txt", "'r.txt' is neither FILE.html nor FILE.json"),
            ("away/r.html", "'away/r.html': there is no folder"),
        ],
    )
    def test_a_file_that_cannot_be_written(
        self, file: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main(["run", f"--report={file}", "program.py"])
        assert ended.value.code == 2 and message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("level", "said"), [("WARNING", "torchdevice: the report is"), ("ERROR", "")]
    )
    def test_a_file_whose_folder_has_gone_meanwhile(
        self, level: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The report is lost, which is said also where nothing else is."""
        with logged(level=level):
            with torchdevice.portable("cpu") as scope:
                report = scope.report()
            report_command.show_report(str(tmp_path / "r.json"), report)
            assert capsys.readouterr().err.partition(" in ")[0] == said
            assert Report.from_dict(json.loads((tmp_path / "r.json").read_text())) == report
            report_command.show_report(str(tmp_path / "gone" / "r.json"), report)
            assert capsys.readouterr().err.startswith(
                "torchdevice: the report could not be written: [Errno 2]"
            )

    def test_what_was_verified_is_said_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        with torchdevice.portable("cpu", verify=True) as scope:
            torch.ones(2, device="cuda").exp()
        capsys.readouterr()  # the process's first use of an accelerator that is not there is noted
        for quiet in (True, False):
            report_command.show_verified(True, scope.report(), quiet=quiet)
            said = capsys.readouterr().err
            assert said == "" if quiet else said.startswith("torchdevice: ")

    def test_a_page(self, tmp_path: Path) -> None:
        result = run_program(
            tmp_path,
            "import os, torch; os.chdir('/'); torch.ones(1).cuda()",
            options=["--report=r.html"],
        )
        assert structure((tmp_path / "r.html").read_text()).fetched == [] and result.returncode == 0
        assert result.stderr.splitlines()[-1].endswith(f"the report is in {tmp_path / 'r.html'}")


def test_places_are_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert source.short(str(tmp_path / "a" / "b.py")) == str(Path("a", "b.py"))
    assert (
        source.short("/venv/lib/python3.12/site-packages/accelerate/state.py")
        == "accelerate/state.py"
    )
    assert source.short("/usr/lib/python3.12/threading.py") == "threading.py"
    assert (
        source.short("/elsewhere/x.py") == "/elsewhere/x.py"
        and source.short("<string>") == "<string>"
    )


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no folder in which a process works")
def test_places_are_whole_where_the_working_folder_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert source.short("/elsewhere/x.py") == "/elsewhere/x.py"
