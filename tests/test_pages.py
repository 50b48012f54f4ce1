"""Pages: commands and code run, links resolve, and the picture shows real output."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from places import PROGRAMS, ROOT, page_maker
from processes import run_python
from torch import nn

import torchdevice

PAGES = [
    "README.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]

MADE = page_maker("make_reference").PAGES
"""What makes each page that only the site has."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield pages whose code runs here: all written ones, and the made page of commands."""
    for page in PAGES:
        yield page, (ROOT / page).read_text()
    yield "cli.md", MADE["cli.md"]()


class Block(NamedTuple):
    """A block of code in a page."""

    page: str
    line: int
    language: str
    text: str


def blocks() -> Iterator[Block]:
    """Yield the blocks of code of all pages."""
    for page, text in texts():
        for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M):
            yield Block(page, text[: found.start()].count("\n") + 1, found[1], found[2])


def in_language(language: str) -> list[Any]:
    """Return the blocks in a language, as parameters of a test."""
    return [
        pytest.param(block, id=f"{block.page}:{block.line}")
        for block in blocks()
        if block.language == language
    ]


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build for CUDA has another error text"
)
def test_the_picture_is_up_to_date() -> None:
    result = run_python(str(ROOT / "docs" / "make_picture.py"), "--check", TORCHDEVICE_ENGINE="")
    assert result.returncode == 0, result.stderr


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
def test_the_report_in_the_pictures_has_rows_of_most_kinds(tmp_path: Path) -> None:
    page = page_maker("make_report_pictures").page(tmp_path).read_text()
    assert all(
        word in page for word in ("fell back", "downcast", "approximate", "exact", "train.py:8")
    )


def words(page: str) -> int:
    """Return how many words a page has, with those of its code."""
    return len(re.findall(r"\S*\w\S*", (ROOT / page).read_text()))


REFERENCE = {
    "api",
    "breakages",
    "gpus",
    "matrix",
    "packages",
    "platforms",
    "published-memory",
    "reference",
    "tested",
    "torch-tests",
}
"""Pages of tables, to look something up in: most are made by a script."""


def test_the_pages_are_few_and_short() -> None:
    """A person can read all of them; what the reference has, they need not repeat."""
    pages = {Path(page).stem: page for page in PAGES if page.startswith("docs/")}
    written = [page for name, page in pages.items() if name not in REFERENCE]
    assert pages.keys() >= REFERENCE
    assert len(written) <= 13
    assert words("README.md") <= 450
    assert sum(map(words, written)) <= 20_000


