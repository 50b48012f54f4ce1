"""The package's structure: imports go one way, names are precise, little is public."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import ROOT
from processes import run_fresh_python, run_torch_python

import torchdevice
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.runtime import Runtime

pytestmark = pytest.mark.one_engine

PACKAGE = Path(torchdevice.__file__).parent

# From the bottom up. A folder is one room. Each room may import the rooms before it, also for types
# and in functions.
ROOMS = [
    "errors",
    "version",
    "cuda",
    "kernel",
    "native",
    "calls",
    "random_numbers",
    "torch_modules",
    "simulation",
    "triton_kernels",
    "packages",
    "report",
    "verify",
    "scope",
    "check",
    "plan",
    "transfer",
    "__init__",
    "tools",
    "__main__",
]


def modules() -> dict[str, Path]:
    """Return the modules of the package by name, without ``torchdevice.``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Return the package's modules that a module imports, in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] == "torchdevice"
        ):
            base = node.module.partition(".")[2]
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in MODULES else base or "__init__")
        elif isinstance(node, ast.Import):
            inside = (
                alias.name.partition(".")[2]
                for alias in node.names
                if alias.name.startswith("torchdevice.")
            )
            found.update(inside)
    return found - {name}


def room_of(name: str) -> str:
    return name.partition(".")[0]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes of a cycle, or an empty list for a graph without cycles."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            found = visit(other, [*way, node])
            if found:
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return each module's imports. Not at import: pytest collects in each worker."""
    found = {name: imports(name) for name in MODULES}
    # Imported by name: each family has a file of its name.
    found["scope.installed"] |= {
        f"torch_modules.accelerators.{family}" for family in FAMILIES
    } & set(MODULES)
    return found


def test_no_file_imports_in_a_circle() -> None:
    assert circle(graph()) == []


def test_no_room_imports_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for name, others in graph().items():
        rooms.setdefault(room_of(name), set()).update(room_of(other) for other in others)
    for name, others in rooms.items():
        others.discard(name)
    assert circle(rooms) == []


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]


def test_imports_go_down() -> None:
    rank = {room: number for number, room in enumerate(ROOMS)}
    above = {
        name: [other for other in others if rank[room_of(other)] > rank[room_of(name)]]
        for name, others in graph().items()
    }
    assert {name: others for name, others in above.items() if others} == {}


def test_each_room_has_a_place_in_the_order() -> None:
    assert set(ROOMS) == {room_of(name) for name in MODULES}


def test_folders_list_the_rooms_that_they_import() -> None:
    """The folder ``cuda`` has a message alone."""
    folders = sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cuda"})
    assert len(folders) > 10
    for folder in folders:
        described = (
            ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
        )
        assert len(described.splitlines()) <= 12, folder
        listed = set(re.findall(r"``(\w+)``", described.rpartition("May import ")[2]))
        others = {
            room_of(other) for name in MODULES if room_of(name) == folder for other in graph()[name]
        }
        assert listed == others - {folder, "__init__"}, folder


def test_every_file_and_public_name_is_documented() -> None:
    for name in MODULES:
        # By the source: the files for a library cannot be imported without it.
        assert ast.get_docstring(ast.parse(MODULES[name].read_text())), name
    for name in torchdevice.__all__:
        assert inspect.getdoc(getattr(torchdevice, name)), name


def _is_nested_ternary(node: ast.AST) -> bool:
    inner = (part for part in ast.walk(node) if part is not node)
    return isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in inner)


def _is_text(node: ast.AST) -> bool:
    """Return whether an expression makes a text: a literal, or a template that is filled in."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("format", "join") or _is_text(node.func.value)
    is_literal = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_literal or isinstance(node, ast.JoinedStr)


def _chooses_text(node: ast.AST) -> bool:
    """Return whether ``and`` returns a text, as in ``condition and "text"``."""
    return (
        isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and _is_text(node.values[-1])
    )


def _is_joined(node: ast.AST) -> bool:
    """Return whether three or more assignments share a line, as in ``a, b, c = 1, 2, 3``."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    are_joined = any(isinstance(target, ast.Tuple) for target in node.targets)
    return are_joined and len(node.value.elts) > 2


