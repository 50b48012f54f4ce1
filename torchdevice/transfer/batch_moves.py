"""Moves of batches between two devices, and the parts of a batch, however it is nested.

Two accelerators exchange tensors on a stream of their own. Every other move is torch's ``.to`` in
the current stream.

A leaf is moved by itself: a tensor, a module, and whatever is no container known here. A batch is
never changed: its containers are made anew, of the same types and with what else they hold.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdevice.errors import WrongDeviceError
from torchdevice.kernel.devices import registry
from torchdevice.kernel.devices.sparse_parts import plain_parts
from torchdevice.transfer.specification import (
    DeviceSpec,
    current_stream,
    is_same,
    own_specification,
)


class Parts(NamedTuple):
    """A container taken apart.

    Attributes:
        names: How the program would write each child after the container: ``"['x']"``, ``"[0]"``,
            ``".x"``.
        children: The children.
        rebuild: Makes a container like it of other children.
    """

    names: Iterable[str]
    children: Iterable[Any]
    rebuild: Callable[[list[Any]], Any]


def parts(batch: Any) -> Parts | None:
    """Take a container apart; None for a leaf."""
    if isinstance(batch, (torch.Tensor, torch.nn.Module, str, bytes)):
        return None
    if isinstance(batch, PackedSequence):
        return _packed(batch)
    if isinstance(batch, Mapping):
        return Parts(
            map("[{!r}]".format, batch), batch.values(), lambda values: _mapping(batch, values)
        )
    if isinstance(batch, (tuple, set, frozenset)):
        # _make skips a program's own __new__, which may take arguments other than fields.
        return Parts(_numbers(), batch, getattr(type(batch), "_make", type(batch)))
    if isinstance(batch, (list, UserList, deque)):
        return Parts(_numbers(), batch, lambda values: _with_items(batch, enumerate(values)))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _record(batch)
    return None


def leaves(batch: Any, name: str = "the batch") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with how the program would write it."""
    found = parts(batch)
    if found is None:
        yield name, batch
        return
    for suffix, child in zip(found.names, found.children, strict=False):
        yield from leaves(child, name + suffix)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch like this one with ``function`` of each leaf in the leaf's place."""
    found = parts(batch)
    if found is None:
        return function(batch)
    return found.rebuild([mapped(child, function) for child in found.children])


def _numbers() -> Iterator[str]:
    return map("[{}]".format, itertools.count())


