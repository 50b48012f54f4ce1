"""Distributed tensors, above all their random numbers. For ``torch/distributed/tensor``.

Every rank has a generator in the same state. On CUDA a rank moves the offset in its generator's
state to the numbers of its shard. The generators of other targets have no offset: here a rank draws
a number from its generator, as every rank does, and seeds the generator with this number and its
shard for one operator. So replicas of a shard are equal, shards differ, and the generators stay in
the same state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.calls.mode import with_mode
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.kernel.python.interrupt_safe_exit import block

_LARGEST_SEED = 2**63 - 1

_ODD = 0x9E3779B97F4A7C15
"""A multiplier that spreads small numbers over 64 bits: 2 to the power of 64 by the golden ratio.
"""


_DISPATCH = "torch.distributed.tensor._dispatch"

_TRACKER = f"{_DISPATCH}:random.OffsetBasedRNGTracker"

# Called without a mode, where the mesh says the target's device: torch refuses the CPU.
replaces(_DISPATCH, "is_rng_supported_mesh", native_to="cuda")(with_mode)


@replaces(_TRACKER, "__init__", native_to="cuda")
def _init_tracker(
    context: Context, original: Any, self: Any, device_mesh: Any, run_state_sync: bool = True
) -> None:
    """``OffsetBasedRNGTracker``, which refuses the CPU."""
    self._device = context.devices.current
    # The program's module: torch looks streams and the random state up there.
    self._device_handle = getattr(torch, context.program)
    self._use_distribute_region = True
    if run_state_sync:
        state = self._get_device_state()
        dist.broadcast(state, 0)
        self._set_device_state(state)


@replaces(_TRACKER, "_distribute_region", native_to="cuda")
def _distribute_region(
    context: Context, original: Any, self: Any, spec: Any, generator: torch.Generator | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return in what a random operator runs on this rank's shard."""
    if self._use_distribute_region:
        return _seeded(context, _shard(spec), generator)
    return contextlib.nullcontext()


@replaces(_DISPATCH, "run_dtensor_rng_op", native_to="cuda", optional=True)  # since torch 2.12
def _run_dtensor_rng_op(
    context: Context, original: Any, start: int, end: int, operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a random operator on this rank's shard, numbered ``start`` where tensors report cuda."""
    with _seeded(context, start, None):
        return operator(*args, **kwargs)


@block
def _seeded(context: Context, shard: int, generator: torch.Generator | None) -> Iterator[None]:
    """Seed the target's generator for one operator by ``generator``, alike on all ranks."""
    default = context.runtime.default_generator(context.thread.device_index)
    source = default if generator is None else generator
    # No mode rewrites this call, and a generator may report another device than torch's.
    is_targets = context.devices.is_targets(source.device)
    place = context.runtime.device(source.device.index or 0) if is_targets else source.device
    # One element, hence one number, which all ranks draw alike.
    drawn = torch.empty((), dtype=torch.int64, device=place).random_(generator=source).item()
    state = default.get_state()
    # Shards count from 1, because 0 would change nothing. The mask keeps the seed positive.
    default.manual_seed((int(drawn) ^ (1 + shard) * _ODD) & _LARGEST_SEED)
    try:
        yield
    finally:
        # The state before the seed and after the draw, which all ranks have in common.
        default.set_state(state)


def _shard(spec: Any) -> int:
    """Return a number that replicas of a shard have in common, and no other shard has."""
    found = 0
    for dimension, (placement, place) in enumerate(
        zip(spec.placements, spec.mesh.get_coordinate(), strict=True)
    ):
        if not placement.is_replicate():
            # Mixed radix: the place in each divided dimension is a digit.
            found = found * spec.mesh.size(dimension) + place
    return found
