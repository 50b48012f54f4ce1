"""The installation: beside the project of the same name, bare, and as imported."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
import venv
from pathlib import Path

import pytest
from places import ROOT
from processes import run_fresh_python

import torchdevice
from torchdevice.kernel.python import garbage_collection

PACKAGE = Path(torchdevice.__file__).parent


pytestmark = pytest.mark.one_engine

THEIRS = {
    "__init__.py": (
        "from torchdevice.cuda import set_cuda_visible_devices\n__all__ = "
        "['set_cuda_visible_devices']\n"
    ),
    "cuda.py": "def set_cuda_visible_devices(n=1): ...\n",
}
"""The shape of the package that PyPI's project ``torchdevice`` installs."""


@pytest.mark.sampled(2, of="a namesake")
class TestNamesake:
    """The other project was installed over this one."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        shutil.copytree(
            PACKAGE, tmp_path / "torchdevice", ignore=shutil.ignore_patterns("__pycache__")
        )
        for name, text in THEIRS.items():
            (tmp_path / "torchdevice" / name).write_text(text)
        return tmp_path

    def ask(self, place: Path, *words: str, **environment: str) -> tuple[int, str]:
        result = run_fresh_python(*words, cwd=place, PYTHONPATH=str(place), **environment)
        return result.returncode, result.stdout + result.stderr

    @pytest.mark.parametrize(
        "program",
        [
            "import torchdevice; torchdevice.portable()",
            "from torchdevice import simulate",
            "import torchdevice; torchdevice.set_cuda_visible_devices(1)",
        ],
    )
    def test_what_is_missing_says_why(self, program: str, place: Path) -> None:
        status, said = self.ask(place, "-c", program)
        last = said.splitlines()[-1]
        assert status == 1 and last.startswith("ImportError: torchdevice."), said
        assert (
            "torchdevice and torchdevice-portable are both installed" in last
            and "pip uninstall torchdevice" in last
        )

    def test_torch_is_imported_in_silence(self, place: Path) -> None:
        assert self.ask(place, "-W", "error", "-c", "import torch, torchdevice") == (0, "")

    def test_names_that_nobody_has_are_looked_up_as_ever(self, place: Path) -> None:
        program = (
            "import torchdevice; print(hasattr(torchdevice, '__wrapped__'), hasattr(torchdevice, "
            "'kernel'))"
        )
        assert self.ask(place, "-c", program) == (0, "False False\n")
        status, said = self.ask(
            place, "-c", "from torchdevice import kernel; import torchdevice; torchdevice.kernel"
        )
        assert (status, said) == (0, "")

    def test_programs_that_do_not_import_it_still_run(self, place: Path) -> None:
        (place / "program.py").write_text("import torch; print(torch.ones(2).cuda().sum().item())")
        status, said = self.ask(place, "-m", "torchdevice", "run", "--quiet", "program.py")
        assert (status, said) == (0, "2.0\n")

    def test_doctor_says_so(self, place: Path) -> None:
        metadata = place / "torchdevice-0.1.3.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.4\nName: torchdevice\nVersion: 0.1.3\n"
        )
        status, said = self.ask(place, "-m", "torchdevice", "doctor")
        assert status == 1 and "another project of that name, torchdevice 0.1.3" in said
        assert (
            "pip uninstall torchdevice, then pip install --force-reinstall --no-deps "
            "torchdevice-portable" in " ".join(said.split())
        )


def test_what_the_package_of_the_other_project_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above for every name, in this process, with that package in this one's place."""
    theirs = types.ModuleType("torchdevice")
    theirs.__path__ = torchdevice.__path__
    monkeypatch.setitem(sys.modules, "torchdevice", theirs)
    from torchdevice.cuda import set_cuda_visible_devices as refuse

    for use in (refuse, lambda: theirs.portable, lambda: theirs.simulate):
        with pytest.raises(
            ImportError, match=r"^torchdevice\.\w+ is not there: .* pip uninstall torchdevice"
        ):
            use()
    for name in ("__wrapped__", "kernel"):
        with pytest.raises(
            AttributeError, match=f"^module 'torchdevice' has no attribute '{name}'"
        ):
            getattr(theirs, name)
    with pytest.raises(
        AttributeError, match=r"^module 'torchdevice\.cuda' has no attribute 'nothing'"
    ):
        assert sys.modules[refuse.__module__].nothing


