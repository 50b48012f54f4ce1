"""Kernels that this package gives torch's dispatcher: put once, never taken out, per thread active.

torch's tables are not made for a change while another thread is between the look-up of a kernel and
the kernel itself. Such a thread runs half of one kernel and half of another, or a kernel that is no
more. So nothing is taken out, and nothing is put into a place from which another thread may read:

- Kernels of a device of this package, and for autocast of a device without, have places that no
  tensor has led to yet.
- Kernels that do a call of torch's in another way stand *in front of* torch's, under a dispatch key
  of their own. It is among the keys of a thread while the thread is in a scope, so that no other
  thread reads there or takes any longer. Each asks whether its thread's scope wants it, and passes
  a call on by torch's dispatcher. No kernel of torch's or of the program's is kept, which could
  end.

The kernels in C++ (``native/kernels.cpp``) are put by C++, over those in Python, and stay too: all
at once, before there is a tensor of a simulated device (``simulation/serving.py``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel.python import forks
from torchdevice.kernel.python.per_thread import PerThread

Own = Callable[..., Any]
"""Passes a call on to the kernel behind."""

Kernel = Callable[..., Any]
"""Is called with the dispatch keys of a call that are left, with :data:`Own`, and with the
arguments of the call.
"""

_BELOW_AUTOGRAD, _ABOVE_AUTOGRAD = "Fake", "DeferredInit"
"""Dispatch keys for which torch has no kernels and no fallback: they were made for a package of its
own (torchdistx).

The first is below modes and subclasses in Python and above all devices, the second above autograd
and autocast.
"""

_BELOW_MODES = "BackendSelect"
"""The place below autograd of a program's own operators before torch 2.13. There the first key is
above modes, and left out of the calls that a mode makes. This one is among the keys of all threads,
and torch's own operators have kernels under it.
"""

_MODES_ARE_ABOVE = torch.__version__ >= "2.13"
"""Whether modes in Python are above the first key."""

_make_library = torch._C._dispatch_library
_has_fallback = torch._C._dispatch_has_backend_fallback
_set_included = torch._C._dispatch_tls_set_dispatch_key_included

_KEYS = {name: torch._C._dispatch_key_parse(name) for name in (_BELOW_AUTOGRAD, _ABOVE_AUTOGRAD)}
_BEHIND = {
    name: torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(name))
    for name in (*_KEYS, _BELOW_MODES)
}

OF_FRONT = functools.reduce(operator.or_, map(torch._C.DispatchKeySet, _KEYS.values()))
"""The dispatch keys of kernels in front."""

_lock = forks.lock(globals())

_libraries: dict[tuple[str, str, str], Any] = {}
"""Kind, namespace and file -> torch's object that registers kernels; without an end, which would
take the kernels out.

Objects of C++: a `torch.library.Library` takes its kernels out when it ends, and at the end of the
process.
"""


def put(
    name: str, kernel: Callable[..., Any], key: str, file: str, *, with_keys: bool = False
) -> None:
    """Put an operator's kernel under a dispatch key that no other thread's tensor has yet.

    Args:
        name: The operator, with namespace and overload.
        kernel: The kernel.
        key: The dispatch key.
        file: The file that names the kernel, for torch's texts.
        with_keys: Whether the kernel is given the dispatch keys of a call before its arguments.
    """
    namespace, _, within = name.partition("::")
    # On one line: an interrupt between two lines would leave the lock held.
    with _lock: _library("IMPL", namespace, file).impl(within, key, kernel, with_keys)  # noqa: E701  # fmt: skip


def _library(kind: str, namespace: str, file: str) -> Any:
    if (kind, namespace, file) not in _libraries:
        _libraries[kind, namespace, file] = _make_library(kind, namespace, "", file, 0)
    return _libraries[kind, namespace, file]


def put_fallback(kernel: Callable[..., Any], key: str, file: str) -> None:
    """Put a kernel for all operators that have none under a dispatch key without a fallback."""
    # On one line: see `put`.
    with _lock: _put_fallback(kernel, key, file)  # noqa: E701  # fmt: skip


def _put_fallback(kernel: Callable[..., Any], key: str, file: str) -> None:
    if not _has_fallback(torch._C._dispatch_key_parse(key)):
        _library("IMPL", "_", file).fallback(key, kernel, False)


def define(namespace: str, schema: str) -> None:
    """Define an operator, once in a process. May be called again."""
    # On one line: see `put`.
    with _lock: _define(namespace, schema)  # noqa: E701  # fmt: skip


def _define(namespace: str, schema: str) -> None:
    if f"{namespace}::{schema.partition('(')[0]}" not in torch._C._dispatch_get_all_op_names():
        _library("FRAGMENT", namespace, __file__).define(schema, "")


@functools.cache
def overload(name: str) -> Any:
    """Return an operator by its name with namespace and overload."""
    namespace, _, operator = name.partition("::")
    packet, _, variant = operator.partition(".")
    operators = getattr(torch.ops, namespace)
    return getattr(getattr(operators, packet), variant or "default")


# ---- in front of torch's kernels -----------------------------------------------------------------


class _InFront:
    """The kernel in front of an operator's kernels, which torch calls.

    Args:
        name: The operator, with namespace and overload.
        place: The dispatch key under which it is registered.

    Attributes:
        kernels: The dispatch key of a kernel behind -> the kernel in front of it, and the feature
            that put it there.
    """

    def __init__(self, name: str, place: str):
        self._name, self._behind = name, _BEHIND[place]
        self.kernels: dict[Any, dict[str, Kernel]] = {}
        # Known from the first call on. A call without tensors does not come to autograd.
        self._by_device: bool | None = False if place == _ABOVE_AUTOGRAD else None

    def run(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the kernels in front of the kernel that torch would call next, if there are any."""
        op, left = overload(self._name), keys & self._behind
        own = functools.partial(_passed_on, op, left)
        for kernel in self.kernels.get(self._next(op, left, kwargs), _NONE).values():
            own = functools.partial(kernel, left, own)
        return own(*args, **kwargs)

    def _next(self, op: Any, left: Any, kwargs: Any) -> Any:
        """Return the dispatch key of the kernel that torch would call next."""
        if self._by_device is None:
            # Without tensors a device argument decides, and torch reads it after this.
            self._by_device = not any(
                "Tensor" in str(argument.type) for argument in op._schema.arguments
            )
        if not self._by_device:
            return left.highestPriorityTypeId()
        device = kwargs.get("device")
        if device is None:
            return None
        name = torch._C._dispatch_key_for_device(device.type)
        return torch._C._dispatch_key_parse(name)


