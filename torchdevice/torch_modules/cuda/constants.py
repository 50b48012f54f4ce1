"""Names that are the same on every stand-in device: constants, versions of CUDA and NCCL, and names that raise.

``constants.json`` lists names of ``torch._C``. The table has, by fidelity and name, a value and what the coverage and
the report say of it: dotted names are the value themselves, the others functions that return it.

``unsupported.json`` lists names without an equivalent on a stand-in device, such as raw pointers and allocators: names
of ``torch._C``, which are supplied, and functions of torch's Python. Each raises with a remedy.
"""

from __future__ import annotations

import copy
import pkgutil
import sys
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.cuda.nccl

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import asked, replaces, supplied_function, supplied_value
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import without_original
from torchdevice.kernel.python import data_files


def _supply(name: str, fidelity: Fidelity, value: Any, note: str) -> None:
    def constant(context: Context) -> Any:
        # A copy, since the program may change a table that it gets.
        return copy.deepcopy(value)

    constant.__doc__ = note
    if "." in name:
        supplied_value(name, fidelity)(constant)
        return
    prefix = name.split("_")[1]
    supplied_function(name, fidelity, note=note, native_to=prefix if prefix in FAMILIES else "cuda")(constant)


for _fidelity, _rows in data_files.read(__file__, "constants.json").items():
    for _name, _row in _rows.items():
        _supply(_name, Fidelity(_fidelity), *_row)


CUDA = "12.8"
"""The version in a build of torch without CUDA."""


@supplied_value("torch.version.cuda", Fidelity.DECLARED)
def cuda(context: Context) -> str:
    """Return the CUDA version of the build, or 12.8 in a build without CUDA."""
    return vars(torch.version).get("cuda") or CUDA


@supplied_function("_cuda_getCompiledVersion", Fidelity.DECLARED)
def get_compiled_version(context: Context) -> int:
    """Return the CUDA version as a number, such as 12080 for 12.8."""
    major, minor = (int(part) for part in cuda(context).split(".")[:2])
    return 1000 * major + 10 * minor


NCCL = "2.27.3"
"""The version of NCCL whose rules and texts process groups have."""


@supplied_function("_nccl_version", Fidelity.DECLARED)
def nccl_version(context: Context) -> int:
    """Return NCCL 2.27.3 as one packed number."""
    major, minor, patch = map(int, NCCL.split("."))
    return major << 32 | minor << 16 | patch


@supplied_function("_nccl_version_suffix", Fidelity.DECLARED)
def nccl_version_suffix(context: Context) -> bytes:
    """Return an empty suffix."""
    return b""


# False, so that torch sums the tensors of several devices without NCCL, whose collectives are refused.
replaces(torch.cuda.nccl, "is_available")(lambda *_: False)


_TABLE = data_files.read(__file__, "unsupported.json")
POOL = _TABLE["pools"]["remedy"]


def _refuse(name: str, remedy: str, family: str) -> None:
    """Let a function of an accelerator, by its dotted name, raise with a remedy."""

    def refuse(context: Context, *args: Any, **kwargs: Any) -> NoReturn:
        named = name.removesuffix(".__init__").removesuffix(".__new__")
        thread_state.refuse(asked(named, sys._getframe(1)), remedy)

    path, _, attribute = name.rpartition(".")
    if path == "torch._C":
        supplied_function(name, Fidelity.UNSUPPORTED, note=remedy, native_to=family)(refuse)
        return
    owner = _found(path)
    # Modules import functions by value; methods are found by their class.
    of_module = isinstance(owner, ModuleType)
    replaces(owner, attribute, native_to=family, optional=True, by_value=of_module)(without_original(refuse))


def _found(dotted: str) -> Any:
    """Return a module or class of torch; None where the installed torch lacks it."""
    try:
        return pkgutil.resolve_name(dotted)
    except AttributeError:
        return None


for _row in _TABLE.values():
    for _name in _row["names"].split():
        _refuse(_name, _row["remedy"], _row.get("native_to", "cuda"))