def _is_chosen(node: ast.AST) -> bool:
    """Return whether an attribute is of a ternary, as in ``(x if y else z).attribute``."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.IfExp)


AT_ONCE = {
    "simulation.allocator.storages:_put_in_memory": "a storage and its views have one memory",
    "simulation.serving:NativeDevice._led_in_python": "the segments and the blocks in them are of one ledger",
    "torch_modules.cuda.graphs:GraphStandIn._abandon": "the capture ends in all three places",
}
"""The functions that assign more on a line, so that no interrupt comes between, and what would be
torn apart.
"""


def test_no_ternary_stands_in_another() -> None:
    nested = {
        f"{module}:{name}" for module, name, node in expressions() if _is_nested_ternary(node)
    }
    assert nested == set()


def test_no_condition_is_used_as_a_text() -> None:
    used = {f"{module}:{name}" for module, name, node in expressions() if _chooses_text(node)}
    assert used == set()


def test_no_ternary_has_an_attribute() -> None:
    chosen = {f"{module}:{name}" for module, name, node in expressions() if _is_chosen(node)}
    assert chosen == set()


def test_lines_assign_one_value_or_a_pair() -> None:
    joined = {f"{module}:{name}" for module, name, node in expressions() if _is_joined(node)}
    assert joined == set(AT_ONCE)


@pytest.mark.parametrize(
    ("found", "refused", "accepted"),
    [
        (_is_nested_ternary, "f(1 if x else 2) if y else 3", "f(1 if x else 2, y)"),
        (_chooses_text, "x and 'a'", "x and y"),
        (_chooses_text, "y or (x and f'{x}')", "'a' and x"),
        (_chooses_text, "x and T.format(x)", "x and f(x)"),
        (_is_chosen, "(x if y else z).f()", "f(x if y else z)"),
        (_is_joined, "a, b, c = 1, 2, 3", "a, b = 1, 2"),
        (_is_joined, "a, b, c = d = 1, 2, 3", "a, b, c = f()"),
    ],
)
def test_what_is_dense_is_found(
    found: Callable[[ast.AST], bool], refused: str, accepted: str
) -> None:
    assert any(map(found, ast.walk(ast.parse(refused))))
    assert not any(map(found, ast.walk(ast.parse(accepted))))


MOST_BRANCHES = 12

ON_EVERY_CALL = {
    "simulation.kernels.pipeline:Pipeline.run": (
        "in three functions `x + 1` takes 14 frames of Python instead of 11"
    ),
    "simulation.allocator.storages:fresh": (
        "every result of an operator comes here; a frame takes 55 ns"
    ),
    "simulation.allocator.block_allocation:Blocks._stays": (
        "in three functions it takes 15 % longer"
    ),
}
"""The functions that may have more, since every call of an operator runs them, and why each is one
function.
"""

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def branches(function: ast.AST) -> int:
    """Return a function's branches, without those of functions and classes inside.

    Each condition, loop, handler of errors and case of a ``match`` is one, each further operand of
    ``and`` and ``or``, and each condition of a comprehension.
    """
    count, parts = 0, list(ast.iter_child_nodes(function))
    while parts:
        node = parts.pop()
        if isinstance(node, _DEFINITIONS):
            continue
        count += isinstance(node, _BRANCHES)
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += len(node.ifs)
        parts += ast.iter_child_nodes(node)
    return count


@functools.cache
def expressions() -> list[tuple[str, str, ast.AST]]:
    """Return the choices and assignments of the package, with module and function."""
    found: list[tuple[str, str, ast.AST]] = []
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        inside: dict[int, str] = {}
        for name, function in functions(tree):  # an inner function comes later
            inside.update((id(node), name) for node in ast.walk(function))
        for node in ast.walk(tree):
            if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Assign)) or _is_chosen(node):
                found.append((module, inside.get(id(node), f"line {node.lineno}"), node))
    return found


def functions(node: ast.AST, around: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions in a file by their dotted names, also those inside others."""
    for inner in ast.iter_child_nodes(node):
        name = around
        if isinstance(inner, _DEFINITIONS):
            name = f"{around}.{inner.name}".lstrip(".")
            if not isinstance(inner, ast.ClassDef):
                yield name, inner
        yield from functions(inner, name)


def test_no_line_is_wide() -> None:
    """What tools read at the end of a line does not count."""
    wide = {
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in MODULES.values()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(re.sub(r"  # (type: ignore|noqa).*", "", line)) > 100
    }
    assert wide == set()


def test_functions_have_few_branches() -> None:
    many = {
        f"{module}:{name}"
        for module, path in MODULES.items()
        for name, function in functions(ast.parse(path.read_text()))
        if branches(function) > MOST_BRANCHES
    }
    assert many == set(ON_EVERY_CALL)


