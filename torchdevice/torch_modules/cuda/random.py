"""Random number generators, for ``torch/cuda/random.py``."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel.bindings import replaces, supplied_value
from torchdevice.kernel.context import Context


@supplied_value("torch.cuda.default_generators")
def default_generators(context: Context) -> tuple[torch.Generator, ...]:
    """Return the default generator of each advertised device, repeated if the target has one."""
    devices = context.devices
    return tuple(
        context.runtime.default_generator(devices.target_index(each))
        for each in range(devices.count)
    )


_CUDA_STATE_BYTES = 16
"""The size of a CUDA generator's state: seed and offset of Philox, 8 bytes each."""


@replaces(torch.cuda.random, "set_rng_state", by_value=True)
def _set_rng_state(
    context: Context, original: Any, new_state: torch.Tensor, device: Any = "cuda"
) -> None:
    own = context.runtime.default_generator(context.devices.current.index or 0).get_state().numel()
    if new_state.numel() == _CUDA_STATE_BYTES != own:
        raise RuntimeError(
            f"A random state of {_CUDA_STATE_BYTES} bytes is that of a CUDA generator, and the "
            f"generator of {context.names.family!r} cannot continue it. Use torch.manual_seed() "
            "instead of restoring the state."
        )
    original(new_state, device)
