"""Libraries that cache whether a package or CUDA is there, which a program then asks them for.

transformers looks for ``flash_attn`` once, and finds none, so that a model has torch's attention by
default. A program that asks for ``attn_implementation="flash_attention_2"``, or whose remote code
asks whether flash_attn is there, demands it. In a scope the answer to these questions is yes, and
to others what transformers has found. diffusers looks for ``xformers`` in the same way, and a
program demands it by ``enable_xformers_memory_efficient_attention()``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from torchdevice.kernel import thread_state
from torchdevice.kernel.bindings import later
from torchdevice.kernel.context import Context
from torchdevice.kernel.journal import callers
from torchdevice.kernel.patching import (
    Callback,
    Patch,
    Replaced,
    ReplacedItem,
    per_context,
    replaced_function,
)
from torchdevice.packages import finder
from torchdevice.packages.finder import StandInModule


def _stands_in(context: Context, package: str) -> bool:
    """Return whether a package is stood in for in a context, and is not installed."""
    if context.options.packages != "stand-in" or "cuda" not in context.names.stood_for:
        return False
    if isinstance(sys.modules.get(package), StandInModule):
        return True
    return not importlib.machinery.PathFinder.find_spec(package)


def _is_there(package: str) -> Any:
    """Return the replacement of a function that asks for a package that is stood in for."""

    def is_there(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
        return _stands_in(context, package) or original(*args, **kwargs)

    return is_there


def _is_there_for_programs(package: str) -> Any:
    """Return a replacement like that of :func:`_is_there`, for questions of the program itself."""

    def is_there(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
        asked_by_program = callers.kind_of(callers.caller_frame()) == callers.PROGRAM
        return (asked_by_program and _stands_in(context, package)) or original(*args, **kwargs)

    return is_there


# ---- bitsandbytes --------------------------------------------------------------------------------


# It chooses its native part while it is imported, by `torch.cuda.is_available()`, and keeps that
# for the process. Its text sees the machine as it is, so that it takes its kernels for CPUs instead
# of a library for CUDA that cannot load.
later("bitsandbytes")(lambda module: [])


# ---- kernels -------------------------------------------------------------------------------------


@later("kernels.backends", sees_scope=True)
def _patches_of_variants(module: ModuleType) -> list[Patch]:
    """Let the library of Hugging Face's Hub take a kernel's build for the target.

    It goes by ``torch.version.cuda``, and a build for CUDA computes on no other device.
    """

    def backend(context: Context, original: Any) -> Any:
        with thread_state.suspended():
            found = original()
        # Its result in a build for CUDA on a machine without a GPU.
        return module.CPU() if found.name == "cuda" else found

    return [replaced_function(module, "_backend", backend, native_to="cuda", may_be_absent=True)]


# ---- transformers --------------------------------------------------------------------------------


_ASKING = ("is_flash_attn_2_available", "is_flash_attn_greater_or_equal")


def _patches_of_questions(module: ModuleType) -> list[Patch]:
    """Answer remote modelling code, which asks before it imports the package."""
    there = [name for name in _ASKING if hasattr(module, name)]
    return [
        replaced_function(module, name, _is_there_for_programs("flash_attn"), native_to="cuda")
        for name in there
    ]


for _module in ("transformers.utils", "transformers.utils.import_utils"):
    later(_module, sees_scope=True)(_patches_of_questions)


@later("transformers.modeling_flash_attention_utils", sees_scope=True)
def _patches_of_dispatch(module: ModuleType) -> list[Patch]:
    """Answer the checks behind ``attn_implementation="flash_attention_2"``."""
    found: list[Patch] = [Callback(lambda: None, lambda: _forget(module))]
    if hasattr(module, "is_flash_attn_2_available"):
        found.append(
            replaced_function(
                module, "is_flash_attn_2_available", _is_there("flash_attn"), native_to="cuda"
            )
        )
    matrix = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    if "general_availability_check" in matrix.get(2, {}):
        check = _is_there("flash_attn")
        make = lambda original: per_context(original, check, native_to="cuda")  # noqa: E731
        found.append(ReplacedItem(matrix[2], "general_availability_check", make))
    return found


def _forget(module: ModuleType) -> None:
    """Let transformers look for the package again: it keeps the functions that it loaded last."""
    code = getattr(vars(module).get("_flash_fn"), "__code__", None)
    if code is not None and code.co_filename.startswith(_FOLDER):
        for name in _KEPT:
            if name in vars(module):
                setattr(module, name, None)


_FOLDER = __file__.rpartition("libraries")[0]

_KEPT = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
"""The names of transformers' module in which it keeps the functions of the implementation that it
loaded last.
"""


# ---- diffusers -----------------------------------------------------------------------------------


class _Demanded(ModuleType):
    """A package's stand-in, in a module that failed to import it: it has the same attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(finder.demanded(self.__name__), name)


def _patches_of_xformers(module: ModuleType) -> list[Patch]:
    """Answer the check in ``enable_xformers_memory_efficient_attention()``."""
    found: list[Patch] = []
    if hasattr(module, "is_xformers_available"):
        found.append(
            replaced_function(
                module, "is_xformers_available", _is_there("xformers"), native_to="cuda"
            )
        )
    for name in ("xformers", "xops"):
        if name in vars(module) and vars(module)[name] is None:
            found.append(Replaced(module, name, lambda original: _Demanded("xformers")))
    return found


for _module in ("diffusers.models.attention_processor", "diffusers.models.attention"):
    later(_module, sees_scope=True)(_patches_of_xformers)
