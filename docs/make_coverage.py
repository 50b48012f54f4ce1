"""Write docs/coverage.md from what the package declares about itself, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from torchdevice import bindings

PAGE = Path(__file__).with_name("coverage.md")

HEADER = """# What is supplied under `torch.cuda`, and how faithfully

Made by `python docs/make_coverage.py`; do not edit. `torch.cuda` itself is torch's own Python, unmodified. These are
the names it stands on, which a scope supplies to the threads that are in it.

- **exact**: the same meaning as on CUDA.
- **approximate**: a plausible value or a coarser behaviour; reported once per line of a program, refused if strict.
- **inert**: a hint with nothing to do.
- **unsupported**: raises `NotSupportedError`, with the way out.

Memory figures are exact where the target has an allocator of its own that keeps them (XPU, CUDA); on a CPU they are the
process's heap, on MPS the peak is the largest figure seen, and both are reported as approximate.

| name | fidelity | what it does |
|---|---|---|
"""


def page() -> str:
    """Return the page for the installed package."""
    bindings.patches()
    rows = sorted(bindings.SUPPLIED.values(), key=lambda supplied: supplied.name)
    return HEADER + "".join(f"| `{row.name}` | {row.fidelity.value} | {row.note} |\n" for row in rows)


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
