"""The page of supplied names and their fidelity, from the package's declarations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from torchdevice.calls.lacking import dtype_gaps
from torchdevice.check import public_names
from torchdevice.kernel import bindings

HEADER = """# Supplied names and their fidelity

Every name under `torch.cuda`, `torch.mps` and `torch.xpu`, and how faithfully each target supplies it. A test reads
the names from the installed torch and uses each one. It fails if a name is missing here, or behaves differently from
what is declared here.

- **exact**: the name has the meaning that it has on the device the program was written for.
- **declared**: the value is a documented constant, or contains documented constants, which were not measured. The
  options `capability=` and `properties=` of a scope set some of them.
- **approximate**: the value is plausible, or the behaviour is coarser. It is reported once per line of the program and
  raises in a strict scope.
- **inert**: the call is a hint that has no effect on the target.
- **unsupported**: the call raises `NotSupportedError`, which names a remedy.

Each target has a column with the fidelity. A sentence after the fidelity replaces the description for that target. The
`mps` column was not tested on a Mac: the calls follow torch's signatures, and the tests record and check them.
"""

_PUBLIC = """
## Public names

`torch.cuda`, `torch.mps` and the modules beside them are torch's own Python code, which calls the names of the second
table.
"""

_PRIVATE = """
## Names of torch's C module and plain values

A scope supplies these names to the threads that are in it.
"""

_DTYPES = """
## Dtypes that CUDA has and the CPU lacks

Where torch's error says that the CPU has no kernel for a dtype, and CUDA has one, the call is made again: on a CPU
target by the engine, on simulated devices where the kernel is called, in backward too. A call with a kernel costs
nothing more. The names are those of torch's error. FFT takes all sizes; cuFFT in half precision takes powers of two.
`engine="wrap"` on a CPU target watches no short function for complex32.

| kernel | dtype | what is done | |
|---|---|---|---|
"""

_LEFT_OUT = """
These raise torch's error:

| operator | why |
|---|---|
"""

_MODULES = """
| module | mps | cpu | simulated |
|---|---|---|---|
"""

_TABLE = """
| name | what it does | mps | cpu | simulated |
|---|---|---|---|---|
"""


Declared = bindings.Supplied | public_names.Declared


def on(declared: Declared, target: str) -> tuple[str, str]:
    """Return the fidelity of a name on a target, and a sentence where it differs there."""
    fidelity, note = declared.on.get(target, (declared.fidelity, ""))
    return fidelity.value, note


def row(name: str, declared: Declared) -> str:
    """Return a row of a table: a name, what it does, and its fidelity on each target."""
    found = (on(declared, target) for target in public_names.TARGETS)
    cells = [
        f"`{name}`",
        declared.note,
        *(f"{fidelity}: {note}" if note else fidelity for fidelity, note in found),
    ]
    return f"| {' | '.join(cells)} |\n"


def totals(module: str, names: Mapping[str, Declared]) -> str:
    """Return a module's row in the table: its names by fidelity, on each target."""
    kinds = [
        Counter(on(declared, target)[0] for declared in names.values())
        for target in public_names.TARGETS
    ]
    cells = [
        ", ".join(f"{count} {kind}" for kind, count in sorted(counted.items())) for counted in kinds
    ]
    return f"| [{module}](#{module.replace('.', '').lower()}) | {' | '.join(cells)} |\n"


def modules() -> str:
    """Return the tables of the public names: one of all modules, and one for each."""
    names = sorted(
        public_names.PUBLIC_NAMES.items(), key=lambda item: (item[0].rpartition(".")[0], item[0])
    )
    found = {
        key: dict(group)
        for key, group in groupby(names, key=lambda item: item[0].rpartition(".")[0])
    }
    counted = _MODULES + "".join(totals(module, names) for module, names in found.items())
    return counted + "".join(
        f"\n### {module}\n{_TABLE}{rows(names)}" for module, names in found.items()
    )


def rows(names: Mapping[str, Declared]) -> str:
    """Return the rows of a table."""
    return "".join(row(name, names[name]) for name in sorted(names))


def dtypes() -> str:
    """Return the section on dtypes that the CPU lacks."""
    kernels = [(kernel, dtype, lacked) for (kernel, dtype), lacked in dtype_gaps.KERNELS.items()]
    kernels += [(text, "", lacked) for text, lacked in dtype_gaps.TEXTS.items()]
    done = "".join(
        f"| `{name}` | {dtype} | {what.done} | {what.fidelity.value} |\n"
        for name, dtype, what in kernels
    )
    left_out = "".join(f"| `{name}` | {reason} |\n" for name, reason in dtype_gaps.LEFT_OUT.items())
    return _DTYPES + done + _LEFT_OUT + left_out


def page() -> str:
    """Return the page for the installed package."""
    return HEADER + _PUBLIC + modules() + _PRIVATE + _TABLE + rows(bindings.SUPPLIED) + dtypes()
