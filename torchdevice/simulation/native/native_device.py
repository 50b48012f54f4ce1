"""The memory of a device whose allocator is that of ``kernels.cpp``, as long as nothing is asked that only Python has.

Either the ledger in C++ leads or the model in Python does. The ledger serves default settings, without private pools,
observers, and blocks that another stream may use or that storages of Python have. Whoever asks anything else of the
device lets the model lead, with the same blocks and figures. The next allocation lets the ledger lead again, if it can.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torchdevice.devices.device_memory import Memory
from torchdevice.simulation.allocator.allocator_settings import DEFAULT
from torchdevice.simulation.allocator.caching_allocator import Device, changing
from torchdevice.simulation.allocator.memory_blocks import FREE, NOBODY, USED, Block, chain_of
from torchdevice.simulation.native import building

devices: weakref.WeakValueDictionary[int, NativeDevice] = weakref.WeakValueDictionary()
"""Number of a ledger -> its device."""

_NAMES = ("allocated", "requested", "count", "inactive", "inactive_count", "reserved", "segments")
_FIGURES = [kind + name for kind in ("", "peak_", "total_") for name in _NAMES]
"""The figures in the order of the ledger's."""


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
        if "_blocks" in vars(self):  # another thread was faster
            return self._blocks
        blocks, (end, obtained, figures, segments) = self._resting, self.ledger.freeze()
        blocks.pools.clear()
        heads, held = {}, {}
        for stream, is_small, parts in segments:
            pool, previous = blocks.pools.pool(stream, is_small, NOBODY), None
            for address, size, requested, number, values in parts:
                block = Block(address, size, pool, USED)
                block.requested, block.previous = requested, previous
                if previous is None:
                    heads[address] = block
                else:
                    previous.next = block
                if number:
                    held[number] = block, values
                else:
                    pool.put(block)
                previous = block
        blocks.segments.heads, blocks.segments.end, blocks.held = heads, end, held
        blocks.statistics.numbers["num_device_alloc"] = obtained
        for of, values in zip(blocks.statistics.counting, figures, strict=True):
            vars(of).update(zip(_FIGURES, values, strict=True))
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
        blocks, statistics = self._blocks, self._blocks.statistics
        # A copy is made at once. A list of the items may collect garbage on the way, and other threads release memory.
        numbers = {block: number for number, (block, _) in blocks.held.copy().items()}
        rows, used = [], 0
        for _, head in sorted(blocks.segments.heads.items()):
            parts = [(each.address, each.size, each.requested, numbers.get(each, 0)) for each in chain_of(head)]
            rows.append((head.pool.stream, head.pool.is_small, parts))
            used += sum(each.state != FREE for each in chain_of(head))
        busy = blocks.pending or blocks.late or blocks.freed or self.observers
        # Storages of Python have blocks too.
        if busy or used > len(numbers) or any(each.uses for each in numbers):
            return False
        usual = all(head.pool.is_usual for head in blocks.segments.heads.values()) and not blocks.pools.routes
        if not usual or blocks.settings != DEFAULT:
            return False
        figures = tuple([getattr(of, name) for name in _FIGURES] for of in statistics.counting)
        obtained, segments = statistics.numbers["num_device_alloc"], blocks.segments
        led: bool = self.ledger.lead(vars(self), (segments.first, segments.end, obtained, figures, rows))
        return led

    def hold(self, block: Block, number: int, memory: Any) -> None:
        """Note that memory of C++, with the values of a CPU tensor, has this block of the model in Python."""
        self._blocks.held[number] = block, memory.data_ptr()

    def release(self, number: int) -> None:
        """Free the block of memory of C++ that has ended. May be called again."""
        block, values = self._blocks.held.pop(number, (None, 0))
        if block is not None:
            self.freed.append(block)
            for observer in self.observers:
                observer.freed(values)

    def _recover(self) -> None:
        for number in list(self._blocks.held):
            if not self.ledger.owns(number):  # an interrupt came into its release
                self.release(number)
        super()._recover()

    def limit(self) -> int:
        """Return the bytes that the device may reserve now; -1 for no limit."""
        limits = self._resting.limits()
        return min((each for each in (limits.room, limits.allowed) if each is not None), default=-1)

    @property
    def has_pending(self) -> bool:
        return not self.ledger.leads and super().has_pending

    def figures(self) -> Memory:
        return Memory(*self.ledger.memory()) if self.ledger.leads else super().figures()
