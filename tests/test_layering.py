"""The shape of the package: imports go one way, private names of torch are declared, nothing is promised in vain."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import torchdevice

PACKAGE = Path(torchdevice.__file__).parent

# Each line may import the ones above it.
LAYERS = [
    ["errors"],
    ["_private"],
    ["_active", "_spelling", "_constructing"],
    ["_patching", "_journal", "_history"],
    ["_runtimes"],
    ["simulation", "simulation._relabel", "simulation._policy"],
    ["simulation._profiles", "simulation._random", "simulation._allocator", "simulation._autocast"],
    ["simulation._placement"],
    ["simulation._kernels", "simulation._rewriters"],
    ["simulation._special", "simulation._process_group", "simulation._sparse"],
    ["simulation._sharing"],
    ["simulation._backend"],
    ["simulation._runtime"],
    ["_target"],
    ["_propagation"],
    [
        "bindings",
        "bindings.settings",
        "bindings.memory",
        "bindings.versions",
        "bindings.random",
        "bindings.storage",
        "bindings.streams",
    ],
    [
        "bindings.collectives",
        "bindings.device",
        "bindings.facade",
        "bindings.graphs",
        "bindings.history",
        "bindings.mps",
        "bindings.nvtx",
        "bindings.unsupported",
    ],
    ["bindings.accelerator", "bindings.xpu"],
    ["_tracing"],
    ["_rewriters", "_capture"],
    ["_mode", "_decorating"],
    ["_entry_points"],
    ["shims"],
    ["_installed"],
    ["_scope"],
    ["_device", "_autoload"],
    ["cli", "__init__"],
    ["pytest_plugin"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    name = name.removesuffix(".__init__")
    return "shims" if name.startswith("shims") else name


def imported(path: Path) -> set[str]:
    """Modules of this package that a file imports when it is imported, types aside."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torchdevice":
                base = node.module.removeprefix("torchdevice").lstrip(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    found.add(
                        inner
                        if (PACKAGE / (inner.replace(".", "/") + ".py")).exists()
                        or (PACKAGE / inner.replace(".", "/")).is_dir()
                        else base
                    )
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                visit(node.body)

    visit(tree.body)
    return {"shims" if name.startswith("shims") else name or "__init__" for name in found}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    name = name_of(path)
    assert name in RANK, f"{name} has no place in LAYERS"
    above = {other for other in imported(path) if RANK[other] > RANK[name]}
    assert not above, f"{name} imports {above}"


def test_public_names_are_documented() -> None:
    for name in torchdevice.__all__:
        value = getattr(torchdevice, name)
        assert inspect.getdoc(value), name


def test_no_file_is_named_after_nothing() -> None:
    forbidden = {"utils", "helpers", "common", "core", "base", "manager", "handler", "misc"}
    assert not {path.stem for path in modules()} & forbidden


def test_no_device_kind_is_asked_for_outside_the_runtimes() -> None:
    """``if target == "mps"`` belongs to a runtime. CUDA as what programs ask for does not count."""
    pattern = re.compile(r"""(?:kind|type) (?:==|!=) ["'](?:mps|xpu)["']""")
    for path in modules():
        if path.name != "_runtimes.py":
            assert not pattern.search(path.read_text()), path
