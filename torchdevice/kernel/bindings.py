"""Registries of everything that a scope puts beneath torch's Python; each area's files fill them.

Functions of torch are replaced (:func:`replaces`). Names that torch lacks are supplied, with values
or functions.

``torch.cuda`` is ordinary Python that calls about a hundred names of ``torch._C``. A build without
CUDA lacks these names. In a CUDA build without a GPU they raise. The files of
``torch_modules/cuda/`` and ``torch_modules/accelerators/`` register functions and values for them
here. torch's own Python calls these unmodified, so argument checks, keys and wording come from
torch itself.

Every name declares its fidelity. ``docs/make_coverage.py`` makes a page of :data:`SUPPLIED`.

Modules that programs import themselves are patched as soon as they are imported, by whatever
statement (:class:`LateModules`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

from torchdevice.kernel import patching, thread_state, torch_internals
from torchdevice.kernel.context import Context
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.patching import TORCHS_OWN, Guarded, Patch, Replaced, ReplacedInImporters

Maker = Callable[[ModuleType], list[Patch]]
"""Returns the patches of a module."""


class Late:
    """Patches of a module that programs import themselves: put in as soon as it is imported.

    Args:
        name: The module's full name.
        makers: Return the patches for the module.
        sees_scope: Whether the module's text runs in the scope; a module of torch sees the machine
            as it is.
        error: The error to raise, given the name, if the module must not be imported. It is found
            all the same, so that a program may ask for it.

    Attributes:
        patches: The patches, from the first installation on.
        module: The module that they change.
        is_plain: Whether to install is to install the patches, so that others' may be among them.
    """

    is_plain = True

    def __init__(
        self,
        name: str,
        *makers: Maker,
        sees_scope: bool = False,
        error: type[Exception] | None = None,
    ):
        self.name = name
        self.makers = list(makers)
        self.sees_scope = sees_scope
        self.error = error
        self.patches: list[Patch] = []
        self.module: ModuleType | None = None

    def build(self) -> list[Patch]:
        """Return the patches, which are made once for a module. It has been imported."""
        module = sys.modules[self.name]
        if self.makers and module is not self.module:
            torch_internals.check("later", self.name)
            # A program may drop a module and import it again, as another object. Patches that are
            # still in the first one are taken out.
            Late.remove(self)
            made = [patch for make in self.makers for patch in make(module)]
            self.patches, self.module = patching.together(made), module
        return self.patches

    def install(self) -> None:
        """Put the patches in. The module has been imported."""
        for patch in self.build():
            patch.install()

    def remove(self) -> None:
        """Take the patches out."""
        for patch in reversed(self.patches):
            patch.remove()


class LateModules:
    """All modules that a scope waits for, as one patch: a finder that defers to Python's own.

    Attributes:
        modules: The modules by name.
    """

    def __init__(self, modules: Iterable[Late]):
        self.modules = {each.name: each for each in modules}
        self._imported: dict[str, ModuleType] = {}
        # Those of all plain modules among the imported ones: each entry would take six frames of
        # Python for each module.
        self._patches: list[Patch] = []

    def install(self) -> None:
        # At the front, before the finders that would load a module unseen.
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        imported = {}
        for name in self.modules:
            # None keeps Python from importing a module. One being imported lacks its functions.
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                imported[name] = module
        if imported != self._imported:
            self._build(imported)
        for patch in self._patches:
            patch.install()
        for name in imported:
            if not self.modules[name].is_plain:
                self.modules[name].install()

    def _build(self, imported: dict[str, ModuleType]) -> None:
        """Make the patches of the plain modules among those that are imported now."""
        if any(imported.get(name) is not each for name, each in self._imported.items()):
            # Patches of a module that the program has dropped may still be in place.
            patching.do_all([patch.remove for patch in reversed(self._patches)])
        plain = [self.modules[name] for name in imported if self.modules[name].is_plain]
        self._patches = patching.together([patch for late in plain for patch in late.build()])
        self._imported = imported

    def remove(self) -> None:
        finders: list[Any] = sys.meta_path
        # On one line: somebody may come between two.
        finders.remove(self) if self in finders else None
        steps = []
        for late in reversed(self.modules.values()):
            # Those that were imported since the scope began have put their patches in themselves.
            is_joined = late.is_plain and self._imported.get(late.name) is late.module
            if late.patches and not is_joined:
                steps.append(late.remove)
        for patch in reversed(self._patches):
            steps.append(patch.remove)
        patching.do_all(steps)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        late = self.modules.get(name)
        if late is None and name.startswith(_COMPILERS):
            late = Late(name)  # a compiler keeps what it asks of the machine
        # The usual finder of files; no builtin or frozen module is waited for.
        spec: Any = (
            None if late is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        )
        if late is not None and spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, late)
        return spec


_COMPILERS = ("torch._inductor.", "torch._dynamo.")


class _Loader:
    """Wraps a loader: patches the module after it has loaded, then hands it back."""

    def __init__(self, loader: Any, late: Late):
        self._loader, self._late = loader, late

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if self._late.error is not None:
            raise self._late.error(self._late.name)
        # Before the module's text runs, which may look at its own loader or reload itself.
        module.__loader__ = module.__spec__.loader = self._loader
        with (
            contextlib.nullcontext()
            if self._late.sees_scope
            else thread_state.suspended(compiling=True)
        ):
            self._loader.exec_module(module)
        self._late.install()  # after the text, so that the functions to patch exist


F = TypeVar("F", bound=Callable[..., Any])

REPLACED: list[Patch] = []
"""The patches of names that exist when this package is imported."""

LATER: dict[str, Any] = {}
"""Full name of a module -> its patches, put in once a program has imported it."""


def replaces(
    owner: Any,
    *names: str,
    native_to: str | None = None,
    makes: bool = False,
    by_value: bool = False,
    optional: bool = False,
    sees_scope: bool = False,
) -> Callable[[F], F]:
    """Register ``(context, original, ...)``, called in a scope instead of functions of torch.

    Args:
        owner: The module or class with the functions or other attributes. One that programs import
            themselves is given as a text: ``"package.module"``, or ``"package.module:Class"``. None
            for one that this torch lacks.
        names: Their names.
        native_to: See :func:`per_context`.
        makes: Whether the function is called with what is there, and returns what takes its place.
        by_value: Whether modules of torch import the functions by value, so that these modules get
            them too.
        optional: Whether some releases or builds of torch lack the functions.
        sees_scope: See :class:`Late`. The module of a text only.
    """
    kind = ReplacedInImporters if by_value else Replaced

    def register(function: F) -> F:
        def patches(within: Any) -> list[Patch]:
            make = function if makes else patching.routed(within, function, native_to)
            return [
                kind(within, name, make) for name in names if not optional or hasattr(within, name)
            ]

        if owner is None:
            return function
        if isinstance(owner, str):
            module, _, inner = owner.partition(":")
            of_inner = operator.attrgetter(inner) if inner else lambda module: module
            later(module, sees_scope=sees_scope)(lambda module: patches(of_inner(module)))
        else:
            REPLACED.extend(patches(owner))
        return function

    return register


def later(module: str, *, sees_scope: bool = False) -> Callable[[Maker], Any]:
    """Register a function that returns patches of a module which programs import themselves."""
    return LATER.setdefault(module, Late(module, sees_scope=sees_scope)).makers.append


class Supplied(NamedTuple):
    """One supplied name.

    Attributes:
        name: Its dotted name: ``"torch._C._cuda_getDevice"``.
        value: A function of the context that returns the name's value.
        fidelity: How close that value comes to the accelerator's own.
        note: A description of the value, in a few words.
        on: Target -> fidelity and note, for the targets where these differ.
        function: The function that is the name's value, without its context; None for other values.
    """

    name: str
    value: Callable[[Context], Any]
    fidelity: Fidelity
    note: str
    on: Mapping[str, tuple[Fidelity, str]] = {}
    function: Callable[..., Any] | None = None


SUPPLIED: dict[str, Supplied] = {}

_named: set[Callable[..., Any]] = set()
"""The functions that are supplied by a name already."""

_C = "torch._C."


def supplied_function(
    name: str,
    fidelity: Fidelity = Fidelity.EXACT,
    *,
    note: str = "",
    native_to: str = "cuda",
    on: Mapping[str, tuple[Fidelity, str]] | None = None,
    denies: Any = None,
) -> Callable[[Any], Any]:
    """Register ``(context, *args)``, which torch calls, without the context, by the given names.

    A call of a function that is not exact is reported once per line of the program, with ``note``
    as its effect. A function with ``on`` reports its calls itself.

    Args:
        name: One name or several, with spaces between: of ``torch._C``, or dotted.
        fidelity: How close the function comes to the accelerator's own.
        note: A description of the function, in a few words; the first line of its docstring if left
            out.
        native_to: The accelerator that the name belongs to: on a target of that type, and in a
            program written for another accelerator, torch's own function is called.
        denies: What programs written for another accelerator find where torch's own name would find
            this one, such as ``patching.ABSENT``; None for what torch itself has there.
        on: Target -> fidelity and note, for the targets where these differ.
    """

    names = name.split()

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        # Functions with a constant or approximate answer report each call; exact ones never do.
        silent = fidelity in (Fidelity.EXACT, Fidelity.UNSUPPORTED)  # what raises notes that itself
        told = note or summary_of(function)
        if silent:
            called = function
        else:
            called = _reporting(function, names[0], fidelity, told.removeprefix("Return "))

        for each in names:
            dotted = each if "." in each else _C + each
            # One function per name, as torch has: Dynamo tells them apart by identity.
            own = functools.wraps(called)(functools.partial(called)) if called in _named else called
            _named.add(called)
            add(
                Supplied(
                    dotted,
                    _value_of(own, native_to, dotted, denies),
                    fidelity,
                    told,
                    on or {},
                    function,
                )
            )
        return function

    return register


def _value_of(
    function: Callable[..., Any], native_to: str, name: str, denies: Any
) -> Callable[[Context], Any]:
    def value(context: Context) -> Any:
        answers = native_to in context.names.stood_for
        if answers:
            found = context.supplied.bound(function)
        else:
            found = _denial(context, native_to, name, denies)
        # Cached by the context, because torch reads names such as `_cuda_getDevice` in hot paths.
        context.supplied.values[value] = found
        return found

    return value


def supplied_as(name: str, other: str, *, native_to: str) -> None:
    """Register the function supplied as ``other`` under an accelerator's dotted ``name`` too."""
    known = SUPPLIED[other]
    supplied_function(name, native_to=native_to, on=known.on)(known.function)


