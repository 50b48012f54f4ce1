"""The simulator of CUDA in numba, on tensors of a scope."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import torchdevice

cuda: Any = pytest.importorskip("numba.cuda", reason="numba is not installed")

TARGETS = ["cpu", "simulated:cuda"]


@cuda.jit
def swapped(x: Any, y: Any, factor: float) -> None:
    """Swap two arrays: an element that was read must not change when the array is written."""
    i = cuda.grid(1)
    if i < x.size:
        before = x[i]
        x[i] = y[i]
        y[i] = before * factor


@cuda.jit(device=True)
def double(value: Any) -> Any:
    return value + value


@cuda.jit
def summed(x: Any, out: Any) -> None:
    part = cuda.shared.array(4, x.dtype)
    thread = cuda.threadIdx.x
    part[thread] = double(x[cuda.grid(1)])
    cuda.syncthreads()
    cuda.atomic.add(out, 0, part[3 - thread])


@pytest.mark.parametrize("target", [*TARGETS, "simulated:mps"])
def test_kernels_write_into_tensors(target: str) -> None:
    with torchdevice.portable(target):
        x = torch.arange(24.0, device="cuda").view(4, 6)[:, 1]  # not contiguous
        y = torch.ones(4, device="cuda")
        swapped[2, 3](x, y, 2.0)
        assert x.tolist() == [1, 1, 1, 1]
        assert y.tolist() == [2, 14, 26, 38]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.uint8])
def test_dtypes_atomics_shared_memory_and_device_functions(target: str, dtype: torch.dtype) -> None:
    with torchdevice.portable(target):
        x = torch.arange(8, device="cuda").to(dtype)
        out = torch.zeros(1, device="cuda", dtype=dtype)
        summed[2, 4](x, out)
        assert out.item() == 56


@pytest.mark.parametrize("target", TARGETS)
def test_as_cuda_array_shares_the_memory_of_a_tensor(target: str) -> None:
    with torchdevice.portable(target):
        x, y = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
        array = cuda.as_cuda_array(x)
        array[1] = 5
        assert x.tolist() == [0, 5, 0, 0]
        swapped[1, 4](array, y, 1.0)
        assert array.copy_to_host().tolist() == x.tolist() == [1, 1, 1, 1]
        swapped[1, 2](array[2:], y, 1.0)
        assert x.tolist() == [1, 1, 0, 5]
        assert cuda.is_cuda_array(x)
        assert not cuda.is_cuda_array([1])
        with pytest.raises(TypeError, match="cuda array interface"):
            cuda.as_cuda_array([1])
    assert not hasattr(cuda, "as_cuda_array")


def test_what_numba_refuses_on_a_gpu() -> None:
    with torchdevice.simulate():
        x = torch.zeros(4, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError) as torchs:
            print(x.__cuda_array_interface__)
        with pytest.raises(RuntimeError, match=re.escape(str(torchs.value))):
            swapped[1, 4](x.detach(), x, 1.0)
        with pytest.raises(ValueError, match="Cannot determine Numba type"):
            swapped[1, 4](torch.zeros(4), x.detach(), 1.0)


def test_a_tensor_that_requires_a_gradient_on_a_cpu() -> None:
    with torchdevice.portable("cpu"):
        x = torch.zeros(4, device="cuda", requires_grad=True)
        with pytest.raises(RuntimeError, match="Variable that requires grad"):
            swapped[1, 4](x, x, 1.0)


def test_a_launch_is_an_operator() -> None:
    """A captured graph runs it again, and an error of a kernel is the program's."""
    with torchdevice.simulate():
        x, y = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            swapped[1, 4](x, y, 3.0)
        before = x.tolist()
        graph.replay()
        assert x.tolist() != before
        with pytest.raises(IndexError, match="ctaid"):
            swapped[1, 4](x, torch.zeros(2, device="cuda"), 1.0)


def test_outside_a_scope_it_is_numbas_own() -> None:
    kernel = type(swapped)
    own = kernel.__call__
    with torchdevice.simulate():
        assert kernel.__call__ is not own
        x, y = np.zeros(4), np.ones(4)
        swapped[1, 4](x, y, 2.0)
        assert x.tolist() == [1, 1, 1, 1]
    assert kernel.__call__ is own
