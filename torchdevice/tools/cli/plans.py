"""``torchdevice plan`` with ``--sweep``, ``--baseline`` or ``--fits``: plans of other processes."""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torchdevice.kernel.python import printable, styled_text
from torchdevice.plan import model_words
from torchdevice.tools.cli.parsing import output, refusals, show_columns

if TYPE_CHECKING:
    from torchdevice.plan.change_words import Change

_SWITCHES = {
    "--json",
    "--markdown",
    "--report",
    "--write-baseline",
    "--checkpointing",
    "--try",
    "--interval",
}

_OF_PARENT = {"--sweep", "--baseline", "--grow", "--fits", "--rank"} | {
    f"--{name}" for name in ("model", *model_words.FLAGS)
}
"""Flags with a word after them, if no sign joins it, that the other processes do not get, and
neither the switches.
"""


def sweep(options: argparse.Namespace, title: str) -> int:
    """Plan a program for each combination of the values that ``--sweep`` names, and show one table.

    Returns:
        The exit status: 1 if a plan did not finish.
    """
    from torchdevice.plan import sweeping

    sweeps = options.sweep
    combinations = sweeping.combinations(sweeps)
    plans: dict[int, dict[str, Any]] = {}
    ended = sweeping.planned(
        sweeping.jobs_of(_words_of_children(options.own), options.rest, combinations)
    )
    try:
        plans.update(styled_text.counted(ended, len(combinations), "plans made"))
    except sweeping.Interrupted:
        print(
            f"torchdevice: interrupted after {len(plans)} of {len(combinations)} plans",
            file=sys.stderr,
        )
    found = sweeping.data(sweeps, plans)
    with output():
        _show_sweep(options, found, sweeping.tables(found), title or " ".join(options.rest))
    return int(
        len(plans) < len(combinations) or not all(each["finished"] for each in plans.values())
    )


def _words_of_children(own: Sequence[str]) -> list[str]:
    """Return the command's words without the flags that only the process in front has."""
    return [word for word in without(own, _OF_PARENT) if word.partition("=")[0] not in _SWITCHES]


def without(own: Sequence[str], flags: Collection[str]) -> list[str]:
    """Return the command's words without flags that have a word after them, if no sign joins it."""
    found: list[str] = []
    left_out = False
    for word in own:
        flag, equals, _ = word.partition("=")
        if left_out:
            left_out = False
        elif flag in flags:
            left_out = not equals
        else:
            found.append(word)
    return found


def try_changes(options: argparse.Namespace, title: str) -> int:
    """Plan a program as it is and with each change that may make it fit, and show one table.

    Returns:
        The exit status: 1 if no plan finishes, or, with ``--fits``, none fits that GPU.
    """
    from torchdevice.plan import change_words, fitting, judging, sweeping

    with refusals():
        model = judging.checked_model(options.fits) if options.fits else None
    own = _words_of_children(options.own)
    if options.model is None:
        changes = change_words.tried(options.world_size)
        jobs = [sweeping.Job([*own, *_change_flag(each)], options.rest, {}) for each in changes]
    else:
        changes = change_words.tried_on_model(options.train, options.world_size, options.strategy)
        jobs = []
        for each in changes:
            words = change_words.words_of_model(options.rest, each)
            jobs.append(sweeping.Job([*own, *_flags_on_model(each)], words, {}))
    plans: dict[int, dict[str, Any]] = {}
    try:
        plans.update(styled_text.counted(sweeping.planned(jobs), len(jobs), "plans made"))
    except sweeping.Interrupted:
        print(f"torchdevice: interrupted after {len(plans)} of {len(jobs)} plans", file=sys.stderr)
    found = [{**plans[number], "change": str(changes[number])} for number in sorted(plans)]
    with output():
        tables = [("", sweeping.tables_of_changes(found, model))]
        _show_sweep(options, {"tried": found}, tables, title or " ".join(options.rest))
    good = [each for each in found if each["finished"] and not each.get("not changed")]
    if model is not None:
        good = [each for each in good if fitting.says_yes(each, model)]
    return int(not good)


