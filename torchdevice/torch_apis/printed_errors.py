"""Errors that a program, a logger or a worker process makes a text of, without this package's frames.

Workers of data loaders and processes of ``torch.multiprocessing`` send such a text to the process that waits for them.
"""

from __future__ import annotations

import traceback
from typing import Any

from torchdevice.core import Context, replaces
from torchdevice.foundation.tracebacks import trim


@replaces(traceback.TracebackException, "__init__")
def _read(
    context: Context, original: Any, self: Any, exc_type: Any, exc_value: Any, exc_traceback: Any, **options: Any
) -> None:
    """``TracebackException.__init__``, by which Python's functions read an error. Frames other than its own stay."""
    own = getattr(exc_value, "__traceback__", None)
    trim(exc_value)
    frames = exc_value.__traceback__ if own is not None and exc_traceback is own else exc_traceback
    original(self, exc_type, exc_value, frames, **options)
