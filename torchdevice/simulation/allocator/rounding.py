"""How CUDA's allocator rounds the size of a block; ``Settings.segment_size`` rounds a segment's."""

from __future__ import annotations

from torchdevice.simulation.allocator.allocator_settings import SMALL, Settings

MINIMUM = 512
"""``kMinBlockSize``: sizes are rounded up to a multiple of it, in bytes."""


def rounded(size: int, settings: Settings) -> int:
    """Return the size of the block for a request of ``size`` bytes."""
    # The power of 2 of the size in MiB. Smaller sizes are in the first interval, larger ones in the
    # last.
    interval = max(0, size.bit_length() - SMALL.bit_length())
    divisions = settings.divisions[min(interval, len(settings.divisions) - 1)]
    # CUDA divides only sizes that have room for so many steps of 512 bytes.
    if divisions <= 1 or size <= MINIMUM * divisions:
        # -512 is a mask of all bits but the last nine, so this rounds up to a multiple of 512.
        return (size + MINIMUM - 1) & -MINIMUM
    # The largest power of 2 that is not above the size.
    power = 1 << size.bit_length() - 1
    # More divisions than bytes give steps of 0, hence the power itself.
    step = power // divisions or power
    # Ceiling division: `-(-a // b)`.
    return -(-size // step) * step
