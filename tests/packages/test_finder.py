"""Who gets a stand-in for a package, for how long, and what is left afterwards."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.metadata
import importlib.util
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from processes import run_program

import torchdevice
from torchdevice.packages import registry
from torchdevice.packages.finder import FINDER

pytestmark = pytest.mark.one_engine


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports a module of an installed library, given its text."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    made = []

    def imported(text: str) -> Any:
        name = f"library_{len(made)}"
        (folder / f"{name}.py").write_text(text)
        made.append(name)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield imported
    for name in made:
        sys.modules.pop(name, None)


class TestScope:
    """A stand-in lives as long as the scope."""

    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
    def test_it_is_there_in_the_scope_and_gone_afterwards(self, target: str) -> None:
        before = list(sys.modules), list(sys.meta_path)
        with torchdevice.portable(target=target):
            import flash_attn
            import flash_attn.bert_padding

            assert importlib.util.find_spec("flash_attn") is flash_attn.__spec__
            assert flash_attn.__version__ == importlib.metadata.version("flash-attn")
            assert sys.meta_path[-1] is FINDER
        left = [name for name in sys.modules if name.startswith("flash_attn")]
        assert left == [] and list(sys.meta_path) == before[1]
        with pytest.raises(ModuleNotFoundError):
            import flash_attn.bert_padding
        assert importlib.util.find_spec("flash_attn") is None

    def test_nested_scopes_share_it(self) -> None:
        with torchdevice.portable(target="cpu"):
            from flash_attn import flash_attn_func

            with torchdevice.simulate("cuda"):
                import flash_attn

                assert flash_attn.flash_attn_func is flash_attn_func
            assert "flash_attn" in sys.modules
        assert "flash_attn" not in sys.modules
        q = torch.randn(1, 2, 1, 4)
        assert flash_attn_func(q, q, q).shape == q.shape  # what a program has kept goes on working

    def test_a_thread_without_the_scope_does_not_import_it(self) -> None:
        found: list[Any] = []
        outside = threading.Event()

        def ask() -> None:
            outside.wait()
            found.append(importlib.util.find_spec("flash_attn"))

        thread = threading.Thread(target=ask)
        thread.start()
        with torchdevice.portable(target="cpu"):
            outside.set()
            thread.join()
        assert found == [None]

    @pytest.mark.parametrize("options", [{"packages": "absent"}, {"written_for": "mps"}])
    def test_it_is_absent_where_it_is_not_wanted(self, options: dict[str, Any]) -> None:
        with torchdevice.portable(target="cpu", **options):
            assert importlib.util.find_spec("flash_attn") is None
            with pytest.raises(ModuleNotFoundError):
                import flash_attn  # noqa: F401

    def test_torch_itself_finds_none(self) -> None:
        from torchdevice.kernel import thread_state

        with torchdevice.portable(target="cpu"), thread_state.suspended():
            assert importlib.util.find_spec("flash_attn") is None


class TestInstalled:
    """An installed package wins."""

    def test_before_ours(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "flash_attn.py").write_text("theirs = True")
        monkeypatch.syspath_prepend(str(tmp_path))
        with torchdevice.portable(target="cpu"):
            import flash_attn

            assert flash_attn.theirs
            with pytest.raises(ModuleNotFoundError, match="not a package"):
                import flash_attn.bert_padding
        assert sys.modules.pop("flash_attn") is flash_attn

    def test_unless_the_program_wants_ours_instead(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Any
    ) -> None:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn/__init__.py").write_text("theirs = True")
        (tmp_path / "flash_attn/own.py").write_text("")
        (tmp_path / "flash_attn-1.0.dist-info").mkdir()
        (tmp_path / "flash_attn-1.0.dist-info/METADATA").write_text(
            "Metadata-Version: 2.1\nName: flash-attn\nVersion: 1.0\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        before = list(sys.meta_path)
        with torchdevice.portable(target="cpu", packages="instead"):
            # A library that can do without it would import theirs.
            trying = library("try:\n    import flash_attn as found\nexcept ImportError:\n    pass")
            import flash_attn
            from flash_attn import flash_attn_func

            assert trying.found is flash_attn and callable(flash_attn_func)
            assert importlib.metadata.version("flash-attn") == flash_attn.__version__ != "1.0"
            with pytest.raises(ModuleNotFoundError):
                import flash_attn.own
        assert sys.meta_path == before
        import flash_attn

        assert flash_attn.theirs and importlib.metadata.version("flash-attn") == "1.0"
        with torchdevice.portable(target="cpu", packages="instead"):
            import flash_attn.own  # of the package that the program has imported before

            assert flash_attn.theirs
        for name in ("flash_attn", "flash_attn.own"):
            del sys.modules[name]

    def test_by_a_finder_that_comes_later(self) -> None:
        class Later:
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
                return importlib.machinery.ModuleSpec(name, self) if name == "flash_attn" else None

            def create_module(self, spec: Any) -> None: ...

            def exec_module(self, module: Any) -> None: ...

        later: Any = Later()
        with torchdevice.portable(target="cpu"):
            sys.meta_path.append(later)
            import flash_attn

            sys.meta_path.remove(later)
            assert not hasattr(flash_attn, "flash_attn_func")
            assert sys.modules.pop("flash_attn") is flash_attn


class TestAskers:
    """A library that can do without a package does without it."""

    @pytest.mark.parametrize(
        ("text", "gets"),
        [
            ("import flash_attn", True),
            ("from flash_attn import flash_attn_func as found", True),
            ("import importlib.util\nfound = importlib.util.find_spec('flash_attn')", False),
            ("try:\n    import flash_attn as found\nexcept ImportError:\n    found = None", False),
            (
                "try:\n    import flash_attn as found\nexcept Exception as error:\n    found = "
                "None",
                False,
            ),
            (
                "try:\n    import flash_attn as found\nexcept (KeyError, "
                "ModuleNotFoundError):\n    found = None",
                False,
            ),
            (
                "found = None\nwith __import__('contextlib').suppress(ImportError):\n    import "
                "flash_attn as found",
                False,
            ),
            (
                "try:\n    import flash_attn as found\nexcept ImportError:\n    raise "
                "RuntimeError('needed') from None",
                True,
            ),
            ("try:\n    import flash_attn as found\nexcept KeyError:\n    found = None", True),
            ("try:\n    import flash_attn as found\nfinally:\n    pass", True),
            (
                "import importlib.metadata as m\nfound = [d for d in m.distributions() if d.name "
                "== 'flash-attn']",
                False,
            ),
        ],
    )
    def test_of_a_library(self, library: Any, text: str, gets: bool) -> None:
        with torchdevice.portable(target="cpu"):
            module = library(text)
            assert bool(getattr(module, "found", True)) is gets

    def test_a_program_gets_it_however_it_asks(self) -> None:
        with torchdevice.portable(target="cpu"):
            try:
                import flash_attn
            except ImportError:
                flash_attn = None
            assert flash_attn is not None
            assert "flash-attn" in {each.name for each in importlib.metadata.distributions()}

    def test_the_functions_that_ask_on_behalf_of_a_program(
        self, library: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from torchdevice.packages import askers

        text = (
            "import importlib\ndef check():\n    try:\n        return "
            "importlib.import_module('flash_attn')\n"
        )
        with torchdevice.portable(target="cpu"):
            module = library(f"{text}    except ImportError:\n        return None\n")
            assert module.check() is None
            monkeypatch.setitem(askers.ON_BEHALF, (module.__name__, "check"), "a test")
            assert module.check() is not None


class TestModules:
    """What a module of a package has."""

    def test_what_it_lacks_is_named(self) -> None:
        with torchdevice.portable(target="cpu"):
            import flash_attn

            with pytest.raises(
                AttributeError, match=r"stand-in for 'flash_attn' has no 'flash_attn_gpu'"
            ):
                _ = flash_attn.flash_attn_gpu
            assert not hasattr(flash_attn, "__all__")
            with pytest.raises(ModuleNotFoundError):
                import flash_attn.nothing

    def test_names_are_the_packages_own(self) -> None:
        with torchdevice.portable(target="cpu"):
            from flash_attn import flash_attn_func
            from flash_attn.layers.rotary import RotaryEmbedding

            assert flash_attn_func.__module__ == "flash_attn.flash_attn_interface"
            assert pickle.loads(pickle.dumps(flash_attn_func)) is flash_attn_func
            module = pickle.loads(pickle.dumps(RotaryEmbedding(4)))
            assert type(module) is RotaryEmbedding

    def test_every_name_of_every_package_is_declared(self) -> None:
        for package in registry.PACKAGES:
            assert registry.names_of(package) is not None, package
        for module, names in registry.MODULES.items():
            for name, found in names.items():
                assert getattr(found.value, "__doc__", None) or not callable(found.value), (
                    f"{module}.{name}"
                )

    def test_uses_are_reported_at_the_programs_line(self) -> None:
        with torchdevice.portable(target="cpu") as scope:
            from flash_attn import flash_attn_func

            q = torch.randn(1, 2, 1, 4)
            flash_attn_func(q, q, q)
        assert "flash_attn_interface.flash_attn_func -> torch's operators [exact]" in str(
            scope.report()
        )


def test_run_gives_it_to_programs(tmp_path: Path) -> None:
    text = "from flash_attn import flash_attn_func\nprint(flash_attn_func.__name__)\n"
    assert run_program(tmp_path, text, options=["--target", "cpu"]).stdout == "flash_attn_func\n"
    lacking = run_program(
        tmp_path, "from flash_attn.ops.rms_norm import nothing", options=["--target", "cpu"]
    )
    assert "This module is torchdevice's stand-in" in lacking.stderr
    absent = run_program(tmp_path, text, options=["--target", "cpu", "--packages", "absent"])
    assert "ModuleNotFoundError: No module named 'flash_attn'" in absent.stderr


def test_an_error_of_an_installed_package_shows_the_option(tmp_path: Path) -> None:
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers/__init__.py").write_text("")
    (tmp_path / "xformers/ops.py").write_text(
        "def unbind(x, dim):\n    raise NotImplementedError('no kernel')"
    )
    text = "import torch, xformers.ops\nprint(len(xformers.ops.unbind(torch.ones(2, device='cuda'), 0)))"
    failed = run_program(tmp_path, text, options=["--target", "cpu"])
    assert failed.returncode == 1 and failed.stderr.rstrip().endswith(
        "NotImplementedError: no kernel\nxformers is installed, and its kernels need an NVIDIA GPU. "
        "With packages='instead' (--packages instead) torchdevice's stand-in takes its place."
    )
    instead = run_program(tmp_path, text, options=["--target", "cpu", "--packages", "instead"])
    assert instead.stdout == "2\n"


def test_an_error_of_an_installed_package_without_a_stand_in_shows_what_to_use(
    tmp_path: Path,
) -> None:
    (tmp_path / "vllm.py").write_text(
        "class LLM:\n    def __init__(self): raise RuntimeError('empty')"
    )
    failed = run_program(tmp_path, "import vllm\nvllm.LLM()", options=["--target", "cpu"])
    assert failed.stderr.rstrip().endswith(
        "RuntimeError: empty\nvllm computes on an NVIDIA GPU only. Use the generate() of the "
        "transformers library."
    )


def test_nothing_imports_the_folder_but_what_registers_it() -> None:
    """The folder can be deleted: only ``scope/features.py`` and this file name its modules."""
    package = ROOT / "torchdevice"
    users = set()
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "packages"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.startswith("torchdevice.packages") for name in names):
                users.add(path.relative_to(package).as_posix())
    assert users == {"tools/cli/run.py"}
