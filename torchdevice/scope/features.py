"""The features of a scope, each of which is a folder that no other part of the package needs.

A feature that begins with the import of a module of the program's, such as Triton's kernels,
registers by ``bindings.later`` instead, see ``installed.py``.
"""

from __future__ import annotations

import functools

from torchdevice.kernel.feature import Feature, Targets
from torchdevice.kernel.options import Options

# The simulation comes last: its record declares `target` again, and the last declaration counts.
FEATURES = (
    Feature(
        "torchdevice.verify",
        options="torchdevice.verify.options",
        threads="torchdevice.verify.watching",
        wanted=lambda options: getattr(options, "verify", None),
    ),
    Feature(
        "torchdevice.packages",
        patches=tuple(
            f"torchdevice.packages.{name}" for name in ("finder", "libraries", "missing", "nvml")
        ),
    ),
    Feature(
        "torchdevice.simulation",
        options="torchdevice.simulation.options",
        targets="torchdevice.simulation.targets",
        prefix="simulated",
    ),
)


@functools.cache
def present() -> tuple[Feature, ...]:
    """Return the features whose folders are there."""
    return tuple(each for each in FEATURES if each.is_present())


def wanted(options: Options) -> tuple[Feature, ...]:
    """Return the features that options ask for, of those that enter threads."""
    return tuple(each for each in present() if each.threads and each.wanted(options))


def answering(name: object) -> Targets | None:
    """Return the targets of the feature that a target's name belongs to; None if it is none's."""
    if not isinstance(name, str):
        return None
    for each in present():
        if each.targets and name.startswith(each.prefix):
            found = each.answering()
            if found.answers(name):
                return found
    return None


def all_targets() -> list[Targets]:
    """Return the targets of all features, whose modules are imported."""
    return [each.answering() for each in present() if each.targets]


def prefixes() -> tuple[str, ...]:
    """Return how the names of the features' targets begin."""
    return tuple(each.prefix for each in present() if each.targets)
