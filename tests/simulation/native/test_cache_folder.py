"""The native kernels' cache folder: what is loaded or refused, and the consequences."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from processes import run_python

from torchdevice.errors import NativeKernelsError
from torchdevice.kernel.python import owned_files
from torchdevice.native import building

pytestmark = [
    pytest.mark.one_engine,
    pytest.mark.skipif(
        sys.platform == "win32",
        reason="the kernels are not built on Windows, and modes say nothing",
    ),
]

_SCOPE = (
    "import torch, torchdevice\n"
    "from torchdevice.native import building\n"
    "for _ in range(2):\n"
    "    with torchdevice.simulate():\n"
    "        x = torch.ones(2, device='cuda') + 1\n"
    "print(x.sum().item(), building.load.cache_info().currsize)\n"
)


@pytest.fixture
def cache(native_kernels: Path, tmp_path: Path) -> Path:
    """Return a folder for caches with the kernels in it."""
    folder = tmp_path / "cache" / "torchdevice"
    owned_files.make_private(folder)
    for each in (native_kernels, native_kernels.with_name(f"{native_kernels.name}.sha256")):
        shutil.copy2(each, folder)
    return folder.parent


def scope(cache: str, cwd: Path | None = None, **more: str) -> CompletedProcess[str]:
    return run_python(
        "-c", _SCOPE, cwd=cwd, XDG_CACHE_HOME=cache, TORCHDEVICE_NATIVE="auto", **more
    )


def library(cache: Path) -> Path:
    return next((cache / "torchdevice").glob("*[!6]"))


def copying_compiler(folder: Path, then: str = "") -> str:
    """Write a compiler that copies this machine's library; the real one takes half a minute."""
    compiler = folder / "compiler"
    copies = f"shutil.copy({str(building.path())!r}, sys.argv[sys.argv.index('-o') + 1])"
    compiler.write_text(f"#!{sys.executable}\nimport shutil, sys, time\n{copies}\n{then}\n")
    compiler.chmod(0o700)
    return str(compiler)


def test_what_was_built_is_loaded(cache: Path) -> None:
    done = scope(str(cache))
    assert (done.stdout, done.stderr) == ("4.0 1\n", "")


def _foreign_owner(cache: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(library(cache), 12345, -1)


WEAKENED: dict[str, Callable[[Path], object]] = {
    "the library can be written": lambda cache: library(cache).chmod(0o722),
    "the folder can be written by all": lambda cache: (cache / "torchdevice").chmod(0o777),
    "the folder can be written by the group": lambda cache: (cache / "torchdevice").chmod(0o770),
    "a folder above can be written": lambda cache: cache.chmod(0o777),
    "the library is another user's": _foreign_owner,
}

CHANGED: dict[str, Callable[[Path], object]] = {
    "cut off": lambda cache: library(cache).write_bytes(library(cache).read_bytes()[:-100]),
    "empty": lambda cache: library(cache).write_bytes(b""),
    "another library": lambda cache: shutil.copy(os.__file__, library(cache)),
    "without a digest": lambda cache: (
        library(cache).with_name(f"{library(cache).name}.sha256").unlink()
    ),
    "with an empty digest": lambda cache: (
        library(cache).with_name(f"{library(cache).name}.sha256").write_text("")
    ),
}


def refusal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return why a process that has not loaded the kernels would not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with pytest.raises(NativeKernelsError) as caught:
        building.load.__wrapped__()
    return str(caught.value)


@pytest.mark.parametrize("how", WEAKENED)
def test_a_library_that_others_can_change_is_not_loaded(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WEAKENED[how](cache)
    said = refusal(cache, monkeypatch)
    assert "can be written by other users" in said or "belongs to user 12345" in said


@pytest.mark.parametrize("how", CHANGED)
def test_a_library_that_is_not_the_one_built_is_not_loaded(
    cache: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHANGED[how](cache)
    assert "is not the file that was built; run 'torchdevice native clean'" in refusal(
        cache, monkeypatch
    )


def test_a_scope_computes_without_a_library_that_others_can_change(cache: Path) -> None:
    library(cache).chmod(0o722)
    done = scope(str(cache))
    assert done.stdout == "4.0 0\n"
    assert done.stderr.count("kernels in Python: '") == 1, done.stderr


def test_a_library_that_does_not_load_is_said_and_replaced(cache: Path, tmp_path: Path) -> None:
    """A build for another machine passes every look at its file."""
    found = library(cache)
    found.write_bytes(b"\x7fELF of another machine")
    found.with_name(f"{found.name}.sha256").write_text(
        hashlib.sha256(found.read_bytes()).hexdigest()
    )
    done = scope(str(cache))
    assert done.stdout == "4.0 0\n" and done.stderr.count("cannot be loaded") == 1, done.stderr
    environment = {"XDG_CACHE_HOME": str(cache)}
    done = run_python("-m", "torchdevice", "doctor", **environment)
    assert "cannot be loaded" in done.stdout, done.stdout
    done = run_python(
        "-m", "torchdevice", "native", "build", CXX=copying_compiler(tmp_path), **environment
    )
    assert done.returncode == 0 and "compiling" in done.stdout, done.stderr
    done = scope(str(cache))
    assert (done.stdout, done.stderr) == ("4.0 1\n", "")
    assert os.stat(cache / "torchdevice").st_mode & 0o777 == 0o700


def test_of_two_builds_at_the_same_time_one_compiles(native_kernels: Path, tmp_path: Path) -> None:
    compiler = copying_compiler(
        tmp_path, then="open(__file__ + '.calls', 'a').write('compiled '), time.sleep(0.5)"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": compiler}
    with ThreadPoolExecutor() as pool:
        words = ("-m", "torchdevice", "native", "build")
        builds = [pool.submit(run_python, *words, **environment) for _ in range(2)]
    assert [each.result().returncode for each in builds] == [0, 0], [
        each.result().stderr for each in builds
    ]
    assert Path(f"{compiler}.calls").read_text().split() == ["compiled"]
    made = sorted(each.name for each in (tmp_path / "cache" / "torchdevice").iterdir())
    assert made == [native_kernels.name, f"{native_kernels.name}.sha256"]


def test_a_relative_folder_for_caches_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert building.folder() == Path("/home/of/mine/.cache/torchdevice")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be a user of whom the system knows nothing, as in containers."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    yield


@pytest.mark.usefixtures("no_home")
def test_without_a_home_folder_there_are_no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert building.trouble() == ""
    with pytest.raises(
        NativeKernelsError, match="no home folder; name a folder for caches by XDG_CACHE_HOME="
    ):
        building.build()
    assert "no home folder" in building.why_not()


def test_a_scope_needs_no_home_folder() -> None:
    known = "import os, pwd\ndel os.environ['HOME']\npwd.getpwuid = lambda uid: {}[uid]\n"
    done = run_python(
        "-c", known + _SCOPE, XDG_CACHE_HOME="", TORCHDEVICE_NATIVE="auto", HOME="/nowhere"
    )
    assert (done.stdout, done.stderr) == ("4.0 0\n", "")


def test_a_build_refuses_a_folder_that_others_can_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(open_folder / "cache"))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(
        NativeKernelsError,
        match=r"open' can be written by other users \(mode 0777\); take that right",
    ):
        building.build()


def test_missing_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        owned_files.make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
    assert owned_files.weakness(tmp_path / "a" / "b") == ""


def test_a_link_is_followed_before_it_is_judged(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    (elsewhere / "file").touch(0o600)
    link.symlink_to(elsewhere / "file")
    assert "elsewhere' can be written" in owned_files.weakness(link)
