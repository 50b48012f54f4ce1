"""Kernels that are registered with torch while a scope needs them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.patching import Installation


@functools.cache
def installation(kernels: Callable[..., Mapping[str, Callable[..., Any]]], key: str, *more: Any) -> Installation:
    """Return what puts ``kernels(key, *more)`` in place under the dispatch key; one object for equal arguments."""
    registrations = Registrations(key, functools.partial(kernels, key, *more))
    return Installation(lambda: [registrations])


class Registrations:
    """Kernels of operators under one dispatch key.

    Args:
        key: The dispatch key.
        kernels: Returns the kernel of each operator, by its name with namespace and overload. Each is called with the
            call's dispatch keys and its arguments.
    """

    def __init__(self, key: str, kernels: Callable[[], Mapping[str, Callable[..., Any]]]):
        self._key = key
        self._kernels = kernels
        self._libraries: dict[str, torch.library.Library] = {}

    def install(self) -> None:
        """Register the kernels, once. May be called again."""
        self.remove()
        # Suspended, because the patch of Library.impl is for a program's kernels.
        with thread_state.suspended(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*[Oo]verrid", UserWarning)
            for name, kernel in self._kernels().items():
                namespace, _, operator = name.partition("::")
                if namespace not in self._libraries:
                    self._libraries[namespace] = torch.library.Library(namespace, "IMPL")
                # Up to torch 2.12, torch refuses a kernel where Python has registered one, as simulated devices have.
                self._libraries[namespace].impl(operator, kernel, self._key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        """Remove the kernels, so that those of torch are back. May be called again."""
        while self._libraries:
            # Taken out after it is destroyed: an interrupt in between makes the next call destroy it again.
            namespace, library = next(iter(self._libraries.items()))
            library._destroy()
            self._libraries.pop(namespace, None)
