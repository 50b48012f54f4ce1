"""How CUDA's allocator rounds sizes: of a block, of a segment, of what a segment grows by."""

from __future__ import annotations

from torchdevice.simulation.allocator.allocator_settings import Settings

SMALL = 1 << 20
"""``kSmallSize``: blocks of at most so many bytes come from the small pools."""

SMALL_SEGMENT = 2 << 20
"""``kSmallBuffer``: the segments of the small pools, in bytes."""

_OWN_SEGMENT = 10 << 20
"""``kMinLargeAlloc``: requests of so many bytes get a segment of their own size."""

_LARGE_UNIT = 2 << 20
"""``kRoundLarge``: such segments are a multiple of it, in bytes."""

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


def segment_size(size: int, settings: Settings) -> int:
    """Return the size of a new segment for a block of ``size`` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return settings.large_segment_size
    return -(-size // _LARGE_UNIT) * _LARGE_UNIT  # rounded up, as above


def mapped_unit(settings: Settings, *, is_small: bool) -> int:
    """Return the bytes that an expandable segment maps at once."""
    return SMALL_SEGMENT if is_small else settings.large_segment_size
