"""Which GPUs have the memory that a program needs, and how much of it they have left.

A model of a GPU is compared with the device of the program that needs the most, so a program for
several devices needs as many of that model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchdevice.kernel.devices.device_properties import CAPABILITY
from torchdevice.plan import workspaces
from torchdevice.scope.collected_options import declarations
from torchdevice.simulation import model_lookup

YES = "yes"
NO = "no"
UNKNOWN = "unknown"
WITHOUT_FRAGMENTS = "without fragments"
"""The facts about a model: it has the memory, too little, perhaps enough, or enough without the
fragments.
"""


def memory_of(model: str) -> int:
    """Return the memory of a model of a GPU in bytes, as torch reports it."""
    return int(declarations()["memory"].check(model_lookup.MODELS[model].memory))


def at_least(devices: Sequence[Mapping[str, Any]], context: int) -> int:
    """Return the bytes that the device with the highest peak needs without fragments."""
    return int(max((each["peak"] - each["fragments"] for each in devices), default=0) + context)


class Workspaces(NamedTuple):
    """The workspaces of cuBLAS that are in the bytes that are needed.

    Attributes:
        number: How many there are.
        capability: The compute capability for which they were counted. Some GPUs have larger ones.
    """

    number: int = 0
    capability: tuple[int, int] = CAPABILITY

    def more_on(self, model: str) -> int:
        """Return how many bytes more they take on a model of a GPU."""
        sizes = [
            workspaces.size(each)
            for each in (model_lookup.MODELS[model].capability, self.capability)
        ]
        return self.number * (sizes[0] - sizes[1])


class Evidence(NamedTuple):
    """A plan's evidence on the memory that its program needs.

    Attributes:
        finished: Whether the program came to its end, and used GPUs. Otherwise it may need more.
        too_little: The bytes of a device on which memory ran out, and ended the program, or the
            program asked for no more.
        adapted_to: The bytes of a device on which memory ran out, and the program went on: with
            more or less memory it does something else.
        is_range: Whether the least memory is that of one process, and the most that of all at once.
    """

    finished: bool = True
    too_little: int = 0
    adapted_to: int = 0
    is_range: bool = False

    def verdict(self, memory: int, need: int, least: int) -> str:
        """Return whether a device with so much memory has enough."""
        if self.adapted_to not in (0, memory):
            return UNKNOWN
        if least > memory or memory <= self.too_little:
            return NO
        if not self.finished:
            return UNKNOWN
        if need <= memory:
            return YES
        return UNKNOWN if self.is_range else WITHOUT_FRAGMENTS


def fits(
    need: int, least: int, more: Workspaces | None = None, *, evidence: Evidence
) -> Iterator[dict[str, Any]]:
    """Yield per GPU model whether it has the needed memory, the smallest memory first.

    A GPU that lacks only the fragments may do: its allocator gives cached memory back before memory
    runs out.

    Args:
        need: The bytes that are needed.
        least: The bytes without fragments.
        more: The workspaces among them, where there are any.
        evidence: What the plan proves.
    """
    for model in sorted(model_lookup.MODELS, key=memory_of):
        memory, larger = memory_of(model), more.more_on(model) if more else 0
        found = evidence.verdict(memory, need + larger, least + larger)
        name = model_lookup.MODELS[model].properties["name"]
        yield {
            "model": model,
            "name": name,
            "memory": memory,
            "fits": found,
            "headroom": _headroom(need + larger, memory),
        }


def macs(need: int, least: int, *, evidence: Evidence) -> Iterator[dict[str, Any]]:
    """Yield per size of a Mac's memory whether Metal recommends to use as much as is needed.

    Args:
        need: The bytes that are needed.
        least: The bytes of the process that needs the most.
        evidence: What the plan proves.
    """
    for size, most in model_lookup.MACS.items():
        found = evidence.verdict(most, need, least if evidence.is_range else need)
        yield {
            "unified memory": f"{size} GB",
            "memory": most,
            "fits": found,
            "headroom": _headroom(need, most),
        }


def _headroom(need: int, memory: int) -> float:
    """Return the part of a memory that is left, in percent; below 0 where it is too little."""
    return round(100 * (memory - need) / memory, 1)


def says_yes(plan: Mapping[str, Any], model: str) -> bool:
    """Return whether a plan fits a model of a GPU for certain."""
    return any(gpu["model"] == model and gpu["fits"] == YES for gpu in plan["fits"])


def smallest(found: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the fitting model with the least memory; None if none fits."""
    return next((each for each in found if each["fits"] == YES), None)
