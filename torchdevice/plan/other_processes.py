"""The memory of the processes that a planned program starts, as each of them reports it at its end.

A plan follows the memory of one process over time. Of the others only the most is known, so it is
unknown which of them are at their peaks at once. The program needs at least what the largest
process needs for its tensors, and at most the sum of what all reserved on a device, each with a
context of CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchdevice.report import Report


def of(report: Report) -> list[dict[str, Any]]:
    """Return the other processes of a run that asked for memory of GPUs, as data for JSON."""
    return [
        {
            "name": each.name,
            "ended": each.end == "reported" and not each.failure,
            "devices": {f"cuda:{index}": size for index, size in each.memory.items()},
            "allocated": {f"cuda:{index}": size for index, size in each.allocated.items()},
        }
        for each in report.processes[1:]
        if each.memory or each.end != "reported"
    ]


def most(
    own: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    context: int,
    workspaces: int = 0,
) -> int:
    """Return the bytes needed of one device if all processes are at their peaks at once.

    Args:
        own: The devices of the process that was planned.
        others: See :func:`of`.
        context: The bytes of CUDA's context, of which each process has one.
        workspaces: The bytes of cuBLAS's workspaces that each of the others may have.
    """
    sums = {each["device"]: each["peak"] + context for each in own}
    for device, size in _sizes(others, "devices"):
        sums[device] = sums.get(device, 0) + size + context + workspaces
    return max(sums.values(), default=context)


def least(others: Sequence[Mapping[str, Any]], context: int) -> int:
    """Return the bytes that the largest of the other processes needs of one device; 0 for none.

    Fragments are left out: the allocator gives cached memory back before memory runs out.
    """
    return max((size + context for _, size in _sizes(others, "allocated")), default=0)


def are_on_one_device(
    own: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether any device is used by two or more processes."""
    used = Counter(each["device"] for each in own)
    used.update(device for device, _ in _sizes(others, "devices"))
    return any(number > 1 for number in used.values())


def _sizes(others: Sequence[Mapping[str, Any]], kind: str) -> Iterator[tuple[str, int]]:
    for each in others:
        yield from each[kind].items()
