"""Write docs/options.md from the record of options, or check that it is up to date (--check)."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from generated import write_or_check

from torchdevice.scope import options

PAGE = Path(__file__).with_name("options.md")

HEADER = """# Options and variables

<!-- Made by python docs/make_options.py from torchdevice/scope/options.py; do not edit. -->

The call decides first: a keyword of `portable`, `simulate` or `enable`, a flag of `torchdevice run` or of pytest. An
option that the call leaves out takes its value from its variable, and otherwise has its default.
`TORCHDEVICE=1` makes `import torch` enable a scope with the options of the variables. `torchdevice run` and
`enable(propagate=True)` set all variables for the processes that a program starts.

In a configuration file of pytest the key of an option is its flag without dashes, as in `torchdevice_memory = 8GiB`
([testing](testing.md)). The file comes after the variables.

A variable is set for the whole process and a file for a whole project, so values of `identity`, `memory` and `devices`
from the environment or a file are dropped if the call's target cannot use them; passed explicitly, they raise.

"""

FOOTER = """
| variable | what it does |
|---|---|
| `TORCHDEVICE` | `1` makes `import torch` enable a scope |
| `TORCHDEVICE_LOG` | sets the level of the messages: `DEBUG`, `INFO`, `WARNING`; `ERROR` for none, as `run --quiet` |
| `TORCHDEVICE_LOG_FILE` | names the file to which the messages are written |
| `TORCHDEVICE_TRACEBACKS` | `full` keeps this package's frames in the tracebacks of a program's errors |
| `NO_COLOR` | turns colours on a terminal off |
| `CUDA_VISIBLE_DEVICES` | hides devices, as in CUDA, of a scope with `devices=` or with simulated devices |
| `PYTORCH_ENABLE_MPS_FALLBACK` | for [what MPS lacks](mps.md): `0` leaves the error, `1` torch's fallback |

Messages go to stderr and begin with `torchdevice:`. There is one where a program that asked for an accelerator runs on
the CPU, once in a run, whatever the number of its processes. A program that configures Python's `logging` gets them
instead, from the logger `torchdevice`.

Three more variables are set for child processes, and are not to be set otherwise: `TORCHDEVICE_RUN_FOLDER`, where a run
has what its processes share, `TORCHDEVICE_REPORT`, whether there is a report, and `TORCHDEVICE_SAID`, what was said.
"""


def table() -> str:
    """Return the options as rows of a Markdown table."""
    rows = ["| option | flag of `run` | variable | pytest | default | what it does |", "|---|---|---|---|---|---|"]
    defaults = {field.name: field.default for field in dataclasses.fields(options.Options)}
    for name, declaration in options.declarations().items():
        flags = [options.flag_of(name), options.variable_of(name), options.pytest_flag_of(name)]
        cells = [name, *flags, repr(defaults[name])]
        rows.append("| " + " | ".join(f"`{cell}`" for cell in cells) + f" | {declaration.text} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write the page. With --check, return 1 if the file differs from the page."""
    return write_or_check(PAGE, HEADER + table() + FOOTER)


if __name__ == "__main__":
    sys.exit(main())
