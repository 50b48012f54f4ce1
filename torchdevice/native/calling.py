"""Lets C++ make the calls of ``calls/wrap.py`` that name a device which the thread has named before.

While a scope with ``engine="wrap"`` is active that may use C++, the classes of the entry points have functions of C++
(``entry_points.h``) in the place of those by which Python calls their objects. The objects stay the same. Calls in a
context with ``native="never"`` are made in Python, also beside such a scope.
"""

from __future__ import annotations

import functools

from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import Callback, Installation
from torchdevice.native import building


def needed(context: Context) -> list[Installation]:
    """Return the installation that lets C++ make calls, where it is built and the context may use it."""
    return [_IN_PLACE] if context.options.native != "never" and building.is_built() else []


_IN_PLACE = Installation(
    lambda: [Callback(*(functools.partial(building.load().place_calls, on) for on in (True, False)))]
)
