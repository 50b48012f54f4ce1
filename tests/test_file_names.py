"""Program files of any name: texts about them are readable and identify the file."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
import torch
from faults import planted_in_cpu
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from processes import run_fresh_python
from rich.console import Console

import torchdevice
from torchdevice.report import Report
from torchdevice.report.discrepancies import findings_of
from torchdevice.tools.cli import main, report

pytestmark = [
    pytest.mark.one_engine,
    pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse most of these names"),
]

PROGRAM = (
    "import torch\nx = torch.linspace(0, 1, 9, device='cuda')\ny = x.exp()\nz = torch.cuda.nvml\n"
)

PARTS = [
    '"""',
    "'''",
    "\\U",
    "\\",
    "\n",
    "\r",
    "#",
    "{",
    "%s",
    "<b>",
    "&lt;",
    "-->",
    "é",
    "\U0001f600",
    "\udcff",
]

NAMES = st.one_of(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=12).map("".join),
    st.binary(min_size=1, max_size=60).map(
        lambda name: os.fsdecode(name.translate(bytes.maketrans(b"/\0", b"'\"")))
    ),
)


def wrong_in_float32(x: torch.Tensor) -> torch.Tensor:
    """A kernel of ``exp``."""
    return x.sin() if x.dtype == torch.float32 else torch.expm1(x) + 1


class Page(HTMLParser):
    """The tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


@contextlib.contextmanager
def strict_stdout() -> Iterator[None]:
    """Let stdout refuse what UTF-8 cannot encode, as it does outside tests."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")):
        yield
        sys.stdout.flush()


class Written:
    """Runs a program of a name in a scope, and writes everything about it.

    Attributes:
        path: The program.
        report: What happened.
        script: The program of the finding, which calls the operator alone.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        self.path = os.path.join(folder, name + ".py")
        Path(self.path).write_text(PROGRAM)
        with (
            torchdevice.portable("cpu", verify=str(folder / "found.json")) as scope,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            with planted_in_cpu("exp", wrong_in_float32), contextlib.suppress(AttributeError):
                exec(compile(PROGRAM, self.path, "exec"), {})
            self.report = scope.report()
        (finding,) = findings_of(scope.journal)
        self.script = Path(finding.script).read_text(encoding="utf-8")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(finding.script)
        assert printed.getvalue() == "aten::exp gives the same on cpu and in float64\n"
        with strict_stdout():
            for file in ("report.html", "report.json"):
                report.show_report(str(folder / file), self.report)
            self.report.show()
            Console(file=sys.stdout, force_terminal=True).print(self.report)
            assert main.main(["report", str(folder / "report.json")]) == 0
            for words in ([], ["--json"], [f"--sarif={folder / 'found.sarif'}"]):
                main.main(["check", "--all", self.path, *words])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, Written(folder, "plain")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(NAMES)
@example('"""\nimport os\n"""')
@example("\\Uzzzz")
@example("\udcff<script>")
@example("x" * 250)
def test_any_name(plain: tuple[Path, Written], tmp_path: Path, name: str) -> None:
    if len(os.fsencode(name)) > 250:
        return
    (_, usual), written = plain, Written(tmp_path / "it", name)
    tree, expected = ast.parse(written.script), ast.parse(usual.script)
    docstring = ast.get_docstring(tree, clean=False)
    assert [ast.dump(each) for each in tree.body[1:]] == [
        ast.dump(each) for each in expected.body[1:]
    ]
    assert (
        docstring is not None
        and written.path.encode("utf-8", "backslashreplace").decode() in docstring
    )
    folder = tmp_path / "it"
    pages = [
        Page((each / "report.html").read_text(encoding="utf-8")) for each in (folder, plain[0])
    ]
    assert pages[0].tags == pages[1].tags
    found = Report.from_dict(json.loads((folder / "report.json").read_text(encoding="utf-8")))
    assert {row.file for row in found.rows} == {written.path}
    (of_verify,) = json.loads((folder / "found.json").read_text(encoding="utf-8"))["findings"]
    assert of_verify["site"]["file"] == written.path
    document = json.loads((folder / "found.sarif").read_text(encoding="utf-8"))
    places = [
        result["locations"][0]["physicalLocation"] for result in document["runs"][0]["results"]
    ]
    uris = {
        unquote_to_bytes(place["artifactLocation"]["uri"].removeprefix("file://"))
        for place in places
    }
    assert uris <= {os.fsencode(written.path), os.fsencode(os.path.relpath(written.path))} and uris


def test_a_run_of_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"tr\xe9in.py")
    (tmp_path / name).write_text("import torch\ntorch.ones(1, device='cuda')\n")
    for words in (["--report=page.html"], ["--report=data.json"], ["--report"]):
        ran = run_fresh_python(
            "-m", "torchdevice", "run", "--target", "cpu", *words, name, cwd=tmp_path
        )
        assert ran.returncode == 0 and "Error" not in ran.stderr, ran.stderr
    assert "tr\\udce9in.py" in (tmp_path / "page.html").read_text(encoding="utf-8")
    shown = run_fresh_python("-m", "torchdevice", "report", "data.json", cwd=tmp_path)
    assert shown.returncode == 0 and "tr\\udce9in.py:2" in shown.stdout, shown.stderr
    log = run_fresh_python(
        "-m",
        "torchdevice",
        "run",
        name,
        cwd=tmp_path,
        TORCHDEVICE_LOG_FILE="log",
        TORCHDEVICE_LOG="DEBUG",
    )
    assert log.returncode == 0 and "Logging error" not in log.stderr, log.stderr
