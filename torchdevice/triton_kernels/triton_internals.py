"""The private names of Triton that this folder uses, from ``triton_names.json``, and an error for other versions."""

from __future__ import annotations

import importlib
import operator
from typing import TYPE_CHECKING, Any

from torchdevice.errors import TritonVersionError
from torchdevice.kernel.python import data_files


def _require(module: str, name: str = "") -> Any:
    """Return a module of Triton, or a name in one.

    Raises:
        TritonVersionError: The installed Triton does not have it.
    """
    try:
        found = importlib.import_module(f"triton.{module}")
        return operator.attrgetter(name)(found) if name else found
    except (ImportError, AttributeError) as error:
        if getattr(error, "name", None) == "numpy":
            raise
        version = importlib.import_module("triton").__version__
        raise TritonVersionError(f"triton.{module}.{name}".rstrip("."), version) from error


_NAMES = data_files.read(__file__, "triton_names.json")
"""What this folder calls it -> where Triton has it."""

globals().update({name: _require(*place.split(":")) for name, place in _NAMES.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
