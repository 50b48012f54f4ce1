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
from torchdevice.simulation.kernels import cpu_kernels, device_mismatch
from torchdevice.simulation.native import building
from torchdevice.simulation.native.memory import NativeDevice, devices

_COPIES = ("aten::copy_", "aten::_to_copy")

HANDWRITTEN = frozenset({"aten::clone", *_COPIES, "aten::empty.memory_format", "aten::empty_strided"})
"""Operators with a handwritten kernel that C++ serves too: allocations, and copies on one device."""

_contexts: set[Context] = set()
"""The contexts that the kernels serve. They are in place while there is one."""

_offers: dict[Any, frozenset[torch.dtype] | None] = {}
"""Operator -> the dtypes of its first tensor that Python must serve; None where nothing is refused."""


def runs(option: str) -> bool:
    """Return whether the kernels in C++ run in a scope with this option.

    Raises:
        NativeKernelsError: They are not built, and the option demands them.
    """
    if option == "never" or building.path().is_file():
        return option != "never"
    if option == "always":
        raise NativeKernelsError("they are not built for this torch and Python; run 'torchdevice native build'")
    return False


def begin(context: Context) -> None:
    """Let the kernels serve a context, if they run there. May be called again."""
    if runs(context.options.native):
        module = building.load()
        if storages.native is None:
            _connect(module)
        context.policy.native = module.Context()
        _contexts.add(context)
        module.install()


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


def follow_thread() -> None:
    """Do so where the policy of this thread's context, or its current stream, is new."""
    follow(thread_state.state.context)


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
    storages.native = SimpleNamespace(Device=NativeDevice, fresh=_fresh, known=_known, disown=module.disown)
    thread_state.on_context = follow
    current_streams.on_change = follow_thread
    for op in list(_offers):
        _register(op)


def _release(number: int) -> None:
    if number in devices:
        devices[number].release()


def _fresh(result: torch.Tensor, index: int, context: Context | None) -> torch.Tensor | None:
    """Return a tensor of a device in the memory of a CPU tensor; None where it must have a storage of Python."""
    native = None if context is None or context.policy is None else context.policy.native
    on = storages.device(index)
    if native is None or not native.serves or not isinstance(on, NativeDevice):
        return None
    native.use(index, on.ledger)
    while on.ended:
        on.ended.popleft().release()
    made: torch.Tensor | None = building.load().made(result, native, index) if on.hand_over() else None
    return made


def _known(storage: Any, dtype: torch.dtype) -> tuple[torch.Tensor, int, Any] | None:
    """Return the CPU tensor of a storage that C++ made, the number of its memory, and its device."""
    found = building.load().known(storage._cdata, dtype)
    if found is None:
        return None
    tensor, number, ledger = found
    # The memory of a machine that has ended is gone, and its tensors are not.
    return tensor, number, devices.get(ledger) or storages.device(_device_of(storage).index)


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
    building.load().offer(
        op._schema.name,
        "" if op._overloadname == "default" else op._overloadname,
        cpu_kernels.is_view(op),
        name not in HANDWRITTEN and device_mismatch.accepts_cpu_scalars(op),
        refused is None,
        results.counts_writes,
        name in _COPIES,
        results.positions,
        list(refused or ()),
    )


_device_of = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]
