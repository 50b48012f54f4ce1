"""Moves between devices as objects: where from, where to, on which streams, and back.

They need no scope. Everything here is written on torch's public functions, so a scope changes what they do as it
changes a program's own ``.to(...)``. Two accelerators exchange tensors on a stream of their own; every other move is
torch's ``.to`` in the stream that is current.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdevice import thread_state
from torchdevice.batches import leaves, mapped
from torchdevice.devices import registry
from torchdevice.errors import WrongDeviceError
from torchdevice.options import is_number

_STREAMS = "transfer streams"
"""Setting of a context: the transfer stream of each pair of its devices."""

_streams_outside: dict[Any, torch.Stream] = {}
"""The transfer stream of each pair of devices, outside scopes."""


# ---- devices and their streams ---------------------------------------------------------------------------------------


class DeviceSpec:
    """A device, and the streams by which it takes part in moves.

    A device without an ordinal means the current one of when the specification is made, where torch knows that by then.
    A specification may be made before a scope is entered: a scope gives the device its meaning at each use.

    Streams that are left out are chosen at each use, for moves between two accelerators of one kind. Copies of a
    specification share its streams. Pickles leave them out, because a stream belongs to a process.

    Args:
        device: Anything that ``torch.device`` takes. None is the CPU.
        compute_stream: The stream on which the program works on this device: a move from here waits for it, and it
            waits for a move to here. Left out, it is the stream that is current when something is moved.
        transfer_stream: The stream on which tensors leave this device for another accelerator. Left out, it is one that
            all moves between the two devices share, see :meth:`p2p_setup`.

    Attributes:
        device: The ``torch.device``.

    Raises:
        ValueError: A stream belongs to another device.
    """

    def __init__(
        self,
        device: Any = None,
        compute_stream: torch.Stream | None = None,
        transfer_stream: torch.Stream | None = None,
    ):
        self.device = _with_ordinal(torch.device("cpu" if device is None else device))
        self._peer: torch.device | None = None
        self._compute = self._checked("compute_stream", compute_stream)
        self._transfer = self._checked("transfer_stream", transfer_stream)

    def _checked(self, name: str, stream: torch.Stream | None) -> torch.Stream | None:
        if stream is None:
            return None
        if not isinstance(stream, torch.Stream):
            raise TypeError(f"{name}={stream!r} is not a stream. Use a torch.Stream, or leave the stream out.")
        device = torch.device(stream.device)
        if not _is_same(device, self.here):
            raise ValueError(
                f"{name} is a stream of {str(device)!r}, and the specification is for {str(self.device)!r}. "
                f"Use a stream of that device, or leave the stream out."
            )
        return _native(stream, self.here)

    @property
    def type(self) -> str:
        """The device type."""
        return self.device.type

    @property
    def here(self) -> torch.device:
        """The device as ``torch.device`` has it in the active scope, if there is one."""
        return torch.device(self.device)

    @property
    def compute_stream(self) -> torch.Stream | None:
        """The stream on which the program works on this device.

        None where moves do not need to know: :meth:`p2p_setup` found no other accelerator of the same kind.
        """
        way = self._way()
        return self._compute if way is None else self._working_stream(way[0])

    @property
    def transfer_stream(self) -> torch.Stream | None:
        """The stream on which tensors leave this device for the other one of :meth:`p2p_setup`; None as above."""
        way = self._way()
        return self._transfer if way is None else self._leaving_stream(*way)

    def _working_stream(self, here: torch.device) -> torch.Stream:
        return self._compute if self._compute is not None else _current_stream(here)

    def _leaving_stream(self, here: torch.device, there: torch.device) -> torch.Stream:
        return self._transfer if self._transfer is not None else _transfer_stream(here, there)

    def p2p_setup(self, other: DeviceSpec | torch.device | str) -> None:
        """Prepare for moves between this device and another one, from device to device where both are accelerators.

        There is one transfer stream for each source and target in a process, and one in each scope.
        """
        device = other.device if isinstance(other, DeviceSpec) else _with_ordinal(torch.device(other))
        self._peer = device if _are_two_of_a_kind(self.device, device) else None

    def _way(self) -> tuple[torch.device, torch.device] | None:
        """Return this device and the other one where tensors go from device to device: both are accelerators here."""
        if self._peer is None:
            return None
        here, there = self.here, torch.device(self._peer)
        return (here, there) if _are_two_of_a_kind(here, there) and _have_streams(here, there) else None

    def __copy__(self) -> DeviceSpec:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def __deepcopy__(self, memo: Any) -> DeviceSpec:
        return self.__copy__()

    def __getstate__(self) -> dict[str, Any]:
        peer = self._peer
        return {"device": _spelled(self.device), "peer": None if peer is None else _spelled(peer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Interned, because in a scope on the CPU the program's own "cpu" is known by identity.
        device, peer = (None if text is None else torch.device(sys.intern(text)) for text in state.values())
        vars(self).update(device=device, _peer=peer, _compute=None, _transfer=None)

    def _key(self) -> tuple[Any, ...]:
        return self.device, self._compute, self._transfer

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, DeviceSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"DeviceSpec({self})"

    def __str__(self) -> str:
        streams = {"compute": self.compute_stream, "transfer": self.transfer_stream}
        shown = [f"{name} stream {stream.stream_id}" for name, stream in streams.items() if stream is not None]
        return f"{self.device} ({', '.join(shown)})" if shown else str(self.device)


def _with_ordinal(device: torch.device) -> torch.device:
    """Return a device with the ordinal that it means now, where torch has a current device of that type."""
    if device.index is not None or not torch.accelerator.is_available():
        return device
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices may be one. Without an ordinal, a device is any of its type."""
    return one.type == other.type and (one.index == other.index or one.index is None or other.index is None)


