"""Write torchdevice/simulation/refusals/cuda_dtypes.json from torch's operator database (--check).

The database (``torch.testing._internal.common_methods_invocations.op_db``) says for each public
function which dtypes the CPU and which CUDA takes. This script runs the database's samples on the
CPU and looks which operators of ATen they reach: an operator lacks a dtype on CUDA if functions
reach it in that dtype, and if CUDA takes the dtype for none of them.
"""

from __future__ import annotations

import collections
import json
import random
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from generated import require_release, write_or_check
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchdevice
from torchdevice.simulation.profiles import is_cpu_only, missing_operators

MADE_WITH = "2.13"
"""The release of torch whose database the file is made from. Other releases differ in single
entries.
"""

PAGE = Path(__file__).parents[1] / "torchdevice" / "simulation" / "refusals" / "cuda_dtypes.json"

SAMPLES = 12

ON_A_GPU = {("linalg_vector_norm", "complex32")}
"""What the database says that CUDA lacks, and an H200 computed (``benchmarks/conformance.json``).
"""

Found = set[tuple[str, torch.dtype]]


class _Seen(TorchDispatchMode):
    """Notes the operators that are called, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.inplace_view not in func.tags:  # such an operator has no kernel on any device
            name = func._schema.name.removeprefix("aten::").rstrip("_")
            dtypes = {
                each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            }
            self.found.update((name, dtype) for dtype in dtypes)
        return func(*args, **(kwargs or {}))


def database() -> list[Any]:
    """Return the database as on a machine with a GPU: some entries ask for its capability."""
    with torchdevice.simulate():
        from torch.testing._internal.common_methods_invocations import op_db
    # These compile CUDA's C++.
    return [entry for entry in op_db if not entry.name.startswith("jiterator")]


def operators_of(entry: Any, dtype: torch.dtype) -> Found:
    """Return the operators that samples of a function reach in a dtype."""
    seen = _Seen()
    for sample in samples_of(entry, dtype):
        try:
            with seen:
                entry(sample.input, *sample.args, **sample.kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue  # the database has samples that are wrong in some dtypes
    return seen.found


def samples_of(entry: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Yield a few samples of a function; none where the database can make none in the dtype."""
    try:
        for number, sample in enumerate(entry.sample_inputs("cpu", dtype, requires_grad=False)):
            if number == SAMPLES:
                return
            yield sample
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return


def gaps() -> Mapping[str, list[str]]:
    """Return operator -> names of the dtypes that it lacks on CUDA.

    float8 is left out: whether CUDA multiplies in it depends on both factors and on the GPU.
    """
    entries = database()
    lacked = [set(entry.dtypes) - set(entry.dtypesIfCUDA) for entry in entries]
    # In every dtype.
    missing = {name.partition(".")[0] for name in filter(is_cpu_only, missing_operators("CUDA"))}
    return lacking(entries, lacked, missing)


def lacking(
    entries: Sequence[Any], lacked: Sequence[set[torch.dtype]], missing: Collection[str]
) -> Mapping[str, list[str]]:
    """Return operator -> names of the dtypes that it lacks on a device.

    Args:
        entries: Functions of the database.
        lacked: The dtypes that each of them lacks on the device.
        missing: Operators to leave out.
    """
    asked = {dtype for dtypes in lacked for dtype in dtypes if "float8" not in str(dtype)}
    has: Found = set()
    for entry, dtypes in zip(entries, lacked, strict=True):
        for dtype in asked & set(entry.dtypes) - dtypes:
            has |= operators_of(entry, dtype)
    found: dict[str, set[str]] = collections.defaultdict(set)
    for entry, dtypes in zip(entries, lacked, strict=True):
        for dtype in asked & dtypes:
            for name, reached in operators_of(entry, dtype) - has:
                short = str(dtype).removeprefix("torch.")
                if reached is dtype and name not in missing and (name, short) not in ON_A_GPU:
                    found[name].add(short)
    return {name: sorted(found[name]) for name in sorted(found)}


def page(gaps: Callable[[], Mapping[str, list[str]]]) -> str:
    """Return the text of a file with dtypes that operators lack."""
    torch.manual_seed(0)
    random.seed(0)
    return (
        "{\n"
        + ",\n".join(f'  "{name}": {json.dumps(dtypes)}' for name, dtypes in gaps().items())
        + "\n}\n"
    )


if __name__ == "__main__":
    require_release(MADE_WITH)
    warnings.simplefilter("ignore")
    sys.exit(write_or_check(PAGE, page(gaps)))
