"""Ends a command that cannot be carried out with one line on stderr and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torchdevice.errors import TorchDeviceError
from torchdevice.foundation.interrupt_safe_exit import block


@block
def refusals() -> Iterator[None]:
    """Turn an error of the options or of the installation into one line on stderr.

    Raises:
        SystemExit: With status 2, for every such error.
    """
    try:
        yield
    except (TorchDeviceError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"torchdevice: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
