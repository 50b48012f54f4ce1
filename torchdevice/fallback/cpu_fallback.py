"""Runs an operator on the CPU in the target's place, with its time and bytes counted at the program's line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchdevice.core.context import Context
from torchdevice.core.thread_state import state
from torchdevice.foundation.fidelity import Fidelity

CPU = torch.device("cpu")

DONE = "the operator on the CPU"
"""What the journal says was done."""


def run(name: str, op: Any, args: Any, kwargs: Any, device_type: str) -> Any:
    """Run an operator on the CPU and count the call.

    Args:
        name: The name by which the journal counts it.
        op: The operator, called with CPU tensors.
        args: The arguments of the call on the target.
        kwargs: The keyword arguments.
        device_type: The target's device type.

    Returns:
        The results on the target; an argument itself where the operator returns it.

    Raises:
        FidelityError: The scope is strict.
    """
    return counted(state.context, name, lambda: Hop(op, device_type).call(args, kwargs), (args, kwargs))


def counted(context: Context | None, name: str, call: Callable[[], Any], given: Any) -> Any:
    """Make a call, and count it in the context's journal with its time and the bytes that it reads and writes."""
    # Noted before the call: a strict scope refuses here.
    entry = context.note(name, DONE, Fidelity.FELL_BACK) if context is not None else None
    start = time.perf_counter_ns()
    result = call()
    if entry is not None:
        entry.seconds += (time.perf_counter_ns() - start) / 1e9
        entry.bytes += _bytes_of((given, result))
    return result


def _bytes_of(values: Any) -> int:
    """Return the bytes of the tensors among some values."""
    dense = (torch.strided, torch.jagged)
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    # Only dense layouts have a size in bytes.
    return sum(value.nbytes if value.layout in dense else 0 for value in tensors)


