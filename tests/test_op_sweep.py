"""Every operator of torch's own database gives the same bits for CUDA spellings in a scope as on the plain CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sweeping import choose, identical
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice

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


def _cuda(value: Any) -> Any:
    """Spell a sample's leaf as a CUDA program would."""
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
    gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)
    return result, gradients


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _compare(op: Any, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Return the number of samples compared, and the differences."""
    backward = op.supports_autograd and dtype is torch.float32
    compared, differences = 0, []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=backward):
        try:
            expected = _run(op, sample.transform(_cpu), backward)
        except Exception:  # the database's own sample does not run on the plain CPU: nothing to compare with
            continue
        with torchdevice.portable("cpu"):
            torch.manual_seed(7)
            actual = _run(op, sample.transform(_cuda), backward)
        compared += 1
        difference = identical(expected, actual)
        if difference:
            differences.append(f"{op.formatted_name} {dtype}: {difference}")
    return compared, differences


@pytest.mark.filterwarnings("ignore")
def test_every_operator_gives_the_same_bits(sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]) -> None:
    operators = choose([op for op in op_db if op.name not in EXCLUDED], sweep, 110)
    samples, pairs, differences, empty = 0, 0, [], []
    for op in operators:
        compared = 0
        for dtype in DTYPES:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                count, found = _compare(op, dtype)
            compared += count
            pairs += count > 0
            differences += found
        samples += compared
        if not compared:
            empty.append(op.formatted_name)
    with capsys.disabled():
        print(f"\nop_db: {len(operators)} of {len(op_db)} operators, {pairs} with a dtype, {samples} samples compared")
        for name, reason in EXCLUDED.items():
            print(f"  excluded: {name}: {reason}")
        for name in empty:
            print(f"  nothing to compare: {name}: none of its samples runs on the plain CPU in {DTYPES}")
    assert differences == []
    assert samples > 5 * len(operators)
