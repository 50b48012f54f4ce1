"""Random number generators. For ``torch/cuda/random.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdevice.bindings import answers, supplies

if TYPE_CHECKING:
    from torchdevice._scope import Scope


@answers("torch.cuda.default_generators")
def default_generators(scope: Scope) -> tuple[torch.Generator, ...]:
    """The target's default generators, one per advertised device; all the same one where the target has one."""
    return tuple(scope.runtime.default_generator(scope.device(i).index or 0) for i in range(scope.device_count))


@supplies("_cuda_getRNGState")
def get_rng_state(scope: Scope) -> torch.Tensor:
    """The state of the current device's generator, under the name that older libraries have for it."""
    return scope.runtime.default_generator(scope.target.index or 0).get_state()


@supplies("_cuda_setRNGState")
def set_rng_state(scope: Scope, state: torch.Tensor) -> None:
    """Set the state of the current device's generator, under the name that older libraries have for it."""
    scope.runtime.default_generator(scope.target.index or 0).set_state(state)
