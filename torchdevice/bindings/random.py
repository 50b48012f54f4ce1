"""Random number generators. For ``torch/cuda/random.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdevice.bindings import answers

if TYPE_CHECKING:
    from torchdevice._scope import Scope


@answers("torch.cuda.default_generators")
def default_generators(scope: Scope) -> tuple[torch.Generator, ...]:
    """The target's default generators, one per advertised device; all the same one where the target has one."""
    return tuple(scope.runtime.default_generator(scope.device(i).index or 0) for i in range(scope.device_count))
