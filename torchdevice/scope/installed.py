"""Patches that are installed while a scope is active. Modules register theirs on import.

A file in ``torch_modules/cuda/``, ``torch_modules/accelerators/`` or ``torch_modules/apis/`` is
found by itself.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType

from torchdevice.errors import PATCHERS, AnotherPatcherError, TritonVersionError
from torchdevice.kernel import bindings
from torchdevice.kernel.patching import Installation, Patch
from torchdevice.kernel.python.logs import warn_once
from torchdevice.random_numbers import checkpoints
from torchdevice.scope import features
from torchdevice.torch_modules import accelerators, cuda
from torchdevice.torch_modules import apis as torch_apis
from torchdevice.torch_modules.compile import torch_compile
from torchdevice.torch_modules.distributed import (
    data_parallel,
    dtensor,
    gloo_waits,
    planned_ranks,
    process_groups,
    remote_calls,
    sharded_attention,
)

_OF_FEATURES = [each.imported(name) for each in features.present() for name in each.patches]

AREAS = (
    *(
        import_module(f"{folder.__name__}.{found.name}")
        for folder in (cuda, accelerators, torch_apis)
        for found in pkgutil.iter_modules(folder.__path__)
    ),
    # The other files of these folders import torch.distributed and torch's compilers, which many
    # programs never need.
    *(torch_compile, data_parallel, dtensor, gloo_waits),
    *(planned_ranks, process_groups, remote_calls, sharded_attention),
    checkpoints,
)
"""The modules that change names of torch or supply them. No two change the same name, so their
order means nothing.
"""


@bindings.later("triton", sees_scope=True)
def _patches_of_triton(module: ModuleType) -> list[Patch]:
    # Imported when the program imports Triton, which is no dependency.
    try:
        from torchdevice.triton_kernels import triton_patches
    except TritonVersionError as error:  # what uses no kernel runs with any version
        warn_once(str(error))
        return []
    return triton_patches.patches()


def _patches() -> list[Patch]:
    rivals = (bindings.Late(name, error=AnotherPatcherError) for name in PATCHERS)
    # Last, since a module that is imported in a scope is patched after everything else.
    waiting = bindings.LateModules([*rivals, *bindings.LATER.values()])
    own = [patch for module in _OF_FEATURES for patch in getattr(module, "PATCHES", ())]
    return [*bindings.patches(), *bindings.REPLACED, waiting, *own]


INSTALLATION = Installation(_patches)
