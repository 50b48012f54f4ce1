"""The features of a scope, each of which is a folder that no other part of the package needs.

A feature that begins with the import of a module of the program's, such as Triton's kernels,
registers by ``bindings.later`` instead, see ``installed.py``.
"""

from __future__ import annotations

from torchdevice.kernel.feature import Feature
from torchdevice.kernel.options import Options

FEATURES = (
    Feature("torchdevice.verify.watching", lambda options: getattr(options, "verify", None)),
)

# The simulation comes last: its record declares `target` again, and the last declaration counts.
OPTIONS = ("torchdevice.verify.options", "torchdevice.simulation.options")
"""The modules of features that declare options, each in a class ``RECORD``. Those of a folder that
is not there are passed over.
"""

REGISTERING = tuple(
    f"torchdevice.packages.{name}" for name in ("finder", "libraries", "missing", "nvml")
)
"""The modules of features that register patches, as the files of torch's modules do, or that list
some as ``PATCHES``.

Those of a folder that is not there are passed over.
"""


def wanted(options: Options) -> tuple[Feature, ...]:
    """Return the features that options ask for."""
    return tuple(feature for feature in FEATURES if feature.wanted(options))
