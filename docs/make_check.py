"""Write docs/check.md and docs/rules/ from the rules of ``torchdevice check``, or check them (--check)."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from generated import write_or_check

from torchdevice.check import RULES, Target, check_file
from torchdevice.check.environment_rules import PACKAGES

PAGE = Path(__file__).with_name("check.md")

FIGURES = PAGE.parents[1] / "benchmarks" / "predicted.json"

HEADER = """# Static check

<!-- Made by python docs/make_check.py from the rules; do not edit. -->

```sh
torchdevice check train.py                           # files, notebooks, folders
torchdevice check --all train.py                     # also what runs as it is
torchdevice check src notebooks --target mps
torchdevice check . --target mps --json              # a list of findings
torchdevice check . --target mps --sarif=out.sarif   # SARIF 2.1.0, which code hosts take
torchdevice check . --select operator,dtype --ignore device
```

Your code is parsed, not run or imported, and names are followed through imports and aliases to those of torch. The
targets are those of `torchdevice run`, available here or not. A source that names a function of torch makes the
command import torch to look its operator up, which takes a second or two; 20,000 lines take about a second.

| verdict | |
|---|---|
| handled | the program runs as it is, with the same meaning |
| approximate | the program runs; it may compute or read other numbers, or take another branch |
| must be changed (`change`) | the line raises an error, or what it asks for is not there |

The command lists the findings that must be changed, on a Mac also the approximate ones, and with `--all` all. The
exit status is 0 if nothing must be changed, 1 if something must, and 2 for an invalid command line or configuration.
With `--json` a finding has
`path`, `line`, `column`, `text`, `rule`, `verdict` and `remedy`. In a notebook the line is that of the notebook's file.
Folders that begin with a dot, virtual environments, `site-packages`, `node_modules` and `__pycache__` are skipped.
Links that lead out of the given paths are reported on stderr and not followed. Pipes, devices, programs of more than
8 MiB and notebooks of more than 64 MiB are not read.

The comment `# torchdevice: ignore` suppresses all findings of its statement, and `# torchdevice: ignore[device]` those
of one rule.

## In a project

The nearest `pyproject.toml` at or above the working folder can configure `check`. The command line overrides it.

```toml
[tool.torchdevice.check]
target = "mps"
select = ["device", "dtype"]              # all rules without it
ignore = ["torch-name"]
exclude = ["third_party", "*_pb2.py"]     # files and folders, relative to pyproject.toml
per-file-ignores = {"tests/*" = ["device"]}
baseline = "torchdevice-baseline.json"    # findings that are known: left out until their line changes
```

`torchdevice check . --baseline known.json --write-baseline` records today's findings, and from then on
only new ones fail. The baseline identifies a finding by file, rule and text of the line, so editing other lines does
not bring it back.

