"""Plans of a program for several values of its flags or variables, in processes side by side.

A name means what the program's words say of it: ``{name}`` in a word, or a flag ``--name`` that is
there. Another name in capitals is a variable of the environment, and any other becomes a flag at
the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from torchdevice.kernel.python.byte_sizes import written
from torchdevice.plan import change_words, fitting, rendering
from torchdevice.plan.rendering import Rows
from torchdevice.simulation import model_lookup

Values = Mapping[str, str]
"""Name -> the value of one plan."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A name, and the values that it has one after the other."""

    name: str
    values: tuple[str, ...]

    @classmethod
    def parsed(cls, text: str) -> Sweep:
        """Parse a text such as ``batch-size=1,2,4``.

        Raises:
            ValueError: It is not of that form.
        """
        name, _, listed = text.lstrip("-").partition("=")
        values = tuple(each.strip() for each in listed.split(",") if each.strip())
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or not values:
            raise ValueError(
                f"{text!r} is not a name with values. Write one such as batch-size=1,2,4."
            )
        return cls(name, values)


def combinations(sweeps: Sequence[Sweep]) -> list[Values]:
    """Return each value of each name with each of the others."""
    names = [each.name for each in sweeps]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(each.values for each in sweeps))
    ]


def words_with(words: Sequence[str], values: Values) -> tuple[list[str], dict[str, str]]:
    """Return a program's words with these values, and the environment variables among them."""
    found, variables = list(words), {}
    for name, value in values.items():
        if any(f"{{{name}}}" in word for word in found):
            found = [word.replace(f"{{{name}}}", value) for word in found]
        elif not _replaced(found, name, value):
            if name.isupper():
                variables[name] = value
            else:
                found += [_flag(name), value]
    return found, variables


