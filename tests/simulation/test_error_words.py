"""Errors of operators on a simulated GPU name no CPU and no out-of-tree device."""

from __future__ import annotations

import itertools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice

DTYPES = [
    *[torch.float16, torch.float64, torch.complex64, torch.complex32],
    *[torch.int64, torch.uint16, torch.bool],
]

FOREIGN = re.compile(r"simulated|PrivateUse|\bCPU", re.IGNORECASE)

OF_TORCH = re.compile(
    # CUDA's group normalization has the check of the CPU's, with these words.
    r"mixed dtype \(CPU\)|expected tensor_indices_or_sections to be on cpu, but it's on cuda"
    # The backends for which torch has an operator.
    r"|^Could not run '.*' with arguments from the '(Sparse\w*)?CUDA' backend"
    # Convolutions in three dimensions and transposed ones compare the two before any kernel. See
    # `mixed`.
    r"|^Input type \(simulatedComplex\w+\) and weight type"
)


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with another tensor in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(changed(each, change) for each in value)
    return value


def calls(op: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield calls with one argument after the other in each dtype, on the device."""
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 2):
        moved = [
            changed(each, lambda x: x.detach().cuda()) for each in (sample.input, *sample.args)
        ]
        named = {
            name: changed(value, lambda x: x.detach().cuda())
            for name, value in sample.kwargs.items()
        }
        for place, dtype in itertools.product(range(len(moved)), DTYPES):
            args = list(moved)
            args[place] = changed(args[place], lambda x, dtype=dtype: x.to(dtype))  # type: ignore[misc]
            yield args, named


@pytest.mark.one_engine
@pytest.mark.sampled(60, of="operators")
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_operators_name_the_programs_device(op: Any) -> None:
    with torchdevice.simulate(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args, named in calls(op):
            try:
                op.op(*args, **named)
            except Exception as error:  # whatever the operator raises
                text = str(error)
                assert not FOREIGN.search(text) or OF_TORCH.search(text), text


def test_foreign_words_are_found() -> None:
    assert FOREIGN.search("but got simulatedHalfType instead")
    assert FOREIGN.search("Sort does not support complex dtypes on CPU")
    assert not FOREIGN.search("but got torch.cuda.HalfTensor instead")
    assert not OF_TORCH.search("Sort does not support complex dtypes on CPU")


@pytest.mark.one_engine
def test_what_has_no_kernel_of_its_own_names_the_programs_device() -> None:
    with torchdevice.simulate():
        x = torch.ones(2, 2, 1, device="cuda", dtype=torch.complex64)
        with pytest.raises(RuntimeError, match=r"^istft\(CUDAComplexFloatType\[2, 2, 1\]"):
            torch.istft(x, 2, window=torch.ones(3, device="cuda"))
        with pytest.raises(RuntimeError, match="to be on cpu, but it's on cuda:0"):
            torch.tensor_split(x, torch.tensor([1], device="cuda"))
        parts = torch.tensor_split(x, torch.tensor([1]))
        assert [part.shape[0] for part in parts] == [1, 1]


CPUS_AND_CUDAS = {"CPUB": "CUDAB", "CPUC": "CUDAC", "torch.": "torch.cuda."}
"""How the CPU's types in an error begin, and the device's."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("convolution", [functional.conv3d, functional.conv_transpose2d])
def test_types_of_tensors_are_spelled_as_torch_does(convolution: Any, dtype: torch.dtype) -> None:
    """Only some have the name of a legacy class, such as ``torch.cuda.FloatTensor``."""
    sizes = [1, 1] + [2] * (3 if convolution is functional.conv3d else 2)
    input = torch.ones(sizes, dtype=torch.complex64)
    weight = torch.ones(sizes, dtype=dtype)
    with pytest.raises(RuntimeError) as of_cpu:
        convolution(input, weight)
    expected = re.sub(r"CPU[BC]|torch\.", lambda found: CPUS_AND_CUDAS[found[0]], str(of_cpu.value))
    with torchdevice.simulate(engine="mode"), pytest.raises(RuntimeError) as found:
        convolution(input.cuda(), weight.cuda())
    assert str(found.value) == expected


def mixed() -> None:
    """Convolve what torch refuses before any kernel: ``engine="wrap"`` does not see the call."""
    weight = torch.ones(1, 1, 2, 2, device="cuda")
    functional.conv_transpose2d(weight.to(torch.complex64), weight)


OF_CUDA = r"Input type \(CUDAComplexFloatType\) and weight type \(torch\.cuda\.FloatTensor\)"


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_an_error_that_leaves_the_scope_names_the_programs_types(engine: Any) -> None:
    with pytest.raises(RuntimeError, match=OF_CUDA), torchdevice.simulate(engine=engine):
        mixed()


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_shown_error_names_the_programs_types(engine: Any) -> None:
    with torchdevice.simulate(engine=engine):
        try:
            mixed()
        except RuntimeError:
            assert re.search(OF_CUDA, traceback.format_exc())


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_an_error_of_the_program_is_kept(engine: Any) -> None:
    text = "simulatedFloatType is no word of torch's here"
    with pytest.raises(ValueError, match=text), torchdevice.simulate(engine=engine):
        raise ValueError(text)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_kernels_that_refuse_complex32_are_cudas() -> None:
    with torchdevice.simulate():
        x = torch.ones(2, 5000, dtype=torch.complex32, device="cuda")
        with pytest.raises(NotImplementedError, match=r'^"sort" not implemented for .ComplexHalf'):
            torch.sort(x)
        with pytest.raises(NotImplementedError, match=r'^"sortKeyValueInplace" not implemented'):
            torch.sort(x, dim=0)
        with pytest.raises(NotImplementedError, match=r'^"topk_out_cuda" not implemented for'):
            torch.topk(x, 1)
