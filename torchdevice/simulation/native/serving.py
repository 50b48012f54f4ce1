"""Lets the kernels of ``kernels.cpp`` serve the contexts whose policy asks nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from torchdevice.core import Context, thread_state
from torchdevice.devices import current_streams
from torchdevice.errors import NativeKernelsError
from torchdevice.foundation.stand_ins import is_written
from torchdevice.simulation import device_generators
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.memory_blocks import Block
from torchdevice.simulation.kernels import cpu_kernels, cuda_values, device_mismatch
from torchdevice.simulation.native import building
from torchdevice.simulation.native.native_device import NativeDevice, devices

_COPIES = ("aten::copy_", "aten::_to_copy")

_ATTENTION = "aten::scaled_dot_product_attention"

_HANDWRITTEN = frozenset(
    {"aten::clone", *_COPIES, "aten::empty.memory_format", "aten::empty_strided", "aten::convolution", _ATTENTION}
    | {"aten::native_dropout", "aten::native_dropout_backward"}
)
"""Operators with a handwritten kernel that C++ serves too."""

_contexts: set[Context] = set()
"""The contexts that the kernels serve. They are in place while there is one."""

_offers: dict[tuple[Any, str], tuple[list[torch.dtype], bool]] = {}
"""Operator and dispatch key that C++ does not know yet -> the further arguments of :func:`offer`."""


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
        for each, facts in _offers.copy().items():
            _register(*each, *facts)
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
            settle=cpu_kernels.settle,
            copied=cpu_kernels.count_copy,
            numbers=device_generators.taken,
            undrawn=device_generators.give_back,
        )
    )
    calls = {"fresh": _fresh, "adopt": _adopt, "known": module.known, "disown": module.disown}
    storages.native = SimpleNamespace(Device=NativeDevice, devices=devices, **calls)
    thread_state.on_context = follow
    current_streams.on_change = module.stream_changed


def _release(ledger: int, number: int) -> None:
    if ledger in devices:
        devices[ledger].release(number)


def _serves(native: Any, on: Any, block: Block | None = None) -> bool:
    """Return whether storages of a device may be of C++, with a block of the model in Python, if any."""
    usual = block is None or block.pool.is_usual
    return bool(native and native.serves and isinstance(on, NativeDevice) and not on.observers and usual)


def _leads(native: Any, on: Any) -> bool:
    """Return whether the ledger of a device gives blocks to a context's storages from now on."""
    serves = _serves(native, on)
    if serves:
        native.use(on.index, on.ledger)
        if on.ended:
            on.release_ended()
    return serves and on.hand_over()


def _fresh(result: torch.Tensor, native: Any, on: Any, block: Block | None = None) -> torch.Tensor | None:
    """Return a tensor of a device in the memory of a CPU tensor; None where it must have a storage of Python.

    The ledger gives it a block, or the model in Python has given it one.
    """
    made: torch.Tensor | None = None
    if block is not None:
        if _serves(native, on, block):
            made, number = building.load().made_for(result, on.ledger)
            on.hold(block, number, result)
        return made
    return building.load().made(result, native, on.index) if _leads(native, on) else made


def _adopt(storage: Any, memory: torch.Tensor, on: Any, block: Block | None = None) -> bool:
    """Let a storage have the memory of a CPU tensor. Return false where it has memory of Python's, or must have.

    It needs no block, or the ledger gives it one, or the model in Python has given it one.
    """
    context = thread_state.state.context
    native = None if context is None or context.policy is None else context.policy.native
    if not (_serves(native, on, block) if block else not memory.nbytes or _leads(native, on)):
        return False
    number = building.load().adopt(storage._cdata, memory, block and on.ledger, None if block else native)
    if number and block:
        on.hold(block, number, memory)
    return bool(number)


def can_serve(op: Any, is_handwritten: bool) -> bool:
    """Return whether there is a kernel in C++ of an operator, which has a handwritten one in Python or none."""
    if is_handwritten:
        return op.name() in _HANDWRITTEN
    arguments, outs = op._schema.arguments, cpu_kernels.outs_of(op)
    if any(str(arguments[i].type) != "Tensor" for i in outs) or cpu_kernels.makes_of_nothing(op):
        return False
    # A division in place that ends at a zero has written some of the quotients.
    divides = cuda_values.divides(op) and any(map(is_written, arguments))
    return not divides and device_generators.place_of(op) < len(arguments)


def offer(op: Any, refused: Iterable[torch.dtype] = (), *, mixes: bool = True, key: str = "PrivateUse1") -> None:
    """Let C++ serve an operator whose kernel in Python does no more than the CPU's.

    Args:
        op: The operator.
        refused: The dtypes in which the first tensor of a call may be refused.
        mixes: Whether C++ serves calls whose tensors have several dtypes.
        key: The dispatch key of the kernel.
    """
    facts = _offers[op, key] = list(refused), mixes
    if storages.native is not None:
        _register(op, key, *facts)


def _register(op: Any, key: str, refused: list[torch.dtype], mixes: bool) -> None:
    name, schema, results = op.name(), op._schema, cpu_kernels.Results(op)
    scalars = name not in _HANDWRITTEN and device_mismatch.accepts_cpu_scalars(op)
    facts = cpu_kernels.is_view(op), scalars, mixes, results.counts_writes, name in _COPIES
    places = device_generators.place_of(op), cpu_kernels.outs_of(op), results.positions
    if building.load().offer(schema.name, schema.overload_name, key, *facts, *places, refused):
        _offers.pop((op, key), None)
