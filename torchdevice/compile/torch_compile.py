"""``torch.compile`` and ``torch.export``, whose compilers see the machine as it is.

Dynamo traces the program's code and must see what the program sees. The compilers that get its graphs, the modules of
these compilers while they are imported, and the functions that ask whether Triton can be used must see no CUDA: no CUDA
code is to be made, and torch keeps the answers for the rest of the process.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchdevice.compile.dynamo import WHEN_IMPORTED, truthfully
from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.core.importing import WhenImported
from torchdevice.core.patching import Patch, replaced_function, replaced_in_importers
from torchdevice.engines.rewriters import native_device
from torchdevice.foundation.fidelity import Fidelity


def _export(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    with thread_state.suspended(compiling=True):
        # Dynamo is imported by then, and can be patched.
        importlib.import_module("torch._inductor.compile_fx")
    WHEN_IMPORTED.install()
    # Outside the suspended block: Dynamo traces the program as the scope's.
    return original(*args, **kwargs)


def _compile(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    backend = kwargs.get("backend", "inductor")
    with thread_state.suspended(compiling=True):
        # Imported here, where no CUDA is seen; the module keeps the answers that it gets at import.
        if backend == "inductor":
            importlib.import_module("torch._inductor.compile_fx")
        elif isinstance(backend, str):
            torch._dynamo.list_backends(None)  # imports the backends' modules
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
    # Options of the call win over those of the mode, as in torch.
    options = {**modes.get(kwargs.get("mode"), {}), **(kwargs.get("options") or {})}
    return [name for name, value in options.items() if name.startswith("triton.") and value]


def _compile_ahead(context: Context, original: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``compile_fx_aot``: refuse a model of a device that AOTInductor cannot write code for."""
    if not context.runtime.compiles_ahead:
        # A model may be a function or a graph without parameters: `list()` is empty.
        held = [*getattr(model, "parameters", list)(), *getattr(model, "buffers", list)()]
        tensors = [each for each in pytree.tree_leaves((inputs, held)) if isinstance(each, torch.Tensor)]
        if any(native_device(each).type == context.device_type for each in tensors):
            thread_state.refuse("AOTInductor", _NOT_AHEAD)
    return original(model, inputs, *args, **kwargs)


_NOT_AHEAD = "Export and package the model on the CPU, in torchdevice.portable('cpu'), or use torch.compile()."


def _compile_backward(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """``compile_fx_backward``, which torch calls in the program's first ``backward``, where a mode is active."""
    with torch._C.DisableTorchFunction():
        return truthfully(context, original, *args, **kwargs)


def _patches_of_inductor(module: ModuleType) -> list[Patch]:
    return [
        replaced_function(module, "compile_fx_aot", _compile_ahead),
        replaced_function(module, "compile_fx_backward", _compile_backward),
    ]


def patches() -> list[Patch]:
    """Return the patches of ``torch.compile``, ``torch.export``, Dynamo and the functions that ask about Triton."""
    triton = importlib.import_module("torch.utils._triton")
    # The functions with a cache are the ones whose answers torch keeps.
    questions = [name for name, function in vars(triton).items() if hasattr(function, "cache_clear")]
    return [
        replaced_function(torch, "compile", _compile),
        replaced_function(importlib.import_module("torch.export"), "export", _export),
        WHEN_IMPORTED,
        WhenImported("torch._inductor.compile_fx", _patches_of_inductor),
        *(replaced_in_importers(triton, name, truthfully) for name in questions),
    ]