def _are_two_of_a_kind(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and not _is_same(one, other) and not registry.runtime(one.type).shares_host_memory


def _have_streams(*devices: torch.device) -> bool:
    """Return whether devices of one type are accelerators that are there, and programs make streams for their work."""
    kind = devices[0]
    if kind.index is None or registry.runtime(kind.type).shares_host_memory:
        return False
    module = torch.get_device_module(kind)
    if not (hasattr(module, "Stream") and hasattr(module, "stream") and hasattr(module, "current_stream")):
        return False
    return max(device.index for device in devices) < module.device_count()


def _current_stream(device: torch.device) -> torch.Stream:
    return torch.get_device_module(device).current_stream(device)


def _transfer_stream(source: torch.device, target: torch.device) -> torch.Stream:
    context = thread_state.state.context
    streams = _streams_outside if context is None else context.settings.setdefault(_STREAMS, {})
    found = streams.get((source, target))
    if found is None:  # two threads may make one each: setdefault gives both the same
        found = streams.setdefault((source, target), torch.get_device_module(source).Stream(source))
    return found


def _native(stream: torch.Stream, device: torch.device) -> torch.Stream:
    """Return a stream as the class that the device's own module has for it.

    Events of ``torch.cuda`` read what a ``torch.cuda.Stream`` has beyond a ``torch.Stream``.
    """
    cls: Any = getattr(torch.get_device_module(device), "Stream", None)
    if cls is None or isinstance(stream, cls):
        return stream
    return cls(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _spelled(device: torch.device) -> str:
    """Return a device as the program spells it, so that it means the same in another scope, or on another machine."""
    context = thread_state.state.context
    if context is None or device.type != context.device_type:
        return str(device)
    on_host = context.runtime.shares_host_memory and device is not context.target
    return str(device if on_host else context.program_device(device.index or 0))


# ---- moves -----------------------------------------------------------------------------------------------------------


class ToDevice(torch.nn.Module):
    """Moves batches from one device to another: a linear operator, whose adjoint moves them back.

    A batch is a tensor, a module, or a nesting of containers with tensors in it: mappings, lists, tuples, named tuples,
    dataclasses, sets, ``PackedSequence``, the outputs and encodings of Hugging Face. Containers are made anew, and what
    is no tensor is handed on; something else that has a ``to`` method is asked to move itself. A module is moved in
    place, as ``module.to(...)`` does.

    Between two accelerators of one kind the copy runs on the source's transfer stream. That stream first waits for the
    compute streams of both devices, and the target's compute stream then waits for it, each by an event; the host waits
    for nothing. A move to the host waits until the data is there. A move from the host does not wait where the tensor
    is pinned and the device copies pinned memory as a whole.

    Until a copy is done, what is moved must not be written to in place: a pinned tensor, and a tensor on the source
    while its transfer stream is busy.

    Args:
        idevice: Where batches come from. None is the CPU.
        odevice: Where they go. None is the CPU.

    Attributes:
        ispec: The source, a specification of this object's own.
        ospec: The target.
    """

    def __init__(self, idevice: Any = None, odevice: Any = None):
        super().__init__()
        self.ispec = _specification(idevice)
        # The same object on both sides is the identity, see normal().
        self.ospec = self.ispec if odevice is idevice and isinstance(idevice, DeviceSpec) else _specification(odevice)
        self.ispec.p2p_setup(self.ospec)
        self.ospec.p2p_setup(self.ispec)

    def forward(self, batch: Any, *, after: torch.Event | None = None) -> Any:
        """Move a batch.

        Args:
            batch: The batch; every tensor in it must be on the source.
            after: An event after which the batch is complete. A move between two accelerators waits for it in place of
                everything that the source's compute stream has been given; any other move waits on the host.

        Returns:
            The batch on the target. Where it was there before, torch's ``.to`` decides what is new.

        Raises:
            WrongDeviceError: A tensor of the batch is on another device than the source. Nothing was moved.
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
        """Return the adjoint after this move: the identity on the source, which hands on what it is given."""
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


def _specification(device: Any) -> DeviceSpec:
    """Return a specification that is nobody else's: a specification knows its peer, and there may be several."""
    return device.__copy__() if isinstance(device, DeviceSpec) else DeviceSpec(device)


def _check(batch: Any, expected: torch.device) -> None:
    if isinstance(batch, torch.Tensor) and _is_same(batch.device, expected):  # the usual case, at half the price
        return
    for name, leaf in leaves(batch):
        for suffix, tensor in _tensors(leaf):
            if not _is_same(tensor.device, expected):
                raise WrongDeviceError(name + suffix, tensor.device, expected)


def _tensors(leaf: Any) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(leaf, torch.Tensor):
        return (("", leaf),)
    if isinstance(leaf, torch.nn.Module):
        return [(f".{name}", tensor) for name, tensor in (*leaf.named_parameters(), *leaf.named_buffers())]
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
        way = self._source._way()
        if way is not None:
            self._listen(*way)
        elif self._after is not None:
            self._after.synchronize()
        if self._transfer is not None or self._source._compute is not None or self._target._compute is not None:
            self._enter_streams()
        return self

    def _enter_streams(self) -> None:
        source, target = self._source, self._target
        with contextlib.ExitStack() as entered:
            # The target's too: the copy takes its memory from the stream that is current there.
            for spec, stream in ((source, source._compute), (target, target._compute), (source, self._transfer)):
                if stream is not None:
                    entered.enter_context(torch.get_device_module(spec.here).stream(stream))
            self._entered = entered.pop_all()

    def __exit__(self, *exc_info: object) -> None:
        if self._entered is not None:
            with self._entered:
                self.hold_up(self._awaiting)

    def _listen(self, here: torch.device, there: torch.device) -> None:
        """Let the transfer stream wait until the batch is complete, and until the target's memory is free."""
        source, target = self._source, self._target
        self._transfer = transfer = source._leaving_stream(here, there)
        self._computing, self._awaiting = source._working_stream(here), target._working_stream(there)
        ready = self._computing.record_event() if self._after is None else self._after
        for event in (ready, self._awaiting.record_event()):
            event.wait(transfer)

    def hold_up(self, stream: torch.Stream | None) -> None:
        """Let another stream wait for what the transfer stream was given, if there is one."""
        if self._transfer is not None and stream is not None:
            self._transfer.record_event().wait(stream)

    def move(self, leaf: Any) -> Any:
        """Return a leaf on the target: what is no tensor and cannot be moved, as it is."""
        if not isinstance(leaf, torch.Tensor):
            return self._move_other(leaf)
        if self._transfer is None:
            return leaf.to(self._device, non_blocking=_may_copy_alone(leaf, self._device))
        return _Exchange.apply(leaf, self)

    def _move_other(self, leaf: Any) -> Any:
        moved = _moved_by_itself(leaf, self._device)
        if moved is not leaf or isinstance(leaf, torch.nn.Module):
            self.hold_up(self._computing)  # its memory is not known, so it cannot be kept until the copy is done
        return moved

    def exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor on the transfer stream, and keep its memory until that is done."""
        moved = tensor.to(self._device, non_blocking=True)
        memory, transfer = _memory(tensor), self._transfer
        assert transfer is not None
        for part in memory:
            part.record_stream(transfer)
        if not memory:
            self.hold_up(self._computing)
        return moved


class _Exchange(torch.autograd.Function):
    """A copy from accelerator to accelerator, for autograd. The gradient takes the transfer stream of its own way."""

    @staticmethod
    def forward(tensor: torch.Tensor, passage: _Passage) -> torch.Tensor:
        return passage.exchange(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, _Passage], output: torch.Tensor) -> None:
        ctx.source, ctx.target = inputs[1]._source, inputs[1]._target

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        with _Passage(ctx.target, ctx.source) as back:
            moved = back.move(gradient)
        # The engine takes what a node returns to be ready on the stream that is current while the node runs
        # (torch/csrc/autograd/input_buffer.cpp), and that is a stream of the target.
        back.hold_up(_current_stream(ctx.target.here))
        return moved, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:  # type: ignore[override]
        with _Passage(ctx.source, ctx.target) as passage:
            return passage.move(tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, passage: _Passage) -> tuple[torch.Tensor, Any]:
        return _Exchange.apply(tensor, passage), in_dims[0]


def _moved_by_itself(leaf: Any, device: torch.device) -> Any:
    """Return what a leaf that is no tensor makes of a move. Classes have methods too, and are not moved."""
    move = None if isinstance(leaf, type) else getattr(leaf, "to", None)
    return move(device) if callable(move) else leaf


def _may_copy_alone(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a copy to a device may go on while the host does: the host's memory stays in place until then."""
    if torch.compiler.is_compiling():  # a graph cannot ask what is pinned
        return False
    if tensor.layout is not torch.strided or not tensor.is_pinned():
        return False
    runtime = registry.runtime(device.type)
    return not (runtime.shares_host_memory or runtime.blocking_copies_only)


def _memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors whose memory a tensor has; none where they are not known."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [_memory(getattr(tensor, name)) for name in names]
        return list(itertools.chain(*inner)) if all(inner) else []
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.detach()
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided and not tensor.is_nested else []


# ---- loaders ---------------------------------------------------------------------------------------------------------


class _Flight(NamedTuple):
    """A batch on its way.

    Attributes:
        batch: The batch on the device, complete after ``arrived``.
        arrived: Where the copies are done; None where they are when they return.
    """

    batch: Any
    arrived: Any


class Prefetcher:
    """A loader whose batches are moved to a device before they are asked for, on a stream of its own.

    The copies run while the program computes, where the loader's batches are pinned
    (``DataLoader(..., pin_memory=True)``) and the device has streams. Elsewhere batches are moved ahead all the same.
    An error of the loader is raised when the batches before it were handed out. A loader may fill the same memory again
    and again: it is asked for a batch after the one before was copied.

    Args:
        loader: An iterable of batches, each as :class:`ToDevice` takes it. Tensors may be anywhere.
        device: Where the batches go. A :class:`DeviceSpec` may name the stream of the copies (``transfer_stream``) and
            the one on which the batches are used (``compute_stream``).
        depth: How many batches are on the device at once: the one in use and those on their way.

    Attributes:
        loader: The loader.
        spec: The device, with its streams.
        depth: As above.

    Raises:
        ValueError: ``depth`` is not an int of 1 or more.
    """

    def __init__(self, loader: Iterable[Any], device: Any, depth: int = 2):
        if not is_number(depth, least=1):
            raise ValueError(f"depth={depth!r} is not a number of batches. Use an int of 1 or more.")
        self.loader = loader
        self.spec = _specification(device)
        self.depth = depth

    def __len__(self) -> int:
        """Return the length of the loader, which must have one."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        device = self.spec.here
        stream = self._stream(device)
        batches = iter(self.loader)
        flights: deque[_Flight] = deque()
        copied: Any = None
        end: Exception | None = None
        while True:
            while end is None and len(flights) < self.depth:
                if copied is not None:
                    copied.synchronize()
                try:
                    flights.append(_sent(next(batches), device, stream))
                    copied = flights[-1].arrived
                except Exception as error:
                    end = error
            if flights:
                yield self._received(flights.popleft(), device)
            elif isinstance(end, StopIteration):
                return
            elif end is not None:
                raise end

    def _stream(self, device: torch.device) -> Any:
        if self.spec._transfer is not None or not _have_streams(device):
            return self.spec._transfer
        return torch.get_device_module(device).Stream(device)

    def _received(self, flight: _Flight, device: torch.device) -> Any:
        """Hand a batch to the compute stream, which waits for it and keeps its memory."""
        if flight.arrived is not None:
            stream = self.spec._compute or _current_stream(device)
            flight.arrived.wait(stream)
            for _, leaf in leaves(flight.batch):
                for part in _memory(leaf) if isinstance(leaf, torch.Tensor) else ():
                    part.record_stream(stream)
        return flight.batch

    def __repr__(self) -> str:
        return f"Prefetcher({self.loader!r}, {str(self.spec)!r}, depth={self.depth})"


def _sent(batch: Any, device: torch.device, stream: Any) -> _Flight:
    """Move a batch, on a stream of the device if there is one."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _moved_by_itself(leaf, device)
        # What cannot be kept until another stream has used it is copied in the current stream.
        if stream is None or not _memory(leaf):
            return leaf.to(device)
        with torch.get_device_module(device).stream(stream):
            return leaf.to(device, non_blocking=_may_copy_alone(leaf, device))

    return _Flight(mapped(batch, move), None if stream is None else stream.record_event())
