"""How a command ends that cannot be carried out, or whose output nobody reads any more."""

from __future__ import annotations

import os
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
    except BrokenPipeError:
        raise
    except (TorchDeviceError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"torchdevice: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


@block
def output() -> Iterator[None]:
    """End a command quietly where nobody reads on what it prints, as ``head`` does not.

    Raises:
        SystemExit: With status 1, where nobody reads on.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left at its end
        raise SystemExit(1) from None
