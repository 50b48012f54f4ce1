"""Activation by environment: ``TORCHDEVICE=1`` makes ``import torch`` enable a scope.

Torch calls :func:`activate` through the ``torch.backends`` entry point at the end of its import, for everybody who has
this package installed. So nothing is imported here before the variable was looked at, and nothing breaks torch's
import.
"""

from __future__ import annotations

import os
import sys

from torchdevice.switch import REPORT, SWITCH, switched_on


def activate() -> None:
    """Enable the scope that the environment asks for, if any, unless one is active."""
    if not switched_on():
        return
    try:
        from torchdevice import options, run_folder, scope

        if scope.current() is None:
            enabled = scope.enable_chosen(options.Options(**options.from_environment()), propagate=False)
            if run_folder.path() is None:
                os.environ.pop(REPORT, None)
                run_folder.begin()
            elif REPORT in os.environ:
                from torchdevice.report import processes

                processes.follow(enabled.journal, enabled.report)
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    """Print one line on why there is no scope, and how to go on."""
    import contextlib

    reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    line = (
        f"torchdevice: {SWITCH}={os.environ[SWITCH]} asks for a scope, which could not be activated: {reason}. "
        f"torch is imported without it. Unset {SWITCH} to run without this message."
    )
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed, and torch must be importable all the same
        if _is_first_to_say(line):
            print(line, file=sys.stderr)


def _is_first_to_say(line: str) -> bool:
    try:
        from torchdevice import logs

        return logs.claim(line)
    except Exception:  # the installation is broken, which is what is to be said
        return True