def supplied_value(
    name: str, fidelity: Fidelity = Fidelity.EXACT, *, native_to: str = "cuda", denies: Any = None
) -> Callable[[Any], Any]:
    """Register a function of the context that returns the value of the dotted ``name``.

    Args:
        name: The dotted name.
        fidelity: How close the value comes to the accelerator's own.
        native_to: See :func:`supplied_function`.
        denies: See :func:`supplied_function`.
    """

    def register(function: Callable[[Context], Any]) -> Callable[[Context], Any]:
        def value(context: Context) -> Any:
            answers = native_to in context.names.stood_for
            return function(context) if answers else _denial(context, native_to, name, denies)

        add(Supplied(name, value, fidelity, summary_of(function)))
        return function

    return register


def _denial(context: Context, family: str, name: str, denies: Any) -> Any:
    """Return ``denies`` for a program written for another accelerator, if torch's name exists."""
    if denies is None or context.names.family == family:
        return TORCHS_OWN
    module, _, attribute = name.rpartition(".")
    own = vars(importlib.import_module(module)).get(attribute)
    if attribute in vars(importlib.import_module(module)) and context.runtime.supplied.is_mac:
        return denies  # a Mac's torch is built for no other accelerator
    # A build for CUDA on a machine without a GPU has the name and finds no device, and its own
    # errors say so.
    found = own() if callable(own) else own
    return denies if found else TORCHS_OWN


