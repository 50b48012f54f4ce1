"""A plan as text and as Markdown, made of its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchdevice.kernel.python.byte_sizes import written
from torchdevice.plan import change_words, fitting, other_processes
from torchdevice.plan.peaks import KINDS
from torchdevice.report import source

Rows = Sequence[tuple[str, ...]]

SHOWN = 12
"""How many GPUs that fit are listed: the smallest ones."""


def answer(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sentences that answer what the program needs, and which GPU has that."""
    if not plan["finished"]:
        # The text of the error is above: the interpreter has printed it.
        if plan["error"] is None:
            yield f"Not all of the program may have run: {plan['ended']}."
        else:
            yield f"The program did not finish: {plan['ended']}."
        if uses_gpus(plan):
            yield (
                f"It needs at least {written(plan['at least'])}. A GPU that is not named below may "
                "have too little, too."
            )
        if plan["advice"]:
            yield plan["advice"]
    elif not uses_gpus(plan):
        yield "The program asked for no memory of a GPU."
    else:
        yield from _interval(plan)
        yield _need(plan)
        yield from _ran_out(plan)
        yield _smallest(plan)
    yield from _not_changed(plan)
    yield from _verdicts(plan)


def _not_changed(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on the parts of a change that were not made, which the plan lacks."""
    if plan.get("not changed") and plan["finished"]:
        names = " and ".join(plan["not changed"])
        yield f"The plan is without {names}: {change_words.NO_PLACE}."


def uses_gpus(plan: Mapping[str, Any]) -> bool:
    """Return whether any process of the program asked for memory of a GPU."""
    return bool(plan["devices"] or plan["other processes"])


def _need(plan: Mapping[str, Any]) -> str:
    """Describe the need of the program; of several processes, one after the other or at once."""
    others = plan["other processes"]
    share = other_processes.are_on_one_device(plan["devices"], others)
    if share and plan["at least"] < plan["needs"]:
        return (
            f"It needs {written(plan['at least'])} if its processes use GPUs one after the other, "
            f"and up to {written(plan['needs'])} if they do so at once, each with "
            f"{written(plan['context'])} for CUDA itself."
        )
    several = ""
    used = {each["device"] for each in plan["devices"]}.union(*(each["devices"] for each in others))
    if len(used) > 1:
        several = f" on the device that needs the most of {len(used)}"
    need, context = written(plan["needs"]), written(plan["context"])
    return f"It needs {need}{several}, with {context} for CUDA itself."


def _smallest(plan: Mapping[str, Any]) -> str:
    """Name the smallest GPU that fits for certain."""
    found = fitting.smallest(plan["fits"])
    if found is not None:
        left = f"{written(found['memory'])}, {found['headroom']:g} % left"
        return f"The smallest GPU that fits: {found['model']} ({left})."
    if any(each["fits"] == fitting.UNKNOWN for each in plan["fits"]):
        return "No GPU is known to fit."
    return "No GPU known here has so much memory."


def _ran_out(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield where memory ran out in a program that went on after that."""
    if plan["ran out"]:
        times = sum(each["times"] for each in plan["ran out"])
        often = "once" if times == 1 else f"{times} times"
        places = ", ".join(map(_place, plan["ran out"]))
        yield (
            f"Memory ran out {often}, at {places}, and the program went on. The plan holds for "
            "this memory only."
        )


def _interval(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence on sizes that depend on values: one bound, or the interval."""
    least = plan.get("least")
    if not plan["bound"]:
        if least is not None:
            yield "No size depends on values, so both bounds are the same."
    elif least is None:
        yield (
            f"The memory depends on values, and this plan is the {plan['bound']} bound. --interval "
            "shows both."
        )
    elif least["finished"]:
        yield (
            f"The memory depends on values: it needs {written(least['needs'])} to "
            f"{written(plan['needs'])}."
        )
    else:
        yield f"The memory depends on values, and the lower bound is not known: {least['ended']}."


def _verdicts(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results of comparing a plan with a baseline and with a GPU."""
    for each in plan.get("judged", ()):
        yield f"{'Failed: ' if each['failed'] else ''}{each['said']}"


def tables(plan: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Yield the tables of a plan, each with its heading, as rows of texts."""
    if plan["devices"]:
        yield from _devices(plan["devices"])
        yield from _ranks(plan)
    others = [(each["name"], _sizes(each)) for each in plan["other processes"]]
    if others:
        yield "other processes", others
    has_memory = uses_gpus(plan)
    if has_memory:
        yield from _gpus(plan)
    assumed = [(each["value"], each["operator"], _place(each)) for each in plan["assumed"]]
    if assumed:
        yield "assumed of values", assumed
    if has_memory:
        versions = ", ".join(f"{name} {version}" for name, version in plan["versions"].items())
        yield "holds for", [(versions,)]


_SIZES = (*KINDS, "workspaces", "fragments", "peak")


def _devices(devices: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Rows]]:
    """Yield a table of the memory by kind, a column a device, and the lines of the peaks."""
    head = ("", *(each["device"] for each in devices))
    sizes = [(kind, *(written(each[kind]) for each in devices)) for kind in _SIZES]
    aligned = [(first, *(f"{cell:>11}" for cell in cells), "") for first, *cells in (head, *sizes)]
    yield "", aligned
    places = [(f"peak of {each['device']} at", _place(each)) for each in devices if each["lines"]]
    if places:
        yield "", places


def _sizes(process: Mapping[str, Any]) -> str:
    """Return another process's peak on each device, and whether the process finished."""
    parts = [f"{written(size)} on {device}" for device, size in process["devices"].items()]
    if not process["ended"]:
        parts.append("did not finish")
    return ", ".join(parts)


def _ranks(plan: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Yield the need of each rank, if several were planned, and the traffic of this one."""
    if "ranks" in plan:
        needs = [
            (f"rank {each['rank']}", f"{written(each['needs']):>11}", each["ended"])
            for each in plan["ranks"]
        ]
        yield "ranks", needs
    traffic = plan["traffic"]
    if traffic is not None and traffic["collectives"]:
        rows = [
            (
                each["collective"],
                f"{each['calls']:>5}",
                f"{written(each['bytes']):>11}",
                f"{written(each['sent']):>11}",
            )
            for each in traffic["collectives"]
        ]
        whole = sum(each["sent"] for each in traffic["collectives"])
        yield (
            f"sent by the rank in {traffic['in']}",
            [_SENT, *rows, ("in all", "", "", f"{written(whole):>11}")],
        )


_SENT = ("collective", "calls", f"{'messages':>11}", f"{'sent':>11}")


def _gpus(plan: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Yield a table of GPUs that fit, with the memory left, and a list of those that do not."""
    fit = [
        each for each in plan["fits"] if each["fits"] in (fitting.YES, fitting.WITHOUT_FRAGMENTS)
    ]
    if fit:
        rows = [
            (each["model"], f"{written(each['memory']):>11}", _left(each), each["name"])
            for each in fit[:SHOWN]
        ]
        larger = [("", "", "", f"and {len(fit) - SHOWN} larger ones")] if len(fit) > SHOWN else []
        yield "fits", [*rows, *larger]
    too_small = [each["model"] for each in plan["fits"] if each["fits"] == fitting.NO]
    if too_small:
        yield "too small", [(", ".join(too_small),)]
    mac = fitting.smallest(plan["macs"])
    if mac is not None:
        least = mac["unified memory"]
        yield "Macs", [(f"from {least} of unified memory on, estimated from the plan for CUDA",)]


def _left(gpu: Mapping[str, Any]) -> str:
    if gpu["fits"] == fitting.WITHOUT_FRAGMENTS:
        return "without fragments"
    return f"{gpu['headroom']:5.1f} % left"


def _place(each: Mapping[str, Any]) -> str:
    """Return the program's line in its short form, with the library's line if a library made the
    request.
    """
    return ", through ".join(map(source.short, each["lines"]))


_HEADS = {
    "fits": ("GPU", "memory", "headroom", "name"),
    "assumed of values": ("value", "read by", "line"),
    "ranks": ("rank", "needs", "ended"),
    "other processes": ("process", "memory"),
}
"""The heads of tables in Markdown. A text has none."""


def markdown(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan in Markdown, for the description of a pull request."""
    yield f"### Memory of `{plan['program']}`"
    yield ""
    yield from answer(plan)
    for heading, rows in tables(plan):
        yield ""
        if len(rows[0]) == 1:
            yield from (f"{sentence(heading)}: {text}" for (text,) in rows)
        elif heading == "" and rows[0][0]:
            yield from (f"{first}: {rest}" for first, rest in rows)
        else:
            if rows[0] == _SENT:
                yield from (f"{sentence(heading)}:", "")
            has_head = rows[0] == _SENT or rows[0][0] == ""
            yield from markdown_table(rows if has_head else [_HEADS[heading], *rows])


def sentence(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def markdown_table(rows: Rows) -> Iterator[str]:
    """Yield a table in Markdown. The first row is its head; columns without text are omitted."""
    cells = [[cell.strip().replace("|", "\\|") for cell in row] for row in rows]
    kept = [index for index, column in enumerate(zip(*cells, strict=True)) if any(column)]
    for index, row in enumerate(cells):
        yield f"| {' | '.join(row[each] for each in kept)} |"
        if index == 0:
            yield f"|{'---|' * len(kept)}"
