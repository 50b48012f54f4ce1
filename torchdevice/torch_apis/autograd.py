"""Where the autograd engine calls the program's Python while the mode is off, and the mode is put back.

Torch takes the mode off the stack while it handles a torch function. ``Tensor.backward`` is one, and so is an operator
that saves a tensor. Without this, custom ``Function.backward``, hooks, checkpoint recomputation and hooks that pack
saved tensors would not see the mode.

It is also where an error goes on that a device guard in Python had to take away, see ``simulation/guard.py``.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from torchdevice.context import Context
from torchdevice.engines.error_texts import OF_TORCH, reword
from torchdevice.engines.mode import with_mode
from torchdevice.patching import Patch, replaced_function


class _Taken(threading.local):
    """The error that a device guard took away from this thread's engine, if any."""

    error: BaseException | None = None


taken = _Taken()


def _run_backward(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the engine with the mode, and raise the error that was taken away on its way."""
    taken.error = None
    try:
        return with_mode(context, original, *args, **kwargs)
    except SystemError as error:  # what Python makes of an error that is gone
        raised = taken.error or error
    except OF_TORCH as error:
        reword(context, error)  # no torch function is called with engine="wrap"
        raise
    finally:
        taken.error = None
    raise raised  # here, so that the SystemError is not noted as its context


def _init_hooks(context: Context, original: Any, self: Any, pack_hook: Any, unpack_hook: Any) -> None:
    """``saved_tensors_hooks``: let both hooks see the mode."""
    original(self, functools.partial(with_mode, context, pack_hook), functools.partial(with_mode, context, unpack_hook))


def patches() -> list[Patch]:
    """Return the patches of the engine's two callers and of the hooks."""
    return [
        replaced_function(torch.autograd, "_engine_run_backward", _run_backward),
        replaced_function(torch.autograd.graph, "_engine_run_backward", _run_backward),
        replaced_function(torch.autograd.graph.saved_tensors_hooks, "__init__", _init_hooks),
    ]
