"""Checkpoints of activations, whose second forward drops what the first has dropped.

``torch.utils.checkpoint`` keeps the random state of the devices that tensors report. With a GPU's
numbers on a target that is no GPU, the state is that of the program's accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.random_numbers import drawing_gpu


@replaces(checkpoint, "_infer_device_type")
def _infer_device_type(context: Context, original: Any, *args: Any) -> str:
    return original(*args) if drawing_gpu.of_context(context) is None else context.program  # type: ignore[no-any-return]


@replaces(checkpoint, "get_device_states")
def _get_device_states(
    context: Context, original: Any, *args: Any
) -> tuple[list[int], list[torch.Tensor]]:
    """Also keep the state where tensors report the CPU."""
    devices, states = original(*args)
    if devices or drawing_gpu.of_context(context) is None:
        return devices, states
    index = context.thread.device_index
    return [index], [torch.cuda.get_rng_state(index)]
