"""Write docs/options.md from the record of options, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from torchdevice import options

PAGE = Path(__file__).with_name("options.md")

HEADER = """# Options and variables

Made by `python docs/make_options.py` from `torchdevice/options.py`, where every option is declared once; do not edit.

The value of an option is that of the call: a keyword of `portable`, `simulate` or `enable`, a flag of `torchdevice
run`, a flag of pytest. Where the call leaves the option out, its variable is read; without a variable it has its
default. `TORCHDEVICE=1` alone makes `import torch` enable a scope with the options that the variables hold;
`torchdevice run` and `enable(propagate=True)` set all variables for the processes that a program starts.

A variable is meant for the whole process, so a variable that contradicts the target of a single call (`identity`,
`memory`, `devices`) is ignored in that call. An option of the call itself that contradicts the target is refused.

"""

FOOTER = """
| variable | what it does |
|---|---|
| `TORCHDEVICE` | `1` makes `import torch` enable a scope |
| `TORCHDEVICE_LOG` | level of the log: `DEBUG`, `INFO`, `WARNING`, `ERROR` |
| `TORCHDEVICE_LOG_FILE` | file to which the log is written |
| `CUDA_VISIBLE_DEVICES` | limits the number of devices, with `devices=` and on simulated devices |
| `PYTORCH_ENABLE_MPS_FALLBACK` | lets operators that `simulated:mps` lacks run on the CPU, as on a Mac |
"""


def main() -> int:
    """Write the page. With --check, return 1 if the file differs from the page."""
    page = HEADER + options.table() + FOOTER
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() == page:
        return 0
    print("docs/options.md is out of date: run python docs/make_options.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
