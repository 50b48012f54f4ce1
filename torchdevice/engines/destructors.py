"""The mode for functions that a garbage collection calls: destructors, callbacks of weak references, ``gc.callbacks``.

Python collects garbage at any time, also while the mode handles a call and is off. A destructor that uses the device
would then reach torch itself. The mode is therefore lent for the time of the collection, and to the end of an object
that a tensor drops in a call.

Python loses what is raised in these callbacks, so they are in place only while ``signals.py`` lets handlers
of signals wait for their end.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchdevice.core import Context, thread_state
from torchdevice.engines.mode import DeviceMode, of_this_thread, with_mode
from torchdevice.engines.rewriters import DROPS, rewrites
from torchdevice.foundation.torch_internals import is_torch_function_all_disabled


class _Thread(threading.local):
    """What the collection in progress of a thread has entered."""

    def __init__(self) -> None:
        self.entered: list[AbstractContextManager[Any]] = []


_thread = _Thread()


def _begin(phase: str, info: Mapping[str, int]) -> None:
    if phase != "start":
        return
    if gc.callbacks[-1] is not _end and _end in gc.callbacks:  # the program has added one, which runs in between
        gc.callbacks.remove(_end)
        gc.callbacks.append(_end)
    _leave()  # an interrupt kept the end of an earlier collection from it
    context = thread_state.state.context
    if context is None:
        return
    # The mode handles a call with all function modes off; the collection came in its midst.
    if is_torch_function_all_disabled():
        _enter(torch._C._EnableTorchFunction())
    if of_this_thread() is None:
        _enter(thread_state.lent(DeviceMode(context), context))


def _end(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop":
        _leave()


# Not an ExitStack: an interrupt within its Python code could leave it between two states.
def _enter(manager: AbstractContextManager[Any]) -> None:
    # Noted before entering: an interrupt in between leaves an exit that may be called without an entry.
    _thread.entered.append(manager)
    manager.__enter__()


def _leave() -> None:
    while _thread.entered:
        _thread.entered[-1].__exit__(None, None, None)  # popped afterwards: after an interrupt it is left once more
        _thread.entered.pop()


def install() -> None:
    """Lend the mode to collections from now on. Handlers of signals must wait for the end of these callbacks."""
    if _begin in gc.callbacks:
        remove()
    gc.callbacks.insert(0, _begin)
    gc.callbacks.append(_end)


def remove() -> None:
    """Lend it no more. May be called again, and by a destructor that a collection runs."""
    _leave()
    gc.callbacks[:] = [each for each in gc.callbacks if each is not _begin and each is not _end]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    with torch._C.DisableTorchFunction():
        return torch.Tensor.untyped_storage(tensor) if torch._C._has_storage(tensor) else None


_HELD: dict[Any, Any] = {
    torch.Tensor.grad.__set__: torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor.grad.__delete__: torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor._backward_hooks.__set__: torch.Tensor._backward_hooks.__get__,  # type: ignore[union-attr]
    torch.Tensor.detach_: torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.detach_: torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    torch.Tensor.data.__set__: storage_of,
}
"""A function by which a tensor drops an object, and the one that returns the object."""


@rewrites(*_HELD, table=DROPS)
def dropping(context: Context, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that drops an object with a destructor, perhaps, which then runs with the mode."""
    return outliving(context, [_HELD[func](args[0] if args else kwargs["input"])], func, args, kwargs)


def outliving(context: Context, held: list[Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function, and let the object in ``held`` go afterwards, with the mode."""
    result = func(*args, **kwargs)
    # A gradient or a storage usually ends without a function in Python.
    quiet = type(held[0]) in _QUIET and not weakref.getweakrefcount(held[0]) and not vars(held[0])
    if held[0] is not None and not quiet:
        with_mode(context, held.clear)
    return result


_QUIET = {torch.Tensor, torch.UntypedStorage}
