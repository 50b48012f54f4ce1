"""The memory of a device whose allocator is that of ``kernels.cpp``, as long as nothing is asked that only Python has.

Either the ledger in C++ leads or the model in Python does. The ledger serves default settings, without private pools,
observers, and blocks that another stream may use or that storages of Python have. Whoever asks anything else of the
device lets the model lead, with the same blocks and figures. The next allocation lets the ledger lead again, if it can.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torchdevice.devices.runtime import Memory
from torchdevice.simulation.allocator.allocator_settings import DEFAULT, Settings
from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.caching_allocator import Device, changing
from torchdevice.simulation.allocator.memory_blocks import FREE, NOBODY, USED, Block, chain_of
from torchdevice.simulation.native import building

devices: weakref.WeakValueDictionary[int, NativeDevice] = weakref.WeakValueDictionary()
"""Number of a ledger -> its device."""

_FIGURES = ("allocated", "requested", "count", "inactive", "inactive_count", "reserved", "segments")
_KINDS = ("", "peak_", "total_")


class _Blocks(Blocks):
    """The blocks of such a device while the model in Python leads.

    Attributes:
        ledger: The ledger in C++.
        observers: Those of the device.
        held: Number of the memory of a storage that C++ made -> its block, and the address of its values.
    """

    ledger: Any
    held: dict[int, tuple[Block, int]]
    observers: Any

    def release_ended(self) -> None:
        super().release_ended()
        for number in self.ledger.drain():
            self.end(number)

    def end(self, number: int) -> None:
        """Free the block of memory that has ended."""
        found = self.held.pop(number, None)
        if found is not None:
            self.freed.append(found[0])
            for observer in self.observers:
                observer.freed(found[1])


class NativeDevice(Device):
    """The memory of one simulated device.

    ``_blocks`` is missing while the ledger leads; whoever reads it lets the model in Python lead.

    Args:
        index: The index of the device.
        more: The further arguments of :class:`Device`.

    Attributes:
        ledger: The ledger in C++.
    """

    def __init__(self, index: int, *more: Any) -> None:
        super().__init__(index, *more)
        self.ledger = building.load().Ledger(index)
        self._blocks.__class__ = _Blocks
        self._blocks.ledger, self._blocks.held, self._blocks.observers = self.ledger, {}, self.observers
        self._resting: Any = self._blocks
        self._waits = itertools.count(1)
        devices[self.ledger.number] = self

    def __getattr__(self, name: str) -> Any:
        if name != "_blocks":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # On one line: tests let interrupts come between lines, where Python lets none come between these.
        with self._lock: return self._led_in_python()  # noqa: E701  # fmt: skip

    def _led_in_python(self) -> Any:
        """Let the model in Python lead. May be called again after an interrupt."""
        blocks = vars(self).get("_blocks")
        if blocks is not None:  # another thread was faster
            return blocks
        blocks, (end, obtained, figures, segments) = self._resting, self.ledger.freeze()
        heads, held, free = {}, {}, []
        for stream, is_small, parts in segments:
            pool, previous = blocks.pools.pool(stream, is_small, NOBODY), None
            for address, size, requested, number, values in parts:
                block = Block(address, size, pool, USED if number else FREE)
                block.requested, block.previous = requested, previous
                if previous is None:
                    heads[address] = block
                else:
                    previous.next = block
                previous = block
                if number:
                    held[number] = block, values
                else:
                    free.append(block)
        blocks.pools.clear()
        for block in free:
            block.pool.put(block)
        blocks.segments.heads, blocks.segments.end, blocks.held = heads, end, held
        blocks.statistics.numbers["num_device_alloc"] = obtained
        for of, values in zip(_all_figures(blocks), figures, strict=True):
            vars(of).update(zip((kind + name for kind in _KINDS for name in _FIGURES), values, strict=True))
        self._waits = itertools.count(1)
        vars(self)["_blocks"] = blocks
        return blocks

    def hand_over(self) -> bool:
        """Let the ledger lead, if it can serve what there is. Return whether it leads."""
        if self.ledger.leads:
            return True
        # Looked at after 1, 2, 4 ... allocations, since a look takes as long as there are blocks.
        count = next(self._waits)
        return not (count & (count - 1)) and not self._is_changing() and self._hand_over()

    @changing
    def _hand_over(self) -> bool:
        blocks = self._blocks
        rows = _rows(blocks, self.observers)
        if rows is None:
            return False
        segments = blocks.segments
        figures = [[vars(of)[kind + name] for kind in _KINDS for name in _FIGURES] for of in _all_figures(blocks)]
        obtained = blocks.statistics.numbers["num_device_alloc"]
        led: bool = self.ledger.lead(vars(self), (segments.first, segments.end, obtained, tuple(figures), rows))
        return led

    def take(self, requested: int, stream: int) -> Block | None:
        """Return a block for a storage that C++ makes; None where one of Python must have it."""
        blocks = self._blocks
        if blocks.settings != DEFAULT or blocks.pools.has_private:
            return None
        return self.allocate(requested, stream)

    def allocate(self, requested: int, stream: int = 0) -> Block:
        # The storages that C++ made and that have ended are not in `ended`.
        self.release_ended()
        return super().allocate(requested, stream)

    def end(self, number: int) -> None:
        """Free the block of the memory with this number, which has ended."""
        self._blocks.end(number)

    def hold(self, number: int, block: Block, values: int) -> None:
        """Note that the memory with this number has a block."""
        self._blocks.release_ended()  # memory that has ended may have had the same number
        self._blocks.held[number] = block, values

    def limit(self) -> int:
        """Return the bytes that the device may reserve now; -1 for no limit."""
        return min((each for each in self._resting.limits() if each is not None), default=-1)

    # ---- what the ledger answers too ---------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        return DEFAULT if self.ledger.leads else super().settings

    def configure(self, settings: Settings) -> None:
        if settings != DEFAULT or not self.ledger.leads:
            super().configure(settings)

    @property
    def has_pending(self) -> bool:
        return not self.ledger.leads and super().has_pending

    @property
    def uncached(self) -> int:
        return 0 if self.ledger.leads else super().uncached

    def figures(self) -> Memory:
        return Memory(*self.ledger.memory()) if self.ledger.leads else super().figures()

    def held_blocks(self) -> dict[Block, int]:
        self.release_ended()
        return dict(self._blocks.held.values())

    def block_of(self, number: int) -> Block | None:
        """Return the block of the memory of a storage that C++ made."""
        found = self._blocks.held.get(number)
        return None if found is None else found[0]


def _all_figures(blocks: Blocks) -> tuple[Any, Any, Any]:
    statistics = blocks.statistics
    return statistics.whole, statistics.of_pools[True], statistics.of_pools[False]


def _rows(blocks: Any, observers: Any) -> list[Any] | None:
    """Return the segments as the ledger reads them; None where there is something that it does not know."""
    plain = blocks.settings == DEFAULT and not (blocks.pending or blocks.late or blocks.freed or observers)
    if not plain or blocks.pools.has_private or blocks.segments.uncached:
        return None
    numbers = {block: (number, values) for number, (block, values) in blocks.held.items()}
    rows = []
    for _, head in sorted(blocks.segments.heads.items()):
        parts = []
        for block in chain_of(head):
            number, _values = numbers.get(block, (0, 0))
            if block.uses or not block.pool.is_usual or (block.state != FREE and not number):
                return None
            parts.append((block.address, block.size, block.requested, number))
        rows.append((head.pool.stream, head.pool.is_small, parts))
    return rows
