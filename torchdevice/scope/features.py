"""The features of a scope, each of which is a folder that no other part of the package needs.

Installed distributions add theirs by entry points, which are read once in a process.

A feature that begins with the import of a module of the program's, such as Triton's kernels,
registers by ``bindings.later`` instead, see ``installed.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import metadata

from torchdevice.kernel.feature import Feature, Targets, broken
from torchdevice.kernel.options import Options

GROUP = "torchdevice.features"
"""The group of the entry points."""

# The simulation comes last: its record declares `target` again, and the last declaration counts.
FEATURES = (
    Feature("torchdevice.plan", command="torchdevice.tools.cli.plan"),
    Feature("torchdevice.check", command="torchdevice.tools.cli.check"),
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
    """Return the features of installed distributions, and those whose folders are there."""
    return (*_installed(), *(each for each in FEATURES if each.is_present()))


def _installed() -> Iterator[Feature]:
    """Yield the features that the entry points of installed distributions name.

    Raises:
        ImportError: One cannot be imported. The message names its distribution.
    """
    seen: set[str] = set()
    for distribution in metadata.distributions():
        # `metadata.entry_points` parses the files of all distributions, which takes twice the time.
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = distribution.metadata["Name"]
        # Of two on the path the first counts, as for imports.
        if name not in seen:
            seen.add(name)
            for point in distribution.entry_points:
                if point.group == GROUP:
                    yield _loaded(point, name)


def _loaded(point: metadata.EntryPoint, distribution: str) -> Feature:
    try:
        found = point.load()
        if not isinstance(found, Feature):
            raise TypeError(f"{point.value!r} is a {type(found).__name__}, not a Feature")
    except Exception as error:
        raise broken(point.name, distribution, error) from error
    return found._replace(distribution=distribution)


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
