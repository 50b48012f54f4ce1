"""Write torchdevice/simulation/cuda_dtypes.py from torch's own database of operators, or check it (--check).

The database (``torch.testing._internal.common_methods_invocations.op_db``) says for each public function which dtypes
the CPU and which CUDA takes. This script runs the database's samples on the CPU and looks which operators of ATen they
reach: an operator lacks a dtype on CUDA if functions reach it in that dtype, and if CUDA takes the dtype for none of
them.
"""

from __future__ import annotations

import collections
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from generated import write_or_check
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchdevice
from torchdevice.simulation.profiles import cpu_only_operators

MADE_WITH = "2.13"
"""The release of torch whose database the file is made from. Other releases differ in single entries."""

PAGE = Path(__file__).parents[1] / "torchdevice" / "simulation" / "cuda_dtypes.py"

SAMPLES = 12

HEADER = f'''"""Dtypes in which the CPU has a kernel of an operator and CUDA has none.

Made by ``python docs/make_cuda_dtypes.py`` from torch {MADE_WITH}; do not edit.
"""

from collections.abc import Mapping

GAPS: Mapping[str, tuple[str, ...]] = {{
'''

Found = set[tuple[str, torch.dtype]]


class _Seen(TorchDispatchMode):
    """Notes the operators that are called, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Found = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.inplace_view not in func.tags:  # such an operator has no kernel on any device
            name = func._schema.name.removeprefix("aten::").rstrip("_")
            dtypes = {each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            self.found.update((name, dtype) for dtype in dtypes)
        return func(*args, **(kwargs or {}))


def database() -> list[Any]:
    """Return the database as it reads on a machine with a GPU: a few entries ask for its capability."""
    with torchdevice.simulate():
        from torch.testing._internal.common_methods_invocations import op_db
    return [entry for entry in op_db if not entry.name.startswith("jiterator")]  # these compile CUDA's C++


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
    lacked = {id(entry): set(entry.dtypes) - set(entry.dtypesIfCUDA) for entry in entries}
    asked = {dtype for dtypes in lacked.values() for dtype in dtypes if "float8" not in str(dtype)}
    missing = {name.partition(".")[0] for name in cpu_only_operators()}  # in every dtype
    has: Found = set()
    for entry in entries:
        for dtype in asked & set(entry.dtypes) - lacked[id(entry)]:
            has |= operators_of(entry, dtype)
    found: dict[str, set[str]] = collections.defaultdict(set)
    for entry in entries:
        for dtype in asked & lacked[id(entry)]:
            for name, reached in operators_of(entry, dtype) - has:
                if reached is dtype and name not in missing:
                    found[name].add(str(dtype).removeprefix("torch."))
    return {name: sorted(found[name]) for name in sorted(found)}


def page() -> str:
    """Return the text of the file."""
    torch.manual_seed(0)
    random.seed(0)
    lines = []
    for name, dtypes in gaps().items():
        listed = ", ".join(f'"{dtype}"' for dtype in dtypes)
        lines.append(f'    "{name}": ({listed}{"," if len(dtypes) == 1 else ""}),\n')
    return HEADER + "".join(lines) + "}\n"


if __name__ == "__main__":
    if not torch.__version__.startswith(MADE_WITH):
        sys.exit(
            f"torch {torch.__version__} is installed, and the file is made with {MADE_WITH}. Install that release."
        )
    warnings.simplefilter("ignore")
    sys.exit(write_or_check(PAGE, page()))
