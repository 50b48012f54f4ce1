"""torch's private names: all that are read are listed, and missing ones named at import."""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import private_names
import pytest
import torch
from private_names import NOT_OF_TORCH, Reads, is_listed, is_private, listed, own_names
from processes import run_torch_python

from torchdevice.errors import TorchVersionError
from torchdevice.kernel import torch_internals
from torchdevice.kernel.bindings import LateModules
from torchdevice.scope import installed

pytestmark = pytest.mark.one_engine

# Not at import: pytest collects the files in each of its workers.
sources = functools.cache(private_names.sources)


@functools.cache
def own() -> set[str]:
    return own_names(sources().values())


LISTED = listed()


def unlisted(tree: ast.Module) -> list[tuple[str, int]]:
    """Return private names that a file reads, neither listed nor the package's own."""
    return [
        (name, line)
        for name, line in Reads(tree)
        if name[1:] not in own() and not is_listed(name, LISTED)
    ]


def test_every_private_name_that_is_read_is_listed() -> None:
    found = {path: unlisted(tree) for path, tree in sources().items()}
    assert {path: names for path, names in found.items() if names} == {}, (
        "add it to kernel/torch_names.json"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch._C._planted()",
        "import torch\ntorch.cuda._planted",
        "import torch.cuda as cuda\ncuda._planted = cuda._planted2",
        "import torch._planted",
        "from torch._C import planted",
        "from torch._C._planted import name",
        "from torch import _C\n_C._planted",
        "import torch\ninner = torch._C\ninner.planted()",
        "import torch\nrequire(torch._C, 'planted')",
        "import torch\nReplaced(torch.cuda, '_planted', make)",
        "import torch\n@replaces(torch.cuda, 'planted', '_planted')\ndef f(): ...",
        "M = 'torch.planted'\n@replaces(f'{M}:Class', '_planted')\ndef f(): ...",
        "import operator\noperator.attrgetter('_planted')",
        "def function(self, tensor):\n    self._planted = tensor._planted",
        "import sys\nsys.modules['torch._dynamo.guards'].planted",
        "import torch\nx = [each._planted for each in torch.tensors()]",
        "import torch\ntorch._C._nn._parse_to._planted",
        "import torch\nwith torch._C._PlantedGuard(): pass",
    ],
)
def test_a_planted_name_is_found(line: str) -> None:
    assert unlisted(ast.parse(line))


def test_what_is_listed_is_read() -> None:
    """Names are taken off the list with the last line that reads them."""
    reads = {name for tree in sources().values() for name, _ in Reads(tree)}
    parts = {part for name in reads for part in name.split(".")}
    public = {
        node.attr
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
    }
    text = {
        node.value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
    }
    assert not {name for name in LISTED if name.rpartition(".")[2] not in parts | public | text}
    assert NOT_OF_TORCH.keys() <= {name[1:] for name in reads}


def test_each_name_is_listed_once() -> None:
    names = Counter(
        (module, name)
        for groups in torch_internals.NAMES.values()
        for modules in groups.values()
        for module, names in modules.items()
        for name in names
    )
    assert names.most_common(1)[0][1] == 1
    assert all(is_private(name) or "old_" in name for name in LISTED), "public names are not listed"


def test_each_module_that_is_checked_later_is_checked() -> None:
    """Where the module is imported in a scope, or before the package reads it."""
    late = next(patch for patch in installed._patches() if isinstance(patch, LateModules))
    watched = {each.name for each in late.modules.values() if each.makers}
    within = {
        node.args[1].value
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch_internals.check"
        if isinstance(node.args[1], ast.Constant)
    }
    later = {module for modules in torch_internals.NAMES["later"].values() for module in modules}
    checked = watched | within
    assert not [
        each for each in later if not any(f"{each}.".startswith(f"{outer}.") for outer in checked)
    ]


def test_the_installed_torch_has_all_names() -> None:
    # In a process of its own: other tests expect that these modules of torch are not imported.
    code = (
        "from torchdevice.kernel.torch_internals import missing; print(*missing('at import'), "
        "*missing('later'))"
    )
    done = run_torch_python("-c", code)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


@pytest.mark.parametrize(
    ("use", "taken", "name", "affected"),
    [
        (
            "torchdevice.portable",
            "del torch.cuda._parse_visible_devices",
            "torch.cuda._parse_visible_devices",
            "entering and leaving a scope",
        ),
        (
            "torchdevice.ToDevice",
            "sys.modules['torch.utils._pytree'] = None",
            "torch.utils._pytree.tree_leaves, torch.utils._pytree.tree_map, "
            "torch.utils._pytree.tree_map_only",
            "rewriting device arguments",
        ),
        (
            "import torchdevice.scope.activation",
            "del torch.jit._state._python_cu",
            "torch.jit._state._python_cu.find_function",
            "TorchScript",
        ),
        (
            "import torchdevice.scope.scope",
            "del torch.nn.Module._apply",
            "torch.nn.Module._apply",
            "rewriting device arguments",
        ),
    ],
)
def test_a_missing_name_is_named_at_import(use: str, taken: str, name: str, affected: str) -> None:
    done = run_torch_python(
        "-c", f"import sys, torch, torchdevice\n{taken}\n{use}", TORCHDEVICE="0"
    )
    version = torch.__version__
    text = (
        f"TorchVersionError: torch {version} has no {name!r}, which torchdevice needs for "
        f"{affected}. Install"
    )
    assert text in done.stderr


def test_a_name_that_is_missing_in_a_late_module_is_named_when_that_is_imported() -> None:
    code = (
        "import sys, torch, torchdevice\n"
        "import torch.distributed.device_mesh as mesh\n"
        "del mesh._get_device_handle\n"
        "with torchdevice.portable(target='cpu'): pass"
    )
    done = run_torch_python("-c", code)
    assert (
        "has no 'torch.distributed.device_mesh._get_device_handle', which torchdevice needs for "
        "process" in done.stderr
    )


class _Listed:
    def __init__(self) -> None:
        self._set_by_the_constructor = 1


def test_what_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.planted")
    module.Listed, module._value = _Listed, SimpleNamespace(inner=1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.planted", module)
    there = ["Listed._set_by_the_constructor", "_value.inner"]
    absent = ["Listed._other", "_value._inner", "_gone", "_gone.inner"]
    table = {"planted": {"tests": {"torch.planted": there + absent, "torch.planted2": ["_name"]}}}
    monkeypatch.setattr(torch_internals, "NAMES", table)
    assert [name for name, _ in torch_internals.missing("planted", "torch.planted")] == [
        f"torch.planted.{name}" for name in absent
    ]
    assert ("torch.planted2._name", "tests") in list(torch_internals.missing("planted"))
    with pytest.raises(
        TorchVersionError, match=r"'torch\.planted\.Listed\._other, .*_gone\.inner'.* for tests\."
    ) as caught:
        torch_internals.check("planted", "torch.planted")
    assert caught.value.affected == "tests"
