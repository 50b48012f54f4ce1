"""Lets the kernels of ``kernels.cpp`` serve the contexts whose policy asks nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.devices import current_streams
from torchdevice.errors import NativeKernelsError
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.memory_blocks import Block
from torchdevice.simulation.kernels import cpu_kernels, device_mismatch
from torchdevice.simulation.native import building
from torchdevice.simulation.native.native_device import NativeDevice, devices

_COPIES = ("aten::copy_", "aten::_to_copy")

HANDWRITTEN = frozenset({"aten::clone", *_COPIES, "aten::empty.memory_format", "aten::empty_strided"})
"""Operators with a handwritten kernel that C++ serves too: allocations, and copies on one device."""

_contexts: set[Context] = set()
"""The contexts that the kernels serve. They are in place while there is one."""

_offers: dict[Any, frozenset[torch.dtype] | None] = {}
"""Operator that C++ does not know yet -> the dtypes of its first tensor that Python must serve; None for none."""


def begin(context: Context) -> None:
    """Let the kernels serve a context, where they are built and its option allows it. May be called again.

    Raises:
        NativeKernelsError: They are not built, and the option demands them.
    """
    option = context.options.native
    if option != "never" and building.is_built():
        module = building.load()
        if storages.native is None:
            _connect(module)
        for op in list(_offers):
            _register(op)
        context.policy.native = module.Context()
        _contexts.add(context)
        module.install()
    elif option == "always":
        raise NativeKernelsError("they are not built for this torch and Python; run 'torchdevice native build'")


def end(context: Context) -> None:
    """Serve a context no more. May be called again."""
    if context in _contexts:
        if context.policy is not None:
            context.policy.native.serves = False
        _contexts.discard(context)
        if not _contexts:
            building.load().uninstall()


def follow(context: Context | None) -> None:
    """Let the kernels, if they are loaded, know the context of this thread and whether it ever chose a stream."""
    if storages.native is not None:
        native = None if context is None or context.policy is None else context.policy.native
        changes = native is not None and context is not None and context.thread.streams.history.has_changes
        building.load().follow(native, changes)


def _connect(module: Any) -> None:
    """Let C++ and Python know each other."""
    module.answer_by(
        SimpleNamespace(
            fresh=storages.fresh,
            limit=lambda number: devices[number].limit(),
            stream=storages.stream,
            waited=storages.host_waited,
            ended=Blocks.ended.append,
            release=_release,
            known=lambda tensor: storages.owner_of(tensor.untyped_storage()),
            wrapped=cpu_kernels.wrapped,
        )
    )
    known, disown = module.known, module.disown
    storages.native = SimpleNamespace(Device=NativeDevice, devices=devices, fresh=_fresh, known=known, disown=disown)
    thread_state.on_context = follow
    current_streams.on_change = module.stream_changed


def _release(number: int) -> None:
    if number in devices:
        devices[number].release()


def _fresh(result: torch.Tensor, native: Any, on: Any, block: Block | None = None) -> torch.Tensor | None:
    """Return a tensor of a device in the memory of a CPU tensor; None where it must have a storage of Python.

    The ledger gives it a block, or the model in Python has given it one.
    """
    if not native.serves or not isinstance(on, NativeDevice) or on.observers:
        return None
    if block is not None:
        return on.hold(block, native, result) if block.pool.is_usual else None
    native.use(on.index, on.ledger)
    while on.ended:
        on.ended.popleft().release()
    made: torch.Tensor | None = building.load().made(result, native, on.index) if on.hand_over() else None
    return made


def offer(op: Any, refused: Iterable[torch.dtype] | None = None) -> None:
    """Let C++ serve an operator whose kernel in Python does no more than the CPU's.

    Args:
        op: The operator.
        refused: The dtypes in which the first tensor of a call may be refused. Calls whose tensors have several dtypes
            are left to Python too. None where no call is refused.
    """
    _offers[op] = None if refused is None else frozenset(refused)
    if storages.native is not None:
        _register(op)


def _register(op: Any) -> None:
    name, refused, results = op.name(), _offers[op], cpu_kernels.Results(op)
    scalars = name not in HANDWRITTEN and device_mismatch.accepts_cpu_scalars(op)
    facts = cpu_kernels.is_view(op), scalars, refused is None, results.counts_writes, name in _COPIES
    if building.load().offer(op._schema.name, op._schema.overload_name, *facts, results.positions, list(refused or ())):
        _offers.pop(op, None)