def interval(options: argparse.Namespace, title: str) -> int:
    """Plan with the most and the fewest values selected, and show the larger plan with both.

    Returns:
        The exit status: 1 if the larger plan did not finish.
    """
    from torchdevice.plan import sweeping

    own = _words_of_children(options.own)
    jobs = [sweeping.Job([*own, "--assume", each], options.rest, {}) for each in ("most", "fewest")]
    try:
        plans = dict(sweeping.planned(jobs))
    except sweeping.Interrupted:
        print("torchdevice: interrupted, and the two plans were not made", file=sys.stderr)
        return 1
    found = plans[0]
    if "program" not in found:
        print(f"torchdevice: the plan could not be made: {found['ended']}", file=sys.stderr)
        return 1
    found |= {"program": title or found["program"], "least": plans[1]}
    with output():
        show(found, options)
    return int(not found["finished"])


def ranks(options: argparse.Namespace, title: str) -> int:
    """Plan each rank of a program, and show the plan of the one that needs the most, with what the
    others need.

    Returns:
        The exit status: 1 if a plan did not finish.
    """
    from torchdevice.plan import sweeping

    own = _words_of_children(options.own)
    numbers = range(options.world_size)
    plans: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        variables = {FOLDER_OF_RANKS: folder}
        jobs = [
            sweeping.Job([*own, "--rank", str(each)], options.rest, variables) for each in numbers
        ]
        # A rank of a pipeline waits for others, which may be later ones.
        noted = _noted(sweeping.planned(jobs, functools.partial(_waiting, folder)), folder)
        try:
            plans.update(styled_text.counted(noted, len(jobs), "ranks planned"))
        except sweeping.Interrupted:
            print(
                f"torchdevice: interrupted after {len(plans)} of {len(jobs)} ranks", file=sys.stderr
            )
    finished = all(each["finished"] for each in plans.values()) and len(plans) == len(jobs)
    made = [number for number in sorted(plans) if plans[number]["devices"]]
    if not made:
        ended = next((each["ended"] for each in plans.values()), "no rank was planned")
        print(f"torchdevice: the plan could not be made: {ended}", file=sys.stderr)
        return 1
    worst = max(made, key=lambda each: plans[each]["needs"])
    of_each = [
        {
            "rank": number,
            **{name: plans[number][name] for name in ("needs", "at least", "finished", "ended")},
        }
        for number in sorted(plans)
    ]
    of_all = f", rank {worst} of {options.world_size}"
    program = f"{title}{of_all}" if title else plans[worst]["program"]
    with output():
        show({**plans[worst], "program": program, "rank": worst, "ranks": of_each}, options)
    return int(not finished)


FOLDER_OF_RANKS = "TORCHDEVICE_PLANNED_RANKS"
"""The variable with the folder in which the plans of all ranks of a program meet."""


def _waiting(folder: str) -> int:
    """Return how many plans of ranks wait for another one's."""
    from torchdevice.torch_modules.distributed.planned_ranks import WAITS

    return len([*Path(folder).glob(WAITS.format("*"))])


def _noted(ended: Iterable[tuple[int, Any]], folder: str) -> Iterator[tuple[int, Any]]:
    """Yield the plans of ranks as they end, and leave a file that shows this to the others."""
    from torchdevice.torch_modules.distributed.planned_ranks import ENDED

    for rank, plan in ended:
        Path(folder, ENDED.format(rank)).touch()
        yield rank, plan


def _change_flag(change: Change) -> list[str]:
    return ["--change", str(change)] if change.names else []


def _flags_on_model(change: Change) -> list[str]:
    """Return the flags that the program that plans a model lacks."""
    flags = ["--change", "8-bit"] if "8-bit" in change.names else []
    return flags if change.ranks is None else [*flags, "--world-size", str(change.ranks)]


def of_rank(program: str, options: argparse.Namespace) -> str:
    """Return the name of a program, with its rank if the plan has several."""
    if options.world_size is None:
        return program
    return f"{program}, rank {options.rank or 0} of {options.world_size}"


