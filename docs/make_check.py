"""Write docs/check.md from the rules of ``torchdevice check``, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check

from torchdevice.check import RULES
from torchdevice.check.surroundings import PACKAGES

PAGE = Path(__file__).with_name("check.md")

HEADER = """# What a target does otherwise, from the source

Made by `python docs/make_check.py` from the rules; do not edit.

```sh
torchdevice check train.py                           # files, notebooks, folders
torchdevice check src notebooks --target mps
torchdevice check . --target mps --json              # a list of findings
torchdevice check . --target mps --sarif=out.sarif   # SARIF 2.1.0, which code hosts take
torchdevice check . --select operator,dtype --ignore device
torchdevice doctor train.py                          # the same for the device that would be chosen
```

Nothing of the sources is run or imported: they are parsed, and names are followed through imports and aliases to
those of torch. The targets are those of `torchdevice run`, whether or not they are available here. Torch is
imported where a source names something of it that a table must be asked about, which takes a second or two; the
sources themselves take about a second for 20,000 lines.

| verdict | |
|---|---|
| handled | the program runs as it is, with the same meaning |
| approximate | the program runs; it may compute or read other numbers, or take another branch |
| must be changed (`change`) | the line raises an error, or what it asks for is not there |

The exit status is 0 if nothing must be changed, 1 if something must, and 2 for a command line that cannot be
carried out. A finding has `path`, `line`, `rule`, `verdict`, `remedy`, and beside them `column` and `text`. The
line of a finding in a notebook is that of the file. Folders that begin with a dot, virtual environments,
`site-packages`, `node_modules` and `__pycache__` are not searched.

The comment `# torchdevice: ignore` leaves the findings of its statement out, `# torchdevice: ignore[device]` those of
a rule.

What a source does not say is not found: a device or a dtype that comes from the command line or from data, a method
of an object whose type no line tells, what a library does. `torchdevice run --check` runs the program, and its
[report](report.md) says what was foretold beside what happened.
"""

_RULES = """
## Rules

`torchdevice check --rules` lists them.

| rule | what it finds |
|---|---|
"""

_PACKAGES = """
## Packages that run on CUDA only

| package | in its place |
|---|---|
"""


def page() -> str:
    """Return the page for the installed package."""
    rules = "".join(f"| `{rule.name}` | {rule.finds} |\n" for rule in RULES.values())
    packages = "".join(f"| `{name}` | {remedy} |\n" for name, remedy in PACKAGES.items())
    return HEADER + _RULES + rules + _PACKAGES + packages


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
