"""The program's own dispatch modes, which torch calls while the mode is off. For ``torch/utils/_python_dispatch.py``.

What such a mode calls is rewritten, and what it is given names the devices that the program's tensors report.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.core import thread_state
from torchdevice.core.bindings import replaces
from torchdevice.core.context import Context
from torchdevice.engines.mode import with_mode

_ATTRIBUTE = "__torch_dispatch__"
"""The attribute of a mode that takes the place of its method while the mode is entered in a scope."""


@replaces(TorchDispatchMode, "__enter__")
def _enter(context: Context, original: Any, self: TorchDispatchMode) -> Any:
    if not type(self).__module__.startswith(("torch.", "torchdevice.")) and _ATTRIBUTE not in vars(self):
        # A method, because torch refuses what is not bound to the mode.
        setattr(self, _ATTRIBUTE, MethodType(functools.partial(_dispatch, getattr(self, _ATTRIBUTE)), self))
    return original(self)


@replaces(TorchDispatchMode, "__exit__")
def _exit(context: Context, original: Any, self: TorchDispatchMode, *raised: Any) -> Any:
    result = original(self, *raised)
    if not self.old_dispatch_mode_flags:  # otherwise the mode is entered once more
        vars(self).pop(_ATTRIBUTE, None)
    return result


def _dispatch(own: Any, self: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call ``__torch_dispatch__`` of a mode of the program's, in the scope of the thread."""
    context = thread_state.state.context
    if context is None:
        return own(func, types, args, kwargs)
    if context.shown_as is not None:
        args, kwargs = pytree.tree_map_only(torch.device, context.shown, (args, kwargs))
    return with_mode(context, own, func, types, args, kwargs)
