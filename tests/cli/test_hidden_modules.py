"""Files named like standard modules beside a program: ``torchdevice run`` acts as Python."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import run_fresh_python

pytestmark = pytest.mark.one_engine

PROGRAM = """
import importlib
import torch

assert torch.ones(2, device={device!r}).sum().item() == 2
for name in {names!r}:
    found = importlib.import_module(name)
    if getattr(found, "own", None) != name:
        print(name)
"""


def written(folder: Path, names: list[str], device: str) -> Path:
    for name in names:
        (folder / f"{name}.py").write_text(f"own = {name!r}\n")
    program = folder / "program.py"
    program.write_text(PROGRAM.format(device=device, names=names))
    return program


@pytest.fixture(scope="module")
def unused_by_torch() -> list[str]:
    """Return standard modules that torch does without: programs beside such files run in Python.

    Those that ``python -m`` imports itself are left out too.
    """
    done = run_fresh_python(
        "-c", "import pkgutil, runpy, sys, torch; torch.ones(2).sum().item(); print(*sys.modules)"
    )
    used = {name.partition(".")[0] for name in done.stdout.split()}
    names = [name for name in sys.stdlib_module_names - used if not name.startswith("_")]
    # One of another system, such as msvcrt, is looked for, too.
    return sorted(name for name in names if importlib.util.find_spec(name) is not None)


@pytest.mark.parametrize("flags", [[], ["--report"], ["--report=r.html"]], ids=str)
def test_every_standard_module(
    flags: list[str], unused_by_torch: list[str], tmp_path: Path
) -> None:
    """All at once, where one alone already ended the command."""
    assert "html" in unused_by_torch and len(unused_by_torch) > 50
    plain = run_fresh_python(str(written(tmp_path, unused_by_torch, "cpu")), cwd=tmp_path.parent)
    done = run_fresh_python(
        "-m",
        "torchdevice",
        "run",
        "--target",
        "cpu",
        *flags,
        str(written(tmp_path, unused_by_torch, "cuda")),
        cwd=tmp_path.parent,
    )
    assert plain.returncode == done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout


def test_a_plan(tmp_path: Path) -> None:
    program = written(tmp_path, ["html", "statistics"], "cuda")
    program.write_text(
        program.read_text().replace("assert torch.ones(2, device='cuda').sum().item() == 2", "")
    )
    done = run_fresh_python("-m", "torchdevice", "plan", str(program))
    assert done.returncode == 0 and done.stdout.startswith("torchdevice: plan of"), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("name", ["random", "multiprocessing", "textwrap"])
def test_a_module_that_torch_uses_does_not_end_the_command(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").touch()
    program = tmp_path / "program.py"
    program.write_text("import torch\nprint(torch.ones(2, device='cuda').sum().item())\n")
    done = run_fresh_python("-m", "torchdevice", "run", "--report", "--target", "cpu", str(program))
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
