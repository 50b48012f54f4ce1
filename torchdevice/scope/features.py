"""The features of a scope, each of which is a folder that no other part of the package needs.

A feature that begins with the import of a module of the program's, such as Triton's kernels,
registers by ``bindings.later`` instead, see ``installed.py``.
"""

from __future__ import annotations

import functools

from torchdevice.kernel.feature import Feature
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
    Feature("torchdevice.simulation", options="torchdevice.simulation.options"),
)


@functools.cache
def present() -> tuple[Feature, ...]:
    """Return the features whose folders are there."""
    return tuple(each for each in FEATURES if each.is_present())


def wanted(options: Options) -> tuple[Feature, ...]:
    """Return the features that options ask for, of those that enter threads."""
    return tuple(each for each in present() if each.threads and each.wanted(options))
