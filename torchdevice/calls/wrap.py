"""The engine without a mode on torch's stack: it wraps torch functions that may take a device.

A mode on the stack costs time in every torch call. With ``engine="wrap"`` the thread's mode stays
beside the stack, and only wrappers call it: those of functions and methods whose schema has a
device argument, of those with a registered rewriter, and of operators called as
``torch.ops.aten...``. Everything else is torch's own.

All threads share the wrappers. In a thread without a mode beside the stack, a wrapper calls its
original.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any, Literal

import torch
from torch.overrides import handle_torch_function

from torchdevice.calls import lookup, moves, rewriters
from torchdevice.calls.error_texts import OF_TORCH, detour_after, is_final
from torchdevice.calls.lacking import dtype_gaps, half_precision_matmul
from torchdevice.errors import TorchDeviceError
from torchdevice.kernel import patching, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.lowlevel import replace_new
from torchdevice.kernel.lowlevel.replace_new import Call, Constructor
from torchdevice.kernel.patching import (
    Installation,
    OwnModule,
    Patch,
    Replaced,
    loaded,
    put_in,
    stands_for,
    take_out,
)
from torchdevice.kernel.python import garbage_collection
from torchdevice.kernel.torch_internals import is_torch_function_all_disabled

_state = thread_state.state

# Reading a member of an enumeration takes longer.
_DEVICE, _EXACT = moves.Side.DEVICE, Fidelity.EXACT

_SIZES = frozenset({int, tuple, list, float, torch.Size})

_ABSENT: Any = object()

_MOVES = {rewriters.move, rewriters.move_to_family}

_Method, _TO = types.MethodType, torch.Tensor.to

_stack_length = torch._C._len_torch_function_stack


def _ask(
    mode: thread_state.ContextMode, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the mode handle a call. It is inactive meanwhile, as one on torch's stack would be."""
    # As torch does by taking a mode off its stack.
    _state.mode = None
    try:
        return mode.__torch_function__(original, (), args, kwargs)
    finally:
        _state.mode = mode if mode.context is not None else None  # the call may have left the scope