def test_a_branch_is_found_in_any_spelling() -> None:
    source = """
class C:
    def f(self, x):
        def g(): return 1 if x else 2
        if x and x and x: pass
        elif x: pass
        for y in x: x = [each for each in x if each if y]
        while x: pass
        try: pass
        except ValueError: pass
        match x:
            case 1: pass
            case _: pass
"""
    found = {name: branches(function) for name, function in functions(ast.parse(source))}
    assert found == {"C.f": 11, "C.f.g": 1}


ROUNDABOUT = re.compile(r"\bby which\b|\bin the place of\b|\btakes? the place of\b", re.IGNORECASE)
"""Words that a shorter sentence does without: "the name by which X finds it" is "its name in X"."""


def test_sentences_are_direct() -> None:
    found = {
        f"{name}: {each[0]}"
        for name, path in MODULES.items()
        for each in ROUNDABOUT.finditer(" ".join(path.read_text().replace("#", " ").split()))
    }
    assert found == set()


def kept(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that raise a variable of a function, which the function does not delete.

    The error has a traceback with the frame, the frame has the variable, and the variable is the
    error. Python itself deletes the name of an except clause.
    """
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            safe = {line for node in ast.walk(function) for line in _deleted(node)}
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
                    is_class = node.exc.id.lstrip("_")[0].isupper()
                    if not is_class and (node.lineno, node.exc.id) not in safe:
                        yield node.lineno


def _deleted(node: ast.AST) -> Iterator[tuple[int, str]]:
    names: set[str] = set()
    if isinstance(node, ast.ExceptHandler) and node.name:
        names = {node.name}
    elif isinstance(node, ast.Try):
        deletions = [each for each in node.finalbody if isinstance(each, ast.Delete)]
        names = {
            target.id
            for each in deletions
            for target in each.targets
            if isinstance(target, ast.Name)
        }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise):
            yield from ((inner.lineno, name) for name in names)


def test_no_function_keeps_the_error_that_it_raises() -> None:
    found = {name: list(kept(ast.parse(path.read_text()))) for name, path in MODULES.items()}
    assert not {name: lines for name, lines in found.items() if lines}


def test_a_kept_error_is_found() -> None:
    assert list(kept(ast.parse("def f(error):\n    raise error"))) == [2]
    assert not list(
        kept(
            ast.parse(
                "def f():\n    try:\n        g()\n    except E as error:\n        raise error"
            )
        )
    )
    assert not list(
        kept(ast.parse("def f(e):\n    try:\n        raise e\n    finally:\n        del e"))
    )
    assert not list(kept(ast.parse("def f():\n    raise _Class")))


def test_data_files_are_made_by_scripts() -> None:
    """Sentences, names and tables that people write stand in the code that uses them."""
    scripts = [path.read_text() for path in (ROOT / "docs").glob("make_*.py")]
    data = [
        path for path in PACKAGE.rglob("*") if path.suffix in {".json", ".toml", ".yaml", ".csv"}
    ]
    assert len(data) > 1
    written = {
        path.name
        for path in data
        if any(re.search(rf'^PAGE = .*"{path.name}"$', each, re.M) for each in scripts)
    }
    assert {path.name for path in data} == written


def test_type_checkers_see_the_public_names() -> None:
    tree = ast.parse(MODULES["__init__"].with_suffix(".pyi").read_text())
    imports = [
        node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "typing"
    ]
    assert {alias.asname for node in imports for alias in node.names} == set(torchdevice.__all__)


def test_a_scope_shows_little() -> None:
    public = {
        name
        for name in (*dir(torchdevice.Scope), *vars(torchdevice.portable()))
        if not name.startswith("_")
    }
    assert public == {"journal", "options", "report", "runtime", "target"}


def test_a_runtime_has_few_members() -> None:
    """What only a device of this package's own answers stands in ``SuppliedDevice``."""
    members = {
        *dir(Runtime),
        *(name for kind in Runtime.__mro__ for name in getattr(kind, "__annotations__", {})),
    }
    assert len({name for name in members if not name.startswith("_")}) <= 40


def test_a_context_has_few_members() -> None:
    """What belongs together is a part with a name, such as ``devices``."""
    with torchdevice.portable("cpu"):
        members = {*dir(Context), *vars(thread_state.innermost())}
    assert len({name for name in members if not name.startswith("_")}) <= 20


def test_no_file_is_named_after_nothing() -> None:
    forbidden = {"utils", "helpers", "common", "core", "base", "manager", "handler", "misc"}
    assert not {path.stem for path in MODULES.values()} & forbidden
    assert not [
        path.name
        for path in MODULES.values()
        if path.stem.startswith("_") and not path.stem.endswith("__")
    ]


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports, at its top and in functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_memory_at_addresses_is_touched_in_one_folder() -> None:
    """The docstring of ``lowlevel`` says what each of its files relies on."""
    users = {
        name for name, path in MODULES.items() if imported(path) & {"ctypes", "_ctypes", "cffi"}
    }
    assert {name.rpartition(".")[0] for name in users} == {"kernel.lowlevel"}
    described = importlib.import_module("torchdevice.kernel.lowlevel").__doc__
    files = {
        name.removeprefix("kernel.lowlevel.")
        for name in MODULES
        if name.startswith("kernel.lowlevel.")
    }
    assert files == set(re.findall(r"^``(\w+)``$", str(described), re.MULTILINE))


def test_addresses_of_tensors_are_read_past_what_scopes_put_there() -> None:
    """A program's ``Tensor.data_ptr`` keeps memory; see `simulation/allocator/kept_memory.py`."""
    found = [
        f"{name}:{node.lineno}"
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "data_ptr"
        and "storage" not in ast.unparse(node.func.value).lower()
    ]
    assert found == []


REGISTERING = {"_dispatch_library", "Library", "register_kernel", "custom_op", "_destroy"}
"""Names by which kernels come into torch's dispatcher, and go."""

KEEPING = {"get_kernel"}
"""Names by which a kernel is kept that another library's end makes invalid."""


def named(path: Path) -> set[str]:
    """Return the attributes that a file reads to call them or to keep them."""
    calls = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    kept = [
        node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assign)
    ]
    return {node.attr for node in (*calls, *kept) if isinstance(node, ast.Attribute)}


