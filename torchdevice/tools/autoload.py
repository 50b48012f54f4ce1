"""Activation by environment: ``TORCHDEVICE=1`` makes ``import torch`` enable a scope.

torch calls :func:`activate` through its entry point in ``torch.backends``,
``torchdevice_autoload``, at the end of its import, wherever this package is installed. So this
module reads the variable before it imports other parts of the package, and it never makes the
import of torch fail.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys

from torchdevice.kernel.python.environment import SWITCH, switched_on


def activate() -> None:
    """Enable a scope by the environment's options if ``TORCHDEVICE`` is set and none is active."""
    if not switched_on():
        return
    try:
        from torchdevice.kernel.python import garbage_collection

        with garbage_collection.paused():
            _enable()
    except Exception as error:
        _report(error)


def _enable() -> None:
    from torchdevice.scope import activation
    from torchdevice.scope import collected_options as options

    if activation.current() is not None:
        return
    _load_backends()
    # As if a call gave them: an option that contradicts the target is an error.
    chosen = activation.chosen_in_rank(options.from_environment(), variables={})
    activation.take_part(activation.enable_chosen(chosen, propagate=False, enabled_by="variable"))


def _load_backends() -> None:
    """Load the backends that torch loads after this package, as one may be the target.

    torch calls their entry points again, so an error is torch's to raise.
    """
    from importlib.metadata import entry_points

    from_own_on = itertools.dropwhile(
        lambda each: each.name != "torchdevice", entry_points(group="torch.backends")
    )
    for backend in list(from_own_on)[1:]:
        with contextlib.suppress(Exception):
            backend.load()()


def _report(error: Exception) -> None:
    """Print one line: why there is no scope, and what to do."""
    reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    line = (
        f"torchdevice: {SWITCH}={os.environ[SWITCH]} asks for a scope, which could not be "
        f"activated: {reason}. torch is imported without a scope. Unset {SWITCH} to run without "
        "this message."
    )
    # Stderr may be closed, and torch must be importable all the same.
    with contextlib.suppress(OSError, ValueError):
        if _is_first_to_say(line):
            print(_printable(line), file=sys.stderr)


def _printable(text: str) -> str:
    # Here, because few imports of torch have anything to say.
    from torchdevice.kernel.python import printable

    return printable.line(text)


def _is_first_to_say(line: str) -> bool:
    try:
        from torchdevice.kernel.python import logs

        return logs.claim(line)
    except Exception:  # the installation is broken, which is what is to be said
        return True
