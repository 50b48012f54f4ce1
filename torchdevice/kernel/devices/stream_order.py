"""The identity of a stream for observers of the order of a device's work."""

from __future__ import annotations

Stream = tuple[int, int]
"""The ordinal of the stream's device and the stream's id; id 0 is the default stream."""

COLLECTIVES = -1
"""The id of the stream of a device on which collectives run."""