class Hop:
    """One call of an operator, below autograd, with CPU tensors in the place of the target's.

    Attributes:
        views_targets_memory: Whether views are made of the target's memory, not of that of the CPU tensors.
        device: The device of the results: that of the arguments, or the one that the call names.
    """

    views_targets_memory = True

    def __init__(self, op: Any, device_type: str):
        self._op = op
        self._device_type = device_type
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.device: torch.device | None = None

    def call(self, args: Any, kwargs: Any) -> Any:
        """Run the operator; give each argument that it writes to what it wrote, and return its results."""
        with torch._C.DisableTorchFunction():
            asked = kwargs.get("device")
            # A device argument becomes the CPU, and is remembered by `there`.
            there, named = tree_map(self.there, (tuple(args), dict(kwargs)))
            if self.views_targets_memory and self._op.is_view:
                return self._view(args, there, named)
            result = self._op(*there, **named)
            self._write_back(args, kwargs)
            # The call asked for the CPU, so the result stays.
            if asked is not None and asked.type == CPU.type:
                return result
            # By `id`: an operator that returns its argument gets the target's own tensor back.
            given = {id(copy): value for value, copy in self._copies.values()}
            return tree_map(lambda each: given[id(each)] if id(each) in given else self.back(each), result)

    def there(self, value: Any) -> Any:
        """Return an argument as the CPU takes it."""
        if isinstance(value, torch.Tensor):
            return self._copy_of(value) if value.device.type == self._device_type else value
        if isinstance(value, torch.device) and value.type == self._device_type:
            self.device = value
            return CPU
        if isinstance(value, torch.Generator) and value.device.type == self._device_type:
            return generator_from(value)
        return value

    def _copy_of(self, value: torch.Tensor) -> torch.Tensor:
        # The first tensor's device, unless the call names one.
        self.device = self.device or value.device
        if id(value) not in self._copies:
            self._copies[id(value)] = value, self.copy(value)
        return self._copies[id(value)][1]

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the target as a CPU tensor."""
        return value.to(CPU)

    def back(self, value: Any) -> Any:
        """Return a result as the target has it."""
        moves = isinstance(value, torch.Tensor) and self.device is not None and value.device.type == CPU.type
        return value.to(self.device) if moves else value

    def store(self, value: torch.Tensor, copy: torch.Tensor) -> None:
        """Give an argument that the operator wrote to what it wrote to the copy."""
        # `out` may have been resized.
        (value if value.shape == copy.shape else value.resize_(copy.shape)).copy_(copy)

    def _write_back(self, args: Any, kwargs: Any) -> None:
        for position, argument in enumerate(self._op._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for value in tree_leaves(written):
                if id(value) in self._copies:
                    self.store(*self._copies[id(value)])

    def _view(self, args: Any, there: Any, named: Any) -> Any:
        """Return the views that an operator makes: of the target's own memory, where the CPU's views lie in theirs."""
        base = args[0]
        # As large as the storage, so that every offset of the view exists.
        like = torch.empty(base.untyped_storage().nbytes() // base.itemsize, dtype=base.dtype)
        like = like.as_strided(base.shape, base.stride(), base.storage_offset())
        views = self._op(like, *there[1:], **named)

        def own(view: torch.Tensor) -> torch.Tensor:
            whole = torch.empty(0, dtype=view.dtype, device=base.device)
            return whole.set_(base.untyped_storage(), view.storage_offset(), view.shape, view.stride())

        return tree_map(own, views)


def generator_from(generator: torch.Generator) -> torch.Generator:
    """Return a generator of the CPU, seeded by a number that one of the target draws."""
    # A seed from the target's generator, so that the CPU's numbers depend on the program's seed.
    seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
    return torch.Generator().manual_seed(int(seed))


# ---- above autograd --------------------------------------------------------------------------------------------------


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device)


def call_on_cpu(
    func: Any, args: Any, kwargs: Any, to_target: Callable[[torch.Tensor, torch.device], torch.Tensor] = _to
) -> Any:
    """Call a torch function with CPU tensors in the place of the target's, so that autograd differentiates the moves.

    An argument that the function writes to gets what was written.

    Args:
        func: The function.
        args: Its arguments on the target.
        kwargs: Its keyword arguments.
        to_target: Returns a result as a tensor of the target.
    """
    context = state.context
    assert context is not None
    device = context.target
    copies: dict[int, _Copy] = {}
    of_value: dict[int, torch.Tensor] = {}

    def there(value: Any) -> Any:
        nonlocal device
        if isinstance(value, torch.Tensor) and value.device.type == context.device_type:
            device = value.device
            if id(value) not in of_value:
                # `.cpu()` under autograd, so the move is a node of the graph.
                copy = of_value[id(value)] = value.cpu()
                copies[id(copy)] = _Copy(value, copy)
            return of_value[id(value)]
        if isinstance(value, torch.device) and value.type == context.device_type:
            device = value
            return CPU
        is_generator = isinstance(value, torch.Generator) and value.device.type == context.device_type
        return generator_from(value) if is_generator else value

    def back(value: Any) -> Any:
        if id(value) in copies:
            return copies[id(value)].value
        return to_target(value, device) if isinstance(value, torch.Tensor) else value

    with torch._C.DisableTorchFunction():
        moved, named = tree_map(there, (tuple(args), dict(kwargs)))
        result = func(*moved, **named)
        for each in copies.values():
            each.write_back()
        return tree_map(back, result)


class _Copy:
    """A CPU tensor in the place of an argument of the target.

    torch counts the writes to a tensor, but not those of ``native_batch_norm`` to its statistics. So tensors that
    autograd does not watch are compared with what they were.

    Attributes:
        value: The argument.
    """

    def __init__(self, value: torch.Tensor, copy: torch.Tensor):
        self.value = value
        self._copy = copy
        # Torch's count of writes to the copy.
        self._version = copy._version
        # A tensor that requires a gradient cannot be written by such a kernel.
        self._before = None if copy.requires_grad else copy.clone()

    def write_back(self) -> None:
        """Give the argument what was written to the copy."""
        if self._copy._version != self._version or self._differs():
            value = self.value
            (value if value.shape == self._copy.shape else value.resize_(self._copy.shape)).copy_(self._copy)

    def _differs(self) -> bool:
        return self._before is not None and not torch.equal(self._copy, self._before)
