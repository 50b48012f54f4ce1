"""The fidelity of each public name, for the documentation, ``check`` and the tests. Scopes do not read it.

``torch.cuda``, ``torch.mps`` and the modules beside them are torch's own Python code, which calls supplied names. So
the fidelity of most public names follows from that of supplied names. ``public_names.json`` declares it for each public
name, and a test uses each in a strict scope, where approximate names raise and no others.

A row of the table has the ``names`` of a module that are alike, what they do (``does``), their ``fidelity`` if it is
not exact, and under ``on`` target -> fidelity and sentence where these differ. A text under ``on`` names the function
of ``torch._C`` that differs in the same way. What differs for all names of a module stands before the modules. Names
``as`` those of another module have the rows of that module. Names that are ``untouched`` use no device: in a scope they
are torch's own objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torchdevice.kernel.bindings import SUPPLIED
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.python import data_files
from torchdevice.scope import installed

assert installed.AREAS  # importing these modules has registered the names that they supply

TARGETS = ("mps", "cpu", "simulated")
"""The targets for which the fidelity of each name is declared."""

_TABLE = data_files.read(__file__, "public_names.json")


class Declared(NamedTuple):
    """The fidelity of a public name.

    Attributes:
        fidelity: How close the name comes to the accelerator's own.
        note: What the name does.
        on: Target -> fidelity and note, for the targets where these differ.
    """

    fidelity: Fidelity
    note: str
    on: Mapping[str, tuple[Fidelity, str]]


PUBLIC_NAMES: dict[str, Declared] = {}


def _differences(on: str | dict[str, tuple[str, str]]) -> Mapping[str, tuple[Fidelity, str]]:
    if isinstance(on, str):
        return SUPPLIED[f"torch._C.{on}"].on
    return {target: (Fidelity(fidelity), note) for target, (fidelity, note) in on.items()}


for _module, _rows in _TABLE["modules"].items():
    for _row in _rows:
        for _name in _row["names"].split():
            _on = {**_differences(_row.get("on", {})), **_differences(_TABLE["on"].get(_module, {}))}
            _same = PUBLIC_NAMES.get(f"{_row.get('as')}.{_name}")
            _declared = _same or Declared(Fidelity(_row.get("fidelity", "exact")), _row["does"], _on)
            PUBLIC_NAMES[f"{_module}.{_name}"] = _declared

UNTOUCHED = frozenset(f"{module}.{name}" for module, names in _TABLE["untouched"].items() for name in names.split())
"""Public names that use no device."""
