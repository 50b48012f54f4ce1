"""Write torchdevice/check/mps_operators.json from torch's databases, or check it (--check).

``tests`` are the functions that torch's own tests expect to fail
(``torch/testing/_internal/common_mps.py``). The samples of the databases (``op_db``, ``module_db``)
run on a simulated Mac that lets operators without a kernel fall back to the CPU and counts them:
most public functions are made of other operators, and the table of kernels alone does not say
which. With --check a quarter of the functions, drawn by --seed, is run, and their rows are
compared.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from generated import require_release, seed_of_check, write_or_check
from make_mps_dtypes import assigned
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

import torchdevice
from torchdevice.simulation import machine

MADE_WITH = "2.13"
"""The release of torch whose databases the file is made from."""

PAGE = Path(__file__).parents[1] / "torchdevice" / "check" / "mps_operators.json"

SAMPLES = 6

ERRORS = (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, IndexError)
"""What samples raise that are wrong in the dtype, or that need float64."""


Entry = tuple[list[str], Iterator[Callable[[], Any]]]
"""The names of a function or module, and calls of it."""


class Mac:
    """A simulated Mac that counts the operators that it lacks."""

    def __init__(self) -> None:
        os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] = "1"
        self._scope = torchdevice.portable("simulated:mps")

    def lacked(self, calls: Iterator[Callable[[], Any]]) -> tuple[str, str]:
        """Return the operators that most calls, and most of their gradients, need; or nothing.

        Args:
            calls: Each makes tensors of the device and calls a function with them.
        """
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        ran = differentiated = 0
        for call in calls:
            with self._scope:
                try:
                    result, seen = self._counted(call)
                except ERRORS:
                    continue
                ran += 1
                forward.update(seen)
                try:
                    backward.update(self._counted(functools.partial(_differentiate, result))[1])
                    differentiated += 1
                except ERRORS:
                    continue
        return _most(forward, ran), _most(backward, differentiated)

    def _counted(self, call: Callable[[], Any]) -> tuple[Any, set[str]]:
        counted = machine.current().fallbacks
        counted.clear()
        return call(), set(counted)


def _differentiate(result: Any) -> None:
    outputs = [
        each
        for each in tree_leaves(result)
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    torch.stack([each.abs().sum() for each in outputs]).sum().backward()


def _most(counted: Counter[str], ran: int) -> str:
    for name, count in counted.most_common(1):
        if 2 * count >= ran:
            return name
    return ""


def functions() -> Iterator[Entry]:
    """Yield the names of each function in the database, and calls of it."""
    for entry in op_db:
        if (
            entry.variant_test_name
            or torch.float32 not in entry.dtypes
            or entry.name.startswith("jiterator")
        ):
            continue
        names = [f"torch.{name}" for name in (entry.name, *(alias.name for alias in entry.aliases))]
        names += [
            f"torch.Tensor.{name.partition('.')[2]}" for name in names if name.count(".") == 1
        ]
        names += [f"{name}_" for name in names if name.startswith("torch.Tensor.")]
        yield names, _calls(entry)


def _calls(entry: Any) -> Iterator[Callable[[], Any]]:
    try:
        samples = entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd)
        for sample in itertools.islice(samples, SAMPLES):
            yield lambda sample=sample: entry(
                *_placed((sample.input, *sample.args)), **_placed(sample.kwargs)
            )
    except ERRORS:
        return


def modules() -> Iterator[Entry]:
    """Yield the name of each module in the database, and calls of it."""
    for entry in module_db:
        yield [f"torch.{entry.name}"], _uses(entry)


def _uses(entry: Any) -> Iterator[Callable[[], Any]]:
    try:
        inputs = entry.module_inputs_func(
            entry, device="cpu", dtype=torch.float32, requires_grad=True, training=True
        )
    except ERRORS:
        return
    for each in inputs[:SAMPLES]:
        if each.forward_input is not None:
            yield lambda each=each: _used(entry, each)


def _used(entry: Any, given: Any) -> Any:
    made, used = given.constructor_input, given.forward_input
    module = entry.module_cls(*made.args, **made.kwargs).cuda()
    return module(*_placed(used.args), **_placed(used.kwargs))


def _placed(values: Any) -> Any:
    return tree_map(_on_device, values)


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return "cuda" if value == "cpu" else value  # what factories are given


_ONLY_HERE = "_thnn_fused"
"""Kernels of cells that torch uses for an out-of-tree device, as the simulated one is, and not on
MPS.
"""


def tables(entries: Sequence[Entry]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return which operators names need: for themselves, and for their gradients alone."""
    mac = Mac()
    forward: dict[str, str] = {}
    backward: dict[str, str] = {}
    for names, calls in entries:
        direct, later = mac.lacked(calls)
        for name in names:
            if _exists(name):
                forward.update({name: direct} if direct and _ONLY_HERE not in direct else {})
                backward.update(
                    {name: later} if later and not direct and _ONLY_HERE not in later else {}
                )
    return forward, backward


def _exists(name: str) -> bool:
    found: Any = torch
    for word in name.split(".")[1:]:
        found = getattr(found, word, None)
    return found is not None and "._" not in name


CONVERSIONS = {"to", "double", "cdouble"}
"""Entries of the list of torch's tests that are in it for float64 alone."""


def expected_failures() -> list[str]:
    """Return the public functions that torch's own tests expect to fail on MPS in float32."""
    listed = assigned()["UNIMPLEMENTED_XFAILLIST"]
    assert isinstance(listed, ast.Dict)
    rows = zip(listed.keys, listed.values, strict=True)
    entries = [(str(getattr(key, "value", "")), ast.unparse(dtypes)) for key, dtypes in rows]
    names = {name for name, dtypes in entries if dtypes == "None" or "torch.float32" in dtypes}
    return sorted(filter(_exists, (f"torch.{name}" for name in names - CONVERSIONS)))


def page(entries: Sequence[Entry]) -> str:
    """Return the text of the file, with the rows of some functions and modules."""
    forward, backward = (dict(sorted(table.items())) for table in tables(entries))
    return (
        json.dumps(
            {"forward": forward, "backward": backward, "tests": expected_failures()}, indent=2
        )
        + "\n"
    )


def rows_of(entries: Sequence[Entry], text: str) -> list[Any]:
    """Return what a text of the file says of some functions and modules."""
    names, found = {name for entry in entries for name in entry[0]}, json.loads(text)
    tables = (
        {name: found[way][name] for name in names & found[way].keys()}
        for way in ("forward", "backward")
    )
    return [*tables, found["tests"]]


def main() -> int:
    require_release(MADE_WITH)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    random.seed(0)
    entries = [*functions(), *modules()]
    seed = seed_of_check()
    if seed is not None:
        entries = random.Random(seed).sample(entries, len(entries) // 4)
    return write_or_check(PAGE, page(entries), functools.partial(rows_of, entries))


if __name__ == "__main__":
    sys.exit(main())