def _with_items(batch: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a copy with other items: a subclass holds more, such as a default factory."""
    new = copy.copy(batch)
    for key, value in items:
        new[key] = value
    return new


def _mapping(batch: Mapping[Any, Any], values: list[Any]) -> Any:
    items = dict(zip(batch, values, strict=True))
    if isinstance(batch, MutableMapping):
        return _with_items(batch, items.items())  # type: ignore[call-arg]
    return type(batch)(items)  # type: ignore[call-arg]


def _packed(batch: PackedSequence) -> Parts:
    """Torch keeps the batch sizes on the CPU, wherever the data is."""
    names = ("data", "sorted_indices", "unsorted_indices")
    children = [getattr(batch, name) for name in names]
    return Parts(
        map(".{}".format, names),
        children,
        lambda new: batch._replace(**dict(zip(names, new, strict=True))),
    )


def _record(batch: Any) -> Parts:
    names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]

    def rebuild(values: list[Any]) -> Any:
        new = copy.copy(batch)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # a frozen dataclass refuses the ordinary way
        return new

    return Parts([f".{name}" for name in names], [getattr(batch, name) for name in names], rebuild)


class ToDevice(torch.nn.Module):
    """Moves batches from one device to another: a linear operator, whose adjoint moves them back.

    A batch is a tensor, a module, or a nesting of containers with tensors in it: mappings, lists,
    tuples, named tuples, dataclasses, sets, ``PackedSequence``, the outputs and encodings of
    Hugging Face. Containers are made anew, and what is no tensor is handed on; something else that
    has a ``to`` method is asked to move itself. A module is moved in place, as ``module.to(...)``
    does.

    Between two accelerators of one kind the copy runs on the source's transfer stream. That stream
    first waits for the compute streams of both devices, and the target's compute stream then waits
    for it, each by an event; the host waits for nothing. A move to the host waits until the data is
    there. A move from the host does not wait where the tensor is pinned and the device copies
    pinned memory as a whole.

    Until a copy is done, what is moved must not be written to in place: a pinned tensor, and a
    tensor on the source while its transfer stream is busy.

    Args:
        idevice: Where batches come from. None is the CPU.
        odevice: Where they go. None is the CPU.

    Attributes:
        ispec: The source, a specification of this object's own.
        ospec: The target.
    """

    def __init__(self, idevice: Any = None, odevice: Any = None):
        super().__init__()
        self.ispec = own_specification(idevice)
        # The same object on both sides is the identity, see normal().
        is_same = odevice is idevice and isinstance(idevice, DeviceSpec)
        self.ospec = self.ispec if is_same else own_specification(odevice)
        self.ispec.p2p_setup(self.ospec)
        self.ospec.p2p_setup(self.ispec)

    def forward(self, batch: Any, *, after: torch.Event | None = None) -> Any:
        """Move a batch.

        Args:
            batch: The batch; every tensor in it must be on the source.
            after: An event after which the batch is complete. A move between two accelerators waits
                for it in place of everything that the source's compute stream has been given; any
                other move waits on the host.

        Returns:
            The batch on the target. Where it was there before, torch's ``.to`` decides what is new.

        Raises:
            WrongDeviceError: A tensor of the batch is on another device than the source. Nothing
                was moved.
        """
        _check(batch, self.ispec.here)
        if self.ispec is self.ospec:
            return batch
        with _Passage(self.ispec, self.ospec, after) as passage:
            return mapped(batch, passage.move)

    def adjoint(self) -> ToDevice:
        """Return the move from the target to the source."""
        return type(self)(self.ospec, self.ispec)

    def normal(self) -> ToDevice:
        """Return the adjoint after this move: the identity on the source."""
        return type(self)(self.ispec, self.ispec)

    @property
    def H(self) -> ToDevice:
        """The adjoint."""
        return self.adjoint()

    @property
    def N(self) -> ToDevice:
        """The normal operator."""
        return self.normal()

    def extra_repr(self) -> str:
        return f"{self.ispec} -> {self.ospec}"


def _check(batch: Any, expected: torch.device) -> None:
    # The usual case, at half the price.
    if isinstance(batch, torch.Tensor) and is_same(batch.device, expected):
        return
    for name, leaf in leaves(batch):
        for suffix, tensor in _tensors(leaf):
            if not is_same(tensor.device, expected):
                raise WrongDeviceError(name + suffix, tensor.device, expected)


def _tensors(leaf: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(leaf, torch.Tensor):
        return (("", leaf),)
    if isinstance(leaf, torch.nn.Module):
        return [
            (f".{name}", tensor)
            for name, tensor in (*leaf.named_parameters(), *leaf.named_buffers())
        ]
    return ()


class _Passage(contextlib.AbstractContextManager["_Passage"]):
    """The streams of one batch's move: entered around it."""

    def __init__(self, source: DeviceSpec, target: DeviceSpec, after: torch.Event | None = None):
        self._source = source
        self._target = target
        self._device = target.here
        self._after = after
        self._transfer: torch.Stream | None = None
        self._computing: torch.Stream | None = None
        self._awaiting: torch.Stream | None = None
        self._entered: contextlib.ExitStack | None = None

    def __enter__(self) -> _Passage:
        source, target = self._source, self._target
        way = source._way()
        if way is not None:
            # The transfer stream waits for the complete batch and for free target memory.
            self._transfer = transfer = source._leaving_stream(*way)
            self._computing = source._working_stream(way[0])
            self._awaiting = target._working_stream(way[1])
            ready = self._computing.record_event() if self._after is None else self._after
            for event in (ready, self._awaiting.record_event()):
                event.wait(transfer)
        elif self._after is not None:
            self._after.synchronize()
        streams = (source, source._compute), (target, target._compute), (source, self._transfer)
        chosen = [(spec, stream) for spec, stream in streams if stream is not None]
        if not chosen:  # as where the call is compiled: Dynamo of torch 2.10 traces no ExitStack
            return self
        with contextlib.ExitStack() as entered:
            # The target's too: the copy takes its memory from the stream that is current there.
            for spec, stream in chosen:
                entered.enter_context(torch.get_device_module(spec.here).stream(stream))
            entered.callback(self.hold_up, self._awaiting)  # before the streams are left
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._entered is not None:
            self._entered.close()

    def hold_up(self, stream: torch.Stream | None) -> None:
        """Let another stream wait for the transfer stream's work, if there is one."""
        if self._transfer is not None and stream is not None:
            self._transfer.record_event().wait(stream)

    def move(self, leaf: Any) -> Any:
        """Return a leaf on the target: what is no tensor and cannot be moved, as it is."""
        if not isinstance(leaf, torch.Tensor):
            moved = moved_by_itself(leaf, self._device)
            if moved is not leaf or isinstance(leaf, torch.nn.Module):
                # Its memory is not known, so it cannot be kept until the copy is done.
                self.hold_up(self._computing)
            return moved
        if self._transfer is None:
            return leaf.to(self._device, non_blocking=may_copy_alone(leaf, self._device))
        return _Exchange.apply(leaf, self)

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor on the transfer stream, and keep its memory until that is done."""
        moved = tensor.to(self._device, non_blocking=True)
        memory, transfer = memory_of(tensor), self._transfer
        assert transfer is not None
        for part in memory:
            part.record_stream(transfer)
        if not memory:
            self.hold_up(self._computing)
        return moved


class _Exchange(torch.autograd.Function):
    """A copy between accelerators, for autograd. The gradient uses the reverse transfer stream."""

    @staticmethod
    def forward(tensor: torch.Tensor, passage: _Passage) -> torch.Tensor:
        return passage.exchange(tensor)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[torch.Tensor, _Passage], output: torch.Tensor
    ) -> None:
        ctx.source, ctx.target = inputs[1]._source, inputs[1]._target

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        with _Passage(ctx.target, ctx.source) as back:
            moved = back.move(gradient)
        # The engine takes what a node returns to be ready on the stream that is current while the
        # node runs (torch/csrc/autograd/input_buffer.cpp), and that is a stream of the target.
        back.hold_up(current_stream(ctx.target.here))
        return moved, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        with _Passage(ctx.source, ctx.target) as passage:
            return passage.move(tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, tensor: torch.Tensor, passage: _Passage
    ) -> tuple[torch.Tensor, Any]:
        return _Exchange.apply(tensor, passage), in_dims[0]


def moved_by_itself(leaf: Any, device: torch.device) -> Any:
    """Return a non-tensor leaf after a move by its own method. Classes stay as they are."""
    move = None if isinstance(leaf, type) else getattr(leaf, "to", None)
    return move(device) if callable(move) else leaf


def may_copy_alone(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a copy may outlast the call: only page-locked memory stays in place."""
    # First, because a graph cannot ask what is pinned.
    if (
        torch.compiler.is_compiling()
        or tensor.layout is not torch.strided
        or not tensor.is_pinned()
    ):
        return False
    runtime = registry.runtime(device.type)
    return not (runtime.shares_host_memory or runtime.blocking_copies_only)


def memory_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors whose memory a tensor has; none where they are not known."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [memory_of(getattr(tensor, name)) for name in names]
        return list(itertools.chain(*inner)) if all(inner) else []
    return list(plain_parts(tensor.detach()))
