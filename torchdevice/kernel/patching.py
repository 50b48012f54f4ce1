"""Reversible patches of torch, and their installation.

A :class:`Patch` is one reversible change of torch. All of them are undone when the last entry in
the process is left, and none of them is noticed by a thread without a scope:

- :class:`Replaced` sets an attribute that torch's Python looks up when it runs. A function put
  there with :func:`per_context` calls the original wherever no context is active.
- :class:`Guarded` gives a module names that only threads with a context can see. The module's class
  becomes a subclass with a descriptor for each name.
- :class:`Callback` runs a pair of functions, for all other changes.

An interrupt may come between any two lines of an installation, and so may a destructor or a signal
handler that enters or leaves a scope itself. Therefore ``install`` and ``remove`` of a patch look
at what is in place instead of remembering it, and may be called again at any time;
:class:`Installation` calls them until what is in place is what is wanted.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol

from torchdevice.kernel.devices.accelerators import of_module
from torchdevice.kernel.python import forks, garbage_collection
from torchdevice.kernel.python.logs import logger
from torchdevice.kernel.thread_state import state
from torchdevice.kernel.torch_internals import require

ABSENT: Any = object()
"""Stands for an attribute that is not there. A guarded name's function returns it where the name
does not exist.
"""


class Patch(Protocol):
    """One reversible change. Both methods may be called again, and after either was interrupted."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


TORCHS_OWN: Any = object()
"""The function of a guarded name returns this object to let torch answer for itself."""


def per_context(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    *,
    native_to: str | None = None,
    family: str | None = None,
) -> Callable[..., Any]:
    """Return a function that calls ``replacement(context, original, ...)`` in a context.

    It calls ``original`` elsewhere. The result keeps the original's name, documentation and
    signature.

    Args:
        original: Torch's own function.
        replacement: The function that stands in for ``original``.
        native_to: The device type the function belongs to: where the target is that device, torch's
            own is called.
        family: The accelerator whose module has the function, which is absent from programs written
            for others.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        # Read once: a signal handler may enter or leave a scope while this function runs.
        context = state.context
        # A simulated Mac is native to "mps"; the machine's context below may still answer.
        while context is not None:
            names = context.names
            if names.family != native_to and (family is None or family in names.families):
                break
            context = names.answered_by
        if context is None:
            return original(*args, **kwargs)
        return replacement(context, original, *args, **kwargs)

    # After `functools.wraps`, which copies this attribute from an original that is a replacement.
    stands_for(function, original)
    # TorchScript compiles the function that this names: here the original.
    function.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    return function


def in_every_thread(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a wrapper that calls ``replacement(original, ...)`` in every thread."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return function

    return make


def stands_for(replacement: Any, original: Any) -> None:
    """Note the original of a replacement, for :func:`original_of`."""
    replacement._torchdevice_original = original


def original_of(function: Any) -> Any:
    """Return torch's own function; functions that are not replacements are returned unchanged."""
    return getattr(function, "_torchdevice_original", function)


class OwnModule(str):
    """A class's ``__module__``, hidden from instances. pybind11 pickles functions by it."""

    def __get__(self, instance: Any, owner: type) -> str:
        # On the class it is a plain text; only instances must seem to have none.
        if instance is None:
            return str(self)
        raise AttributeError("__module__")


