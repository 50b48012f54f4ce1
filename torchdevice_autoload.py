"""The function that ``import torch`` calls where torchdevice-portable is installed. It lies beside
the package, which it calls.

So torch can be imported where the package is broken or deleted, and its metadata is still there.

PYTEST_DONT_REWRITE: there is nothing for pytest to rewrite here, and without this word it would
warn of that in every process that has imported torch.
"""

from __future__ import annotations

import os
import sys


def activate() -> None:
    """Enable a scope if the environment asks for one; if the package cannot be imported, print an
    error and go on.
    """
    try:
        from torchdevice.tools import autoload
    except Exception as error:
        # Silent where no scope is asked for. The package, which knows the other words for "0",
        # cannot be asked.
        if (
            os.environ.get("TORCHDEVICE", "0") != "0"
            and sys.stderr is not None
            and not sys.stderr.closed
        ):
            reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
            print(
                f"torchdevice: the package cannot be imported: {reason}. torch is imported without "
                "a scope. Install torchdevice-portable again, or remove it with pip uninstall "
                "torchdevice-portable.",
                file=sys.stderr,
            )
    else:
        autoload.activate()
