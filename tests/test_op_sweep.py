"""torch's operator database gives the same bits for CUDA in a scope as on the plain CPU.

It runs on a CPU target and on a simulated device.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import pytest
import torch
from sweeping import choose, identical, samples_of
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice
from torchdevice.simulation.refusals.device_refusals import MPS_GAPS

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)

UNINITIALISED = "returns uninitialised memory, which differs from call to call"
ALIGNMENT = "plain CPU itself gives different bits by the alignment of its input"
NEEDS_GPU = "runs only on a real GPU"

EXCLUDED = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "linalg.lstsq": ALIGNMENT,
}

EXCLUDED_SIMULATED = {
    "native_dropout_backward": (
        "multiplies in the order of the CPU's own dropout, which uses other operators"
    ),
    "sparse.sampled_addmm": "compressed sparse layouts are not simulated",
    "sparse.mm": "compressed sparse layouts are not simulated",
}

REFUSED_BY_CUDA = {"tensor_split": "to be on cpu", "linalg.ldl_solve": "not supported on CUDA"}
"""Operator that refuses some samples on any accelerator -> part of its error's text."""


def _cuda(value: Any) -> Any:
    """Return a leaf of a sample as a CUDA program would spell it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().cuda().requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) and value.type == "cpu":
        return "cuda:0"
    return "cuda" if isinstance(value, str) and value == "cpu" else value


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _run(op: Any, sample: Any, backward: bool) -> Any:
    torch.manual_seed(7)
    result = op(sample.input, *sample.args, **sample.kwargs)
    if not backward:
        return result
    outputs = [t for t in _tensors(result) if t.requires_grad]
    inputs = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    if not outputs or not inputs:
        return result, ()
    gradients = torch.autograd.grad(
        outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True
    )
    return result, gradients


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]


_NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def _difference(expected: Any, actual: Any, kind: str) -> str:
    """Return "" if results are equal. On MPS, float64 samples may be nearly so in float32."""
    if kind != "mps" or all(leaf.dtype not in _NARROWER for leaf in _tensors(expected)):
        return identical(expected, actual, kind)
    pairs = zip(_tensors(expected), _tensors(actual), strict=True)
    narrowed = [
        one.to(other.dtype) if _NARROWER.get(one.dtype) is other.dtype else one
        for one, other in pairs
    ]
    torch.testing.assert_close(_tensors(actual), narrowed, check_device=False, equal_nan=True)
    return ""


def _refused(op: Any, dtype: torch.dtype, kind: str, error: Exception) -> bool:
    """Return whether the device refuses a call, by the tables or torch's database."""
    if op.name in REFUSED_BY_CUDA and REFUSED_BY_CUDA[op.name] in str(error):
        return True
    gaps = MPS_GAPS.get(op.name, ()) if kind == "mps" else ()
    if isinstance(error, TypeError) and str(dtype).removeprefix("torch.") in gaps:
        return True
    return isinstance(error, RuntimeError) and dtype not in op.dtypesIfCUDA


def _compare(op: Any, dtype: torch.dtype, target: str, kind: str) -> tuple[int, int, list[str]]:
    """Return the number of compared samples, of those with target results, and differences."""
    backward = op.supports_autograd and dtype is torch.float32
    compared, placed, differences = 0, 0, []
    for sample in samples_of(op, dtype, requires_grad=backward):
        try:
            expected = _run(op, sample.transform(_cpu), backward)
        except Exception:
            # The database's own sample does not run on the plain CPU: nothing to compare with.
            continue
        compared += 1
        try:
            with torchdevice.portable(target):
                torch.manual_seed(7)
                actual = _run(op, sample.transform(_cuda), backward)
                difference = _difference(expected, actual, kind)
                placed += any(leaf.device.type == kind for leaf in _tensors(actual))
        except Exception as error:
            if kind != "cpu" and _refused(op, dtype, kind, error):
                compared -= 1
                continue
            differences.append(
                f"{op.formatted_name} {dtype}: {type(error).__name__}: {str(error)[:200]}"
            )
            continue
        if difference:
            differences.append(f"{op.formatted_name} {dtype}: {difference}")
    return compared, placed, differences


@pytest.mark.filterwarnings("ignore")
def test_every_operator_gives_the_same_bits(
    target: str, kind: str, sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]
) -> None:
    excluded = EXCLUDED if target == "cpu" else {**EXCLUDED, **EXCLUDED_SIMULATED}
    operators = choose([op for op in op_db if op.name not in excluded], sweep, 16)
    samples, pairs, differences, empty = 0, 0, [], []
    placed_samples = 0
    fractions = []  # of each operator's samples, how many have results on the target
    for op in operators:
        compared, on_target = 0, 0
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                count, placed, found = _compare(op, dtype, target, kind)
            compared += count
            on_target += placed
            pairs += count > 0
            differences += found
        samples += compared
        placed_samples += on_target
        if not compared:
            empty.append(op.formatted_name)
        else:
            fractions.append(on_target / compared)
    with capsys.disabled():
        print(
            f"\nop_db on {target}: {len(operators)} of {len(op_db)} operators, {pairs} with a "
            "dtype,",
            end=" ",
        )
        print(f"{samples} samples compared, {placed_samples} with results on the target")
        for name, reason in excluded.items():
            print(f"  excluded: {name}: {reason}")
        for name in empty:
            print(
                f"  nothing to compare: {name}: none of its samples runs on the plain CPU in "
                f"{DTYPES}"
            )
        for line in sorted(set(differences)):
            print(f"  differs: {line}")
    assert differences == []
    assert samples > 5 * len(operators)
    # By operator: one whose results are numbers or on the CPU may have thousands of samples.
    assert statistics.fmean(fractions) > 0.6
