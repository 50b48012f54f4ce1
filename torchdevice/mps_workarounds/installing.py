"""Puts guards in place of torch's kernels of the operators that MPS is known to compute wrongly.

``faults.json`` lists the operators. Numbers are those of issues of https://github.com/pytorch/pytorch. A version is
given where the issue, or what is known of it, says which one has the fault. Everywhere else the guard is always on.
"""

from __future__ import annotations

import functools
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchdevice.core import Context, Installation, thread_state
from torchdevice.fallback.fallback_kernels import installation, overload
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity
from torchdevice.mps_workarounds import guards

Version = tuple[int, ...]


@dataclass(frozen=True)
class Fault:
    """A kernel that gives wrong results.

    Attributes:
        operators: The operators, with overload.
        issues: The issues that report it.
        what: What is wrong, for the report and the documentation.
        guard: What is done instead.
        macos_before: The first version of macOS without the fault; None where none is known.
        torch_before: The first version of torch without the fault; None where none is known.
    """

    operators: tuple[str, ...]
    issues: tuple[int, ...]
    what: str
    guard: guards.Guard
    macos_before: Version | None = None
    torch_before: Version | None = None

    @property
    def done(self) -> str:
        """What the report says where a call met it."""
        return f"{self.guard.__name__.replace('_', ' ')} (pytorch issues {', '.join(map(str, self.issues))})"

    def is_in(self, torch_version: Version, macos_version: Version | None) -> bool:
        """Return whether versions of torch and of macOS may have the fault; an unknown version may."""
        if self.torch_before is not None and torch_version >= self.torch_before:
            return False
        return self.macos_before is None or macos_version is None or macos_version < self.macos_before


def _fault(row: dict[str, Any]) -> Fault:
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Fault(**{**values, "guard": getattr(guards, row["guard"])})


FAULTS = tuple(map(_fault, data_files.read(__file__, "faults.json")))
"""Every known fault with a guard."""


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def version(text: str) -> Version | None:
    """Return a version as numbers, None for a text without any."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else None


def here(faults: Iterable[Fault] = FAULTS) -> list[Fault]:
    """Return the faults that the installed torch and this machine's macOS may have."""
    installed = version(torch.__version__) or ()
    return [fault for fault in faults if fault.is_in(installed, version(platform.mac_ver()[0]))]


def guarded_on(key: str) -> set[str]:
    """Return the operators with a guard that have a kernel under a dispatch key, with namespace."""
    names = (f"aten::{name}" for fault in FAULTS for name in fault.operators)
    return {name for name in names if _has_kernel(name, key)}


def kernels(key: str, faults: Iterable[Fault] | None = None) -> Mapping[str, Callable[..., Any]]:
    """Return the guarded kernel of each operator of some faults, or those here, that has one under a dispatch key."""
    found = defaultdict(list)
    for fault in here() if faults is None else faults:
        for name in fault.operators:
            found[f"aten::{name}"].append(fault)
    return {name: _guarded(name, key, of_it) for name, of_it in found.items() if _has_kernel(name, key)}


def _guarded(name: str, key: str, faults: Sequence[Fault]) -> Callable[..., Any]:
    """Return the kernel of an operator that computes, in a scope, what torch's kernel computes wrongly."""
    op, original = overload(name), torch.library.get_kernel(name, key)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        if context is None:
            return original.call_boxed(keys, *args, **kwargs)
        own = functools.partial(original.call_boxed, keys)
        with torch._C.DisableTorchFunction():
            for fault in faults:
                result = fault.guard(own, op, args, kwargs)
                if result is not guards.HARMLESS:
                    context.journal.record(name, fault.done, Fidelity.EXACT)
                    return result
            return own(*args, **kwargs)

    return kernel


def needed(context: Context) -> list[Installation]:
    """Return the installations that a context needs for its target."""
    key = context.runtime.corrected_key
    return [installation(kernels, key)] if key is not None else []