def test_the_readme_shows_it() -> None:
    assert "(docs/images/terminal.svg)" in (ROOT / "README.md").read_text()
    picture = (ROOT / "docs" / "images" / "terminal.svg").read_text()
    assert min(map(float, re.findall(r"opacity: ([0-9.]+)", picture))) > 0.5, (
        "a viewer that shows only the first frame shows all of it"
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    lost = [
        link
        for link in links
        if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert lost == []


@pytest.mark.parametrize("page", ["how-it-works.md", "contributing.md", "mps.md"])
def test_named_files_are_there(page: str) -> None:
    named = re.findall(
        r"`([a-z_.]+/[\w/.]*\.(?:py|json|toml|cpp|h))`", (ROOT / "docs" / page).read_text()
    )
    lost = {
        path
        for path in named
        if not any((ROOT / top / path).exists() for top in ("", "torchdevice", "tests"))
    }
    assert lost == set()


def anchor(title: str) -> str:
    """Return the anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_lead_to_headings(page: str) -> None:
    for name, heading in re.findall(r"\]\(([\w./-]*\.md)?#([^)\s]+)\)", (ROOT / page).read_text()):
        other = (ROOT / page).parent / name if name else ROOT / page
        titles = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
        assert heading in map(anchor, titles), f"{name}#{heading}"


def test_titles_are_the_names_in_the_navigation() -> None:
    """A page has one name: its title, in navigation, or a heading of docs/reference.md."""
    lines = (ROOT / ".ci" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    names = {file: name for name, file in re.findall(r"^ +- (.+): ([\w-]+\.md)$", lines, re.M)}
    written = {path.name: path.read_text() for path in ROOT.glob("docs/*.md")}
    made = {name: make() for name, make in MADE.items()}
    titles = {
        name: text.partition("\n")[0].removeprefix("# ")
        for name, text in {**written, **made}.items()
    }
    assert names == titles
    assert set(re.findall(r"^## (.*)$", written["reference.md"], re.M)) == {
        titles[name] for name in made
    }
    assert not set(written) & set(made)


def test_every_block_says_its_language() -> None:
    # ini, yaml and nox's Python: test_recipes.py. ipython: test_magics.py. toml:
    # test_device_models.py. json, dockerfile: test_ci_page.py. text: printed output.
    known = {
        "python",
        "sh",
        "ini",
        "yaml",
        "toml",
        "ipython",
        "text",
        "markdown",
        "json",
        "dockerfile",
    }
    assert {(block.page, block.line) for block in blocks() if block.language not in known} == set()
    assert all((ROOT / page).read_text().count("```") % 2 == 0 for page in PAGES)


def train() -> None:
    device = "cuda" if torch.cuda.is_available() else "mps"
    assert torch.ones(2, device=device).sum().item() == 2


def given(block: Block) -> dict[str, Any]:
    """Return what a page assumes: a program with model, loader and training function."""
    names = {"torch": torch, "nn": nn, "torchdevice": torchdevice, "Path": Path, "train": train}
    if "import Prefetcher" in block.text:
        return {
            **names,
            "first": nn.Linear(3, 3),
            "second": nn.Linear(3, 3),
            "loader": [torch.rand(4, 3)],
            "loss": torch.sum,
        }
    return {**names, "model": nn.Linear(3, 2)}


def scope_of(block: Block) -> Any:
    """Return the scope that a page takes for granted."""
    if "import Prefetcher" in block.text:
        return torchdevice.simulate(devices=2)
    if "on the host's side" in block.text:
        return torchdevice.portable("cpu")
    return contextlib.nullcontext()


def run_block(block: Block) -> None:
    """Run a Python block by statement: ``# True`` and ``# False`` give expressions' values."""
    names = given(block)
    comments = dict(
        enumerate(
            (line.partition("  # ")[2].split(":")[0] for line in block.text.splitlines()), start=1
        )
    )
    for statement in ast.parse(block.text).body:
        said = comments[statement.end_lineno or statement.lineno]
        if isinstance(statement, ast.Expr) and said in ("True", "False"):
            found = eval(compile(ast.Expression(statement.value), block.page, "eval"), names)
            assert found is (said == "True"), ast.unparse(statement)
        else:
            exec(compile(ast.Module([statement], []), block.page, "exec"), names)


def raised(block: Block) -> Any:
    """Return what catches the error that a block announces in a comment."""
    found = re.search(r"# (\w+Error): ([^.\n]*)", block.text)
    if found is None:
        return contextlib.nullcontext()
    return pytest.raises(
        getattr(torchdevice.errors, found[1]), match=re.sub(r"\d+", r"\\d+", re.escape(found[2]))
    )


def is_run_elsewhere(block: Block) -> bool:
    """Whether test_recipes.py runs a block, a test file, nox's, or verify/test_verify.py."""
    return any(
        word in block.text
        for word in ("def test_", "import nox", "torch.library.Library", "def run(device)")
    )


@pytest.mark.parametrize(
    "block", [case for case in in_language("python") if not is_run_elsewhere(case.values[0])]
)
def test_python_of_the_pages_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        with scope_of(block), raised(block):
            run_block(block)
    finally:
        if torchdevice.current() is not None:
            torchdevice.disable()


TRAIN = """
import torch
x = torch.ones(2, device=torch.accelerator.current_accelerator())
print(x.device, torch.cuda.device_count())
"""

TRAIN_DDP = """
import os, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
dist.destroy_process_group()
"""

TEST = """
import pytest, torch
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_it():
    assert torch.ones(1, device="cuda").device.type in ("cuda", "mps")
"""

ELSEWHERE = {
    "pip": "tests/test_install.py installs the package; .ci/run does it as README.md says",
    "pytest -n auto": "this suite",
    "pytest tests/": "this suite",
    "pytest --sweep": "this suite",
    "coverage": "another run of this suite",
    "cosmic-ray": "tests/test_mutants.py does it on a small project",
    "cr-": "the same",
    "python .ci/mutants.py": "the same",
    "python docs/make_reference.py": ".ci/check runs it, in the repository",
    "mkdocs": ".ci/check builds the site",
    "python -m benchmarks": "tests/test_benchmarks.py",
}
"""What commands begin with that are not run here, and why."""


def commands() -> list[Any]:
    """Return the commands of the pages, each once."""
    found = {}
    for block in blocks():
        for line in block.text.splitlines() if block.language == "sh" else ():
            command = line.partition("  #")[0].strip()
            if (
                not command.startswith(tuple(ELSEWHERE))
                and "torchdevice doctor --target mps" not in command
            ):
                found.setdefault(command, f"{block.page}:{block.line}")
    return [pytest.param(command, id=f"{place} {command}") for command, place in found.items()]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the programs that the commands of the pages name."""
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py", "package/__init__.py"):
        (tmp_path / name).write_text(TRAIN)
    (tmp_path / "train_ddp.py").write_text(TRAIN_DDP)
    parallel = (PROGRAMS / "planned_parallel.py").read_text()
    (tmp_path / "train_pipeline.py").write_text(parallel.replace("sys.argv[1]", '"pipeline"'))
    (tmp_path / "test_project.py").write_text(TEST)
    for folder in ("src", "notebooks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(TRAIN)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    report = (
        "import sys, torchdevice.tools.cli.main as m; sys.exit(m.main(['run', "
        "'--report=monday.json', 'train.py']))"
    )
    assert run_python("-c", report, cwd=tmp_path).returncode == 0
    shutil.copy(tmp_path / "monday.json", tmp_path / "tuesday.json")
    return tmp_path


# Each command is a process or several, so the default run takes a sample.
@pytest.mark.sampled(1)
@pytest.mark.one_engine
@pytest.mark.parametrize("command", commands())
def test_commands_of_the_pages_run(command: str, project: Path) -> None:
    scripts = project / "scripts"
    scripts.mkdir()
    ways = {
        "python": "",
        "torchdevice": "-m torchdevice",
        "pytest": "-m pytest",
        "torchrun": "-m torch.distributed.run",
    }
    for name, words in ways.items():
        (scripts / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (scripts / name).chmod(0o755)
    path = os.pathsep.join([str(scripts), os.environ["PATH"]])
    # Kernels that a command builds belong to the project, not to whoever runs the tests.
    cache = {"XDG_CACHE_HOME": str(project / "cache")}
    environ = {**os.environ, **cache, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, cwd=project, env=environ, capture_output=True, text=True, timeout=300
    )
    # `check` ends with 1 where something must be changed, as in examples/.
    expected = {0, 1} if command.startswith("torchdevice check") else {0}
    assert done.returncode in expected and "Traceback" not in done.stderr, done.stdout + done.stderr