def judge(options: argparse.Namespace, title: str) -> int:
    """Plan in another process, and compare with a baseline and with the GPU it should fit.

    Returns:
        The exit status: 1 if the program needs more than it may, or does not fit or finish.
    """
    from torchdevice.plan import judging, rendering, sweeping

    with refusals():
        before = _limits(options)
    command = [
        sys.executable,
        "-m",
        "torchdevice",
        "plan",
        "--json",
        *_words_of_children(options.own),
        *_report_flag(options.report),
        *options.rest,
    ]
    # A session of its own, so that Ctrl-C reaches this process alone.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    with sweeping.ending_together([process]):
        printed = _printed(process)
    try:
        plan: dict[str, Any] = json.loads(printed)
    except ValueError:
        if not process.returncode:
            print("torchdevice: the program ended without a plan", file=sys.stderr)
        return process.returncode or 1
    if title:
        plan["program"] = of_rank(title, options)
    plan["judged"] = [*judging.judged(plan, before, options.grow, options.fits)]
    with refusals():
        if options.write_baseline and plan["finished"] and rendering.uses_gpus(plan):
            judging.write(options.baseline, plan)
    with output():
        show(plan, options)
    return int(not plan["finished"] or any(each["failed"] for each in plan["judged"]))


def _limits(options: argparse.Namespace) -> dict[str, Any] | None:
    """Check the GPU that a plan should fit, and return the baseline; None for none.

    Raises:
        ValueError: There is no such GPU or baseline.
    """
    from torchdevice.plan import judging

    if options.fits:
        options.fits = judging.checked_model(options.fits)
    if options.write_baseline and not options.baseline:
        raise ValueError("--write-baseline names no file. Add --baseline FILE.")
    if options.baseline and not options.write_baseline:
        return judging.read(options.baseline)
    return None


def _printed(process: subprocess.Popen[str]) -> str:
    """Return the output of a plan. The plan handles Ctrl-C, and shows how far it came. The third
    Ctrl-C ends it.
    """
    presses = 0
    while True:
        try:
            return process.communicate()[0]
        except KeyboardInterrupt:
            presses += 1
            if presses > 2:
                process.kill()
            elif os.name != "nt":  # where it has reached the plan, too
                process.send_signal(signal.SIGINT)


def _report_flag(wanted: str | bool | None) -> list[str]:
    """Return the flag for the report of a plan, as it was given."""
    if wanted is None:
        return []
    return ["--report" if wanted is True else f"--report={wanted}"]


def _show_sweep(
    options: argparse.Namespace, found: Any, tables: Iterable[tuple[str, Any]], program: str
) -> None:
    """Print a sweep as text, JSON or Markdown."""
    from torchdevice.plan import rendering

    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"### Memory of `{program}`"
        if options.markdown
        else printable.line(f"torchdevice: plans of {program}")
    )
    for heading, rows in tables:
        if heading:
            print(f"\n{rendering.sentence(heading)}:" if options.markdown else f"\n{heading}")
        if options.markdown:
            print("", *map(printable.line, rendering.markdown_table(rows)), sep="\n")
        else:
            show_columns(rows, indent="  ")


def show(plan: dict[str, Any], options: argparse.Namespace, file: TextIO | None = None) -> None:
    """Print a plan as text, JSON or Markdown.

    Args:
        plan: Its data.
        options: Which of the three.
        file: Where to; None for stdout.
    """
    from torchdevice.plan import rendering

    if options.json:
        print(json.dumps(plan, indent=1), file=file)
    elif options.markdown:
        print(*map(printable.line, rendering.markdown(plan)), sep="\n", file=file)
    else:
        print(printable.line(f"torchdevice: plan of {plan['program']}"))
        print(*map(printable.line, rendering.answer(plan)), sep="\n")
        for heading, table in rendering.tables(plan):
            print(f"\n{heading}" if heading else "")
            show_columns(table, indent="  ")
    print(end="", file=file, flush=True)
