"""What a plan says: the memory of each device at its peak, the GPUs that have so much, and what was assumed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torchdevice.devices import device_models
from torchdevice.foundation.byte_sizes import written
from torchdevice.options import declarations
from torchdevice.plan.peaks import KINDS, Peaks
from torchdevice.report import Report, formatting, source
from torchdevice.simulation.observe.assumed_values import ASSUMED


def data(peaks: Peaks, report: Report) -> dict[str, Any]:
    """Return what a plan says, as data for JSON."""
    devices = [_device(peaks, index) for index in sorted(peaks.devices)]
    error = getattr(sys, "last_value", None)  # what the interpreter printed
    return {
        "program": formatting.program(report),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "devices": devices,
        "context": peaks.context,
        "fits": list(_fits(devices, peaks.context)),
        "assumed": [
            {
                "lines": [f"{each.file}:{each.line}" for each in (row, *row.libraries[:1])],
                "operator": row.asked,
                "value": row.done.removeprefix(ASSUMED),
            }
            for row in report.rows
            if row.done.startswith(ASSUMED)
        ],
    }


def _device(peaks: Peaks, index: int) -> dict[str, Any]:
    peak, kinds = peaks.devices[index], peaks.kinds(index)
    return {
        "device": f"cuda:{index}",
        **{kind: kinds[kind] for kind in KINDS},
        "fragments": peak.reserved - peak.allocated,
        "peak": peak.reserved,
        "lines": [f"{site.file}:{site.line}" for site in peak.sites],
    }


def _fits(devices: Sequence[dict[str, Any]], context: int) -> Iterator[dict[str, Any]]:
    """Yield for each model of a GPU whether it has the memory that the device with the highest peak needs.

    A GPU that lacks only the fragments may do: its allocator gives cached memory back before memory runs out.
    """
    needed = max((each["peak"] for each in devices), default=0) + context
    least = max((each["peak"] - each["fragments"] for each in devices), default=0) + context
    for name, model in device_models.MODELS.items():
        memory = declarations()["memory"].check(model.memory)
        fits = "yes" if needed <= memory else "without fragments" if least <= memory else "no"
        yield {"model": name, "name": model.properties["name"], "memory": memory, "fits": fits}


def tables(plan: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield the tables of a plan, each with its heading, as rows of texts."""
    devices, assumed = plan["devices"], [(each["value"], each["operator"], _place(each)) for each in plan["assumed"]]
    if devices:
        sizes = [(name, *(written(each[name]) for each in devices)) for name in (*KINDS, "fragments", "peak")]
        named = ("", *(each["device"] for each in devices))
        yield "", [(first, *(f"{cell:>11}" for cell in cells), "") for first, *cells in (named, *sizes)]
        yield "", [(f"peak of {each['device']} at", _place(each)) for each in devices]
        models = [
            (each["model"], f"{written(each['memory']):>11}", each["fits"], each["name"]) for each in plan["fits"]
        ]
        yield f"\nfits, with {written(plan['context'])} for CUDA itself", models
    if assumed:
        yield "\nassumed of values", assumed


def _place(each: dict[str, Any]) -> str:
    """Return the program's line as a person writes it, and the library's where that asked."""
    return ", through ".join(map(source.short, each["lines"]))
