"""A program with Triton's kernels where Triton is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

import torchdevice

pytestmark = pytest.mark.one_engine


def test_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        with torchdevice.portable("cpu"):
            importlib.import_module("triton")
    assert caught.value.__notes__ == [
        "Install Triton by `pip install triton` (Linux). Its kernels then run without a GPU, in "
        "NumPy."
    ]


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_kernel_for_cuda_that_imports_it(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing. A default kernel with other values does not run."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with torchdevice.portable(target):
        op = torch.library.custom_op(f"torchdevice_without_triton::{target[:3]}", mutates_args=())(
            negated
        )
        op.register_kernel("cuda", lambda x: importlib.import_module("triton").launched(x))
        with pytest.raises(ModuleNotFoundError, match="triton"):
            op(torch.ones(2, device="cuda"))


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def test_nothing_is_said_of_other_modules() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        with torchdevice.portable("cpu"):
            importlib.import_module("triton_of_another_name")
    assert not hasattr(caught.value, "__notes__")


def test_a_scope_without_triton_imports_nothing_of_its_folder() -> None:
    if importlib.util.find_spec("triton") is None:
        with torchdevice.simulate():
            assert not [
                name for name in sys.modules if name.startswith("torchdevice.triton_kernels")
            ]
