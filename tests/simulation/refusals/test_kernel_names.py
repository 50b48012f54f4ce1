"""Errors for dtypes that neither the CPU nor CUDA has a kernel for name CUDA's kernel."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweeping import choose
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice
from torchdevice.simulation.refusals import kernel_names


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=torch.float16)


def truth(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=torch.bool)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse product": (
        lambda: torch.bmm(half(1, 2, 2).to_sparse(), half(1, 2, 2)),
        "\"bmm_sparse_cuda\" .* 'Half'",
    ),
    "product": (lambda: truth(2, 2) @ truth(2, 2), "\"addmm_cuda\" .* 'Bool'"),
    "batch of products": (lambda: truth(1, 2, 2) @ truth(1, 2, 2), "\"baddbmm_cuda\" .* 'Bool'"),
    "svd": (lambda: torch.linalg.svd(half(2, 2)), "\"svd_cuda_gesvdj\" .* 'Half'"),
    "qr": (lambda: torch.linalg.qr(half(2, 2)), "\"geqrf_cuda\" .* 'Half'"),
    "cholesky": (lambda: torch.linalg.cholesky(half(2, 2)), "\"cholesky_cusolver\" .* 'Half'"),
    "eigenvalues": (lambda: torch.linalg.eigvalsh(half(2, 2)), "\"linalg_eigh_cuda\" .* 'Half'"),
    "softmax": (lambda: truth(2).softmax(0), "\"host_softmax\" .* 'Bool'"),
    "pooling": (lambda: F.avg_pool2d(truth(1, 4, 4), 2), "\"avg_pool2d_out_cuda_frame\" .* 'Bool'"),
    "interpolation": (
        lambda: F.interpolate(truth(1, 1, 4), 8),
        "\"upsample_nearest1d_out_frame\" .* 'Bool'",
    ),
    "gelu": (lambda: F.gelu(truth(2)), "\"GeluCUDAKernelImpl\" .* 'Bool'"),
    "rounding": (lambda: truth(2).ceil(), "\"ceil_cuda\" .* 'Bool'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_name_is_cudas(name: str) -> None:
    call, text = CALLS[name]
    with torchdevice.simulate(), pytest.raises((RuntimeError, NotImplementedError), match=text):
        call()


def test_a_mac_keeps_its_own_words() -> None:
    error = NotImplementedError("\"linalg_svd_cpu\" not implemented for 'Half'")
    with torchdevice.simulate("mps"):
        assert kernel_names.named("_linalg_svd", error) is error
    assert kernel_names.named("_linalg_svd", error) is error, "outside of scopes"


def test_other_errors_are_kept() -> None:
    error = RuntimeError("expected m1 and m2 to have the same dtype")
    with torchdevice.simulate():
        assert kernel_names.named("mm", error) is error


def lacking(op: Any, dtype: torch.dtype) -> list[str]:
    """Return the names of kernels in the errors of an operator's samples with tensors of a
    dtype.
    """

    def given(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return (value.detach().to(dtype) if value.is_floating_point() else value.detach()).cuda()

    found = []
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 2):
        try:
            call = sample.transform(given)
            op(call.input, *call.args, **call.kwargs)
        except Exception as error:  # the database has no samples for dtypes that operators lack
            found += re.findall(r'"([^"]+)" not implemented for', str(error))
    return found


@pytest.mark.filterwarnings("ignore")
def test_no_operator_names_a_kernel_of_the_cpu(sweep: tuple[bool, int]) -> None:
    operators = choose([op for op in op_db if torch.float32 in op.dtypes], sweep, 40)
    found: dict[str, list[str]] = {}
    with warnings.catch_warnings(), torchdevice.simulate():
        warnings.simplefilter("ignore")
        for op in operators:
            names = [name for dtype in (torch.bool, torch.complex32) for name in lacking(op, dtype)]
            found[op.formatted_name] = names
    assert sum(map(len, found.values())) > len(operators) / 4, "the sweep refuses something"
    assert {op: names for op, names in found.items() if any("cpu" in name for name in names)} == {}
