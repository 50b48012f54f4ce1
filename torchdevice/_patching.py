"""How a replacement is put in and taken out.

Three kinds, all of them undone in reverse order when the last activation in the process ends, and all of them
transparent to threads without a scope:

- :class:`Replaced` sets an attribute that torch's Python looks up when it runs. A function put there with
  :func:`per_scope` calls the original wherever no scope is active.
- :class:`Guarded` gives a module names that only threads with a scope can see. The module's class becomes a subclass
  with properties, so the module's own dictionary is not touched.
- :class:`Callback` runs a pair of functions, for what is neither.

Activations are counted: the first installs, the last removes.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from torchdevice import _active
from torchdevice._private import require

logger = logging.getLogger("torchdevice")

_ABSENT = object()

_state = _active.state


class Patch(Protocol):
    """One reversible change."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


OWN: Any = object()
"""What the function of a guarded name returns to let torch answer for itself."""


def per_scope(
    original: Callable[..., Any], replacement: Callable[..., Any], *, family: str | None = None
) -> Callable[..., Any]:
    """Return a function that calls ``replacement(scope, original, ...)`` where a scope is active, else ``original``.

    The result keeps the original's name, documentation and signature.

    Args:
        original: Torch's own function.
        replacement: What stands in for it.
        family: The device family it belongs to: where the target is that device itself, torch's own is called.
    """

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        scope = _state.scope
        if scope is None or scope.kind == family:
            return original(*args, **kwargs)
        return replacement(scope, original, *args, **kwargs)

    return function