class EntryPoint:
    """The wrapper of a function or method of torch that can carry a device.

    It compares, hashes, pickles and inspects as the original, because torch and programs keep
    tables of functions.
    """

    __module__ = OwnModule(__name__)
    original: Any = None  # until __init__ has run, before which Dynamo asks what the object is

    def __init_subclass__(cls) -> None:
        cls.__module__ = OwnModule(cls.__module__)

    def __init__(self, original: Any):
        functools.update_wrapper(self, original)
        self.original = original
        stands_for(self, original)
        self._method: Any = self
        # Kept: hashing a method descriptor takes longer than reading an attribute.
        self._hash = hash(original)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        mode = _state.mode
        # In this order: outside scopes only one attribute of the thread is read.
        if mode is None or is_torch_function_all_disabled():
            return self.original(*args, **kwargs)
        if _stack_length():
            return self._by_modes_above(args, kwargs)
        return _ask(mode, self.original, args, kwargs)

    def _by_modes_above(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the uppermost mode on torch's stack, one of the program's, handle a call.

        That mode calls the entry point again, with one mode less on the stack. So the program's
        modes see the call as it is written, and none of the calls that this package makes for it.
        """
        # torch finds these by name, where entry points are; of others it names the originals.
        if isinstance(self.original, (types.FunctionType, types.MethodDescriptorType)):
            return self.original(*args, **kwargs)
        relevant = [value for value in args if type(value) is not torch.Tensor]
        return handle_torch_function(self, relevant, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        # Also while Dynamo traces, which recognizes only torch's own methods.
        if _state.mode is None:
            return self.original.__get__(instance, owner)
        # As a method of Python binds: the tensor becomes the first argument.
        return _Method(self._method, instance)

    # torch's tables are keyed by originals, and `==` of two entry points compares what they wrap.
    def __eq__(self, other: object) -> bool:
        # Never calls `__eq__` of the other, which may be an entry point too.
        return other is self or self.original == other

    def __hash__(self) -> int:
        return self._hash

    # `__self__`, `__text_signature__` and such, which update_wrapper does not copy.
    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __repr__(self) -> str:
        return repr(self.original)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self.original, types.FunctionType):  # pickle knows these by their type
            # Pickle takes a text as the name of a global object, which it finds in `__module__`.
            return self.original.__qualname__
        return self.original.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any = None) -> EntryPoint:
        # Functions are copied as themselves.
        return self

    __copy__ = __deepcopy__

    @property
    def __class__(self) -> Any:
        # `isinstance(f, types.BuiltinFunctionType)`, which inspect asks, stays true.
        return type(self.original)


class _Naming(EntryPoint):
    """A factory with a keyword ``device``. A device the thread has named before needs no mode."""

    def __call__(self, /, *args: Any, device: Any = _ABSENT, **kwargs: Any) -> Any:
        if device is _ABSENT:
            return EntryPoint.__call__(self, *args, **kwargs)
        mode: Any = _state.mode
        known = None
        if mode is not None and not _stack_length() and not is_torch_function_all_disabled():
            known = mode.known.get(device) if device.__class__ is str else _own(mode, device)
        # A tensor that a factory is given may be its result.
        makes = not args or args[0].__class__ in _SIZES
        is_usual = makes and (not kwargs or kwargs.keys().isdisjoint(_NEED_MODE))
        if known is not None and is_usual and mode.find(self.original) in rewriters.NAMING:
            kwargs["device"] = known[0]
            result = _made(mode, known, None, self.original, args, kwargs)
            if result is not _ABSENT:
                return result
        kwargs["device"] = device
        return EntryPoint.__call__(self, *args, **kwargs)


_NEED_MODE = ("pin_memory", "generator")
"""The arguments of factories that a mode must see."""


def _made(
    mode: Any, known: Any, source: Any, make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make a call that names a device this thread has named before, while the mode is inactive.

    Args:
        mode: The thread's mode.
        known: The entry of ``mode.known`` for the device.
        source: The tensor that is moved; None for a factory.
        make, args, kwargs: The call, with the device that stands in.

    Returns:
        The result; ``_ABSENT`` after an error for which the mode may have another way, or a better
        text. The mode then makes the call, outside the ``except`` clause, as in ``LastResort``.
    """
    _, requested, done = known
    context = mode.context
    shares = context.runtime.shares_host_memory
    if shares and source is not None and moves.stays(context, source):
        if requested:
            context.journal.record(requested, done, _EXACT, 2)
        return source
    _state.mode = None
    try:
        result = make(*args, **kwargs)
        if requested:
            context.journal.record(requested, done, _EXACT, 2)
        if not shares:
            return result
        if result is source:
            return moves.moved(context, source, result, _DEVICE)
        return moves.mark(result, _DEVICE)
    except OF_TORCH as error:
        if is_final(context, error):
            raise
        return _ABSENT
    finally:
        _state.mode = mode if mode.context is not None else None  # as in `_ask`


def _own(mode: Any, asked: Any) -> Any:
    """Return the entry of ``mode.known`` for a device, or that of the target's first device.

    On a target that shares the CPU's memory a device's side is known by the object: a device of the
    same value may be the host's, see `moves.py`.
    """
    runtime = mode.context.runtime
    if asked.__class__ is torch.device and not runtime.shares_host_memory:
        return mode.known.get(asked)
    return (asked, "", "") if mode.known and asked is runtime.device(0) else None


class _Move(EntryPoint):
    """``Tensor.to(device)`` and ``Tensor.cuda()``, without the mode for a device named before."""

    def __init__(self, original: Any):
        super().__init__(original)
        rewriter = rewriters.REGISTERED[original]
        family = "" if original == _TO else original.__name__
        count = 1 if family else 2

        @functools.wraps(original)
        def move(*args: Any, **kwargs: Any) -> Any:
            mode: Any = _state.mode
            if (
                mode is None
                or kwargs
                or len(args) != count
                or is_torch_function_all_disabled()
                or _stack_length()
            ):
                return EntryPoint.__call__(self, *args, **kwargs)
            asked = f"{family}:{mode.context.thread.device_text}" if family else args[1]
            known = mode.known.get(asked) if asked.__class__ is str else _own(mode, asked)
            if known is not None and mode.find(original) is rewriter:
                result = _made(mode, known, args[0], _TO, (args[0], known[0]), kwargs)
                if result is not _ABSENT:
                    return result
            return EntryPoint.__call__(self, *args)

        self._method = move  # Python takes longer to call an object

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


class LastResort(EntryPoint):
    """An entry point that calls the mode only after the original has failed, and so costs little.

    Attributes:
        comes_first: Returns whether the mode comes first for these arguments; None where it never
            does.
    """

    comes_first: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if _stack_length() or (self.comes_first is not None and self.comes_first(args)):
            return EntryPoint.__call__(self, *args, **kwargs)
        try:
            return self.original(*args, **kwargs)
        except (RuntimeError, TypeError) as error:  # torch's errors for missing kernels and dtypes
            if _state.mode is None or isinstance(error, TorchDeviceError):
                raise
        # Outside the `except` clause, so that an error of the mode's own attempt has no other one
        # as its context.
        return EntryPoint.__call__(self, *args, **kwargs)


class _Product(LastResort):
    """A product of tensors or attention: a last resort, unless halves are computed in float32.

    Half precision does not fail, it is only slow.
    """

    @staticmethod
    def comes_first(args: tuple[Any, ...]) -> bool:
        mode: Any = None if half_precision_matmul.begins_in_float32(args) else _state.mode
        return (
            mode is not None and mode.context is not None and bool(mode.context.dtypes.in_float32)
        )


def kinds(cls: type[EntryPoint] = EntryPoint) -> Iterator[type[EntryPoint]]:
    """Yield the classes of entry points."""
    yield cls
    for derived in cls.__subclasses__():
        yield from kinds(derived)


class _Attribute:
    """The wrapper of a tensor attribute such as ``Tensor.device``; on the class, the original."""

    # Getter and setter are functions of torch that the mode knows by these very objects.
    def __init__(self, original: Any):
        self.original, self._read = original, original.__get__
        self._getter, self._setter = EntryPoint(self._read), EntryPoint(original.__set__)

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self.original
        mode = _state.mode
        # Gradients are read often, and wrapped for what writes them.
        if mode is None or (mode.find(self._read, self) is None and not _stack_length()):  # type: ignore[attr-defined]
            return self._read(tensor)
        return self._getter(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        self._setter(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self.original.__delete__(tensor)


def _new_device(original: Call) -> Any:
    """Replace ``torch.device.__new__``."""

    def __new__(cls: type, /, *args: Any, **kwargs: Any) -> torch.device:
        mode = _state.mode
        if mode is None or _stack_length() or is_torch_function_all_disabled():
            return original(cls, args, kwargs)  # the program's modes call the class again
        if len(args) == 1 and args[0].__class__ is str and not kwargs:
            context: Any = mode.context
            known = context.thread.redirects.get(args)
            if known is not None:
                device, requested, done = known
                if requested:
                    context.journal.record(requested, done, _EXACT, 1)
                return device  # type: ignore[no-any-return]
        return _ask(mode, cls, args, kwargs)

    return __new__


class _VariableFunctions:
    """The object in which ``torch._VF`` looks its functions up: one patch instead of a hundred."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        # Looked up in torch's object at each use: a program may have replaced the function.
        return _stand_in(getattr(self._original, name))


def _operator_call(original: Any) -> Any:
    """Replace ``__call__`` of ``OpOverload`` or ``OpOverloadPacket``: it calls every operator."""

    @functools.wraps(original)
    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode: Any = _state.mode
        if mode is None or _stack_length() or is_torch_function_all_disabled():
            return original(self, *args, **kwargs)
        # The usual case: an operator that carries no device.
        if lookup.rewriter_of(mode.table, self) is None:
            try:
                return original(self, *args, **kwargs)
            except (RuntimeError, TypeError) as error:
                if mode.context is None or detour_after(error, mode.context, self, None) is None:
                    raise
        # Outside the `except` clause, as in `LastResort`.
        return _ask(mode, self, args, kwargs)

    return __call__


_entry_points: dict[int, EntryPoint] = {}
"""``id`` of an original function -> its entry point. Aliases such as ``mm`` and ``dsmm`` are equal,
and two objects.
"""


def _entry_point(function: Any) -> EntryPoint:
    """Return the entry point of a function; an entry point is its own."""
    if isinstance(function, EntryPoint):
        return function
    if id(function) not in _entry_points:
        _entry_points[id(function)] = _kind_for(function)(function)
    return _entry_points[id(function)]


def _stand_in(original: Any) -> Any:
    """Return the entry point of a function; a program's own replacement is returned as it is."""
    # By `id` of the original, so an object that a program put there is not found.
    return _entry_points.get(id(original), original)


# ---- where the entry points are ------------------------------------------------------------------

_NAMESPACES = (
    torch,
    torch.nn.functional,
    torch._C._nn,
    torch.fft,
    torch.linalg,
    torch.special,
    torch.sparse,
)

_BUILTINS = (types.BuiltinFunctionType, types.MethodDescriptorType)
_FUNCTIONS = (*_BUILTINS, types.FunctionType)

_WITHOUT_SCHEMA = frozenset({torch.Tensor.new, torch.Tensor.new_tensor})


def _members() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner, name and torch's value of each member of torch's namespaces and of tensors.

    Another installation may be in place: a scope inside another builds what only it needs.
    """
    for namespace in _NAMESPACES:
        for name, value in list(vars(namespace).items()):
            yield namespace, name, _unwrapped(value)
    # Methods that torch.Tensor overrides in Python replace those in C.
    for name, value in {**vars(torch._C.TensorBase), **vars(torch.Tensor)}.items():
        yield torch.Tensor, name, _unwrapped(value)
    for name in dir(torch._C._VariableFunctions):  # torch._VF looks its functions up there
        yield torch._VF, name, _unwrapped(getattr(torch._C._VariableFunctions, name))


def _unwrapped(value: Any) -> Any:
    """Return the member of torch that a wrapper stands for; another value as it is."""
    # By the type, since `isinstance` asks each of thousands of values for its `__class__` too.
    return value.original if issubclass(type(value), (EntryPoint, _Attribute)) else value


class _Walk:
    """One walk through torch's namespaces and all modules, which the installations of an entry
    share.

    Attributes:
        members: The items of :func:`_members`.
        functions: The functions among them.
        loaded: Which modules were loaded, see :func:`loaded`.
        searched: The modules that were searched: name -> id.
        places: The `id` of a function -> the modules that hold it, with its names there.
    """

    def __init__(self) -> None:
        self.members = list(_members())
        # A set, since torch holds many functions in several namespaces.
        self.functions = {value for _, _, value in self.members if isinstance(value, _FUNCTIONS)}
        originals = {id(value) for _, _, value in self.members if isinstance(value, _FUNCTIONS)}
        self.loaded = loaded()
        modules = dict(sys.modules)
        self.searched = _ids(modules)
        self.places: dict[int, list[_Place]] = {}
        for original, place in _held_by(modules.items(), originals):
            self.places.setdefault(original, []).append(place)


def _listed(functions: Collection[Any], walk: _Walk) -> list[Patch]:
    """Return a patch for each place in torch that holds one of these functions or accessors."""
    found: list[Patch] = []
    # By `id`, because equal functions may be several objects (see `_entry_points`).
    wrapped: set[int] = set()
    for owner, name, value in walk.members:
        if isinstance(value, types.GetSetDescriptorType):
            if value.__get__ in functions or value.__set__ in functions:
                found.append(Replaced(owner, name, _Attribute))
        elif isinstance(value, _FUNCTIONS) and value in functions:
            wrapped.add(id(_entry_point(value).original))
            if owner is not torch._VF:  # see _VariableFunctions
                found.append(Replaced(owner, name, _stand_in))
    return [*found, _ImportedByValue(wrapped, walk)]


def _kind_for(function: Any) -> type[EntryPoint]:
    """Return the class of a function's entry point."""
    rewriter = lookup.rewriter_of(dict(rewriters.REGISTERED), function)
    if rewriter in _MOVES:
        return _Move
    if rewriter is rewriters.with_device_keyword:
        return _Naming
    if function in half_precision_matmul.TABLE:
        return _Product
    takes_dtype = isinstance(function, _BUILTINS) and lookup.takes_dtype(function)
    repeated = function in _may_be_refused() or dtype_gaps.asked_last(function) or takes_dtype
    # A function with a rewriter must come to the mode first. Without one the mode is needed for a
    # second attempt only.
    return LastResort if repeated and rewriter is None else EntryPoint


def _for_every_scope(walk: _Walk) -> list[Patch]:
    """Return the patches for every scope.

    They are for functions with a rewriter, with a device in their schema, and for calls that may be
    repeated.
    """
    builtins = {function for function in walk.functions if isinstance(function, _BUILTINS)}
    found = {
        *filter(lookup.takes_device, builtins),
        *_WITHOUT_SCHEMA,
        *filter(dtype_gaps.asked_last, walk.functions),
    }
    # Not by name: `torch.mm` equals `torch.dsmm`, and the set of all functions may hold either.
    found.update(dtype_gaps.PRODUCTS)
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
    return [
        *_listed(found | rewriters.REGISTERED.keys(), walk),
        *(Replaced(operator, "__call__", _operator_call) for operator in operators),
        Constructor(torch.device, _new_device),
        Replaced(torch._VF, "vf", _VariableFunctions),
        Replaced(torch.fx.node, "_find_module_of_method", patching.in_every_thread(_find_module)),
    ]


def _for_dtypes(walk: _Walk) -> list[Patch]:
    """Return patches for targets that lack dtypes: of functions that take a dtype and no device."""
    found = (
        value
        for value in walk.functions
        if isinstance(value, _BUILTINS) and lookup.takes_dtype(value)
    )
    return _listed({value for value in found if lookup.classify(value, {}) is None}, walk)


@functools.cache
def _may_be_refused() -> frozenset[Any]:
    """Return functions that kernels may refuse, except the short ones, which are tensor methods."""
    spaces = (torch.nn.functional, torch._C._nn, torch.linalg, torch.special, torch.fft)
    found = {
        value for space in spaces for value in vars(space).values() if isinstance(value, _FUNCTIONS)
    }
    # Has_torch_function and its siblings.
    found = {value for value in found if value.__module__ != "torch._C"}
    return frozenset(filter(dtype_gaps.can_be_repeated, found))


_Place = tuple[types.ModuleType, str]
"""A module, and a name in it."""


def _ids(modules: dict[str, Any]) -> dict[str, int]:
    return dict(zip(modules, map(id, modules.values()), strict=True))


def _held_by(
    modules: Iterable[tuple[str, Any]], originals: Set[int]
) -> Iterator[tuple[int, _Place]]:
    """Yield each original that a module holds, with the place."""
    for key, module in modules:
        # The modules of this package hold originals on purpose.
        if not isinstance(module, types.ModuleType) or key.startswith("torchdevice."):
            continue
        held = vars(module)
        # Of all at once: most modules hold none.
        if not originals.isdisjoint(map(id, list(held.values()))):
            for name, value in list(held.items()):
                if id(value) in originals:
                    yield id(value), (module, name)


class _ImportedByValue:
    """The patch of modules, torch's own included, that imported functions before the scope.

    A function held by a class, a closure or a default argument is not found.
    """

    def __init__(self, originals: Set[int], walk: _Walk) -> None:
        self._originals = originals
        # The modules that were searched: a module that is imported again is another one.
        self._seen, self._loaded = walk.searched, walk.loaded
        self._patches: dict[_Place, Replaced] = {}
        for original in originals:
            self._add(walk.places.get(original, ()))

    def _add(self, places: Iterable[_Place]) -> None:
        for place in places:
            # `may_be_absent`: the name can be deleted after the search.
            self._patches.setdefault(place, Replaced(*place, _stand_in, may_be_absent=True))

    def install(self) -> None:
        originals = self._originals
        now = loaded()
        if now != self._loaded:
            modules = dict(sys.modules)
            present = _ids(modules)
            # The main module grows while a program is typed in, without an import.
            new = dict(present.items() - self._seen.items()).keys() | {"__main__"}
            found = _held_by([(key, modules.get(key)) for key in new], originals)
            self._add(place for _, place in found)
            self._seen, self._loaded = present, now
        # Only places that hold an original now: the program may have assigned another value since.
        held = []
        for patch in self._patches.values():  # a comprehension would be a frame
            if id(patch.present_value(patch.name, None)) in originals:
                held.append(patch)
        put_in(held)

    def remove(self) -> None:
        take_out(list(self._patches.values()))


def _find_module(original: Any, orig_method: Any) -> str:
    """Look up a function's module for ``torch.fx``, which compares functions by identity."""
    entry = _entry_points.get(id(orig_method))
    # For functions without `__module__` torch searches modules, which hold the entry point.
    return original(orig_method if entry is None or orig_method.__module__ else entry)  # type: ignore[no-any-return]


class _Wrapping(Installation):
    """An installation of wrappers.

    Args:
        build: Returns the patches, from a walk through torch.
    """

    def __init__(self, build: Callable[[_Walk], list[Patch]]):
        super().__init__(lambda: build(self._walk or _Walk()))
        self._walk: _Walk | None = None

    def build(self, walk: _Walk) -> None:
        """Build the patches from a walk that others share."""
        self._walk = walk
        try:
            self.prepare()
        finally:
            self._walk = None


def _of(functions: Collection[Any]) -> _Wrapping:
    return _Wrapping(functools.partial(_listed, functions))


_FOR_EVERY_SCOPE = _Wrapping(_for_every_scope)

_INSTALLATIONS = {
    operator.attrgetter("shown_as"): _of(rewriters.READS),
    operator.attrgetter("runtime.blocking_copies_only"): _of(rewriters.COPIES),
    operator.attrgetter("dtypes.in_float32"): _of(half_precision_matmul.TABLE),
    operator.attrgetter("dtypes.unsupported"): _Wrapping(_for_dtypes),
    operator.attrgetter("runtime.refusing_key"): _Wrapping(
        lambda walk: _listed(_may_be_refused(), walk)
    ),
}
"""The condition on a context -> the installation that it then needs."""

_OF_RUNTIMES: dict[int, _Wrapping] = {}
"""The `id` of a runtime's own table of rewriters, which the installation keeps -> the installation
of their wrappers.
"""


def needed(context: Context) -> list[Installation]:
    """Return the installations that wrap the entry points a context needs."""
    found = [_FOR_EVERY_SCOPE]
    # A comprehension would be a frame more for each entry.
    for asked, each in _INSTALLATIONS.items():
        if asked(context):
            found.append(each)
    own = context.runtime.rewriters
    kind = id(own)
    if own and kind not in _OF_RUNTIMES:
        _OF_RUNTIMES[kind] = _of(own)
    if own:
        found.append(_OF_RUNTIMES[kind])
    if not all(map(_is_built, found)):
        with garbage_collection.paused():
            walk = _Walk()
            for each in found:
                each.build(walk)
    return [*found]


_is_built = operator.attrgetter("is_built")


# ---- functions of torch that a program holds -----------------------------------------------------

# Wrappers do not reach a function that a closure, a default argument, an object or
# `functools.partial` has held since before the scope. Only modules that use torch can hold one, so
# none is held before such a module has been imported.

_ROOTS_OF_TORCH = ("torch", "torchgen", "functorch", "torchdevice")

_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))

_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)


