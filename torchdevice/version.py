"""The version of this package, and of what it runs on."""

from __future__ import annotations

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of this package, of torch and of Python."""
    # Not above: torch imports this package in every process in which it is installed.
    import platform

    import torch

    return {
        "torchdevice": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