def imported_by_value(module: ModuleType, names: str) -> None:
    """Replace supplied names of ``torch._C`` in a module of torch that imports them by value."""
    for name in names.split():
        function: Any = SUPPLIED[_C + name].function
        replaces(module, name)(patching.without_original(function))


def add(supplied: Supplied) -> None:
    """Register a supplied name.

    Raises:
        ValueError: The name is supplied already.
    """
    # Two files that supply one name would override each other by the order of imports.
    if supplied.name in SUPPLIED:
        raise ValueError(f"{supplied.name!r} is supplied already")
    SUPPLIED[supplied.name] = supplied


def _reporting(
    function: Callable[..., Any], name: str, fidelity: Fidelity, note: str
) -> Callable[..., Any]:
    @functools.wraps(function)
    def reporting(context: Context, *args: Any, **kwargs: Any) -> Any:
        # Before the call: a strict scope raises here, and the function has no effect.
        context.report(asked(name, sys._getframe(1)), note, fidelity)
        return function(context, *args, **kwargs)

    return reporting


def asked(name: str, caller: FrameType) -> str:
    """Return the public name that a private one stands for, or words for a setting."""
    module = caller.f_globals.get("__name__", "")
    function = caller.f_code.co_name
    private = name.removeprefix(_C)
    if not private.startswith("_") or not module.startswith(("torch.", "torchdevice.")):
        return name
    words = private.removeprefix("_cuda").lstrip("_").removeprefix("set_").replace("_", " ")
    return words if function.startswith("_") else f"{module}.{function}"


def summary_of(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a function's docstring as one line."""
    summary = (function.__doc__ or "").partition("\n\n")[0]
    return " ".join(summary.split())


def patches() -> list[Patch]:
    """Return the patch that makes every supplied name visible to threads with a context."""
    modules: dict[ModuleType, dict[str, Callable[[Any], Any]]] = {}
    for supplied in SUPPLIED.values():
        module, _, name = supplied.name.rpartition(".")
        modules.setdefault(importlib.import_module(module), {})[name] = supplied.value
    return [Guarded(modules)]
