"""Green contexts, which divide a GPU and are refused, for ``torch/cuda/green_contexts.py``."""

from __future__ import annotations

import torch
import torch.cuda.green_contexts

from torchdevice.core.patching import Patch, Replaced
from torchdevice.cuda.monitoring import refuses

_REMEDY = "It divides a GPU's multiprocessors. Leave it out; the work runs on the whole target."


def patches() -> list[Patch]:
    """Return the patches of the functions that make green contexts, as far as the installed torch has them."""
    module = torch.cuda.green_contexts
    found: list[Patch] = [refuses(module, name, _REMEDY) for name in _LOCALITIES if hasattr(module, name)]
    for cls_name, constructor in (("GreenContext", "create"), ("SMPartition", "from_device")):
        cls = getattr(module, cls_name, None)
        if hasattr(cls, constructor):
            make = refuses(cls, constructor, _REMEDY).make
            found.append(Replaced(cls, constructor, lambda original, make=make: staticmethod(make(original))))
    return found


_LOCALITIES = ("get_num_locality_domains", "is_localization_supported")
