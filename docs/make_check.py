"""The pages of ``torchdevice check``'s rules and of their accuracy, from rules and a record."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from torchdevice.check import RULES, Target, check_file
from torchdevice.check.environment_rules import PACKAGES

FIGURES = Path(__file__).parents[1] / "benchmarks" / "predicted.json"

HEADER = """# Rules of check

`torchdevice check --rules` lists the rules of the [static check](report.md#static-check). Each
example shows what the command finds in it for a Mac. `torchdevice check --select RULE` applies one
rule, and `--ignore RULE` leaves it out. The comment `# torchdevice: ignore[RULE]` suppresses it for
a statement.
"""

_RULE = """
## {name}

{finds}

{example}"""

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


_MEASURED = """# How right the check is

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
    """Return the page with the figures."""
    rows = json.loads(FIGURES.read_text())
    groups = {
        "seen": [r for r in rows if not r["held_out"]],
        "held out": [r for r in rows if r["held_out"]],
    }
    totals = "\n".join(
        _sum(name, kind, group)
        for name, group in groups.items()
        for kind in ("degraded", "handled")
    )
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
    cells = [
        f"{figures.get(f'degraded {word}', 0)} ({figures.get(f'handled {word}', 0)})"
        for word in _COLUMNS
    ]
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
    """Return the page of the rules, for the installed package."""
    rules = (
        _RULE.format(name=each.name, finds=each.finds, example=_example(each.name))
        for each in RULES.values()
    )
    packages = "".join(f"| `{name}` | {remedy} |\n" for name, remedy in PACKAGES.items())
    return HEADER + "".join(rules) + _PACKAGES + packages
