"""Checks that torch has the private names that this package reads (see ``torch_names.py``).

Most of them are checked here, when the package is imported, so that a release of torch that lacks
one fails before anything is changed. Those of modules that take long to import are checked when
these modules are imported. That file also lists the names that only some releases or builds of
torch have, for which the code that reads them asks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.errors import TorchVersionError
from torchdevice.kernel.torch_names import NAMES


def missing(when: str, within: str = "torch") -> Iterator[tuple[str, str]]:
    """Yield the names that the installed torch lacks, and the feature that needs each.

    Args:
        when: ``"at import"`` or ``"later"``: a part of the table.
        within: The module whose names are looked up, with all modules in it. They are imported.
    """
    for affected, modules in NAMES[when].items():
        for module, names in modules.items():
            if f"{module}.".startswith(f"{within}."):
                yield from (
                    (f"{module}.{name}", affected) for name in names if not _has(module, name)
                )


def _has(module: str, name: str) -> bool:
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    for part in name.split("."):
        if not hasattr(owner, part):
            # An attribute that the constructor sets is not on the class, but its code, which a
            # scope wraps, names it.
            constructor = inspect.unwrap(owner.__init__) if isinstance(owner, type) else None
            code = getattr(constructor, "__code__", None)
            return code is not None and part in code.co_names
        owner = getattr(owner, part)
    return True


def check(when: str, within: str = "torch") -> None:
    """Check names, see :func:`missing`.

    Raises:
        TorchVersionError: The installed torch lacks some of them, all of which the error names.
    """
    found = dict(missing(when, within))
    if found:
        raise TorchVersionError(
            ", ".join(found), torch.__version__, ", ".join(dict.fromkeys(found.values()))
        )


def require(owner: Any, name: str) -> Any:
    """Return ``owner.name``, which a patch replaces.

    Raises:
        TorchVersionError: The installed torch does not have the name.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        label = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise TorchVersionError(f"{label}.{name}", torch.__version__, "its patches") from None


check("at import")

# Names that more than one file uses.
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
is_torch_function_all_disabled = torch._C._is_torch_function_all_disabled
registrations_for_dispatch_key = torch._C._dispatch_get_registrations_for_dispatch_key
storage_use_count = torch._C._storage_Use_Count
data_ptr = torch._C.TensorBase.data_ptr  # of the class behind the one in which scopes put their own
