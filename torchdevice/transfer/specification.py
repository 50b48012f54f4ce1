"""Devices as they take part in moves, and their streams."""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices import registry

_STREAMS = "transfer streams"
"""Setting of a context: the transfer stream of each pair of its devices."""

_streams_outside: dict[Any, torch.Stream] = {}
"""The transfer stream of each pair of devices, outside scopes."""


class DeviceSpec:
    """A device, and its streams for moves.

    A device without an ordinal means the current one of when the specification is made, where torch
    knows that by then. A specification may be made before a scope is entered: a scope gives the
    device its meaning at each use.

    Streams that are left out are chosen at each use, for moves between two accelerators of one
    kind. Copies of a specification share its streams. Pickles leave them out, because a stream
    belongs to a process.

    Args:
        device: Anything that ``torch.device`` takes. None is the CPU.
        compute_stream: The stream on which the program works on this device: a move from here waits
            for it, and it waits for a move to here. Left out, it is the stream that is current when
            something is moved.
        transfer_stream: The stream on which tensors leave this device for another accelerator. Left
            out, it is one that all moves between the two devices share, see :meth:`p2p_setup`.

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
            raise TypeError(
                f"{name}={stream!r} is not a stream. Use a torch.Stream, or leave the stream out."
            )
        device = torch.device(stream.device)
        if not is_same(device, self.here):
            raise ValueError(
                f"{name} is a stream of {str(device)!r}, and the specification is for "
                f"{str(self.device)!r}. Use a stream of that device, or leave the stream out."
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

        None where moves do not need to know: :meth:`p2p_setup` found no other accelerator of the
        same kind.
        """
        way = self._way()
        return self._compute if way is None else self._working_stream(way[0])

    @property
    def transfer_stream(self) -> torch.Stream | None:
        """The stream for tensors from here to the other of :meth:`p2p_setup`; None as above."""
        way = self._way()
        return self._transfer if way is None else self._leaving_stream(*way)

    def _working_stream(self, here: torch.device) -> torch.Stream:
        return self._compute if self._compute is not None else current_stream(here)

    def _leaving_stream(self, here: torch.device, there: torch.device) -> torch.Stream:
        return self._transfer if self._transfer is not None else _transfer_stream(here, there)

    def p2p_setup(self, other: DeviceSpec | torch.device | str) -> None:
        """Prepare moves between two devices, direct from device to device if both are accelerators.

        There is one transfer stream for each source and target in a process, and one in each scope.
        """
        if isinstance(other, DeviceSpec):
            device = other.device
        else:
            device = _with_ordinal(torch.device(other))
        self._peer = device if _are_two_of_a_kind(self.device, device) else None

    def _way(self) -> tuple[torch.device, torch.device] | None:
        """Return both devices if tensors go directly: both are accelerators here."""
        if self._peer is None:
            return None
        here, there = self.here, torch.device(self._peer)
        if _are_two_of_a_kind(here, there) and have_streams(here, there):
            return (here, there)
        return None

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
        device, peer = (
            None if text is None else torch.device(sys.intern(text)) for text in state.values()
        )
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
        shown = [
            f"{name} stream {stream.stream_id}"
            for name, stream in streams.items()
            if stream is not None
        ]
        return f"{self.device} ({', '.join(shown)})" if shown else str(self.device)


def _with_ordinal(device: torch.device) -> torch.device:
    """Return a device with the current ordinal, if it has none and torch a current device."""
    if device.index is None:
        current = torch.accelerator.current_accelerator(check_available=True)
    else:
        current = None
    if current is None or current.type != device.type:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def is_same(one: torch.device, other: torch.device) -> bool:
    """Return whether two devices may be one. Without an ordinal, a device is any of its type."""
    return one.type == other.type and (
        one.index == other.index or one.index is None or other.index is None
    )


def _are_two_of_a_kind(one: torch.device, other: torch.device) -> bool:
    return (
        one.type == other.type
        and not is_same(one, other)
        and not registry.runtime(one.type).shares_host_memory
    )


def have_streams(*devices: torch.device) -> bool:
    """Return whether devices of a type are available accelerators with streams for programs."""
    kind = devices[0]
    if kind.index is None or registry.runtime(kind.type).shares_host_memory:
        return False
    module = torch.get_device_module(kind)
    has_streams = all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))
    return has_streams and max(device.index for device in devices) < module.device_count()


def current_stream(device: torch.device) -> torch.Stream:
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
    return cls(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _spelled(device: torch.device) -> str:
    """Return a device as the program spells it, to mean the same in other scopes or machines."""
    context = thread_state.state.context
    if context is None or device.type != context.device_type:
        return str(device)
    on_host = context.runtime.shares_host_memory and device is not context.devices.current
    return str(device if on_host else context.devices.of_program(device.index or 0))


def own_specification(device: Any) -> DeviceSpec:
    """Return an unshared specification: each knows one peer, and there may be several."""
    return device.__copy__() if isinstance(device, DeviceSpec) else DeviceSpec(device)
