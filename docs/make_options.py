"""The page of options and variables, made from the record of options."""

from __future__ import annotations

import dataclasses

from torchdevice.scope import collected_options as options

HEADER = """# Options and variables

The call decides first: a keyword of `portable`, `simulate` or `enable`, a flag of `torchdevice run` or of pytest. An
option that the call leaves out takes its value from its variable, and otherwise has its default.
`TORCHDEVICE=1` makes `import torch` enable a scope with the options of the variables. `torchdevice run` and
`enable(propagate=True)` set all variables for the processes that a program starts.

In a configuration file of pytest the key of an option is its flag without dashes, as in `torchdevice_memory = 8GiB`
([tests](using.md#tests)). The file comes after the variables.

A variable is set for the whole process and a file for a whole project, so values of `identity`, `memory` and `devices`
from the environment or a file are dropped if the call's target cannot use them; passed explicitly, they raise.

## Options
"""

FOOTER = """
## Variables that are no options

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


def section(name: str, declaration: options.Declaration, default: object) -> str:
    """Return an option's section: its effect, default, and spelling in each place."""
    spelled = {
        "Python": f"{name}=",
        "`run`": options.flag_of(name),
        "pytest": options.pytest_flag_of(name),
        "variable": options.variable_of(name),
    }
    listed = " · ".join(f"{place} `{spelling}`" for place, spelling in spelled.items())
    return f"\n### {name}\n\n{declaration.text}\n\n{listed} · default `{default!r}`\n"


def sections() -> str:
    """Return the sections of all options."""
    defaults = {field.name: field.default for field in dataclasses.fields(options.Options)}
    return "".join(
        section(name, each, defaults[name]) for name, each in options.declarations().items()
    )


def page() -> str:
    """Return the page."""
    return HEADER + sections() + FOOTER
