"""Errors for dtypes that neither the CPU nor CUDA has a kernel for name CUDA's kernel."""

from __future__ import annotations

import itertools
import mmap
import re
import warnings
from collections.abc import Callable
from pathlib import Path
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
    "padding": (
        lambda: F.pad(truth(1, 1, 4), (1, 1), "replicate"),
        "\"replication_pad1d_cuda\" .* 'Bool'",
    ),
    "mirrored padding": (
        lambda: F.pad(truth(1, 1, 4, 4), (1, 1, 1, 1), "reflect"),
        "\"reflection_pad2d_out_template\" .* 'Bool'",
    ),
    "loss of two classes": (
        lambda: torch.ops.aten.binary_cross_entropy(truth(2), truth(2)),
        "\"binary_cross_entropy_out_cuda\" .* 'Bool'",
    ),
    "polygamma": (lambda: torch.polygamma(2, half(2).to(torch.complex64)), '"polygamma_cuda" '),
    "triangle": (
        lambda: torch.ones(2, 2, device="cuda").to(torch.uint16).tril(),
        "\"triu_tril_cuda_template\" .* 'UInt16'",
    ),
    "remainder of 0": (
        lambda: torch.zeros(2, dtype=torch.uint16, device="cuda") % 0,
        "\"remainder_cuda\" .* 'UInt16'",
    ),
    "nearest exact": (
        lambda: F.interpolate(truth(1, 1, 4), 8, mode="nearest-exact"),
        "\"upsample_nearest1d_out_frame\" .* 'Bool'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_name_is_cudas(name: str) -> None:
    call, text = CALLS[name]
    with torchdevice.simulate(), pytest.raises((RuntimeError, NotImplementedError), match=text):
        call()


KEPT_BY_NONE = 16
"""The compiler writes shorter texts into the code."""

LIBRARIES = [
    path
    for name in ("libtorch_cuda.so", "libtorch_cuda_linalg.so")
    if (path := Path(torch.__file__).with_name("lib") / name).exists()
]


@pytest.mark.skipif(not LIBRARIES, reason="the build has no kernels of CUDA")
def test_long_names_are_in_torchs_libraries() -> None:
    """A text may be the end of another one, so only its end is looked for."""
    known = {*kernel_names._OF_OPERATORS.values(), *kernel_names._OF_KERNELS.values()}
    missing = {name for name in known if len(name) > KEPT_BY_NONE}
    for path in LIBRARIES:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            missing = {name for name in missing if text.find(name.encode() + b"\0") < 0}
    assert missing == set()


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
    """Return kernels' names in an operator's errors for samples of a dtype."""

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


LACKING = (torch.bool, torch.complex32, torch.uint16)


@pytest.mark.filterwarnings("ignore")
def test_no_operator_names_a_kernel_of_the_cpu(sweep: tuple[bool, int]) -> None:
    operators = choose([op for op in op_db if torch.float32 in op.dtypes], sweep, 40)
    found: dict[str, list[str]] = {}
    with warnings.catch_warnings(), torchdevice.simulate():
        warnings.simplefilter("ignore")
        for op in operators:
            found[op.formatted_name] = [name for dtype in LACKING for name in lacking(op, dtype)]
    assert sum(map(len, found.values())) > len(operators) / 4, "the sweep refuses something"
    assert {op: names for op, names in found.items() if any("cpu" in name for name in names)} == {}


@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("native", ["never", "auto"])
def test_the_type_of_a_tensor_has_the_name_of_the_device(engine: Any, native: Any) -> None:
    with torchdevice.simulate(engine=engine, native=native):
        words = torch.ones(2, 3, dtype=torch.float16, device="cuda")
        with pytest.raises(RuntimeError, match=r"but got torch\.cuda\.HalfTensor instead"):
            torch.nn.functional.embedding_bag(words, torch.ones(4, 4, device="cuda"))
