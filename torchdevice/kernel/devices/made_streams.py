"""The streams that a program has made."""

from __future__ import annotations

from typing import Any

from torchdevice.kernel.devices.stream_order import Stream


class MadeStreams:
    """The streams of a scope.

    Attributes:
        last: The last streams that were made, by class, id and ordinal.
        handles: Handle -> stream, of the streams that were made, where streams have handles.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[type, int, int], Any] = {}
        self.handles: dict[int, Stream] = {}