class Replaced:
    """An attribute of a module or class, replaced by what ``make(original)`` returns.

    Args:
        owner: A module or a Python class.
        name: The attribute.
        make: Called with the current value at installation; what it returns is set, and again with the same value.
        may_be_absent: The attribute need not exist; ``make`` then gets None, and removal deletes it.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any], *, may_be_absent: bool = False):
        if not may_be_absent:
            require(owner, name)
        self._owner, self._name, self.make = owner, name, make
        self._previous: Any = _ABSENT
        self._original: Any = _ABSENT
        self._value: Any = _ABSENT

    def install(self) -> None:
        self._previous = vars(self._owner).get(self._name, _ABSENT)
        original = getattr(self._owner, self._name, None)
        if self._value is _ABSENT or original is not self._original:  # made once for the same original
            self._original, self._value = original, self.make(original)
        setattr(self._owner, self._name, self._value)

    def remove(self) -> None:
        if vars(self._owner).get(self._name, _ABSENT) is not self._value:
            logger.info("%s.%s was set to something else during the scope and stays so", self._owner, self._name)
        elif self._previous is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._previous)


class ReplacedItem:
    """A value of a dictionary, replaced by what ``make(original)`` returns."""

    def __init__(self, owner: dict[str, Any], name: str, make: Callable[[Any], Any]):
        self._owner, self._name = owner, name
        self._original = owner[name]
        self._value = make(self._original)

    def install(self) -> None:
        self._owner[self._name] = self._value

    def remove(self) -> None:
        self._owner[self._name] = self._original


def replaced_function(owner: Any, name: str, replacement: Callable[..., Any], *, family: str | None = None) -> Replaced:
    """Return the patch that routes ``owner.name`` to ``replacement(scope, original, ...)`` where a scope is active."""
    return Replaced(owner, name, lambda original: per_scope(original, replacement, family=family))


class Everywhere:
    """A function of torch, replaced in each of torch's modules that has imported it by value.

    Modules that are imported later are found at the next installation; what they import meanwhile is the replacement.
    """

    def __init__(self, owner: ModuleType, name: str, make: Callable[[Any], Any]):
        self._name, self._make = name, make
        self._function = require(owner, name)
        self._modules = 0
        self._patches: list[Replaced] = []

    def install(self) -> None:
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._patches = [Replaced(module, self._name, self._make) for module in self._holders()]
        for patch in self._patches:
            patch.install()

    def remove(self) -> None:
        for patch in self._patches:
            patch.remove()

    def _holders(self) -> list[ModuleType]:
        return [
            module
            for key, module in list(sys.modules.items())
            if key.startswith("torch.") and vars(module).get(self._name) is self._function
        ]


def replaced_everywhere(
    owner: ModuleType, name: str, replacement: Callable[..., Any], *, family: str | None = None
) -> Everywhere:
    """Return the patch that routes a function of torch to ``replacement`` in each module that has imported it."""
    return Everywhere(owner, name, lambda original: per_scope(original, replacement, family=family))


def subclass_in_place_of(original: type, new: Callable[..., Any], *, also: tuple[type, ...] = ()) -> Any:
    """Return a subclass of an immutable class of torch that can take its place under its name.

    Annotations such as ``torch.Generator | None``, ``isinstance``, ``issubclass`` and ``==`` still mean the original.

    Args:
        original: The class.
        new: The ``__new__`` of the subclass; it may return instances of the original.
        also: Classes that are subclasses of it on the device they belong to, and not in every build.
    """

    class Meta(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (original, *also))

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    members = {"__new__": new, "__module__": original.__module__, "__doc__": original.__doc__}
    return Meta(original.__name__, (original,), members)


class Guarded:
    """Names of a module that answer by scope.

    Args:
        module: The module, for example ``torch._C``.
        names: For each name, a function of the active scope that returns its value, or :data:`OWN`.
    """

    def __init__(self, module: ModuleType, names: Mapping[str, Callable[[Any], Any]]):
        self._module = module
        self._previous: type[ModuleType] = type(module)
        properties = {name: _guarded_property(name, value) for name, value in names.items()}
        self._class = type(f"Guarded[{module.__name__}]", (self._previous,), properties)

    def install(self) -> None:
        self._module.__class__ = self._class

    def remove(self) -> None:
        self._module.__class__ = self._previous


def _guarded_property(name: str, value: Callable[[Any], Any]) -> property:
    def get(module: ModuleType) -> Any:
        scope = _state.scope
        if scope is not None:
            found = scope.known.get(value) or value(scope)
            if found is not OWN:
                return found
        try:
            return vars(module)[name]
        except KeyError:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}") from None

    def set_(module: ModuleType, new: Any) -> None:
        vars(module)[name] = new

    return property(get, set_)


class Callback:
    """A change made and undone by two functions."""

    def __init__(self, install: Callable[[], None], remove: Callable[[], None]):
        self.install = install
        self.remove = remove


class Installation:
    """A list of patches, in place while at least one activation holds it.

    Args:
        build: Returns the patches; called at the first acquisition, so that importing the package builds nothing.
    """

    def __init__(self, build: Callable[[], list[Patch]]):
        self._build = build
        self._patches: list[Patch] | None = None
        self._installed: list[Patch] = []
        self._holders = 0
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def acquire(self) -> None:
        """Install everything if nobody holds it yet. A failure half-way leaves nothing installed."""
        with self._lock:
            if self._holders == 0:
                if self._patches is None:
                    self._patches = self._build()
                try:
                    for patch in self._patches:
                        patch.install()
                        self._installed.append(patch)
                except BaseException:
                    self._remove_all()
                    raise
            self._holders += 1

    def release(self) -> None:
        """Remove everything if nobody else holds it."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._remove_all()

    def _remove_all(self) -> None:
        while self._installed:
            self._installed.pop().remove()


def acquire_all(installations: Sequence[Installation]) -> None:
    """Acquire some installations in their order. A failure leaves none of them acquired."""
    for number, installation in enumerate(installations):
        try:
            installation.acquire()
        except BaseException:
            release_all(installations[:number])
            raise


def release_all(installations: Sequence[Installation]) -> None:
    """Release some installations in the reverse order."""
    for installation in reversed(installations):
        installation.release()
