"""Dtypes that MPS refuses, on the simulated Mac: in its words, and repeated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.simulation.refusals.device_refusals import MPS_GAPS

COMPLEX = (
    "Trying to convert ComplexFloat to the MPS backend but it does not have support for that dtype."
)

C64, I64, U8, U16 = torch.complex64, torch.int64, torch.uint8, torch.uint16


def square(dtype: torch.dtype, device: str) -> torch.Tensor:
    eye = torch.eye(3) * 2 + torch.ones(3, 3)
    return eye.to(dtype).to(device)


# Functions are looked up at the call: engine="wrap" does not reach those that a table holds.
CASES: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "inverse": (C64, lambda x: torch.linalg.inv(x), COMPLEX),
    "determinant": (C64, lambda x: torch.linalg.det(x), COMPLEX),
    "cholesky": (C64, lambda x: torch.linalg.cholesky(x @ x.mH), COMPLEX),
    "silu": (C64, lambda x: torch.nn.functional.silu(x), COMPLEX),
    "i0e": (
        U16,
        lambda x: torch.special.i0e(x),
        "Operation 'special_i0e()' does not support input type 'uint16' in MPS backend.",
    ),
    "convolution": (
        I64,
        lambda x: torch.nn.functional.conv1d(x[None], x[None]),
        "Convolution is supported only for Floating types",
    ),
    "bicubic": (
        U8,
        lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=2, mode="bicubic"),
        "Operation 'upsample_bicubic2d()' does not support input type 'uint8' in MPS backend.",
    ),
}


@pytest.mark.parametrize(("dtype", "call", "message"), CASES.values(), ids=CASES)
class TestEachDtype:
    @pytest.mark.parametrize("options", [{"strict": True}, {"written_for": "mps"}], ids=str)
    def test_it_is_refused(
        self, dtype: torch.dtype, call: Callable[[Any], Any], message: str, options: dict[str, Any]
    ) -> None:
        with (
            torchdevice.simulate("mps", **options),
            pytest.raises((TypeError, RuntimeError)) as caught,
        ):
            call(square(dtype, options.get("written_for", "cuda")))
        assert str(caught.value) == message

    def test_the_call_is_made_on_the_cpu(
        self, dtype: torch.dtype, call: Callable[[Any], Any], message: str
    ) -> None:
        with torchdevice.simulate("mps") as scope:
            result = call(square(dtype, "cuda"))
            assert result.is_mps and torch.equal(result.cpu(), call(square(dtype, "cpu")))
            (entry,) = [
                entry for entry in scope.journal.degraded if entry.fidelity is Fidelity.FELL_BACK
            ]
            assert entry.requested.endswith(f"in {dtype}") and entry.site.file == __file__

    def test_cuda_takes_it_or_refuses_it_itself(
        self, dtype: torch.dtype, call: Callable[[Any], Any], message: str
    ) -> None:
        with torchdevice.simulate("cuda"):
            try:
                call(square(dtype, "cuda"))
            except (RuntimeError, TypeError) as error:
                assert "MPS" not in str(error)

    def test_float32_is_not_refused(
        self, dtype: torch.dtype, call: Callable[[Any], Any], message: str
    ) -> None:
        with torchdevice.simulate("mps", written_for="mps"):
            assert call(square(torch.float32, "mps")).dtype is torch.float32


def test_the_table_names_operators_and_dtypes_of_torch() -> None:
    gone = {"cholesky"} if torch.__version__ >= "2.14" else set()  # linalg_cholesky is left
    for name, dtypes in MPS_GAPS.items():
        assert (
            name in gone or hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")
        ), name
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in dtypes)
        assert "float32" not in dtypes and "float16" not in dtypes


def test_the_gradient_of_a_call_made_on_the_cpu_is_made_there_too() -> None:
    def gradient(device: str) -> torch.Tensor:
        x = square(C64, device).requires_grad_()
        torch.linalg.inv(x).abs().sum().backward()
        assert x.grad is not None
        return x.grad

    with torchdevice.simulate("mps"):
        there = gradient("cuda")
        assert there.is_mps and torch.allclose(there.cpu(), gradient("cpu"))
