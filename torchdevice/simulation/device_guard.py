"""The device guard, which torch asks for the type of the device where no error may be raised.

torch asks when it records an operator for ``backward`` and around every node of ``backward``, also
while it unwinds from an error that a hook raised. An answer that is an error ends the process
there. Two things would make it one: an error that is pending in Python, and a handler of a signal
that raises. So looking ``type_`` up takes a pending error away, which
``torch_modules/apis/autograd.py`` raises where the engine returns; and handlers wait until torch
has its answer (``calls/interruptions.py``).

No function in Python may do this: Python runs handlers where one begins, and from 3.12 on collects
garbage there, which drops a pending error. Generators do it, which wait in ``yield from`` for
functions in C.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from torchdevice.calls import interruptions
from torchdevice.torch_modules.apis.autograd import taken

_looked_up, _called = itertools.count(), itertools.count()
"""How often torch has looked methods up, and called them. Iterators in C count also where an error
is pending.
"""

_second = operator.itemgetter(1)  # a function in C, as is everything in the chain of `constant`


def is_asked() -> bool:
    """Return whether torch looked up a method it has not called yet. It holds the GIL meanwhile."""
    return _ahead() > 0


interruptions.is_asked = is_asked


def _ahead() -> int:
    """Return how often torch has looked a method up and not called it, without counting."""
    # `repr` of `count(7)` is "count(7)". `next` would count, and copying an iterator is deprecated.
    looked_up, called = repr(_looked_up), repr(_called)
    if looked_up == called:
        return 0
    return int(looked_up[len("count(") : -1]) - int(called[len("count(") : -1])


def _lookups(method: Any) -> Iterator[Any]:
    """Give torch a method, until an error is pending; take it away, and end."""
    try:
        # Python refuses what a function in C returns while an error is pending: SystemError, with
        # that cause. `map` over an endless iterator runs C code only, and `yield from` takes no
        # step of Python between two items.
        yield from map(operator.itemgetter(0), itertools.repeat((method,)))
    except SystemError as refusal:
        # The generator ends here, so the chain takes the next of the spare ones.
        taken.error = refusal.__cause__


SPARE = 64
"""How many errors can be taken away by a method, in all threads together, until :func:`renew` is
called.
"""

_spare: dict[Any, deque[Iterator[Any]]] = {}
"""Method -> generators that wait to give it to torch."""


def renew() -> None:
    """Let new generators stand in for those that have ended."""
    for method, spare in _spare.items():
        while len(spare) < SPARE:
            waiting = _lookups(method)
            next(waiting)  # up to the first `yield`, where the error check waits
            spare.append(waiting)
    ahead = _ahead()  # 0, unless somebody else than torch looked a method up, or called it
    for counter in ahead * [_called] or -ahead * [_looked_up]:
        next(counter)


def constant(value: Any) -> Any:
    """Return a property with a method that takes at most one argument, and returns ``value``."""
    # next(it, default): torch's argument becomes the default, but the iterator is infinite. `zip`
    # counts a call and gives the value; `_second` drops the count.
    method = functools.partial(next, map(_second, zip(_called, itertools.repeat(value))))
    spare = _spare[method] = deque()
    renew()
    # `iter(popleft, None)` ends never by itself: no generator equals None.
    lookups = itertools.chain.from_iterable(iter(spare.popleft, None))
    # Looking `type_` up counts, and returns the method that counts the call.
    return property(functools.partial(next, map(_second, zip(_looked_up, lookups, strict=False))))


class Guard(torch._C._acc.DeviceGuard):
    """The guard that torch asks for the type of the device."""

    type_ = constant(torch._C._autograd.DeviceType.PrivateUse1)


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """The hooks that torch asks about the device type."""

    is_available = is_built = has_primary_context = constant(True)
