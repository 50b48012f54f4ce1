"""Which operators a backend such as MPS or CUDA lacks, by torch's own table of operators.

The table is torchgen/packaged/ATen/native/native_functions.yaml, which every torch wheel carries. What a device lacks
besides, a profile or a model of the device says (``profiles.py``, ``devices/device_models.json``). A real device's
operators without a kernel are those that are not registered with torch, see ``fallback/fallback_kernels.py``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

import torch

_DELEGATE = re.compile(r"\n  structured_delegate: ([\w.]+)")
_DISPATCH = re.compile(r"\n    ([A-Z][\w, ]+):")


class _Entry:
    """The entry of one operator in torch's table.

    Args:
        text: The entry's lines, each but the first with two spaces before its key.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.checks_devices = "\n  device_check: NoCheck" not in text
        self.structured = "\n  structured: True" in text

    @functools.cached_property
    def delegate(self) -> str | None:
        found = _DELEGATE.search(self._text)
        return found[1] if found else None

    @functools.cached_property
    def keys(self) -> frozenset[str]:
        """The dispatch keys that it has kernels for."""
        named = frozenset(key.strip() for keys in _DISPATCH.findall(self._text) for key in keys.split(","))
        generated = "\n  ufunc_inner_loop:" in self._text  # for these two
        return named | {"CPU", "CUDA"} if generated else named


@functools.cache
def missing_operators(backend: str) -> Mapping[str, str]:
    """Return the operators without a kernel for a backend: name with overload -> the name that torch reports.

    An operator without dispatch keys, or with a composite kernel, is made of other operators and needs no kernel.

    Raises:
        FileNotFoundError: The installed torch does not carry its table of operators.
    """
    table = _table()
    keys = {name: table[_reported(name)].keys for name in table}
    return {name: table[name].delegate or name for name, each in keys.items() if _lacks(each, backend)}


def _reported(name: str) -> str:
    """Return the entry of an operator's kernels: that of the structured operator it delegates to, or its own."""
    delegate = _table()[name].delegate
    return delegate if delegate is not None and delegate in _table() else name


def _lacks(keys: frozenset[str], backend: str) -> bool:
    return bool(keys) and backend not in keys and not any(key.startswith("Composite") for key in keys)


@functools.cache
def missing_functions(backend: str) -> Mapping[str, str]:
    """Return the operators of which no overload has a kernel: name without overload -> the name that torch reports."""
    missing = missing_operators(backend)
    present = {name.partition(".")[0] for name in _table() if name not in missing}
    return {
        name: reported for overload, reported in missing.items() if (name := overload.partition(".")[0]) not in present
    }


def is_cpu_only(name: str) -> bool:
    """Return whether an operator on dense tensors, by name with overload, has a kernel for the CPU and none for CUDA.

    Those that the CPU's own kernels are split into, and those that compilers put into graphs and replace, are left out.
    """
    table = _table()
    if name not in table or "_for_cpu" in name or name in _WITHIN_COMPILED_GRAPHS:
        return False
    keys = table[_reported(name)].keys
    return "CPU" in keys and _lacks(keys, "CUDA")


@functools.cache
def cpu_only_sparse_operators() -> frozenset[str]:
    """Return the operators on compressed sparse tensors that have a kernel for the CPU and none for CUDA."""
    keys = {name: entry.keys for name, entry in _table().items()}
    return frozenset(name for name, each in keys.items() if "SparseCsrCPU" in each and "SparseCsrCUDA" not in each)


_WITHIN_COMPILED_GRAPHS = {"_functional_assert_async.msg", "_make_dep_token"}


@functools.cache
def unchecked_operators() -> frozenset[str]:
    """Return the operators whose CUDA wrapper does not check devices, because their kernel's tensor iterator does."""
    return frozenset(name for name, entry in _table().items() if not entry.checks_devices)


def is_structured(name: str) -> bool:
    """Return whether an operator, by name with overload, is structured or delegates to a structured one."""
    entry = _table().get(name)
    return entry is not None and (entry.structured or entry.delegate is not None)


@functools.cache
def _table() -> Mapping[str, _Entry]:
    """Read torch's table of operators as text: a YAML parser would take seconds and be one more dependency."""
    path = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    entries = path.read_text().split("\n- func: ")[1:]
    return {entry.partition("(")[0]: _Entry(entry) for entry in entries}
