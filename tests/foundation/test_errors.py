"""Bad input: an exception that names the value and the remedy, and leaves nothing changed."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice import errors
from torchdevice.kernel.devices import registry


@pytest.mark.parametrize("target", ["gpu", "cudaa", "simulated:vax", "cpu:1:2"])
def test_unknown_target(target: Any) -> None:
    with pytest.raises(errors.UnknownTargetError, match="is not a target") as caught:
        torchdevice.portable(target).__enter__()
    assert caught.value.target == target and "cpu" in caught.value.known
    assert not torch.cuda.is_available()


def test_unknown_target_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEVICE_TARGET", "abacus")
    with pytest.raises(errors.UnknownTargetError, match="'abacus'"):
        torchdevice.portable().__enter__()
    with torchdevice.portable("cpu") as scope:  # the argument takes precedence
        assert scope.runtime.device_type == "cpu"


@pytest.mark.parametrize("target", ["cuda", "mps", "xpu"])
def test_target_not_available_here(target: str) -> None:
    if registry.runtime(target).is_available():
        pytest.skip(f"this machine has {target}")
    with pytest.raises(
        errors.TargetUnavailableError,
        match=rf"'{target}' is not available here\. .*leave the target out",
    ):
        torchdevice.portable(target).__enter__()
    assert torchdevice.current() is None


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 0},
        {"devices": -1},
        {"devices": "two"},
        {"devices": True},
        {"identity": "gpu"},
        {"float64": "half"},
        {"capability": 8},
        {"capability": (8,)},
        {"capability": ("8", "0")},
    ],
    ids=str,
)
def test_bad_options(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=rf"{name}=.*Use ") as caught:
        torchdevice.portable("cpu", **options)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", ["torch_npu.contrib.transfer_to_npu", "torchada", "mpsify"])
def test_another_patcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(errors.AnotherPatcherError, match=name):
        torchdevice.portable("cpu").__enter__()
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    "program",
    [
        "import NAME",
        "from NAME import *",
        "__import__('NAME')",
        "import importlib; importlib.import_module('NAME')",
    ],
)
@pytest.mark.parametrize("name", ["torch_npu.contrib.transfer_to_npu", "torchada", "mpsify"])
def test_another_patcher_that_a_program_imports_in_a_scope(
    name: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path.joinpath(*name.split(".")[:-1])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text("import torch\ntorch.cuda.is_available = lambda: True\n")
    monkeypatch.syspath_prepend(tmp_path)
    for each in [module for module in sys.modules if module.startswith("torch_npu")]:
        monkeypatch.delitem(sys.modules, each)
    before = torch.cuda.is_available
    with torchdevice.portable("cpu"):
        assert importlib.util.find_spec(name) is not None
        for _ in range(2):
            with pytest.raises(errors.AnotherPatcherError, match=name):
                exec(program.replace("NAME", name), {})
    assert name not in sys.modules and torch.cuda.is_available is before
    # The packages around it.
    for each in [module for module in sys.modules if module.startswith("torch_npu")]:
        del sys.modules[each]


def test_another_patcher_that_is_not_installed() -> None:
    with torchdevice.portable("cpu"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("mpsify")


def test_a_private_name_of_torch_that_is_gone() -> None:
    from torchdevice.kernel.torch_internals import require

    with pytest.raises(
        errors.TorchVersionError,
        match=rf"torch {torch.__version__.split('+')[0]}.* has no 'torch\._C\._gone'",
    ) as caught:
        require(torch._C, "_gone")
    assert (caught.value.name, caught.value.version) == ("torch._C._gone", torch.__version__)


def test_bad_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDEVICE_LOG", "SHOUT")
    with pytest.raises(ValueError, match="TORCHDEVICE_LOG='SHOUT' is not a level"):
        torchdevice.portable("cpu").__enter__()
    assert torchdevice.current() is None and not torch.cuda.is_available()


def test_every_exception_has_its_place_in_the_hierarchy() -> None:
    for name in errors.__all__:
        exception = getattr(errors, name)
        assert issubclass(exception, (errors.TorchDeviceError, Warning))
    assert issubclass(errors.UnknownTargetError, ValueError)
    assert issubclass(errors.NotSupportedError, NotImplementedError)


def test_torchs_own_exceptions_keep_type_and_text() -> None:
    with pytest.raises(RuntimeError) as plain:
        torch.ones(2) @ torch.ones(3)
    with torchdevice.portable("cpu"), pytest.raises(RuntimeError) as scoped:
        torch.ones(2, device="cuda") @ torch.ones(3, device="cuda")
    assert (type(scoped.value), scoped.value.args) == (type(plain.value), plain.value.args)
