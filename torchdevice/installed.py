"""The patches that are installed while a scope is active, gathered from the modules that have a function ``patches()``.

A file in ``cuda/``, ``accelerators/`` or ``torch_apis/`` is found by itself. It may also only supply names, which it
registers when it is imported.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from torchdevice import accelerators, cuda, torch_apis
from torchdevice.compile import torch_compile
from torchdevice.core import bindings
from torchdevice.core.importing import Refusing
from torchdevice.core.patching import Installation, Patch
from torchdevice.errors import PATCHERS, AnotherPatcherError
from torchdevice.torch_apis.distributed import data_parallel, dtensor, process_groups, sharded_attention

# The other files of these folders import torch.distributed and torch's compilers, which many programs never need.
_OF_LARGE_FOLDERS = (torch_compile, data_parallel, dtensor, process_groups, sharded_attention)

AREAS = (
    *(
        import_module(f"{folder.__name__}.{found.name}")
        for folder in (cuda, accelerators, torch_apis)
        for found in pkgutil.iter_modules(folder.__path__)
    ),
    *_OF_LARGE_FOLDERS,
)
"""The modules that change names of torch or supply them. No two change the same name, so their order means nothing."""


def _patches() -> list[Patch]:
    found = [patch for area in AREAS if hasattr(area, "patches") for patch in area.patches()]
    return [Refusing(PATCHERS, AnotherPatcherError), *bindings.patches(), *found]


INSTALLATION = Installation(_patches)