def test_kernels_have_one_owner_and_none_is_kept() -> None:
    """A kernel is put once, and is never taken out: see `kernel/registered_kernels.py`."""
    files = {path.relative_to(PACKAGE).as_posix(): named(path) for path in PACKAGE.rglob("*.py")}
    assert {name for name, names in files.items() if names & REGISTERING} == {
        "kernel/registered_kernels.py"
    }
    # A view's kernel for the CPU is torch's own, and so is a factory's for CUDA.
    assert {name for name, names in files.items() if names & KEEPING} == {
        "calls/kept_functions.py",
        "simulation/kernels/cpu_kernels.py",
    }


def test_an_import_is_found_in_any_spelling(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        "import os, ctypes.util as c\ndef f():\n    from _ctypes import PyObj_FromPtr\n"
    )
    assert imported(path) == {"os", "ctypes", "_ctypes"}


def _strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


DEVICE_TYPES = {"cpu", "mps", "xpu", "simulated"}


PROGRAMS = {"written_for", "program", "accelerator"}
"""Attributes that name the accelerator a program is written for or spells, not the device that
stands in.
"""


def compared(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of device types with which a file compares a value."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: set(_strings(node.value)) & DEVICE_TYPES
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            if any(isinstance(part, ast.Attribute) and part.attr in PROGRAMS for part in parts):
                continue
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "startswith"
        ):
            parts = list(node.args)
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            if isinstance(part, (ast.Constant, ast.Tuple, ast.Set, ast.List)):
                yield from ((node.lineno, text) for text in _strings(part) if text in DEVICE_TYPES)
            elif isinstance(part, ast.Name):
                yield from ((node.lineno, text) for text in constants.get(part.id, ()))


OF_DEVICES = ("kernel.devices.", "simulation.", "scope.target_selection")
"""The modules that may ask which device there is."""


def test_no_device_type_is_asked_for_outside_the_devices() -> None:
    """``target == "mps"`` belongs in a runtime. Comparing what programs spell is allowed."""
    found = {
        name: list(compared(path))
        for name, path in MODULES.items()
        if not name.startswith(OF_DEVICES)
    }
    assert {name: places for name, places in found.items() if places} == {}


def test_a_comparison_is_found_in_any_spelling(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        'K = ("mps", "xpu")\na = x == "mps"\nb = x in {"cpu"}\nc = x in K\nd = '
        'x.startswith("xpu")\n'
    )
    assert sorted({line for line, _ in compared(path)}) == [2, 3, 4, 5]


# ---- features ------------------------------------------------------------------------------------

BELOW_FEATURES = ("kernel", "calls", "torch_modules")
"""The rooms that know no feature."""

FEATURES = (
    "check",
    "packages",
    "plan",
    "report",
    "simulation",
    "transfer",
    "triton_kernels",
    "verify",
)
"""The folders of which a scope on a CPU target loads no more than their options, and any of which
can be deleted.
"""

