"""``torch.compile`` and ``torch.export``, whose compilers see the machine as it is.

Dynamo traces the program's code and must see what the program sees. The compilers that get its graphs, the modules of
these compilers while they are imported, and the functions that ask whether Triton can be used must see no CUDA: no CUDA
code is to be made, and torch keeps the answers for the rest of the process.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from torchdevice import thread_state
from torchdevice.compile.dynamo import WHEN_IMPORTED, truthfully
from torchdevice.context import Context
from torchdevice.fidelity import Fidelity
from torchdevice.patching import (
    Patch,
    replaced_function,
    replaced_in_importers,
)


def _export(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    with thread_state.suspended(compiling=True):
        importlib.import_module("torch._inductor.compile_fx")
    WHEN_IMPORTED.install()
    return original(*args, **kwargs)


def _compile(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    backend = kwargs.get("backend", "inductor")
    with thread_state.suspended(compiling=True):
        if backend == "inductor":
            importlib.import_module("torch._inductor.compile_fx")
        elif isinstance(backend, str):
            torch._dynamo.list_backends(None)
        asked = [] if context.runtime.makes_triton_code else _asked_of_triton(kwargs)
    WHEN_IMPORTED.install()
    for option in asked:
        context.report(f"torch.compile with {option}", "nothing: there is no Triton", Fidelity.INERT)
    return original(*args, **kwargs)


def _asked_of_triton(kwargs: dict[str, Any]) -> list[str]:
    """Return the options in these arguments of ``torch.compile`` that have an effect on Triton code only."""
    backend = kwargs.get("backend", "inductor")
    if backend != "inductor":
        return ["backend cudagraphs"] if backend == "cudagraphs" else []
    modes = importlib.import_module("torch._inductor").list_mode_options()
    options = {**modes.get(kwargs.get("mode"), {}), **(kwargs.get("options") or {})}
    return [name for name, value in options.items() if name.startswith("triton.") and value]


def patches() -> list[Patch]:
    """Return the patches of ``torch.compile``, ``torch.export``, Dynamo and the functions that ask about Triton."""
    triton = importlib.import_module("torch.utils._triton")
    questions = [name for name, function in vars(triton).items() if hasattr(function, "cache_clear")]
    return [
        replaced_function(torch, "compile", _compile),
        replaced_function(importlib.import_module("torch.export"), "export", _export),
        WHEN_IMPORTED,
        *(replaced_in_importers(triton, name, truthfully) for name in questions),
    ]