def _passed_on(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass a call to the kernel behind, with tensors for numbers that torch hands to Python.

    ``2 ** x`` calls an operator of two tensors, of which one stands for the number 2. A kernel in
    Python is given 2, which the kernel behind does not take.
    """
    if any(type(value) in _NUMBERS for value in args):
        given = [value for value in args if isinstance(value, torch.Tensor)]
        exact = any(value.is_floating_point() or value.is_complex() for value in given)
        for index, (value, argument) in enumerate(zip(args, op._schema.arguments, strict=False)):
            if type(value) in _NUMBERS and str(argument.type) == "Tensor":
                args = (*args[:index], _tensor_of(value, exact), *args[index + 1 :])
    # What `op.redispatch` calls, whose frame would stand in the tracebacks of the program's errors.
    return op._handle.redispatch_boxed(keys, *args, **kwargs)


_NUMBERS = frozenset({bool, int, float, complex})


def _tensor_of(number: Any, exact: bool) -> torch.Tensor:
    """Return a tensor without dimensions that promotes other dtypes as the number does.

    Args:
        number: The number.
        exact: Whether a tensor beside it is of floats, and keeps its dtype beside a number of a
            wider one.
    """
    wide = {float: torch.float64, complex: torch.complex128}.get(type(number)) if exact else None
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.tensor(number, dtype=wide, device="cpu")


_NONE: dict[str, Kernel] = {}

_in_front: dict[tuple[str, str], _InFront] = {}


def put_in_front(name: str, key: str, kernel: Kernel, by: str) -> None:
    """Put a kernel before an operator's own for a dispatch key. Repeated calls do nothing.

    Args:
        name: The operator, with namespace and overload. It need not be defined yet.
        key: The dispatch key.
        kernel: See :data:`Kernel`. It is in front of the kernels that were put before it.
        by: The feature that puts it. Each puts one kernel only in front of an operator for a key.
    """
    place = _place(name, key)
    known = _in_front.get((name, place))
    if known is None or by not in known.kernels.get(torch._C._dispatch_key_parse(key), _NONE):
        # On one line: see `put`.
        with _lock: _put_in_front(name, place, key, kernel, by)  # noqa: E701  # fmt: skip


def _place(name: str, key: str) -> str:
    """Return the dispatch key of the kernel in front of an operator's kernels for another key."""
    if key.startswith("Autograd"):
        return _ABOVE_AUTOGRAD
    if _MODES_ARE_ABOVE or name.startswith("aten::"):
        return _BELOW_AUTOGRAD
    return _BELOW_MODES


def _put_in_front(name: str, place: str, key: str, kernel: Kernel, by: str) -> None:
    prepare()
    known = _in_front.get((name, place))
    parsed = torch._C._dispatch_key_parse(key)
    if known is not None:
        # A new table, because other threads may be going through the one that there is.
        known.kernels[parsed] = {**known.kernels.get(parsed, _NONE), by: kernel}
        return
    made = _InFront(name, place)
    made.kernels[parsed] = {by: kernel}
    put(name, made.run, place, __file__, with_keys=True)
    _in_front[name, place] = made


def prepare() -> None:
    """Let torch skip dispatch keys of kernels in front for operators without one. Repeatable."""
    for place in _KEYS:
        put_fallback(torch.library.fallthrough_kernel, place, __file__)


_thread = PerThread(is_included=False)


def include(wanted: bool) -> None:
    """Let this thread's calls come to the kernels in front, or not. May be called again."""
    if _thread.is_included is wanted:
        return
    if wanted and not all(map(_has_fallback, _KEYS.values())):
        # On one line: see `put`.
        with _lock: prepare()  # noqa: E701  # fmt: skip
    # Until all are set. An interrupt may come between two, and the next call sets them anew.
    _thread.is_included = None
    for key in _KEYS.values():
        _set_included(key, wanted)
    _thread.is_included = wanted
