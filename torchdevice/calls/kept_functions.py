"""Functions of torch that a program has kept since before a scope, in a closure, an object, a
default argument or a ``functools.partial``.

``engine="wrap"`` puts wrappers where names of modules are, so a function that is kept elsewhere
asks torch itself for the program's accelerator. That is harmless where the accelerator is absent
and the target has a device of its own: nothing is made on a wrong device.

- Factories come to the dispatch key of the absent accelerator, to which no tensor leads. Kernels
  are put there that make the tensor on the target.
- Functions that choose the device before torch looks for a kernel raise torch's own error:
  ``torch.tensor``, ``as_tensor`` and ``asarray``, constructors of sparse tensors, and ``to`` and
  ``cuda`` of tensors. The scope adds a note to it (:func:`explain`). A build with CUDA asks for the
  device once in a process, and then comes to the kernels above.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import torch

from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices import registry
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.lowlevel import replace_new
from torchdevice.kernel.options import Options, spelled
from torchdevice.kernel.python.uncaught_errors import add_note

FACTORIES = (
    "aten::_efficientzerotensor",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::tril_indices",
    "aten::triu_indices",
)
"""The operators that make a tensor on a device by a kernel of that device. torch composes all other
factories of these.
"""

_OF_BUILDS_WITHOUT = (
    r"Torch not compiled with {0} enabled|PyTorch is not linked with support for {0} devices"
    r"|Could not run '[\w:.]+' with arguments from the '{0}' backend"
)
_OF_BUILDS_WITH_CUDA = (
    r"Found no NVIDIA driver on your system|CUDA error: CUDA driver version is insufficient"
    r"|CUDA error: no CUDA-capable device is detected"
)
"""torch's texts for an accelerator that is absent."""


def _families(options: Options) -> tuple[str, ...]:
    return FAMILIES if options.written_for == "any" else (options.written_for,)


def are_loud(runtime: Runtime, options: Options) -> bool:
    """Return whether a function that no wrapper sees raises or is served, on a target.

    Args:
        runtime: The target.
        options: The options of the scope. They name the accelerator that the program is written
            for. Where it is there, torch would use it, beside the target.
    """
    # A target that lacks dtypes or operators makes calls again that it has refused. Only a mode
    # sees the refusals of methods of tensors.
    whole = runtime.supplied.is_gpu and not runtime.unsupported_dtypes
    return whole and replace_new.refusal() is None and all(map(_is_absent, _families(options)))


@functools.cache
def _is_absent(family: str) -> bool:
    with thread_state.suspended():  # an outer scope would answer that it is there
        return not registry.runtime(family).is_available()


def put(context: Context) -> None:
    """Put the kernels that make tensors on a context's target where a program keeps torch's
    factories. May be called again.
    """
    served = context.runtime, context.options.written_for
    if served not in _served:
        if are_loud(context.runtime, context.options):
            for family in _families(context.options):
                _put(family)
        _served.add(served)


_served: set[tuple[Runtime, str]] = set()
"""The targets and accelerators for which :func:`put` has been called, which each entry does."""


@functools.cache
def _put(family: str) -> None:
    key = torch._C._dispatch_key_for_device(family)
    with warnings.catch_warnings():
        # Builds with CUDA have kernels there, and before torch 2.13 torch warns of the first that
        # is put over one of its own.
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in FACTORIES:
            made = functools.partial(_made_on_target, name, _kernel_of_torch(name, key))
            registered_kernels.put(name, made, key, __file__, with_keys=True)


def _kernel_of_torch(name: str, key: str) -> Any:
    """Return torch's own kernel, which builds with CUDA have; None in other builds."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
        return None
    return torch.library.get_kernel(name, key)


def _made_on_target(name: str, torchs: Any, keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a tensor on the target of this thread's scope; without one, do as torch does."""
    context = thread_state.state.context
    op = registered_kernels.overload(name)
    target = None
    if context is not None and are_loud(context.runtime, context.options):
        target = context.redirect(kwargs["device"])
    if target is None:
        return _as_torch(name, torchs, keys, *args, **kwargs)
    kwargs["device"] = target
    key = torch._C._dispatch_key_for_device(target.type)
    behind = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
    # By the kernel, because the program's dispatch modes have seen the operator already.
    return op._handle.redispatch_boxed(behind, *args, **kwargs)  # type: ignore[no-any-return]


def _as_torch(name: str, torchs: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch's kernel of an accelerator, or raise torch's error where its build has none."""
    if torchs is not None:
        return torchs.call_boxed(keys, *args, **kwargs)
    absent = torch._C.DispatchKeySet(torch._C.DispatchKey.HIP)
    try:
        return registered_kernels.overload(name)._handle.redispatch_boxed(absent, *args, **kwargs)
    except NotImplementedError as error:
        own = f"'{kwargs['device'].type.upper()}' backend"
        error.args = (str(error).replace("'HIP' backend", own, 1),)
        raise


def explain(context: Context | None, error: BaseException) -> None:
    """Add a note to an error that leaves a scope, if a function that the program has kept asked
    torch for the absent accelerator.
    """
    if context is None or context.options.engine != "wrap" or hasattr(error, "__notes__"):
        return
    text = str(error)
    found = re.match(_OF_BUILDS_WITHOUT.format(context.program), text, re.IGNORECASE)
    if found or (context.program == "cuda" and re.match(_OF_BUILDS_WITH_CUDA, text)):
        remedy = spelled("engine", "mode", context.entries.way)
        add_note(
            error,
            "A function or method of torch that was kept from before the scope asked for "
            f"{context.program!r}. Look it up inside the scope, or use {remedy}.",
        )
