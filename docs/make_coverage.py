"""Write docs/coverage.md from what the package declares about itself, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from torchdevice import installed, public_names, supplied

PAGE = Path(__file__).with_name("coverage.md")

HEADER = """# What is supplied, and how faithfully

Made by `python docs/make_coverage.py`; do not edit. A test reads the names from the installed torch, uses each of them,
and fails on a name that is missing here or whose fidelity differs from its row.

- **exact**: the same meaning as on the device the program was written for.
- **declared**: a documented constant of the stand-in, or a mixture of constants and readings. The constants were not
  measured; the options `capability=` and `properties=` of a scope set some of them.
- **approximate**: a plausible value or a coarser behaviour; reported once per line of a program, refused if strict.
- **inert**: a hint with nothing to do.
- **unsupported**: raises `NotSupportedError`, with the way out.

Each target has a column. A sentence after the word there says what the name does on that target, if that differs from
the column "what it does". The `mps` column was not tested on a Mac: the calls were written to torch's signatures, and
the tests record and check them.
"""

_PUBLIC = """
## Public names

`torch.cuda`, `torch.mps` and their neighbours are torch's own Python, unmodified. They call the names of the second
table.
"""

_PRIVATE = """
## Names of torch's C module and plain values

A scope supplies these to the threads in it.
"""

_TABLE = """
| name | what it does | mps | cpu | simulated |
|---|---|---|---|---|
"""


def row(name: str, declared: supplied.Supplied | public_names.Declared) -> str:
    """Return a row of a table: a name, what it does, and its fidelity on each target."""
    cells = [f"`{name}`", declared.note]
    for target in public_names.TARGETS:
        fidelity, note = declared.on.get(target, (declared.fidelity, ""))
        cells.append(f"{fidelity.value}: {note}" if note else fidelity.value)
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the page for the installed package."""
    assert installed.AREAS  # importing these modules has registered the names that they supply
    public = "".join(row(name, public_names.PUBLIC_NAMES[name]) for name in sorted(public_names.PUBLIC_NAMES))
    private = "".join(row(name, supplied.SUPPLIED[name]) for name in sorted(supplied.SUPPLIED))
    return HEADER + _PUBLIC + _TABLE + public + _PRIVATE + _TABLE + private


def main() -> int:
    """Write the page. With --check, return 1 if the file differs from the page."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print("docs/coverage.md is out of date: run python docs/make_coverage.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
