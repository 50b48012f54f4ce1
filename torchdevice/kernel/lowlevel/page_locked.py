"""Gives torch an allocator of page-locked memory for the device: the CPU's own.

``DistributedDataParallel`` with unused parameters or a static graph asks for such memory in C++,
and torch has no way from there to Python. Torch asks the hooks of the device, an object in C++. The
object gets a copy of its table of virtual functions, with two functions in Python while such a
model exists. Their places are not assumed: torch's own header has the order of the functions, and a
comparison with the table of the class above must agree with it.

Torch asks whether memory is page-locked directly after it has allocated such memory, and takes the
answer no for a defect of its own. So the answer to a thread's first question after an allocation is
yes.

Source: ATen/detail/AcceleratorHooksInterface.h, and the Itanium C++ ABI for the table.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from pathlib import Path
from typing import Any

import torch

from torchdevice.kernel.lowlevel.lazy_initialization import library
from torchdevice.kernel.python.per_thread import PerThread

_WORD = ctypes.sizeof(ctypes.c_void_p)

_ABOVE = 2
"""The words of a table before its first function: the offset to the whole object, and the type."""

_DESTRUCTORS = 2  # a virtual destructor has two entries: the complete one and the deleting one

_OWN = frozenset({"isBuilt", "isAvailable", "hasPrimaryContext"})
"""Functions that the hooks of a backend in Python have of their own."""

_INHERITED = frozenset(
    {"deviceCount", "getCurrentDevice", "exchangeDevice", "resizePrivateUse1Bytes"}
)
"""Functions that the hooks of a backend in Python inherit."""

_ALLOCATOR, _IS_LOCKED = "getPinnedMemoryAllocator", "isPinnedPtr"

_functions_of_models: list[tuple[Any, int, int, Any]] = []
"""The table, which the object refers to for the rest of the process, a place in it, torch's
function and the other.
"""

_served: set[object] = set()
"""A key for each model that is served."""


_asked = PerThread(allocator=False)
"""Whether this thread has asked for the allocator, and not yet whether memory is page-locked."""


def register() -> bool:
    """Give the device's hooks a table of their own, once in a process.

    Returns:
        False where torch's libraries are built or laid out in another way. Torch then raises where
        it asks.
    """
    try:
        order = _functions()
        hooks, allocator, above = _addresses()
    # Torch then asks where the program needs the memory, and raises its own error.
    except (OSError, AttributeError):  # no header, no library of that name, or no such symbol in it
        return False
    count = _DESTRUCTORS + len(order)
    # The pointer in an object is to the first function, two words after the beginning of the table;
    # the symbol is the beginning itself.
    own = _table(ctypes.c_void_p.from_address(hooks).value, count)
    inherited = _table(above + _ABOVE * _WORD, count)
    # A backend in Python that overrides a function has a table at another address than the class.
    of_its_own = {
        name for at, name in enumerate(order, _ABOVE + _DESTRUCTORS) if own[at] != inherited[at]
    }
    known = {*order} >= {*_INHERITED, _ALLOCATOR, _IS_LOCKED}
    # Overridden and inherited functions are known, so a table of another layout is noticed here.
    if not (known and of_its_own >= _OWN and of_its_own.isdisjoint(_INHERITED)):
        return False
    for name, function in ((_ALLOCATOR, _answer(allocator)), (_IS_LOCKED, _is_locked)):
        # The header names no destructors, hence their two places.
        place = _ABOVE + _DESTRUCTORS + order.index(name)
        _functions_of_models.append((own, place, own[place], function))
    # C++ may read the table after Python has ended, when the objects of modules are gone.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))
    # The object's first word is the pointer to its table; from here on it uses the copy.
    ctypes.c_void_p.from_address(hooks).value = ctypes.addressof(own) + _ABOVE * _WORD
    return True


def serve(model: object) -> None:
    """Serve torch page-locked memory while a model exists. Without one, it raises on request."""
    key = object()
    _served.add(key)
    # The key and not the model, which must be able to end.
    weakref.finalize(model, _drop, key)
    _settle()


def _drop(key: object) -> None:
    _served.discard(key)
    _settle()


def _settle() -> None:
    for table, place, original, function in _functions_of_models:
        # The table changes only when a model comes or goes; plain programs call torch's functions.
        table[place] = _address(function) if _served else original


def _answer(allocator: int) -> Any:
    """Return the function that answers with an allocator."""

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
    def get_pinned_memory_allocator(hooks: int) -> int:
        _asked.allocator = True
        return allocator

    return get_pinned_memory_allocator


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _is_locked(hooks: int, address: int) -> bool:
    # The answer is yes once, see the module's text.
    asked, _asked.allocator = _asked.allocator, False
    return asked


def _functions() -> list[str]:
    """Return the names of the virtual functions of a device's hooks, in the order of the table."""
    folder = Path(torch.__file__).parent / "include" / "ATen" / "detail"
    # In the order of inheritance, which is the order of the table.
    names = ("AcceleratorHooksInterface.h", "PrivateUse1HooksInterface.h")
    # Comments contain the word "virtual" too.
    text = re.sub(r"//.*", "", "\n".join((folder / name).read_text() for name in names))
    # No destructors (`~`), and the last name before the arguments: return types come before it.
    return re.findall(r"\bvirtual\s[^;{(~]*?(\w+)\(", text)


def _addresses() -> tuple[int, int, int]:
    """Return the addresses of the hooks, the CPU's allocator and the hooks' base-class table."""
    torch_cpu, torch_python = library("torch_cpu"), library("torch_python")
    # Mangled names of `at::detail::getPrivateUse1Hooks()` and `c10::GetCPUAllocator()`.
    get_hooks = torch_cpu._ZN2at6detail19getPrivateUse1HooksEv
    get_allocator = torch_cpu._ZN3c1015GetCPUAllocatorEv
    get_hooks.restype = get_allocator.restype = ctypes.c_void_p
    # The table of `at::PrivateUse1HooksInterface` as a symbol.
    return get_hooks(), get_allocator(), _address(torch_python._ZTVN2at25PrivateUse1HooksInterfaceE)


def _address(symbol: Any) -> int:
    return ctypes.cast(symbol, ctypes.c_void_p).value or 0


def _table(functions: int | None, count: int) -> Any:
    """Return a copy of the table whose functions begin at an address."""
    assert functions is not None, "an object with virtual functions has a table"
    words = _ABOVE + count
    return (ctypes.c_void_p * words).from_buffer_copy(
        ctypes.string_at(functions - _ABOVE * _WORD, words * _WORD)
    )