def automatic() -> Literal["mode", "wrap"]:
    """Return the engine of ``engine="auto"`` for a scope of the whole process, entered now."""
    return "mode" if may_be_held() or replace_new.refusal() else "wrap"


def may_be_held() -> bool:
    """Return whether a module outside torch, or ``__main__``, may hold a function of torch."""
    for key, module in list(sys.modules.items()):
        root = key.partition(".")[0]
        if (
            not isinstance(module, types.ModuleType)
            or root in _ROOTS_OF_TORCH
            or root in sys.stdlib_module_names
        ):
            continue
        is_main = key in ("__main__", "__mp_main__")
        if _can_hold(module) if is_main else any(map(_is_of_torch, list(vars(module).values()))):
            return True
    return False


def _is_of_torch(value: object) -> bool:
    """Return whether a value is torch's module, class or function, without calling its methods."""
    if type(value) is types.ModuleType:
        name = vars(value).get("__name__")
    elif issubclass(type(value), _NAMED):
        name = value.__module__ or type(getattr(value, "__self__", None)).__module__
    else:
        return False
    return isinstance(name, str) and name.partition(".")[0] == "torch"


def _can_hold(main: types.ModuleType) -> bool:
    """Return whether ``__main__`` has more than modules, plain values and imported names."""
    for name, value in list(vars(main).items()):
        named = issubclass(type(value), (*_NAMED, types.ModuleType))
        imported = named and getattr(value, "__module__", None) != "__main__"
        if not (
            imported
            or type(value) in _PLAIN_VALUES
            or (name.startswith("__") and name.endswith("__"))
        ):
            return True
    return False