IN_A_SCOPE = """
import sys
import torch, torchdevice

layer = torch.nn.Linear(4, 4)
with torchdevice.portable("cpu"):
    layer.cuda()(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.cuda.synchronize()
print(layer.weight.grad.sum().item())
inner = [name.split(".")[1:] for name in sys.modules if name.startswith("torchdevice.")]
print(sorted({name[0] for name in inner if len(name) > 1 and name[1] != "options"}))
"""


def test_no_lower_room_imports_a_feature() -> None:
    found = {
        name: others
        for name in graph()
        if room_of(name) in BELOW_FEATURES
        and (others := {each for each in graph()[name] if room_of(each) in FEATURES})
    }
    assert found == {}


def test_the_choice_of_a_target_imports_no_feature() -> None:
    """Features answer for names by their records."""
    found = graph()["scope.target_selection"] | graph()["scope.features"]
    assert {name for name in found if room_of(name) in FEATURES} == set()


WORDS_OF_FEATURES = re.compile(
    r"simulat|triton|verif(?:y|ied)|\bfindings?\b|\bplan(?:s|ned)?\b|\braces?\b", re.IGNORECASE
)

WITH_WORDS = {
    # The table of torch's private names, by what needs them.
    "kernel.torch_names",
    # The heading of a command line, a fact about the target, and advice in an error.
    "kernel.options",
    # The name that no other backend may take.
    "kernel.devices.registry",
    # What an error says needs the offsets.
    "kernel.lowlevel.object_fields",
    # Remedies for modules that are missing, before the feature could be imported.
    "kernel.python.uncaught_errors",
}
"""The files of the kernel that have words of features outside docstrings and comments, and why."""


def _words(tree: ast.AST) -> Iterator[str]:
    """Yield the names and the texts in a file, without docstrings."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    described = {id(text) for text in texts if isinstance(text, ast.Constant)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in described
        ):
            yield node.value
        for field in ("id", "attr", "name", "arg", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def test_the_kernel_and_calls_have_no_word_of_features() -> None:
    found = {
        name
        for name, path in MODULES.items()
        if room_of(name) in ("kernel", "calls")
        and any(WORDS_OF_FEATURES.search(word) for word in _words(ast.parse(path.read_text())))
    }
    assert found == WITH_WORDS


def test_a_word_of_a_feature_is_found() -> None:
    tree = ast.parse(
        '"""races"""\nimport a.triton\ndef f(verify): x.simulated_by\n"plan"\ny = "a plan"'
    )
    found = {word for word in _words(tree) if WORDS_OF_FEATURES.search(word)}
    assert found == {"verify", "a.triton", "a plan", "simulated_by"}


def test_a_scope_on_a_cpu_loads_no_feature() -> None:
    done = run_torch_python("-c", IN_A_SCOPE)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1])) & set(FEATURES)
    assert loaded <= {"packages"}, "the finder of stand-ins is in place in every scope"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_folder_of_a_feature_can_be_deleted(feature: str, tmp_path: Path) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "torchdevice", ignore=shutil.ignore_patterns("__pycache__", feature)
    )
    assert not (tmp_path / "torchdevice" / feature).exists()
    done = run_fresh_python("-c", IN_A_SCOPE, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    program = "import torch; print(torch.ones(2, device='cuda').device)"
    command = ("-m", "torchdevice", "run", "--target", "cpu", "-c", program)
    done = run_fresh_python(*command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "cpu\n", done.stderr
    if feature in ("check", "plan"):
        words = ("-m", "torchdevice", "--help")
        done = run_fresh_python(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert " doctor " in done.stdout and f" {feature} " not in done.stdout, done.stderr
    if feature == "simulation":
        unknown = "import torchdevice; torchdevice.portable('simulated:cuda').__enter__()"
        done = run_fresh_python("-c", unknown, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert "UnknownTargetError: 'simulated:cuda' is not a target." in done.stderr


OF_LOWER_ROOMS = (
    "core/test_patching.py",
    "cuda/test_torch_cuda.py",
    "engines/test_device_arguments.py",
)
"""Tests of the kernel, of calls and of torch's modules that start no processes: the command line
has all features.
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("feature", FEATURES)
def test_tests_of_lower_rooms_pass_without_a_feature(feature: str, tmp_path: Path) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "torchdevice", ignore=shutil.ignore_patterns("__pycache__", feature)
    )
    shutil.copytree(
        ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    flags = ("-q", "-p", "no:cacheprovider", "--targets", "cpu", "-k", "not simulated")
    files = [f"tests/{name}" for name in OF_LOWER_ROOMS]
    done = run_fresh_python("-m", "pytest", *flags, *files, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 100
