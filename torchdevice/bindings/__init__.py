"""The C-level names that ``torch.cuda`` is written on.

``torch.cuda`` is ordinary Python on top of about a hundred names of ``torch._C``. A build without CUDA lacks them, a
CUDA build without a GPU has them raise. Each file here supplies those that one file of ``torch.cuda`` uses; torch's
own Python runs on them unmodified, so argument checks, keys and wording come from torch itself.

Every name declares its fidelity; the coverage table in the documentation is made from :data:`SUPPLIED`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torchdevice._journal import Fidelity
from torchdevice._patching import OWN, Guarded, Patch

if TYPE_CHECKING:
    from torchdevice._scope import Scope


class Supplied(NamedTuple):
    """One supplied name.

    Attributes:
        name: Its dotted name: ``"torch._C._cuda_getDevice"``.
        value: A function of the scope that returns what the name stands for.
        fidelity: How close that comes to the family's own device.
        note: What it does, in a few words.
        on: The same for the targets where it differs: target -> fidelity and note.
    """

    name: str
    value: Callable[[Scope], Any]
    fidelity: Fidelity
    note: str
    on: Mapping[str, tuple[Fidelity, str]] = {}


SUPPLIED: dict[str, Supplied] = {}

_C = "torch._C."


def supplies(
    name: str | Sequence[str],
    fidelity: Fidelity = Fidelity.EXACT,
    *,
    note: str = "",
    family: str = "cuda",
    on: Mapping[str, tuple[Fidelity, str]] | None = None,
) -> Callable[[Any], Any]:
    """Register a function ``(scope, *args)`` as what ``torch._C.<name>`` does, or a dotted name, or each of several.

    An approximate or inert one is reported once per call site with ``note`` as what is done instead. Where the target
    is the device of ``family`` itself, torch's own is called. A function that differs by target, as ``on`` says,
    reports that itself.
    """

    names = [name] if isinstance(name, str) else name

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = (
            function
            if fidelity in (Fidelity.EXACT, Fidelity.UNSUPPORTED)
            else _reporting(function, names[0], fidelity, note)
        )

        def value(scope: Scope) -> Any:
            found = OWN if scope.kind == family else scope.bound(called)
            scope.known[value] = found
            return found

        for each in names:
            dotted = each if "." in each else _C + each
            add(Supplied(dotted, value, fidelity, note or _first_line(function), on or {}))
        return function

    return register


def answers(name: str, fidelity: Fidelity = Fidelity.EXACT, *, family: str = "cuda") -> Callable[[Any], Any]:
    """Register a function of the scope as the value of the dotted ``name``, as :func:`supplies` does."""

    def register(function: Callable[[Scope], Any]) -> Callable[[Scope], Any]:
        add(
            Supplied(
                name,
                lambda scope: OWN if scope.kind == family else function(scope),
                fidelity,
                _first_line(function),
            )
        )
        return function

    return register


def add(supplied: Supplied) -> None:
    """Register a supplied name.

    Raises:
        ValueError: It is supplied already.
    """
    if supplied.name in SUPPLIED:
        raise ValueError(f"{supplied.name!r} is supplied already")
    SUPPLIED[supplied.name] = supplied


def _reporting(function: Callable[..., Any], name: str, fidelity: Fidelity, note: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def reporting(scope: Scope, *args: Any, **kwargs: Any) -> Any:
        scope.report(name, note, fidelity)
        return function(scope, *args, **kwargs)

    return reporting


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().split("\n")[0]


def patches() -> list[Patch]:
    """Return the patches that make every supplied name visible to threads with a scope."""
    from torchdevice.bindings import (  # noqa: F401  (importing registers)
        accelerator,
        collectives,
        device,
        graphs,
        history,
        memory,
        mps,
        nvtx,
        random,
        settings,
        storage,
        streams,
        unsupported,
        versions,
        xpu,
    )

    modules: dict[str, dict[str, Callable[[Any], Any]]] = {}
    for supplied in SUPPLIED.values():
        module, _, name = supplied.name.rpartition(".")
        modules.setdefault(module, {})[name] = supplied.value
    return [Guarded(importlib.import_module(module), names) for module, names in modules.items()]
