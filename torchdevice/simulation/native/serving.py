"""Lets the kernels of ``kernels.cpp`` serve the contexts whose policy asks nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchdevice.core import thread_state
from torchdevice.core.context import Context
from torchdevice.devices import current_streams
from torchdevice.errors import NativeKernelsError
from torchdevice.simulation import backend, device_generators
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.kernels import cpu_kernels, device_mismatch
from torchdevice.simulation.kernels.overloads import overload_of
from torchdevice.simulation.native import building
from torchdevice.simulation.native.memory import NativeDevice, devices
from torchdevice.simulation.refusals import cuda_refusals, nondeterminism

_VIEW, _FACTORY, _GENERAL = range(3)

_FORMULAS = ("native_dropout", "native_dropout_backward")
"""Operators that C++ computes of others, as the handwritten kernel does."""

_DRAWING = (*_FORMULAS, "_scaled_dot_product_flash_attention_for_cpu")
"""Operators that draw from the default generator and that C++ serves nevertheless, attention without dropout only."""

_PLAIN = ("clone", "copy_", "_to_copy", *_FORMULAS)
"""Operators with a handwritten kernel that does no more than their CPU kernel where all tensors are on one device."""

_OF_THEIR_OWN = ("empty.memory_format", "empty_strided")
"""Operators with a handwritten kernel in C++ too."""

_device_of = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]

_contexts: set[Context] = set()
"""The contexts that the kernels serve. They are in place while there is one."""


def runs(option: str) -> bool:
    """Return whether the kernels in C++ run in a scope with this option.

    Raises:
        NativeKernelsError: They are not built, and the option demands them.
    """
    if option == "never" or building.is_built():
        return option != "never"
    if option == "always":
        raise NativeKernelsError("they are not built for this torch, Python and version of torchdevice")
    return False


def begin(context: Context) -> None:
    """Let the kernels serve a context, if they run there. May be called again."""
    if runs(context.options.native):
        module = _module()
        context.policy.native = module.Context()
        _contexts.add(context)
        module.install()


def end(context: Context) -> None:
    """Serve a context no more. May be called again."""
    if context in _contexts:
        if context.policy is not None and context.policy.native is not None:
            context.policy.native.serves = False
        _contexts.discard(context)
        if not _contexts:
            building.load().uninstall()


def follow(context: Context | None) -> None:
    """Let the kernels know the context of this thread."""
    native = None if context is None or context.policy is None else context.policy.native
    changes = native is not None and context is not None and context.thread.streams.history.has_changes
    building.load().follow(native, changes)


def follow_entry() -> None:
    """Let the kernels know the context of this thread, if they are loaded: its policy may be new."""
    if storages.native is not None:
        follow(thread_state.state.context)


def follow_streams() -> None:
    """Let the kernels ask for this thread's current stream from now on: it is not always the default one."""
    follow(thread_state.state.context)


def _module() -> Any:
    """Return the module, which knows what to ask of Python and which operators it may run."""
    module = building.load()
    if storages.native is None:
        module.answer_by(
            {
                "fresh": storages.fresh,
                "limit": lambda number: devices[number].limit(),
                "stream": storages.stream,
                "asserted": cuda_refusals.asserted,
                "waited": storages.host_waited,
                "settle": cpu_kernels.settle,
                "ended": lambda number, memory: Blocks.ended.append(_End(number, memory)),
                "known": lambda tensor: storages.owner_of(tensor.untyped_storage()),
                "numbers": device_generators.drawing_for,
                "wrapped": cpu_kernels.wrapped,
            }
        )
        storages.native = _Storages()
        backend.on_kernel = offer
        thread_state.on_context = follow
        current_streams.on_change = follow_streams
        for name in (*_PLAIN, *_OF_THEIR_OWN, *backend.VIEWS):
            offer(overload_of(name))
        for op in list(backend.made):
            offer(op)
        module.offer_attention()
    return module


def offer(op: Any) -> None:
    """Let the kernel in C++ serve an operator whose kernel in Python does no more than it."""
    name = op._schema.name.removeprefix("aten::")
    draws_elsewhere = device_generators.kind_of(op) is device_generators.from_default and name not in _DRAWING
    if not op._schema.name.startswith("aten::") or draws_elsewhere or cuda_refusals.may_refuse(op):
        return
    kind = cpu_kernels.kind_of(op)
    results = cpu_kernels.Results(op)
    is_plain = name not in _PLAIN
    building.load().offer(
        op._schema.name,
        "" if op._overloadname == "default" else op._overloadname,
        (_VIEW, _FACTORY, _GENERAL)[("view", "factory").index(kind) if kind in ("view", "factory") else 2],
        is_plain and device_mismatch.accepts_cpu_scalars(op),
        cuda_refusals.asserts(op),
        cuda_refusals.base_name(op) in nondeterminism.OPERATORS,
        not op._schema.returns and name.startswith("_foreach_"),
        name == "_to_copy",
        kind == "out",
        _place_of_generator(op),
        results.positions,
        cuda_refusals.refused_dtypes(op),
    )


def _place_of_generator(op: Any) -> int:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("generator") if "generator" in names else -1


class _End(NamedTuple):
    """The end of the memory of a storage that C++ made, in the order of all ends.

    Attributes:
        ledger: The number of the ledger.
        memory: The number of the memory.
    """

    ledger: int
    memory: int

    def release(self) -> None:
        """Give the block back."""
        device = devices.get(self.ledger)
        if device is not None and device.ledger.has_ended(self.memory):
            device.end(self.memory)


class _Storages:
    """What ``allocator/storages.py`` asks of the storages that C++ makes."""

    Device = NativeDevice

    def fresh(self, result: torch.Tensor, index: int, context: Context | None) -> torch.Tensor | None:
        """Return a tensor of a device in the memory of a CPU tensor; None where it must have a storage of Python."""
        native = None if context is None or context.policy is None else context.policy.native
        on = storages.device(index)
        if native is None or not native.serves or not isinstance(on, NativeDevice):
            return None
        native.use(index, on.ledger)
        while on.ended:
            on.ended.popleft().release()
        if on.hand_over():
            made: torch.Tensor | None = building.load().made(result, native, index)
            if made is not None:
                return made
        block = None
        try:
            assert context is not None
            block = on.take(result.nbytes, context.thread.streams.get(index, 0))
            if block is None:
                return None
            tensor, number = building.load().made_for(result, native, on.ledger)
            on.hold(number, block, result.data_ptr())
            block = None
            return tensor  # type: ignore[no-any-return]
        except BaseException:
            if block is not None:  # without a storage the block would be lost
                on.freed.append(block)
            raise

    def known(self, storage: Any, dtype: torch.dtype) -> tuple[torch.Tensor, int, Any] | None:
        """Return the CPU tensor of a storage that C++ made, the number of its memory, and its device."""
        found = building.load().known(storage._cdata, dtype)
        if found is None:
            return None
        tensor, number, ledger = found
        # The memory of a machine that has ended is gone, and its tensors are not.
        return tensor, number, devices.get(ledger) or storages.device(_device_of(storage).index)

    def disown(self, storage: Any, *, frees: bool) -> None:
        """Let Python alone serve a storage from now on."""
        building.load().disown(storage._cdata, frees)
