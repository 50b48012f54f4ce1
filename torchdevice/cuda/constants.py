"""Functions of ``torch._C`` that give the same on every stand-in device. ``constants.json`` lists them.

The table has, by fidelity and name, what a function returns and what the coverage and the report say of it.
"""

from __future__ import annotations

import copy
from typing import Any

from torchdevice.core.bindings import supplied_function
from torchdevice.foundation import data_files
from torchdevice.foundation.fidelity import Fidelity


def _supply(name: str, fidelity: Fidelity, value: Any, note: str) -> None:
    prefix = name.split("_")[1]
    family = prefix if prefix in ("mps", "xpu") else "cuda"
    # A copy, since the program may change a table that it gets.
    supplied_function(name, fidelity, note=note, native_to=family)(lambda context: copy.deepcopy(value))


for _fidelity, _rows in data_files.read(__file__, "constants.json").items():
    for _name, _row in _rows.items():
        _supply(_name, Fidelity(_fidelity), *_row)