class TestImport:
    def test_it_warns_of_nothing(self) -> None:
        result = run_fresh_python("-W", "error", "-c", "import torchdevice")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")

    def test_it_loads_next_to_nothing(self) -> None:
        """The import loads one file, the first use nothing that torch or psutil would not."""
        program = """
            import sys, torch
            before = set(sys.modules)
            import torchdevice
            print(*sys.modules.keys() - before)
            before = set(sys.modules)
            torchdevice.portable
            used = {name.partition(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names
            print(*(name for name in used if not name.startswith("_sysconfigdata")))
        """
        ran = run_fresh_python("-c", textwrap.dedent(program), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        first, used = ran.stdout.splitlines()
        assert first.split() == ["torchdevice"], ran.stderr
        assert {"torchdevice"} <= set(used.split()) <= {"torchdevice", "torch", "psutil", "numpy"}

    def test_the_first_use_collects_no_garbage(self) -> None:
        """A full collection is due after torch's import, and would take longer than this."""
        program = """
            import gc, importlib.abc, sys, torch, torchdevice

            class Seen(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    print(gc.isenabled(), name)

            sys.meta_path.insert(0, Seen())
            torchdevice.portable
            del sys.meta_path[0]
            print(gc.isenabled(), "afterwards")
        """
        lines = run_fresh_python("-c", textwrap.dedent(program)).stdout.splitlines()
        loaded = {line[5:] for line in lines if line.startswith("True ")} - {
            "torchdevice.kernel.python"
        }
        pause = {"garbage_collection", "interrupt_safe_exit"}
        assert loaded == {"afterwards", *(f"torchdevice.kernel.python.{name}" for name in pause)}
        assert len(lines) > 50

    def test_a_run_loads_torch_without_a_full_collection(self) -> None:
        program = "import gc; print(gc.isenabled(), gc.get_stats()[2]['collections'])"
        assert run_fresh_python("-m", "torchdevice", "run", "-c", program).stdout.split() == [
            "True",
            "0",
        ]

    def test_a_failed_first_use_leaves_the_collector_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(torchdevice._MODULES, "nowhere", "nowhere")
        with pytest.raises(ModuleNotFoundError):
            torchdevice.__getattr__("nowhere")
        assert gc.isenabled()

    def test_a_collector_that_is_off_stays_off(self) -> None:
        gc.disable()
        try:
            with garbage_collection.paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
        finally:
            gc.enable()


TYPED = """
import torch
import torchdevice
from typing_extensions import assert_type

assert_type(torchdevice.portable(), torchdevice.Scope)
assert_type(torchdevice.simulate("cuda", count=2, memory="8GiB"), torchdevice.Scope)
assert_type(torchdevice.current(), torchdevice.Scope | None)
assert_type(torchdevice.portable("cpu").report(), torchdevice.Report)
assert_type(torchdevice.TorchDevice().device, torch.device)

@torchdevice.portable
def plain(x: int) -> str:
    return str(x)

@torchdevice.portable("cpu", strict=True)
def with_options(x: int) -> str:
    return str(x)

assert_type(plain(1), str)
assert_type(with_options(1), str)
with torchdevice.portable() as scope:
    assert_type(scope.journal.entries, list[torchdevice.Entry])
torchdevice.portable(stric=True)
plain("text")
assert_type(with_options(1), int)
"""

TYPE_ERRORS = [
    'Unexpected keyword argument "stric"',
    'Argument 1 to "plain" has incompatible type "str"',
    'Expression is of type "str", not "int"',
]


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a bare environment in which a built distribution is installed.

    torch and the other dependencies are found where this Python has them, and this checkout is not
    found.
    """
    pytest.importorskip("build", reason="install with the [test] extra")
    pytest.importorskip("hatchling", reason="install with the [test] extra")
    folder = tmp_path_factory.mktemp(request.param)
    quietly = {"check": True, "capture_output": True, "timeout": 300}
    built = folder / "dist"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "-q",
            f"--{request.param}",
            "--no-isolation",
            "--outdir",
            built,
            ROOT,
        ],
        **quietly,
    )
    (distribution,) = built.iterdir()
    venv.create(folder / "venv", symlinks=os.name != "nt")
    python = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (packages,) = (folder / "venv").rglob("site-packages")
    elsewhere = [
        path
        for path in sys.path
        if Path(path).is_dir() and Path(path).resolve() not in (ROOT, ROOT / "tests")
    ]
    (packages / "dependencies.pth").write_text("\n".join(elsewhere))
    install = [
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--ignore-installed",
        "--no-build-isolation",
        "--prefix",
    ]
    subprocess.run([python, "-m", "pip", *install, folder / "venv", distribution], **quietly)
    return python


@pytest.mark.sampled(1, of="distributions")
class TestDistribution:
    def ask(self, python: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHD", "PYTHONP"))
        }
        environment["TORCHDEVICE_TARGET"] = "cpu"
        return subprocess.run(
            [python, *words],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def test_it_is_whole(self, installed: Path, tmp_path: Path) -> None:
        program = "import torchdevice, pathlib; print(pathlib.Path(torchdevice.__file__).parent)"
        said = self.ask(installed, "-W", "error", "-c", program, cwd=tmp_path)
        there = Path(said.stdout.strip())
        assert said.stderr == "" and installed.parent.parent in there.parents
        ours = {
            path.relative_to(PACKAGE)
            for path in PACKAGE.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert ours == {
            path.relative_to(there)
            for path in there.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert Path("py.typed") in ours and there.with_name("torchdevice_autoload.py").exists()

    def test_its_ways_in_work(self, installed: Path, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(
            "import torch; print(torch.ones(2).cuda().sum().item())"
        )
        (tmp_path / "test_it.py").write_text(
            "import torch\ndef test(): assert torch.cuda.is_available()\n"
        )
        command = str(installed.with_name("torchdevice" + installed.suffix))
        program = "import os, sys; os.environ['TORCHDEVICE'] = '1'; import program"
        for words in ([command, "run", "--quiet", "program.py"], [str(installed), "-c", program]):
            said = self.ask(Path(words[0]), *words[1:], cwd=tmp_path)
            assert (said.returncode, said.stdout) == (0, "2.0\n"), said.stderr
        said = self.ask(installed, "-m", "pytest", "-q", "--torchdevice=cpu", cwd=tmp_path)
        assert "1 passed" in said.stdout, said.stdout + said.stderr

    def test_its_types_are_seen(self, installed: Path, tmp_path: Path) -> None:
        pytest.importorskip("mypy", reason="install with the [test] extra")
        (tmp_path / "typed.py").write_text(TYPED)
        words = [
            "-m",
            "mypy",
            "--strict",
            "--no-incremental",
            "--follow-imports=silent",
            "--python-executable",
        ]
        said = self.ask(
            Path(sys.executable), *words, str(installed), "typed.py", cwd=tmp_path
        ).stdout
        errors = [line for line in said.splitlines() if ": error: " in line]
        assert len(errors) == len(TYPE_ERRORS) and all(
            map(str.__contains__, errors, TYPE_ERRORS)
        ), said


def test_the_site_is_built_with_exact_releases() -> None:
    """The file of constraints names everything that the group ``docs`` installs, and no torch."""
    pytest.importorskip("mkdocs", reason="install .ci/docs.txt")
    from packaging.requirements import Requirement

    lines = [
        Requirement(line)
        for line in (ROOT / ".ci" / "docs.txt").read_text().splitlines()
        if line[0] != "#"
    ]
    assert all(str(line.specifier).startswith("==") for line in lines)
    locked = {canonical(line.name) for line in lines}
    (declared,) = re.findall(r"^docs = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)
    wanted, seen = [Requirement(text) for text in json.loads(declared)], set()
    while wanted:
        requirement = wanted.pop()
        name = canonical(requirement.name)
        if name not in seen:
            seen.add(name)
            needed = map(Requirement, importlib.metadata.requires(name) or ())
            asked = [{"extra": extra} for extra in requirement.extras or {""}]
            wanted += [
                one for one in needed if not one.marker or any(map(one.marker.evaluate, asked))
            ]
    assert len(seen) > 20 and seen <= locked, seen - locked
    assert "torch" not in seen | locked


def canonical(name: str) -> str:
    """Return the name of a distribution as all its spellings have it in common."""
    return re.sub(r"[-_.]+", "-", name).lower()


TWICE = """
import contextlib, sys, torch, torchdevice as first
def import_again():
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdevice"]:
        del sys.modules[name]
    import torchdevice
    return torchdevice
def use(package):
    with package.portable("cpu"):
        return torch.ones(2, device="cuda").sum().item()
use(first)
with first.portable("cpu") if sys.argv[1] == "active" else contextlib.nullcontext():
    second = import_again()
    try:
        use(second)
    except RuntimeError as error:
        print(type(error).__name__, error)
    print(use(first))
print(torch.cuda.is_available())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["active", "left"])
def test_two_copies_in_one_process(first: str, tmp_path: Path) -> None:
    ran = run_fresh_python("-c", TWICE, first, cwd=tmp_path, TORCHDEVICE_LOG="ERROR")
    refused, *rest = ran.stdout.splitlines()
    assert refused.startswith(
        "SecondCopyError torchdevice was imported twice in this process, and only"
    ), ran.stderr
    assert rest == ["2.0", "False"], ran.stderr
