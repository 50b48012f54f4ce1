"""Python's garbage collector, held back while the package is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torchdevice.kernel.python.interrupt_safe_exit import block


@block
def paused() -> Iterator[None]:
    """Let no garbage be collected in a block that makes many objects that stay, and no circles.

    After the import of torch Python is about to collect in full, and some 20,000 new objects let it
    begin. It would look at the 165,000 objects of torch and find nothing, which takes longer than
    to load this package.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
