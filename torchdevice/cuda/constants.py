"""Names of ``torch._C`` that are the same on every stand-in device. ``constants.json`` lists them.

The table has, by fidelity and name, a value and what the coverage and the report say of it: dotted names are the value
themselves, the others functions that return it.
"""

from __future__ import annotations

import copy
from typing import Any

from torchdevice.core import Context, supplied_function, supplied_value
from torchdevice.devices.accelerators import FAMILIES
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity


def _supply(name: str, fidelity: Fidelity, value: Any, note: str) -> None:
    def constant(context: Context) -> Any:
        # A copy, since the program may change a table that it gets.
        return copy.deepcopy(value)

    constant.__doc__ = note
    if "." in name:
        supplied_value(name, fidelity)(constant)
        return
    prefix = name.split("_")[1]
    family = prefix if prefix in FAMILIES else "cuda"
    supplied_function(name, fidelity, note=note, native_to=family)(constant)


for _fidelity, _rows in data_files.read(__file__, "constants.json").items():
    for _name, _row in _rows.items():
        _supply(_name, Fidelity(_fidelity), *_row)