def _flag(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _replaced(words: list[str], name: str, value: str) -> bool:
    """Replace the value of a flag that is among the words, spelled with hyphens or underscores."""
    spellings = {_flag(each) for each in (name, name.replace("_", "-"), name.replace("-", "_"))}
    for index, word in enumerate(words[1:], start=1):
        flag, equals, _ = word.partition("=")
        if flag in spellings and equals:
            words[index] = f"{flag}={value}"
            return True
        if flag in spellings and index + 1 < len(words):
            words[index + 1] = value
            return True
    return False


class Interrupted(Exception):
    """Ctrl-C was pressed, and the plans that had ended by then are all that there are."""


class Job(NamedTuple):
    """One plan to make.

    Attributes:
        own: The words of the command before the program.
        words: The program's words.
        variables: Variables of the environment.
    """

    own: Sequence[str]
    words: Sequence[str]
    variables: Mapping[str, str]


def jobs_of(own: Sequence[str], words: Sequence[str], all_values: Sequence[Values]) -> list[Job]:
    """Return a plan to make for each combination of values.

    Args:
        own: The words of the command before the program, without those of the sweep.
        words: The program's words.
        all_values: The combinations.
    """
    return [Job(own, *words_with(words, each)) for each in all_values]


_LOOK = 0.1
"""Seconds between two looks for plans that wait."""


def planned(
    jobs: Sequence[Job], waiting: Callable[[], int] | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield the number of each job and its plan, as the plans end, in processes side by side.

    Args:
        jobs: The jobs. As many run at once as there are cores.
        waiting: Returns how many of those that run wait for others, and leave their core to
            another; None if none ever waits.

    Raises:
        Interrupted: Ctrl-C was pressed.
    """
    running: list[subprocess.Popen[bytes]] = []
    # All plans read the program, so it is read here, once.
    is_on_stdin = any(each.words[:1] == ["-"] for each in jobs)
    source = sys.stdin.buffer.read() if is_on_stdin else b""
    cores = os.cpu_count() or 1
    pool = ThreadPoolExecutor(len(jobs))
    left = list(enumerate(jobs))
    numbers: dict[Future[dict[str, Any]], int] = {}
    try:
        with ending_together(running):
            while left or numbers:
                waits = waiting() if waiting is not None else 0
                while left and len(numbers) - waits < cores:
                    number, job = left.pop(0)
                    numbers[pool.submit(_plan, job, source, running)] = number
                timeout = _LOOK if left and waiting is not None else None
                for done in wait(numbers, timeout, FIRST_COMPLETED).done:
                    yield numbers.pop(done), done.result()
    except KeyboardInterrupt:
        raise Interrupted from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def ending_together(running: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """End plans, which have sessions of their own, at the end of a block or of this process."""

    def end_all() -> None:
        for process in [*running]:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    process.terminate()

    def end(number: int, frame: Any) -> None:
        end_all()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python allows no other
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        end_all()
        for number, handler in before.items():
            signal.signal(number, handler)


def _plan(job: Job, source: bytes, running: list[Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchdevice", "plan", "--json", *job.own, *job.words]
    # A session of its own, so that Ctrl-C reaches this process alone.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **job.variables},
        start_new_session=True,
    )
    running.append(process)
    printed, errors = process.communicate(source)
    running.remove(process)
    last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
    try:
        plan: dict[str, Any] = json.loads(printed)
    except ValueError:
        ended = last or f"exit status {process.returncode}"
        return {
            "finished": False,
            "ended": ended,
            "at least": 0,
            "needs": 0,
            "fits": [],
            "smallest": None,
            "devices": [],
            "other processes": [],
        }
    said = _said(plan, last)
    if said:
        plan["ended"] += f" ({said})"
    return plan


_LONGEST = 200
"""The most letters of a program's last words."""


def _said(plan: Mapping[str, Any], last: str) -> str:
    """Return the program's own words on its early end; empty if there are none.

    Args:
        plan: The plan.
        last: The last line on stderr. An exit status has its reason there.
    """
    if plan["error"] is None:
        return ""
    text = plan["error"].partition(": ")[2].strip()
    if plan["ended"].startswith("exit status"):
        return last
    return textwrap.shorten((text.splitlines() or [""])[0], _LONGEST, placeholder=" ...")


def data(sweeps: Sequence[Sweep], plans: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return a sweep as data for JSON.

    Args:
        sweeps: The names and their values.
        plans: Number of a combination -> its plan, of those that have ended.
    """
    found = [
        {"values": values, **plans[i]}
        for i, values in enumerate(combinations(sweeps))
        if i in plans
    ]
    largest = {
        model: _largest(model, found)
        for model in sorted(model_lookup.MODELS, key=fitting.memory_of)
    }
    return {"names": [each.name for each in sweeps], "plans": found, "largest": largest}


def _largest(model: str, plans: Sequence[Mapping[str, Any]]) -> Values | None:
    """Return the values of the largest fitting plan."""
    fit = [each for each in plans if fitting.says_yes(each, model)]
    return max(fit, key=_size)["values"] if fit else None


def _size(plan: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the sort key of a plan: the value if one name is swept, else the need.

    Small programs need the same for several values, of which the largest counts.
    """
    numbers = [_number(each) for each in plan["values"].values()]
    if len(numbers) == 1:
        return *numbers, plan["needs"]
    return plan["needs"], *numbers


def _number(value: str) -> float:
    return float(value) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", value) else 0.0


def tables(found: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Yield the tables of a sweep, each with its heading, as rows of texts."""
    head = (*found["names"], f"{'needs':>11}", "the smallest GPU that fits")
    yield "", [head, *((*each["values"].values(), *needs(each)) for each in found["plans"])]
    if not any(each["finished"] and rendering.uses_gpus(each) for each in found["plans"]):
        return
    by_values: dict[tuple[str, ...], list[str]] = {}
    for model, values in found["largest"].items():
        by_values.setdefault(tuple((values or {}).values()), []).append(model)
    none = ("none", *[""] * (len(found["names"]) - 1))
    rows = [(*(values or none), ", ".join(models)) for values, models in by_values.items()]
    yield "the largest that fits each GPU", [(*found["names"], "GPUs"), *rows]


def tables_of_changes(plans: list[dict[str, Any]], model: str | None) -> list[tuple[str, ...]]:
    """Return the rows of the table of plans.

    Args:
        plans: The plans, each with its ``change``.
        model: The GPU that the program is to fit; None for none.
    """
    of_model = [] if model is None else [f"fits {model}"]
    rows = [("change", f"{'needs':>11}", "the smallest GPU that fits", *of_model)]
    for each in plans:
        change = change_words.Change()
        if each["change"]:
            change = change.parsed(each["change"])
        title = change.title
        if each.get("not changed") and each["finished"]:
            rows.append((title, "", f"not tried: {change_words.NO_PLACE}", *[""] * len(of_model)))
            continue
        fits = next((gpu["fits"] for gpu in each["fits"] if gpu["model"] == model), fitting.UNKNOWN)
        rows.append((title, *needs(each), *[fits] * len(of_model)))
    return rows


def needs(plan: Mapping[str, Any]) -> tuple[str, str]:
    """Return the need of a plan, and the smallest GPU that has it, or why that is not known."""
    if not plan["finished"]:
        if not rendering.uses_gpus(plan):
            return "", f"not finished: {plan['ended']}"
        return f"{written(plan['at least']):>11}", f"at least, not finished: {plan['ended']}"
    if not rendering.uses_gpus(plan):
        return "", "the program asked for no memory of a GPU"
    return f"{written(plan['needs']):>11}", plan["smallest"] or "none known here"
