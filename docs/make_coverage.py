"""Write docs/coverage.md from what the package declares about itself, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from torchdevice import installed, public_names, supplied
from torchdevice.engines import cuda_dtypes

PAGE = Path(__file__).with_name("coverage.md")

HEADER = """# What is supplied, and how faithfully

Made by `python docs/make_coverage.py`; do not edit. A test reads the names from the installed torch, uses each of them,
and fails on one that is not here or not as faithful as it says.

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

`torch.cuda`, `torch.mps` and their neighbours are torch's own Python, unmodified, on the names further below.
"""

_PRIVATE = """
## Names of torch's C module and plain values

What a scope supplies to the threads that are in it.
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

_TABLE = """
| name | what it does | mps | cpu | simulated |
|---|---|---|---|---|
"""


def row(name: str, declared: supplied.Supplied | public_names.Declared) -> str:
    """Return a line of a table: what a name does, and how faithfully on each target."""
    cells = [f"`{name}`", declared.note]
    for target in public_names.TARGETS:
        fidelity, note = declared.on.get(target, (declared.fidelity, ""))
        cells.append(f"{fidelity.value}: {note}" if note else fidelity.value)
    return f"| {' | '.join(cells)} |\n"


def dtypes() -> str:
    """Return the section on dtypes that the CPU lacks."""
    kernels = [(kernel, dtype, lacked) for (kernel, dtype), lacked in cuda_dtypes.KERNELS.items()]
    kernels += [(text, "", lacked) for text, lacked in cuda_dtypes.TEXTS.items()]
    rows = "".join(f"| `{name}` | {dtype} | {what.done} | {what.fidelity.value} |\n" for name, dtype, what in kernels)
    left_out = "".join(f"| `{name}` | {reason} |\n" for name, reason in cuda_dtypes.LEFT_OUT.items())
    return _DTYPES + rows + _LEFT_OUT + left_out


def page() -> str:
    """Return the page for the installed package."""
    assert installed.AREAS  # importing them registers what they supply
    public = "".join(row(name, public_names.PUBLIC_NAMES[name]) for name in sorted(public_names.PUBLIC_NAMES))
    private = "".join(row(name, supplied.SUPPLIED[name]) for name in sorted(supplied.SUPPLIED))
    return HEADER + _PUBLIC + _TABLE + public + _PRIVATE + _TABLE + private + dtypes()


def main() -> int:
    """Write the page, or return 1 with --check if the one that is there differs."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print("docs/coverage.md is out of date: run python docs/make_coverage.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
