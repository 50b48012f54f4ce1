"""Caches on disk that plain programs and programs in a scope share: Inductor's and its
autotuning's, AOT autograd's, Dynamo's profiles, Triton's, extensions, torch.hub, ``__pycache__``,
and the folder of temporary files.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from places import PROGRAMS
from processes import run_python

PROGRAM = PROGRAMS / "with_caches.py"

SCOPES = [("cpu", "mode"), ("cpu", "wrap"), ("simulated:cuda", "mode"), ("simulated:cuda", "wrap")]

KEPT = frozenset((".py", ".pyc", ".cpp", ".so", ".o", ".pt"))
"""What later runs load, and no run writes anew."""


class Shared:
    """A folder of caches, and the program beside it."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copy(PROGRAM, folder)
        (folder / "cached_beside_it.py").write_text("VALUE = 42\n")
        self.variables = {
            "TORCH_COMPILE_JOB_ID": "job",
            "TORCHDEVICE_TARGET": "",
            "TORCHDEVICE_ENGINE": "",
        }
        for name in (
            "TORCHINDUCTOR_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "TORCH_HOME",
            "TORCH_EXTENSIONS_DIR",
            "TMPDIR",
        ):
            self.variables[name] = str(folder / name)
            (folder / name).mkdir()

    def run(self, target: str = "", engine: str = "") -> str:
        """Run the program, in a scope where a target is given, and return what it prints."""
        options = (
            ("-m", "torchdevice", "run", "--target", target, "--engine", engine) if target else ()
        )
        done = run_python(
            *options, PROGRAM.name, cwd=self.folder, PYTHONDONTWRITEBYTECODE="", **self.variables
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def copy(self) -> Path:
        """Return a copy of the folder, from which :meth:`restore` makes it again."""
        return Path(
            shutil.copytree(
                self.folder, self.folder.with_name(f"{self.folder.name}-copy"), symlinks=True
            )
        )

    def restore(self, copy: Path) -> None:
        """Let the folder be as it was. It keeps its place, which is in keys of caches."""
        shutil.rmtree(self.folder)
        shutil.copytree(copy, self.folder, symlinks=True)

    def kept(self) -> dict[Path, bytes]:
        """Return the contents of the files that later runs load."""
        return {
            path: path.read_bytes()
            for path in self.folder.rglob("*")
            if path.suffix in KEPT and path.is_file()
        }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program prints where nothing is cached."""
    return Shared(tmp_path_factory.mktemp("plain")).run()


@pytest.fixture(scope="module")
def begin(
    plain: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Shared, Path]]:
    """Returns a folder used by a scope and then by plain code, and a copy from between."""

    @functools.cache
    def begun(*scope: str) -> tuple[Shared, Path]:
        shared = Shared(tmp_path_factory.mktemp("shared"))
        assert shared.run(*scope) == plain
        assert shared.run() == plain
        return shared, shared.copy()

    return begun


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
@pytest.mark.parametrize(
    ("first", "second"), [*itertools.permutations(SCOPES, 2)], ids=lambda scope: "/".join(scope)
)
def test_scopes_and_plain_programs_share_caches(
    first: tuple[str, str],
    second: tuple[str, str],
    plain: str,
    begin: Callable[..., tuple[Shared, Path]],
) -> None:
    shared, copy = begin(*first)
    shared.restore(copy)
    kept = shared.kept()
    assert {path.suffix for path in kept} >= {".py", ".pyc", ".so", ".pt"}
    assert shared.run(*second) == plain
    assert {path: shared.kept().get(path) for path in kept} == kept
    assert shared.run() == plain
