"""``torch.Generator(device="cuda")``, which makes a generator of the target."""

from __future__ import annotations

import copyreg
import functools
import pkgutil
from typing import Any

import torch

from torchdevice.core import REPLACED, Callback, thread_state
from torchdevice.core.patching import ReplacedInImporters, subclass_in_place_of

_Original = torch.Generator


@functools.wraps(_Original.__new__)
def _new(cls: type, device: Any = "cpu") -> torch.Generator:
    context = thread_state.state.context
    if context is not None:
        device = context.redirect(device) or torch.device(device)
        if device.type == context.device_type:
            return context.runtime.generator(device.index or 0, _Original if cls is Generator else cls)
    return _Original(device) if cls is Generator else _Original.__new__(cls, device)  # type: ignore[call-arg]


Generator = subclass_in_place_of(_Original, _new)


def _reduce(generator: torch.Generator) -> Any:
    """Pickle a generator with torch's own class. torch's ``__reduce__`` names the present ``torch.Generator``."""
    _, *rest = _Original.__reduce__(generator)
    return _Original, *rest


Generator.__reduce__ = _reduce  # for subclasses of a program, which torch pickles as torch.Generator


def _reduce_class(cls: type) -> Any:
    """Pickle the stand-in class as torch's own, and a program's subclasses by their names."""
    return (pkgutil.resolve_name, ("torch:Generator",)) if cls is Generator else cls.__qualname__


copyreg.dispatch_table[type(Generator)] = _reduce_class  # for good: a program may keep the class


def _register() -> None:
    copyreg.dispatch_table.setdefault(_Original, _reduce)


def _unregister() -> None:
    if copyreg.dispatch_table.get(_Original) is _reduce:
        copyreg.dispatch_table.pop(_Original, None)


REPLACED.extend([ReplacedInImporters(torch, "Generator", lambda _: Generator), Callback(_register, _unregister)])
