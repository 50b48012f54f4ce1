"""Finds the private names of torch that the package reads, from its source.

``docs/make_torch_names.py`` makes a table of them.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torchdevice
from torchdevice.kernel import torch_internals

PACKAGE = Path(torchdevice.__file__).parent

READERS = {"require", "getattr", "hasattr", "Replaced", "ReplacedInImporters", "replaced_function"}
"""Functions whose first two arguments are an owner and the name of one of its attributes."""

NOT_OF_TORCH = {
    "_ZN2at6detail19getPrivateUse1HooksEv": "C++",
    "_ZN3c1015GetCPUAllocatorEv": "C++",
    "_ZTVN2at25PrivateUse1HooksInterfaceE": "C++",
    "_ActionsContainer": "argparse",
    "_GeneratorContextManager": "contextlib",
    "_StderrHandler": "logging",
    "_adjust_thread_count": "concurrent.futures",
    "_args_from_interpreter_flags": "subprocess",
    "_asdict": "named tuples",
    "_fields": "named tuples",
    "_from_config": "transformers",
    "_create_worker_context": "concurrent.futures",
    "_getframe": "sys",
    "_is_owned": "threading",
    "_keep_in_fp32_modules": "transformers",
    "_no_split_modules": "transformers",
    "_option_string_actions": "argparse",
    "_optionals": "argparse",
    "_run_module_as_main": "runpy",
    "_showwarnmsg": "warnings",
    "_torchdevice_original": "set by the package",
    "_torchdevice_side": "set by the package",
    "_torchdynamo_orig_backend": "asked for with hasattr",
}
"""Private names that the package reads of other things than torch, and of which."""


def listed() -> dict[str, str]:
    """Return the names of ``torch_names.py`` in full, and which part of it has them."""
    return {
        f"{module}.{name}": when
        for when, groups in torch_internals.NAMES.items()
        for modules in groups.values()
        for module, names in modules.items()
        for name in names
    }


def is_listed(name: str, names: Collection[str]) -> bool:
    """Return whether a table has a name that :class:`Reads` yields.

    ``torch._C`` is listed with what it contains. What is listed is listed with its own public
    attributes.
    """
    if name.startswith("."):
        return any(name[1:] in each.split(".") for each in names) or name[1:] in NOT_OF_TORCH
    if name.startswith("torch.ops.") and len(parts := name.split(".")) > _WITH_OVERLOAD:
        overload, attributes = ".".join(parts[:_WITH_OVERLOAD]), parts[_WITH_OVERLOAD:]
        names = {*names, overload} if not is_private(overload) else names
        return all(is_listed(f".{each}", names) for each in attributes) and is_listed(
            overload, names
        )
    parents = (name[:end] for end in range(len(name) + 1) if end == len(name) or name[end] == ".")
    inside = any(each in names and not is_private(name[len(each) :]) for each in parents)
    return inside or any(each.startswith(f"{name}.") for each in names)


_WITH_OVERLOAD = 5
"""The parts of the name of an operator with an overload. What comes after is an attribute of any
operator.
"""


def is_private(name: str) -> bool:
    """Return whether a dotted name's part is private, unlike ``__init__`` and its kind."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def sources() -> dict[str, ast.Module]:
    """Return the parsed files of the package by their path in it, without the list of names."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "torch_names.py"]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Return files' private names: in classes and modules, and attributes of their objects."""
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef)):
                found.update(_defined(node.body))
            if isinstance(node, ast.ClassDef):
                # Not in functions outside classes: ``self`` is torch's object in replacements.
                found.update(each.attr for each in ast.walk(node) if _is_set(each))
    return {name for name in found if is_private(name)}


def _is_set(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    )


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id
                    if target.id == "__slots__" and node.value is not None:
                        yield from (
                            each.value
                            for each in ast.walk(node.value)
                            if isinstance(each, ast.Constant)
                        )


class Reads:
    """The private names that a file reads.

    A name that begins at a module of torch is written in full, such as ``torch._C._nn._parse_to``.
    Of an attribute of any other value only the name is known, and it is written ``._cdata``.

    Args:
        tree: The file.
    """

    def __init__(self, tree: ast.Module):
        self._tree = tree
        self._bound: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        for node in ast.walk(tree):
            self._bind(node)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from ((name, node.lineno) for name in _imported(node) if is_private(name))
        yield from self._in(self._tree)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    self._bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom):
            for alias, name in zip(node.names, _imported(node), strict=False):
                self._bound[alias.asname or alias.name] = name
        elif (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            name = self._full_name(node.value)
            if name is not None:
                self._bound[node.targets[0].id] = name
            elif isinstance(node.value, (ast.Constant, ast.JoinedStr)):
                self._texts[node.targets[0].id] = self._text(node.value)

    def _full_name(self, node: ast.expr) -> str | None:
        """Return what an expression names, from ``torch`` on, or None."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        link = _link(node)
        if link is not None:
            owner = self._full_name(link[0])
            return f"{owner}.{link[1]}" if owner else None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            name = node.slice.value if isinstance(node.slice, ast.Constant) else ""
            return name if str(name).partition(".")[0] == "torch" else None
        return None

    def _replaced(self, node: ast.AST) -> Iterator[str]:
        """Yield the names given to ``replaces``, in full where their owner is known."""
        function = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not function.endswith("replaces"):
            return
        given = node.args if function == "_replaces" else node.args[1:]
        owner = (
            ""
            if function == "_replaces"
            else self._full_name(node.args[0]) or self._text(node.args[0])
        )
        yield from (f"{owner}.{each.value}" for each in given if isinstance(each, ast.Constant))

    def _text(self, node: ast.expr) -> str:
        """Return the owner that a text names, as ``package.module:Class``."""
        if isinstance(node, ast.Constant):
            return str(node.value).replace(":", ".")
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        return self._texts.get(node.id, "") if isinstance(node, ast.Name) else ""

    def _in(self, node: ast.AST) -> Iterator[tuple[str, int]]:
        for name in self._replaced(node):
            if is_private(name):
                yield name, node.lineno
        link = _link(node)
        name = self._full_name(node) if link is not None else None
        if name is not None:
            if is_private(name):
                yield name, node.lineno
            return
        if link is not None and is_private(link[1]):
            yield f".{link[1]}", node.lineno
        for child in ast.iter_child_nodes(node):
            yield from self._in(child)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return what a statement imports of torch, in full."""
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    names = [f"{module}{alias.name}" for alias in node.names]
    return [name for name in names if name.partition(".")[0] == "torch"]


def _link(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Return the owner and the name of the attribute that an expression reads, or None."""
    if isinstance(node, ast.Attribute):
        return (node.value, node.attr) if isinstance(node.ctx, ast.Load) else None
    if isinstance(node, ast.Call):
        function = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        spelled = (
            node.args[1:2]
            if function in READERS
            else node.args[:1]
            if function == "attrgetter"
            else []
        )
        if spelled and isinstance(spelled[0], ast.Constant) and isinstance(spelled[0].value, str):
            return node.args[0], spelled[0].value
    return None