class Replaced:
    """An attribute of a module or class, replaced by the result of ``make(original)``.

    Args:
        owner: A module or a Python class.
        name: The attribute.
        make: Called with the current value at installation; its result is used again while that
            value is unchanged.
        may_be_absent: The attribute need not exist; ``make`` then gets None, and removal deletes
            the attribute.

    Attributes:
        present_value: Returns the owner's attribute of a name, or a default.
        before: The value that :func:`put_in` found there last.
        original: The last argument of ``make``.
        value: The last result of ``make``.
        expected: Whether the value should be there.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Any], Any], *, may_be_absent: bool = False
    ):
        if not may_be_absent:
            require(owner, name)
        self.owner = owner
        self.name = name
        self.make = make
        # A class has a mapping proxy, a module its dictionary; both follow later changes.
        self.present_value: Callable[[str, Any], Any] = owner.__dict__.get  # of a live view
        self.before: Any = ABSENT
        self.original: Any = ABSENT
        self.value: Any = ABSENT
        self.expected = False

    def install(self) -> None:
        put_in((self,))

    def remove(self) -> None:
        take_out((self,))

    def places(self) -> tuple[Replaced, ...]:
        return (self,)


def put_in(patches: Iterable[Replaced]) -> None:
    """Install attributes in order, in one call of Python: a scope has hundreds of them."""
    for patch in patches:
        name, present_value = patch.name, patch.present_value
        # Read at each turn: what a signal handler has put in place is seen.
        while (present := present_value(name, ABSENT)) is not patch.value or patch.value is ABSENT:
            # The usual case is what was there before, without another look. The replacement is made
            # again only for another original, since other patches and Dynamo hold it by identity.
            if present is not patch.before or present is ABSENT:
                original = getattr(patch.owner, name, None)  # by attribute, for an inherited one
                if present_value(name, ABSENT) is not present:
                    continue  # somebody came between, and may have installed this patch
                if patch.value is ABSENT or original is not patch.original:
                    patch.original, patch.value = original, patch.make(original)
                patch.before = present
            # The last step. An interrupt before it leaves torch's own value in place.
            setattr(patch.owner, name, patch.value)
            break
        patch.expected = True


def take_out(patches: Sequence[Replaced]) -> None:
    """Remove attributes, last first, each even if another failed; then raise the first error."""
    failed: BaseException | None = None
    # In reverse, so that two patches of one attribute each restore the value before them.
    for patch in reversed(patches):
        try:
            if patch.value is ABSENT or patch.present_value(patch.name, ABSENT) is not patch.value:
                if patch.expected:
                    # A program that patches torch inside the scope and keeps it: its value wins.
                    logger.info(
                        "%s.%s was set to something else during the scope and stays so",
                        patch.owner,
                        patch.name,
                    )
            elif patch.before is ABSENT:
                # On one line: somebody may have removed it since the line above.
                delattr(patch.owner, patch.name) if patch.name in vars(patch.owner) else None
            else:
                setattr(patch.owner, patch.name, patch.before)
            patch.expected = False
        # Also for KeyboardInterrupt: the remaining attributes must not stay replaced.
        except BaseException as error:
            failed = error if failed is None else failed  # which may be falsy
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # or its traceback would hold this frame, and this frame the error


class ReplacedItem:
    """A value of a dictionary, replaced by the result of ``make(original)``."""

    def __init__(self, owner: dict[Any, Any], name: Any, make: Callable[[Any], Any]):
        self._owner, self._name = owner, name
        self._original = owner[name]
        self._value = make(self._original)

    def install(self) -> None:
        self._owner[self._name] = self._value

    def remove(self) -> None:
        # Somebody else's value in the meantime is left alone.
        if self._owner.get(self._name) is self._value:
            self._owner[self._name] = self._original


class Added:
    """Entries that a dictionary or a set of torch's has in scopes only.

    Args:
        container: The dictionary or the set.
        entries: The entries that it lacks outside of scopes: a mapping for a dictionary, a set for
            a set.
    """

    def __init__(self, container: Any, entries: Any):
        self._container, self._entries = container, entries

    def install(self) -> None:
        self._container.update(self._entries)

    def remove(self) -> None:
        if isinstance(self._container, set):
            self._container.difference_update(self._entries)
            return
        for each in self._entries:
            self._container.pop(each, None)


def replaced_function(
    owner: Any,
    name: str,
    replacement: Callable[..., Any],
    *,
    native_to: str | None = None,
    may_be_absent: bool = False,
) -> Replaced:
    """Return a patch of ``owner.name`` by ``replacement(context, original, ...)`` in contexts."""

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        kind = "type object" if isinstance(owner, type) else "module"
        raise AttributeError(f"{kind} {owner.__name__!r} has no attribute {name!r}")

    make = routed(owner, replacement, native_to)
    return Replaced(
        owner, name, lambda original: make(original or absent), may_be_absent=may_be_absent
    )


def routed(
    owner: Any, replacement: Callable[..., Any], native_to: str | None
) -> Callable[[Any], Any]:
    """Return a decorator for replacements of functions of ``owner``, see :func:`per_context`.

    A name of an accelerator's module is native to that accelerator.
    """
    family = of_module(owner)
    return functools.partial(
        per_context, replacement=replacement, native_to=native_to or family, family=family
    )


def without_original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement that calls ``function(context, ...)`` without torch's own function."""
    return lambda context, original, *args, **kwargs: function(context, *args, **kwargs)


