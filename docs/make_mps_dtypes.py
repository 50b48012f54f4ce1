"""Write torchdevice/simulation/refusals/mps_dtypes.json from torch's own tests' lists (--check).

Three lists say which dtypes a public function lacks on MPS: ``dtypesIfMPS`` of the database of
operators, and in
``torch/testing/_internal/common_mps.py`` the functions that are expected to fail in some dtypes,
and those that support complex numbers. An operator of ATen lacks a dtype if functions reach it in
that dtype, and if MPS takes the dtype for none of them (see make_cuda_dtypes.py).
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from generated import require_release, write_or_check
from make_cuda_dtypes import MADE_WITH, database, lacking, page

from torchdevice.simulation.profiles import missing_operators

PAGE = Path(__file__).parents[1] / "torchdevice" / "simulation" / "refusals" / "mps_dtypes.json"

LISTS = Path(torch.__file__).parent / "testing/_internal/common_mps.py"

COMPLEX = {torch.complex32, torch.complex64}

LEFT_OUT = {
    "bincount": "its test fails in integers because the CPU's result with weights is float64",
    "mul": "functions of torch.special reach it, whose own kernels lack the dtypes",
}
"""Operators that the lists do not mean -> reason."""

NEVER = {torch.float64, torch.complex128}
"""What no tensor of MPS can have."""


def assigned() -> Mapping[str, ast.expr]:
    """Return what torch's tests of MPS assign to each name first."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(ast.parse(LISTS.read_text())):
        target = (
            node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        )
        if (
            isinstance(node, (ast.Assign, ast.AnnAssign))
            and isinstance(target, ast.Name)
            and node.value is not None
        ):
            found.setdefault(target.id, node.value)
    return found


def lists() -> tuple[Mapping[str, set[torch.dtype]], set[str]]:
    """Return function -> dtypes expected to fail on MPS, and functions that may be complex.

    The latter are those that the list says, and those that make tensors without values, which are
    not tested.
    """
    found = assigned()
    refused, complex_ones = found["UNIMPLEMENTED_XFAILLIST"], found["SUPPORTED_COMPLEX_OPS"]
    empty = found["EMPTY_OPS_SKIPLIST"]
    assert (
        isinstance(refused, ast.Dict)
        and isinstance(complex_ones, ast.Set)
        and isinstance(empty, ast.Dict)
    )
    dtypes = {
        ast.literal_eval(key): {
            getattr(torch, each.attr) for each in value.elts if isinstance(each, ast.Attribute)
        }
        for key, value in zip(refused.keys, refused.values, strict=True)
        if key is not None and isinstance(value, ast.List)
    }
    return dtypes, {
        ast.literal_eval(each) for each in (*complex_ones.elts, *filter(None, empty.keys))
    }


def lacked_by(
    entry: Any, refused: Mapping[str, set[torch.dtype]], complex_ones: set[str]
) -> set[torch.dtype]:
    """Return the dtypes that a function of the database takes on the CPU and lacks on MPS."""
    name = entry.name + entry.variant_test_name
    lacked = set(entry.dtypes) - set(entry.dtypesIfMPS or entry.dtypes) | refused.get(name, set())
    return (lacked if name in complex_ones else lacked | COMPLEX) & set(entry.dtypes) - NEVER


def gaps() -> Mapping[str, list[str]]:
    """Return operator -> dtypes missing on MPS, without operators that MPS lacks."""
    entries, found_lists = database(), lists()
    lacked = [lacked_by(entry, *found_lists) for entry in entries]
    missing = {
        name.partition(".")[0].rstrip("_") for name in missing_operators("MPS")
    } | LEFT_OUT.keys()
    return lacking(entries, lacked, missing)


if __name__ == "__main__":
    require_release(MADE_WITH)
    warnings.simplefilter("ignore")
    sys.exit(write_or_check(PAGE, page(gaps)))
