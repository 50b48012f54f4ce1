"""The page of the programs, made from the catalog and the recorded runs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.programs.catalog import PROGRAMS
from benchmarks.programs.program import OWN, Program
from benchmarks.programs.runs import Run

HEADER = """# Public programs

These public programs are written for CUDA and run without it. Each is checked out at a commit, or unpacked from
its wheel on PyPI, and not a line of it is changed. Each gets a small task, with generated data and random weights, so
that nothing is downloaded. The gallery shows those that run on simulated GPUs: the seconds there and on a CPU target,
and the command, which follows `torchdevice run --target simulated:cuda` unless it names a target itself.

{gallery}

How many ran, of all that were tried:

{summary}

Seconds are processor time of all processes of a run, with one thread each and the import of torch included. They
depend on what else the machine did. Each program also ran on the CPU target, and by plain python in its own CPU mode
if it has one. `+cpu` is torch's CPU build, `+cu` is the CUDA build of PyPI, with Triton, on a machine without a GPU.
`simulated:cuda:2` is two simulated GPUs. The commands are run again, with their data, by

```sh
python -m benchmarks.programs --list
python -m benchmarks.programs --only nanoGPT --keep build/programs
```

Where a run failed, the list below its table says why, and whether the program, the environment or torchdevice is at
fault. Install the packages that a program imports first; the lists below name them. `--python` names the interpreter
of another environment, `--sources` a folder with git directories in place of GitHub. The scripts that are named as
ours are in `benchmarks/programs/drivers`: they call a library as its README does, or seed a program that does not
seed itself.

## How to read a difference

A CPU target has one stream of random numbers, that of the CPU. A simulated device has a generator of its own for each
GPU, as a real one. A program that draws on the GPU therefore computes other values on a simulated device than on the
CPU target and in its own CPU mode.
"""

FOOTER = """
## What was not run

The engines of vLLM and SGLang, which need NVIDIA's management library and kernels that are compiled for CUDA. airbench
runs a narrower network on fewer images than its records do, and OLMo a smaller model than any that was released.
"""


def fault(program: Program, run: Run) -> str:
    """Return why a run failed, and whose fault that is, if the catalog says so."""
    return next(
        (why for pattern, why in program.faults.items() if re.search(pattern, run.error)), ""
    )


def page(runs: Sequence[Run], programs: Sequence[Program] = PROGRAMS) -> str:
    """Return the page of these runs."""
    parts = [HEADER.format(gallery=_gallery(runs, programs), summary=_summary(runs))]
    for area in dict.fromkeys(program.area for program in programs):
        there = [program for program in programs if program.area == area]
        parts.append(_area(area, there, runs))
    return "\n".join(parts) + FOOTER


def _gallery(runs: Sequence[Run], programs: Sequence[Program]) -> str:
    """Return the programs that run on simulated GPUs, with commands and seconds per target."""
    lines = [
        "| program | seconds | on the CPU | torch | `torchdevice run` |",
        "|---|---|---|---|---|",
    ]
    for program in programs:
        done = [run for run in runs if run.name == program.name and run.outcome == "finished"]
        shown = next((run for run in done if _kind(run.target) == "simulated:cuda"), None)
        if shown is None:
            continue
        other = next(
            (
                f"{run.seconds:.0f}"
                for run in done
                if (run.torch, run.target) == (shown.torch, "cpu")
            ),
            "",
        )
        command = program.command.replace("{drivers}", "drivers").replace("|", "\\|")
        target = f"--target {shown.target} " if shown.target != "simulated:cuda" else ""
        name = f"[{program.name}]({program.address})"
        lines.append(
            f"| {name} | {shown.seconds:.0f} | {other} | {shown.torch} | `{target}{command}` |"
        )
    return "\n".join(lines)


def _summary(runs: Sequence[Run]) -> str:
    """Return how many programs ran, by release of torch and target."""
    lines = ["| torch | target | programs | ran |", "|---|---|---|---|"]
    for torch, target in dict.fromkeys((run.torch, _kind(run.target)) for run in runs):
        found = [run for run in runs if (run.torch, _kind(run.target)) == (torch, target)]
        ran = sum(run.outcome == "finished" for run in found)
        lines.append(f"| {torch} | {target} | {len(found)} | {ran} |")
    return "\n".join(lines)


def _kind(target: str) -> str:
    """Return a target without its number of devices."""
    return re.sub(r":\d+$", "", target)


def _area(area: str, programs: Sequence[Program], runs: Sequence[Run]) -> str:
    lines = [
        "| program | torch | target | loss or result | own CPU mode | seconds |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for program in programs:
        found = [run for run in runs if run.name == program.name]
        for run in found:
            own = next(
                (each for each in found if each.target == OWN and each.torch == run.torch), None
            )
            lines.append(_row(program, run, own))
        notes.append(_note(program, found))
    return f"## {area[0].upper()}{area[1:]}\n\n" + "\n".join([*lines, "", *notes]) + "\n"


def _row(program: Program, run: Run, own: Run | None) -> str:
    compared = (
        "" if run is own else "has none" if program.own is None else _value(own) if own else ""
    )
    cells = (program.name, run.torch, run.target, _value(run), compared, f"{run.seconds:.0f}")
    return "| " + " | ".join(cells) + " |"


def _value(run: Run) -> str:
    """Return what a run printed."""
    return run.outcome if run.outcome != "finished" else run.loss or run.result.strip()


def _note(program: Program, runs: Sequence[Run]) -> str:
    """Return a note on a program: commit, inputs, requirements, reason of failure."""
    source = f"[`{program.commit[:9]}`]({program.address})"
    text = f"- **{program.name}**, {source}. Given: {program.given}."
    if program.needs:
        text += f" Needs {', '.join(f'`{need}`' for need in program.needs)}."
    if "{drivers}" in program.command:
        driver = program.command.partition("{drivers}/")[2].split()[0]
        text += f" By our `{driver}`."
    if program.differs:
        text += f" Differs: {program.differs}."
    said = dict.fromkeys(
        (run.error, fault(program, run)) for run in runs if run.outcome != "finished"
    )
    for error, why in said:
        text += (
            f" Fails with `{error.replace('`', '').replace('|', '/')}`{f': {why}' if why else ''}."
        )
    return text
