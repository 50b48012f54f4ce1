"""Replaces the constructor of a C class, where Python refuses an assignment to ``__new__``.

``torch.device`` can be neither subclassed nor assigned to, and must stay the class that
annotations, pickles and Dynamo use. So it gets what Python gives a class whose ``__new__`` is
written in Python: a ``__new__`` in its dictionary, and in its ``tp_new`` slot the C function that
looks ``__new__`` up. The offset of the slot is not assumed. It is the only offset in the class's
memory at which the value is found that the C API returns for the slot, and must be equal in several
classes.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

from torchdevice.errors import EngineUnavailableError
from torchdevice.kernel.lowlevel.object_fields import offsets

_SLOT = 65
"""``Py_tp_new`` of the stable ABI."""

Call = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]


# An empty class with `__new__` in Python: its slot holds the C function that looks `__new__` up.
class _WithNew:
    def __new__(cls) -> _WithNew:
        return object.__new__(cls)


class Constructor:
    """The constructor of a class, replaced by the result of ``make(original)``.

    Args:
        cls: A class written in C, with a constructor of its own.
        make: Takes the original constructor, called as ``original(cls, args, kwargs)``, and returns
            the new ``__new__``.

    Raises:
        EngineUnavailableError: On installation, if :func:`refusal` has a reason.
    """

    def __init__(self, cls: type, make: Callable[[Call], Callable[..., Any]]):
        self._class, self._make = cls, make
        self._new: Any = None

    def install(self) -> None:
        if self._new is None:
            self._prepare()
        # The staticmethod is what Python itself puts into a class for a `__new__`.
        self._put(self._new, self._looks_new_up)

    def remove(self) -> None:
        self._put(self._original_new, self._original_slot)

    def _prepare(self) -> None:
        if reason := refusal():
            raise EngineUnavailableError(reason)
        get_slot = ctypes.pythonapi.PyType_GetSlot
        # Else ctypes cuts the pointer to an int.
        get_slot.restype, get_slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
        # Three classes of different kinds: the offset must be the same in all of them.
        classes = (self._class, _WithNew, int)
        slots = [get_slot(cls, _SLOT) for cls in classes]
        size: Any = type.__basicsize__
        places = offsets([*map(id, classes)], slots, size // ctypes.sizeof(ctypes.c_void_p))
        # `__dict__` of a class is a read-only view; its only referent is the dictionary.
        dictionaries = gc.get_referents(self._class.__dict__)
        if len(places) != 1 or "__new__" not in dictionaries[0]:
            raise EngineUnavailableError(
                "the offset of the constructor in a class cannot be determined"
            )
        self._slot = ctypes.c_void_p.from_address(id(self._class) + places[0])
        self._original_slot, self._looks_new_up, _ = slots
        self._dictionary: dict[str, Any] = dictionaries[0]
        self._original_new = self._dictionary["__new__"]
        # PYFUNCTYPE keeps the global lock, as calls of the C API need.
        prototype = ctypes.PYFUNCTYPE(
            ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.py_object
        )
        new = self._make(prototype(self._original_slot))
        self._new = staticmethod(functools.update_wrapper(new, self._original_new))

    def _put(self, new: Any, slot: int) -> None:
        # The dictionary first: until the next line, the old slot makes devices without `__new__`.
        self._dictionary["__new__"] = new
        self._slot.value = slot
        # Drops Python's caches of attribute lookups for the class.
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(self._class))


def refusal() -> str | None:
    """Return why this Python lets no constructor be replaced; None where it can be.

    The class must have CPython's layout. Another thread must not construct an object between the
    changes of the dictionary and of the slot, which the global interpreter lock prevents. The
    interpreters of a process share the class, so only the main one may change it.
    """
    if sys.implementation.name != "cpython":
        return "this Python does not lay out classes as CPython does"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        # Both writes of `_put` would have to be one.
        return (
            "this build of Python is free-threaded, and another thread may construct a device "
            "during the change"
        )
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = api.PyInterpreterState_Main.restype = ctypes.c_void_p
    if api.PyInterpreterState_Get() != api.PyInterpreterState_Main():
        return "this is a sub-interpreter, and the main interpreter shares torch.device with it"
    return None