def without_cache(context: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's function below its cache, which would keep a scope's answer for good."""
    return inspect.unwrap(original)(*args, **kwargs)


class ReplacedInImporters:
    """A torch function, replaced in each torch module that imported it by value.

    A module that is imported later is found at the next installation. A module that is imported in
    a scope gets the replacement.
    """

    def __init__(self, owner: ModuleType, name: str, make: Callable[[Any], Any]):
        # The importers share one object, so `a.f is b.f` stays true.
        self._name, self._make = name, functools.cache(make)
        self._function = require(owner, name)
        # All names are searched for at once, see `_importers`.
        _imported_names.add(name)
        self._patches: dict[ModuleType, Replaced] = {}

    def install(self) -> None:
        put_in(self.places())

    def remove(self) -> None:
        take_out(list(self._patches.values()))

    def places(self) -> Collection[Replaced]:
        """Return the patch of each module that holds the function now."""
        for module in _importers(loaded(), frozenset(_imported_names))[self._name]:
            # By identity: a module may have a function of its own by that name.
            if vars(module).get(self._name) is self._function and module not in self._patches:
                self._patches[module] = Replaced(module, self._name, self._make)
        return self._patches.values()


def loaded() -> tuple[int, str, int]:
    """Return how many modules are loaded, and the newest: it differs after another import."""
    # The count alone misses a module that took the place of a removed one, and the name one that
    # was imported again.
    name = next(reversed(sys.modules))
    return len(sys.modules), name, id(sys.modules.get(name))


_imported_names: set[str] = set()
"""The names of the functions that are replaced in their importers."""


@functools.lru_cache(maxsize=1)
def _importers(
    loaded: tuple[int, str, int], names: frozenset[str]
) -> Mapping[str, list[ModuleType]]:
    """Return torch's modules that have each name, found by one search until another import."""
    found: dict[str, list[ModuleType]] = {name: [] for name in names}
    # A copy, since an import in another thread changes the dictionary during the loop.
    for key, module in list(sys.modules.items()):
        # Which has the originals.
        if key == "torch" or (key.startswith("torch.") and key != "torch._C"):
            for name in vars(module).keys() & names:
                found[name].append(module)
    return found


def subclass_in_place_of(
    original: type, new: Callable[..., Any], *, also: tuple[type, ...] = ()
) -> Any:
    """Return a subclass of an immutable class of torch that can take its place under its name.

    Annotations such as ``torch.Generator | None``, ``isinstance``, ``issubclass`` and ``==`` still
    mean the original.

    Args:
        original: The class.
        new: The ``__new__`` of the subclass; it may return instances of the original.
        also: Further classes that ``issubclass`` accepts: in some builds of torch they do not
            derive from it.
    """

    # Derived from the original's metaclass, or Python raises a metaclass conflict.
    class Meta(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (original, *also))

        # Tables that are keyed by the original find the subclass too.
        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    members = {"__new__": new, "__module__": original.__module__, "__doc__": original.__doc__}
    return Meta(original.__name__, (original,), members)


# ---- names whose value depends on the thread -----------------------------------------------------


class Guarded:
    """Names of modules whose values depend on the thread's context.

    Args:
        modules: For each module, such as ``torch._C``, and for each of its names, a function of the
            active context that returns the value, :data:`TORCHS_OWN` or :data:`ABSENT`.
    """

    def __init__(self, modules: Mapping[ModuleType, Mapping[str, Callable[[Any], Any]]]):
        self._classes = [
            (module, type(module), _with_names(module, names)) for module, names in modules.items()
        ]

    def install(self) -> None:
        for module, _, guarded in self._classes:
            module.__class__ = guarded

    def remove(self) -> None:
        for module, before, guarded in self._classes:
            # Another package may have put its own subclass on top, which must not be taken away.
            if type(module) is guarded:
                module.__class__ = before


def _with_names(module: ModuleType, names: Mapping[str, Callable[[Any], Any]]) -> type[ModuleType]:
    descriptors = {name: _GuardedName(name, value) for name, value in names.items()}
    # Pybind11 reads `__module__` of the instance, see `OwnModule`.
    members = {**descriptors, "__module__": OwnModule(__name__)}
    return type(f"Guarded[{module.__name__}]", (type(module),), members)


class _GuardedName:
    """The descriptor of a guarded name. Without a context it acts as a plain attribute.

    A value that a program sets there belongs to its context, and ends with it.
    """

    def __init__(self, name: str, value: Callable[[Any], Any]):
        self._name, self._value = name, value
        # The name lacks its module; the value tells equal names of two modules apart.
        self._key = (value, name)

    def __get__(self, module: ModuleType | None, owner: type) -> Any:
        if module is None:
            return self
        context = state.context
        while context is not None:
            supplied = context.supplied
            written = supplied.written
            if written and self._key in written:
                found = written[self._key]
            else:
                # Only functions are cached, never false. Other values are computed at each read.
                found = supplied.values.get(self._value) or self._value(context)
            if found is ABSENT:
                raise self._absent(module)
            if found is not TORCHS_OWN:
                return found
            context = context.names.answered_by
        try:
            # The module's dictionary, not `getattr`, which would come back here.
            return vars(module)[self._name]
        except KeyError:
            raise self._absent(module) from None

    def __set__(self, module: ModuleType, new: Any) -> None:
        # Monkeypatch writes what it read, which must not count as a value of the program.
        context = self._answering()
        if context is None:
            vars(module)[self._name] = new
        elif self._is_what_was_there(module, context, new):
            context.supplied.written.pop(self._key, None)
        else:
            context.supplied.written[self._key] = new

    def __delete__(self, module: ModuleType) -> None:
        self.__get__(module, type(module))  # raises where there is nothing to delete
        context = self._answering()
        if context is None:
            del vars(module)[self._name]
        else:
            context.supplied.written[self._key] = ABSENT

    def _answering(self) -> Any:
        """Return the context that answers for the name; None where torch does."""
        context = state.context
        while context is not None and self._value(context) is TORCHS_OWN:
            context = context.names.answered_by
        return context

    def _is_what_was_there(self, module: ModuleType, context: Any, new: Any) -> bool:
        """Return whether a program restores a found value, by attribute or by dictionary."""
        if new is self._value(context):
            return True
        return self._key in context.supplied.written and new is vars(module).get(self._name, ABSENT)

    def _absent(self, module: ModuleType) -> AttributeError:
        return AttributeError(f"module {module.__name__!r} has no attribute {self._name!r}")


class Together:
    """Replaced attributes that follow each other in a list of patches, as one patch.

    Attributes:
        patches: The patches, in the order of installation.
        places: The attributes that they replace.
    """

    def __init__(self, patches: list[Replaced | ReplacedInImporters]):
        self.patches = patches
        self.places: list[Replaced] = []
        self._searched = 0

    def install(self) -> None:
        # A changed number of modules is a cheap sign of an import; without it, places are known.
        now = len(sys.modules)
        if now != self._searched:
            self.places = [place for patch in self.patches for place in patch.places()]
            self._searched = now
        put_in(self.places)

    def remove(self) -> None:
        take_out(self.places)


def together(patches: Sequence[Patch]) -> list[Patch]:
    """Return patches with all replaced attributes joined in their order and put first."""
    replaced: list[Replaced | ReplacedInImporters] = []
    others: list[Patch] = []
    for patch in patches:
        if isinstance(patch, (Replaced, ReplacedInImporters)):
            replaced.append(patch)
        elif isinstance(patch, Together):
            replaced.extend(patch.patches)
        else:
            others.append(patch)
    # First, for a patch of modules that import by value looks at what is replaced already.
    return [Together(replaced), *others] if replaced else others


class Callback(NamedTuple):
    """A change made and undone by two functions, which may be called again."""

    install: Callable[[], None]
    remove: Callable[[], None]


# ---- all of them together ------------------------------------------------------------------------


class Installation:
    """A list of patches, in place while it has a holder.

    Args:
        build: Returns the patches; called when they are first needed, so that importing the package
            builds nothing.

    Attributes:
        is_built: Whether the patches have been built.
    """

    def __init__(self, build: Callable[[], list[Patch]]):
        self._build = build
        self.is_built = False
        self._patches: list[Patch] | None = None
        self._holders: set[object] = set()
        self._in_place: bool | None = False  # None while patches are being installed or removed
        self._round: object = None
        self._lock = forks.lock(vars(self))

    def hold(self, holder: object) -> None:
        """Install everything. If that fails or is interrupted, the caller must :meth:`drop`."""
        self._holders.add(holder)
        # On one line: an interrupt between two lines would leave the lock held. Nested entries,
        # which change nothing, take no lock.
        if self._in_place is not True:
            with self._lock: self._change()  # noqa: E701  # fmt: skip

    def drop(self, holder: object) -> None:
        """Remove all if nobody else holds. May be repeated, and called without :meth:`hold`."""
        self._holders.discard(holder)
        if self._in_place is not bool(self._holders):
            with self._lock: self._change()  # noqa: E701  # fmt: skip

    def prepare(self) -> None:
        """Build the patches. May be called again."""
        # On one line: see `hold`.
        with self._lock: self._built()  # noqa: E701  # fmt: skip

    def _built(self) -> list[Patch]:
        if self._patches is None:
            # Building makes thousands of lasting objects, and a collection would find no garbage.
            with garbage_collection.paused():
                self._patches = together(self._build())
            self.is_built = True
        return self._patches

    def _change(self) -> None:
        """Install or remove all patches, again if another call of this method came meanwhile."""
        patches = self._patches
        if patches is None:
            patches = self._built()
        while True:
            # A nested call of this method replaces the round, and the outer call then starts again.
            self._round = this_round = object()
            wanted = bool(self._holders)
            # None is neither True nor False, so after an interrupt the next call settles.
            self._in_place = None
            if wanted:
                for patch in patches:
                    patch.install()
            else:
                # Without a frame of Python.
                do_all(list(map(operator.attrgetter("remove"), reversed(patches))))
            if self._round is this_round and bool(self._holders) is wanted:
                self._in_place = wanted
                return


def do_all(steps: Sequence[Callable[..., None]], *args: Any) -> None:
    """Do each step, even if a step before it failed; then raise the first error."""
    failed: BaseException | None = None
    for step in steps:
        try:
            step(*args)
        except BaseException as error:
            failed = error if failed is None else failed  # which may be falsy
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # or its traceback would hold this frame, and this frame the error