For [pre-commit](https://pre-commit.com), add the repository with the hook `torchdevice-check`, which runs the installed
command. In a GitHub workflow, the action `.github/actions/check` of the repository installs the package,
checks `paths`, and writes SARIF for code scanning:

```yaml
- uses: OWNER/torchdevice/.github/actions/check@main
  with: {paths: src, target: mps}
- if: always()
  uses: github/codeql-action/upload-sarif@v3
  with: {sarif_file: torchdevice.sarif}
```

## What it does not find

The check misses devices and dtypes that come from the command line or from data, methods of objects of unknown type,
and calls within libraries. The [report](report.md) of a run shows these too.
"""

_RULES = """
## Rules

`torchdevice check --rules` lists the rules. Each has a page with an example and what the command finds in it for a Mac.

| rule | what it finds |
|---|---|
"""

_RULE = """# The rule `{name}`

<!-- Made by python docs/make_check.py from the rules; do not edit. -->

{finds}

For example, with `--target mps`:

{example}
`torchdevice check --select {name}` looks for this alone, and `--ignore {name}` leaves it out. The comment
`# torchdevice: ignore[{name}]` suppresses it for a statement. [All rules](../check.md#rules).
"""

_EXAMPLES = {
    "syntax": "print 'epoch'",
    "device": 'model.to("cuda")',
    "is-cuda": "assert x.is_cuda",
    "device-type": 'fast = x.device.type == "cuda"',
    "dtype": "x = x.double()",
    "package": "import cupy",
    "patcher": "import torchada",
    "extension": 'torch.utils.cpp_extension.CUDAExtension("ops", ["ops.cu"])',
    "nvidia-smi": 'subprocess.run(["nvidia-smi"])',
    "nccl": 'torch.distributed.init_process_group("nccl")',
    "compile": 'torch.compile(f, mode="reduce-overhead")',
    "profiler": "torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])",
    "operator": "values = torch.linalg.eigvals(x)",
    "operator-tests": "y = torch.nn.functional.adaptive_avg_pool2d(x, (3, 5))",
    "mps-arguments": "torch.nn.LSTM(3, 4, proj_size=2)",
    "torch-name": "torch.cuda.temperature()",
}
"""A line of a program for each rule."""

_PACKAGES = """
## Packages that run on CUDA only

| package | in its place |
|---|---|
"""


_MEASURED = """
## How right it is

`python -m benchmarks.predicted CLONES --write` measures it on public programs: {programs} programs of
{repositories} repositories, in the list `benchmarks/predicted.txt`, with commits and arguments. Each was checked
for a simulated Mac and run on one, as a single rank, until it had used {seconds} s of processor time; operators
that a Mac lacks ran on the CPU, as by default. Most got random or toy data. The rules were written with {seen} of
the programs in view; the others are held out, and were read only afterwards. The list leaves out programs whose
packages or data were missing, and programs that name no device and fail as soon as new tensors are made on one.

A finding counts if its line ran and a report can show it. It was right if something of its kind happened at its
line. **Degraded** means that another device gives an error, other numbers, or a value that is only plausible. An
error that ended the program counts too if it concerns the device.

| programs | | right findings (precision) | predicted lines (recall) |
|---|---|---|---|
{totals}

Missed most often: {missed}.
Most downcasts come from one library, torchdiffeq, which takes the dtype from its arguments. The wrong findings are
there too: their lines ran, but not the branch of the conditional expression that they are about. Few lines of the
held-out programs are degraded, so their figures say little.

A `+` before a program means that it names no device, and ran with `torch.set_default_device("cuda")`: only what is
degraded is counted there. The columns are right findings, wrong findings, and missed lines; handled ones in brackets.

| program | arguments | it ended | right | wrong | missed |
|---|---|---|---|---|---|
"""

_LIMIT = "8 to 15"
"""How many seconds of processor time a program was given."""


def measured() -> str:
    """Return the section with the figures."""
    rows = json.loads(FIGURES.read_text())
    groups = {"seen": [r for r in rows if not r["held_out"]], "held out": [r for r in rows if r["held_out"]]}
    totals = "\n".join(_sum(name, kind, group) for name, group in groups.items() for kind in ("degraded", "handled"))
    repositories = dict.fromkeys(f"{row['repository']} at {row['commit']}" for row in rows)
    said = _MEASURED.format(
        programs=len(rows),
        repositories=len(repositories),
        seconds=_LIMIT,
        seen=len(groups["seen"]),
        totals=totals,
        missed=_missed(rows),
    )
    commits = "".join(f"- `{each}`\n" for each in repositories)
    return said + "".join(map(_measured, rows)) + f"\nThe commits:\n\n{commits}"


def _sum(name: str, kind: str, rows: list[dict[str, Any]]) -> str:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["figures"])
    cells = []
    for good, bad in (("right", "wrong"), ("predicted", "missed")):
        some, all_ = total[f"{kind} {good}"], total[f"{kind} {good}"] + total[f"{kind} {bad}"]
        cells.append(f"{some} of {all_} ({some / max(all_, 1):.0%})")
    return f"| {name} | {kind} | {' | '.join(cells)} |"


def _missed(rows: list[dict[str, Any]]) -> str:
    """Return the kinds of events that were missed most, with their numbers."""
    kinds = Counter(re.sub(r"^\S+ ", "", event) for row in rows for event in row["missed"])
    return "; ".join(f"`{kind}` ({count})" for kind, count in kinds.most_common(4)) or "nothing"


def _measured(row: dict[str, Any]) -> str:
    figures = row["figures"]
    cells = [f"{figures.get(f'degraded {word}', 0)} ({figures.get(f'handled {word}', 0)})" for word in _COLUMNS]
    plus = "+" * row["path"].startswith("+")
    name = f"{plus}{row['repository']}/{row['path'].removeprefix('+')}"
    ended = row["ended"].partition(":")[0].replace("OutOfTime", "stopped")
    return f"| `{name}` | {' '.join(row['arguments'])} | {ended} | {' | '.join(cells)} |\n"


_COLUMNS = ("right", "wrong", "missed")


def _example(name: str) -> str:
    """Return the example of a rule, and what is found in it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "example.py")
        file.write_text(f"import os, subprocess, torch\n{_EXAMPLES[name]}\n")
        found = check_file(str(file), Target.named("mps"), [name])
    (finding, *_) = found
    return f"```text\n{_EXAMPLES[name]}\n    {finding.verdict.value}: {finding.remedy}\n```\n"


def page() -> str:
    """Return the page for the installed package."""
    rules = "".join(f"| [`{each.name}`](rules/{each.name}.md) | {_first(each.finds)} |\n" for each in RULES.values())
    packages = "".join(f"| `{name}` | {remedy} |\n" for name, remedy in PACKAGES.items())
    return HEADER + _RULES + rules + _PACKAGES + packages + measured()


def _first(text: str) -> str:
    """Return the first sentence of a text, or what comes before its colon."""
    return re.split(r"(?<=\w|`|\))[.:] ", text)[0].rstrip(".") + "."


def pages() -> dict[Path, str]:
    """Return all pages, by their files."""
    of_rules = {
        PAGE.with_name("rules") / f"{each.name}.md": _RULE.format(
            name=each.name, finds=each.finds.replace("](", "](../"), example=_example(each.name)
        )
        for each in RULES.values()
    }
    return {PAGE: page(), **of_rules}


if __name__ == "__main__":
    PAGE.with_name("rules").mkdir(exist_ok=True)
    sys.exit(max(write_or_check(path, text) for path, text in pages().items()))
