"""Write docs/options.md from the record of options, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from torchdevice import options

PAGE = Path(__file__).with_name("options.md")

HEADER = """# Options and variables

Made by `python docs/make_options.py`; do not edit. Every option is declared once, in `torchdevice/options.py`; every
way in takes it from there.

An option is taken from the call: a keyword of `portable`, `simulate` or `enable`, a flag of `torchdevice run`, a flag
of pytest. Where the call leaves it out, its variable is read. Then it has its default. `TORCHDEVICE=1` alone makes
`import torch` enable a scope with the options that the variables say; `torchdevice run` and `enable(propagate=True)`
set all of them for the processes that a program starts.

A variable is meant for the whole process, so one that contradicts the target of a single call (`identity`, `memory`,
`devices`) is left out there. What a call itself says and contradicts its target is refused.

"""

FOOTER = """
| variable | what it does |
|---|---|
| `TORCHDEVICE` | `1` makes `import torch` enable a scope |
| `TORCHDEVICE_LOG` | level of the messages: `DEBUG`, `INFO`, `WARNING`; `ERROR` for none, as `run --quiet` |
| `TORCHDEVICE_LOG_FILE` | file to which the messages are written |
| `NO_COLOR` | no colours on a terminal |
| `CUDA_VISIBLE_DEVICES` | shapes the number of devices where the scope says it: `devices=`, simulated devices |
| `PYTORCH_ENABLE_MPS_FALLBACK` | lets operators that `simulated:mps` lacks run on the CPU, as on a Mac |

Messages go to stderr and begin with `torchdevice:`. There is one where a program that asked for an accelerator runs on
the CPU, once in a run, whatever the number of its processes. A program that configures Python's `logging` gets them
instead, from the logger `torchdevice`.

Three more variables are set for child processes, and are not to be set otherwise: `TORCHDEVICE_RUN_FOLDER`, where a run
has what its processes share, `TORCHDEVICE_REPORT`, whether there is a report, and `TORCHDEVICE_SAID`, what was said.
"""


def main() -> int:
    """Write the page, or return 1 with --check if the one that is there differs."""
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
