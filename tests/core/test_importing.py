"""Modules imported in a scope: when their patches are installed, and what remains."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchdevice
from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import Late, LateModules
from torchdevice.kernel.patching import Callback, Patch, Replaced

pytestmark = pytest.mark.one_engine

NAME = "a_late_module"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath(f"{NAME}.py").write_text(
        "from torchdevice.kernel.thread_state import state\nnumber, loader = 1, "
        "__loader__\ncontext = state.context\n"
    )
    finders = list(sys.meta_path)
    yield tmp_path
    sys.modules.pop(NAME, None)
    assert sys.meta_path == finders


def patches(module: types.ModuleType) -> list[Patch]:
    return [Replaced(module, "number", lambda original: original + 1)]


def test_a_module_is_patched_as_soon_as_it_is_imported_and_as_long_as_that_is_wanted() -> None:
    late = LateModules([Late("another", patches), Late(NAME, patches)])
    for _ in range(2):
        late.install()
        late.install()
        module: Any = importlib.import_module(NAME)
        assert module.number == 2 and sys.meta_path.count(late) == 1  # type: ignore[arg-type]
        assert module.__loader__ is module.__spec__.loader is module.loader, (
            "the module knows its own loader"
        )
        late.remove()
        late.remove()
        assert module.number == 1
    late.install()
    try:
        assert importlib.reload(module).number == 2, (
            "a module that is imported again is patched again"
        )
    finally:
        late.remove()
    assert module.number == 1 and "another" not in sys.modules


@pytest.mark.parametrize("is_in_place", [False, True], ids=["between_scopes", "in_a_scope"])
def test_a_module_that_was_dropped_is_patched_when_it_is_imported_anew(is_in_place: bool) -> None:
    late = LateModules([Late(NAME, patches)])
    first: Any = importlib.import_module(NAME)
    late.install()
    if not is_in_place:
        late.remove()
    del sys.modules[NAME]
    if not is_in_place:
        late.install()
    second: Any = importlib.import_module(NAME)
    assert second is not first and second.number == 2
    late.install()
    late.remove()
    assert first.number == second.number == 1


def test_a_module_in_the_midst_of_its_import_is_not_patched(folder: Path) -> None:
    late = LateModules([Late(NAME, patches)])
    sys.modules["late_modules_of_the_test"] = types.SimpleNamespace(late=late)  # type: ignore[assignment]
    folder.joinpath(f"{NAME}.py").write_text(
        "from late_modules_of_the_test import late\nlate.install()\nnumber = 1\n"
    )
    try:
        module = importlib.import_module(NAME)
        assert module.number == 1
        late.install()
        assert module.number == 2
    finally:
        late.remove()
        del sys.modules["late_modules_of_the_test"]


@pytest.mark.parametrize("sees_scope", [True, False])
def test_the_text_of_a_module_runs_in_the_scope_where_it_is_a_programs(sees_scope: bool) -> None:
    with torchdevice.portable("cpu"):
        late = LateModules([Late(NAME, patches, sees_scope=sees_scope)])
        late.install()
        try:
            assert (
                importlib.import_module(NAME).context is thread_state.state.context
            ) is sees_scope
        finally:
            late.remove()


@pytest.mark.parametrize("name", ["torch._dynamo.test_case", "torch._inductor.test_case"])
def test_tests_of_torch_see_the_scope_whichever_way_they_are_imported(name: str) -> None:
    program = f"""
        import torch, torchdevice
        torchdevice.enable("simulated:cuda:2")
        import {name}
        from torch.testing._internal import common_cuda, common_device_type, common_utils
        assert common_utils.TEST_CUDA and common_cuda.TEST_MULTIGPU
        assert common_device_type.CUDATestBase in common_device_type.get_device_type_test_bases()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_refused_module_is_found_and_not_imported() -> None:
    late = LateModules([Late(NAME, error=ImportError)])
    late.install()
    try:
        assert importlib.util.find_spec(NAME) is not None
        with pytest.raises(ImportError, match=NAME):
            importlib.import_module(NAME)
        assert NAME not in sys.modules
    finally:
        late.remove()
    assert importlib.import_module(NAME).number == 1


def _fail() -> None:
    raise RuntimeError("half-way")


class _Failing(Late):
    is_plain = False

    def remove(self) -> None:
        _fail()


FAILING = [
    Late("json", lambda _: [Callback(int, _fail)]),
    _Failing("json", lambda _: [Callback(int, int)]),
]


@pytest.mark.parametrize("failing", FAILING, ids=["a patch", "all patches"])
def test_one_error_keeps_no_other_module_from_its_removal(failing: Late) -> None:
    module = importlib.import_module(NAME)
    late = LateModules([Late(NAME, patches), failing])
    late.install()
    assert module.number == 2
    with pytest.raises(RuntimeError, match="half-way"):
        late.remove()
    assert module.number == 1


def test_a_scope_has_two_finders_before_all_others_and_one_behind_them() -> None:
    before = list(sys.meta_path)
    for engine in ("mode", "wrap"):
        with torchdevice.simulate(engine=engine), torchdevice.portable("cpu"):
            assert sys.meta_path[2:-1] == before
        assert sys.meta_path == before
