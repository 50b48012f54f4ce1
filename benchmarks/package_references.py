"""A plugin of pytest for tests of stood-in packages: sampled cases, and their references.

Such tests compare a package's function with another one of the package, such as
``selective_scan_ref``. The plugin takes that from the package's own source, so that a stand-in is
not compared with itself. Environment variables give the folder of the source (``PACKAGE_SOURCE``),
the seed of the sample (``SAMPLE_SEED``) and how many cases of each test are drawn (``SAMPLE``).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from torchdevice.packages.registry import MODULES, names_of

SOURCE = Path(os.environ["PACKAGE_SOURCE"])


WHOLE = os.environ.get("PACKAGE_WHOLE") == "1"
"""Whether modules that the stand-in lacks, and names of its modules, come from the source too."""


def pytest_configure(config: Any) -> None:
    """Give stand-ins the references that test files import, and the functions they lack."""
    if WHOLE:
        _SourceFinder()
        return
    for path in (Path(each.partition("::")[0]) for each in config.args):
        if path.suffix == ".py":
            _supply(path)


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave some cases of each test, drawn by a seed."""
    by_test: dict[str, list[Any]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawing, count = random.Random(os.environ["SAMPLE_SEED"]), int(os.environ["SAMPLE"])
    drawn = {
        id(item)
        for cases in by_test.values()
        for item in drawing.sample(cases, min(count, len(cases)))
    }
    print(f"{len(items)} cases")
    items[:] = [item for item in items if id(item) in drawn]


def _supply(test_file: Path) -> None:
    for node in ast.walk(ast.parse(test_file.read_text())):
        # A module that the stand-in lacks is for the test file itself to miss.
        if isinstance(node, ast.ImportFrom) and node.module and (source := _source_of(node.module)):
            if node.module.endswith(".testing"):
                _load(node.module, source)
            with contextlib.suppress(ImportError):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if name.endswith("_ref") or not hasattr(module, name):
                        _define(module, name, ast.parse(source.read_text()))


class _SourceFinder:
    """Finds modules of the package's source that the stand-in lacks, and completes the others.

    A module of the stand-in keeps its names, and gets those that only the source has.
    """

    def __init__(self) -> None:
        package = importlib.import_module(SOURCE.name)
        # xformers calls the kernels of flash_attn where that is there.
        sys.modules["flash_attn"] = None  # type: ignore[assignment]
        self._package = SOURCE.name
        sys.meta_path.append(self)  # type: ignore[arg-type]
        _complete(package, SOURCE / self._package / "__init__.py")
        # The innermost first, which the others import from.
        modules = [name for name in MODULES if name.startswith(f"{self._package}.")]
        for name in sorted(modules, key=lambda name: (-name.count("."), name)):
            if (file := _source_of(name)) is not None:
                _complete(importlib.import_module(name), file)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of the source, where the stand-in has none."""
        lacks = name.startswith(f"{self._package}.") and names_of(name) is None
        file = _source_of(name) if lacks else None
        return None if file is None else importlib.util.spec_from_file_location(name, file)


def _complete(module: Any, file: Path) -> None:
    """Define what a module lacks of a source file, and leave its own names."""
    tree, own = ast.parse(file.read_text()), dict(vars(module))
    kept = [each for each in tree.body if getattr(each, "name", None) not in own]
    exec(compile(ast.Module(kept, []), str(file), "exec"), vars(module))
    vars(module).update(own)


def _load(module: str, source: Path) -> None:
    """Load a package's own module of devices and dtypes for its tests."""
    importlib.import_module(module.partition(".")[0])
    spec = importlib.util.spec_from_file_location(module, source)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])


def _source_of(module: str) -> Path | None:
    """Return the file of a module in the package's source."""
    base = SOURCE.joinpath(*module.split("."))
    return next(
        (each for each in (base.with_suffix(".py"), base / "__init__.py") if each.exists()), None
    )


def _define(module: Any, name: str, tree: ast.Module) -> None:
    """Define a function of a source file, and those of the file that it calls, in a module."""
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    space = {"math": math, "torch": torch, "F": functional, "__name__": module.__name__}
    for statement in _imports(tree):
        # What needs the package's kernels is not there, and the references do without it.
        with contextlib.suppress(ImportError):
            exec(compile(ast.Module([statement], []), name, "exec"), space)
    space |= {key: value for key, value in vars(module).items() if key not in space}
    wanted = [name] if name in functions else []
    while wanted:
        function = functions.pop(wanted.pop())
        named = (each.id for each in ast.walk(function) if isinstance(each, ast.Name))
        wanted += {each for each in named if each in functions and each not in space}
        function.decorator_list = []
        exec(compile(ast.Module([function], []), name, "exec"), space)
    if name in space:
        setattr(module, name, space[name])


def _imports(tree: ast.Module) -> Iterator[ast.stmt]:
    for statement in tree.body:
        within = statement.body if isinstance(statement, ast.Try) else [statement]
        yield from (each for each in within if isinstance(each, ast.Import | ast.ImportFrom))
