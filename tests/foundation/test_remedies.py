"""Libraries that run CUDA's own code: notes on their errors, or on their absence."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import torchdevice

TARGETS = ["cpu", "simulated:cuda"]

pytestmark = pytest.mark.one_engine


def fake(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module of a name and text, which can be imported."""
    module = ModuleType(name)
    exec(text, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def notes_of(action: Any, target: str = "simulated:cuda") -> str:
    """Return the notes of the error with which an action ends in a scope."""
    with pytest.raises(Exception) as caught:
        with torchdevice.portable(target):
            action(torch.ones(2, device="cuda"))
    return "\n".join(getattr(caught.value, "__notes__", []))


# CuPy 14.2 without a driver: it can be imported, and the first array raises an error of its own.
CUPY = """
class CUDARuntimeError(RuntimeError): pass
def asarray(a): raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
def from_dlpack(a): raise TypeError(f"Unsupported array type: {a.__dlpack_device__()[0]}")
"""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["cupy", "cupy_backends.cuda.api.runtime", "cupyx.scipy"])
@pytest.mark.parametrize("function", ["asarray", "from_dlpack"])
def test_errors_that_cupy_raises_name_the_remedy(
    target: str, name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = fake(name, CUPY, monkeypatch)
    assert notes_of(getattr(cupy, function), target).count("Use torch or NumPy") == 1


@pytest.mark.parametrize("name", ["cupy", "cupyx"])
def test_a_missing_cupy_names_the_remedy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert "Use torch or NumPy" in notes_of(lambda x: importlib.import_module(name))


def test_an_error_that_a_program_catches_and_raises_again_is_noted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = fake("cupy", CUPY, monkeypatch)

    def again(x: torch.Tensor) -> None:
        with torchdevice.portable("simulated:cuda"):
            cupy.asarray(x)

    assert notes_of(again).count("Use torch or NumPy") == 1


@pytest.mark.parametrize("name", ["cupydo", "my.cupy", "numba.cuda.simulator.kernel"])
def test_other_modules_are_not_noted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes_of(fake(name, CUPY, monkeypatch).asarray) == ""


@pytest.mark.parametrize(
    "name", ["numba.cuda.cudadrv.driver", "numba.cuda.dispatcher", "numba.cuda.api"]
)
def test_numba_without_its_simulator_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NUMBA_ENABLE_CUDASIM=1" in notes_of(fake(name, CUPY, monkeypatch).asarray)
