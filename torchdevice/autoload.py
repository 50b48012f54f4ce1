"""Activation by environment: ``TORCHDEVICE=1`` makes ``import torch`` enable a scope.

Torch calls :func:`activate` through the ``torch.backends`` entry point at the end of its import, for everybody who has
this package installed. So nothing is imported here before the variable was looked at, and nothing breaks torch's
import.
"""

from __future__ import annotations

import os
import sys

from torchdevice.switch import SWITCH, switched_on


def activate() -> None:
    """Enable the scope that the environment asks for, if any, unless one is active."""
    if not switched_on():
        return
    try:
        from torchdevice import options, scope

        if scope.current() is None:
            scope.enable_chosen(options.Options(**options.from_environment()), propagate=False)
    except Exception as error:
        print(
            f"torchdevice: {SWITCH}={os.environ[SWITCH]} asks for a scope, which could not be activated: {error} "
            f"torch is imported without it. Unset {SWITCH} to run without this message.",
            file=sys.stderr,
        )
