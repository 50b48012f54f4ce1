"""Capture and replay of operators, which is what a CUDA graph is.

While a capture is on, a dispatch mode notes every operator below autograd with its arguments and results. A replay runs
them again, and puts new results into the memory of the noted ones, which the program and the later operators know.
Nothing happens during a capture on CUDA: what the operators wrote to the program's own tensors is put back at its end.

A graph of CUDA knows memory, not tensors. So what is noted are other tensors with the same memory, as they are when
their operator has run: ``squeeze_`` or ``resize_`` may change the program's tensors later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.engines.rewriters import native_device
from torchdevice.torch_internals import require

_aten = torch.ops.aten


_WAITS_FOR_THE_DEVICE = frozenset(
    {
        _aten._local_scalar_dense.default,
        _aten._unique2.default,
        _aten.equal.default,
        _aten.masked_select.default,
        _aten.nonzero.default,
        _aten.repeat_interleave.Tensor,
        _aten.unique_consecutive.default,
        _aten.unique_dim.default,
    }
)
"""Operators whose values, or the size of whose result, the host needs: they cannot be captured."""


_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
"""Operators that cannot be captured where an index is a mask, for the same reason."""


_UNINITIALISED = frozenset({_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default})


_below_autograd = require(torch._C, "_AutoDispatchBelowAutograd")


_exclude = require(torch._C, "_ExcludeDispatchKeyGuard")


_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


_INPLACE_VIEW = torch.Tag.inplace_view
"""Marks operators that change what a tensor looks at and no memory: the host does that, at the capture only."""


class _Step(NamedTuple):
    """One operator of a capture, and its results that are not its arguments or views of them."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[torch.Tensor]


class Capture(TorchDispatchMode):
    """A capture, in progress while the mode is entered.

    Args:
        device_type: The type of the device whose work is captured; None for the CPU, whose own work looks alike.
        generators: Draw the graph's random numbers: the device's own, and those that the program registered.

    Attributes:
        failed: Whether an operator was called that cannot be captured.
    """

    def __init__(self, device_type: str | None, generators: Sequence[torch.Generator]):
        super().__init__()
        self.failed = False
        self._random_states = [(generator, generator.get_state()) for generator in generators]
        self._device_type = device_type
        self._steps: list[_Step] = []
        self._made: set[int] = set()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._refuse_waiting(func, args, kwargs)
        self._refuse_generator(args, kwargs)
        if _INPLACE_VIEW in func.tags:
            return func(*args, **kwargs)
        self._keep(func, args, kwargs)
        with self._undeclared_writes(func, args, kwargs):
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _refuse_waiting(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise CUDA's error for what makes the host wait for the device: ``item()``, ``cpu()``."""
        if self._device_type is None or not any(native_device(t).type == self._device_type for t in _tensors(args)):
            return
        device = kwargs.get("device")
        to_host = func is _aten._to_copy.default and device is not None and device.type != self._device_type
        masked = func in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
        if func in _WAITS_FOR_THE_DEVICE or masked or (to_host and not kwargs.get("non_blocking")):
            self.failed = True
            raise not_permitted()

    def _refuse_generator(self, args: Any, kwargs: Any) -> None:
        """Raise CUDA's error for numbers of a generator that the graph does not know."""
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is None or self._device_type is None:
            return
        devices = [device] if device is not None else map(native_device, _tensors(args))
        known = any(each._cdata == generator._cdata for each, _ in self._random_states)
        if not known and any(each.type == self._device_type for each in devices):
            self.failed = True
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what a tensor of the program holds before it is first written to."""
        for argument, value in _arguments(func, args, kwargs):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors(value):
                storage = tensor.untyped_storage()._cdata
                if storage not in self._made:
                    self._made.add(storage)
                    whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
                    self._before.append((whole, whole.clone()))

    @contextlib.contextmanager
    def _undeclared_writes(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Keep what tensors of the program held that an operator wrote to without its schema saying so.

        ``native_batch_norm`` does, and operators of the program may. Only the values tell: kernels of an out-of-tree
        device write to the memory without counting a version.
        """
        if all(declared.alias_info is not None for declared in func._schema.returns):
            yield
            return
        theirs = [tensor for tensor in _tensors((args, kwargs)) if self._may_be_written(tensor)]
        before = [(tensor.detach(), tensor.clone()) for tensor in theirs]
        yield
        self._before.extend((tensor, held) for tensor, held in before if not _same_bits(tensor, held))

    def _may_be_written(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
        if not plain or tensor.is_meta or not tensor.numel():
            return False
        expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return not expanded and tensor.untyped_storage()._cdata not in self._made

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = _made_by(func, result)
        self._made.update(tensor.untyped_storage()._cdata for tensor in made if tensor.layout is torch.strided)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if made or writes:  # a view needs nothing when the memory it looks at is written again
            self._steps.append(_Step(func, *_same_memory((args, kwargs, made))))

    def abandon(self) -> None:
        """Leave a capture that the program did not end, and undo what it wrote."""
        self.__exit__(None, None, None)
        self.put_back()

    def put_back(self) -> None:
        """Undo what the operators wrote to the program's tensors, and the numbers they drew."""
        for generator, state in self._random_states:
            generator.set_state(state)
        with _as_kernels_do():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        """Run the operators again, into the same memory."""
        with _as_kernels_do():
            for op, args, kwargs, made in self._steps:
                if op in _UNINITIALISED:
                    continue
                for known, new in zip(made, _made_by(op, op(*args, **kwargs)), strict=True):
                    known.copy_(new)


def not_permitted() -> torch.AcceleratorError:
    """Return CUDA's error for what cannot be done during a capture."""
    return torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def invalidated() -> torch.AcceleratorError:
    """Return CUDA's error for the end of a capture in which something was not permitted."""
    return torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs)


def _made_by(op: Any, result: Any) -> list[torch.Tensor]:
    """Return the results of an operator that are new tensors, not arguments or views of them."""
    returns = op._schema.returns
    results = (result,) if len(returns) == 1 else result or ()
    new = [each for declared, each in zip(returns, results, strict=True) if declared.alias_info is None]
    return _tensors(new)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _same_memory(tree: Any) -> Any:
    """Return other tensors with the same memory, which stay as they are whatever the program does with its own."""
    known: dict[int, torch.Tensor] = {}

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in _PLAIN:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.detach()
        return known[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, other, tree)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors hold the same; NaN is the same as NaN."""
    values = (each.resolve_conj().resolve_neg().contiguous() for each in (tensor, other))
    bits = (each.view(-1).view(torch.uint8) for each in values)
    return torch.equal(*bits)


@contextlib.contextmanager
def _as_kernels_do() -> Iterator[None]:
    """Write to tensors unseen by autograd: a replay on CUDA is not noticed by it either."""
    with torch._C.DisableTorchFunction(), torch.no_grad(), _below_autograd(), _exclude(_VERSIONS):
        yield
