"""The memory of a launch: each argument has addresses of its own, and each access is looked at.

A kernel gets addresses of a space in which every storage among its arguments has a region of 16 TiB
to itself, with the storage in the middle. So an address outside a storage tells which argument it
was computed from, and by how much it is outside, also where the memory after it belongs to another
tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from torchdevice.kernel.lowlevel import memory_windows
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.simulation.observe.unwritten_memory import PATTERN
from torchdevice.triton_kernels.outer_sums import OuterSum, compact

_SHIFT, _FIRST = 44, 16
"""Regions begin above the addresses of processes (48 bits), which kernels may read from memory."""

_ALIGNMENT = 4095
"""Addresses keep their last bits, since kernels may ask whether they are aligned."""


_PARTS = 8
"""Into how many parts, by what its mask lets through, the rows of a block may fall that are copied
row by row.
"""


class Region(NamedTuple):
    """Where a storage is.

    Attributes:
        name: The arguments with the storage.
        first: The first address, as the kernel sees it.
        memory: The storage's bytes.
        itemsize: The size of an element.
    """

    name: str
    first: int
    memory: Any
    itemsize: int


class Rows(NamedTuple):
    """A block in memory whose elements lie one after the other along an axis.

    Attributes:
        parts: The rows of which the mask lets the same lanes through: all rows of that length that
            the storage has, one at each element, the numbers of the block's, and where they are in
            the block, whose last axis is then that of the rows.
        axis: The axis of the rows.
        shape: The shape of the block.
    """

    parts: list[tuple[Any, Any, tuple[Any, slice]]]
    axis: int
    shape: tuple[int, ...]

    def read(self, default: Any) -> Any:
        """Return the elements, and ``default`` where the mask lets nothing through."""
        windows, numbers, (which, _) = self.parts[0]
        if which is ... and windows.shape[-1] == self.shape[self.axis]:
            return np.moveaxis(windows[numbers], -1, self.axis)
        whole = np.broadcast_to(default, np.broadcast_shapes(self.shape, default.shape))
        result = whole.astype(windows.dtype)
        for windows, numbers, place in self.parts:
            np.moveaxis(result, self.axis, -1)[place] = windows[numbers]
        return result

    def write(self, values: Any, memory: Memory) -> None:
        """Write values, after the memory has kept the old ones."""
        whole = np.broadcast_to(values, np.broadcast_shapes(self.shape, values.shape))
        given = np.moveaxis(whole, self.axis, -1)
        for windows, numbers, place in self.parts:
            rows = given[place]
            at = np.broadcast_to(numbers, rows.shape[:-1])
            if memory.logs is not None:
                memory.logs.append(functools.partial(windows.__setitem__, at, windows[at]))
            windows[at] = rows


class Memory:
    """The storages of a launch.

    Args:
        launch: Raises for a wrong access by its ``fault`` and ``report_unwritten``, with a text
            that describes the access and the instance.
        races: Told of each access; None where nothing looks for races.

    Attributes:
        launch: The launch.
        largest: The largest number of elements that an instance has accessed at once.
        logs: The functions that restore the memory from before the group that runs; None where
            nothing is kept.
    """

    def __init__(self, launch: Any, races: Races | None = None):
        self.launch, self._races = launch, races
        self._regions: dict[int, Region] = {}
        self.largest = 1
        self.logs: list[Callable[[], None]] | None = None

    def place(self, name: str, memory: torch.Tensor) -> int:
        """Give a storage addresses, and return the first.

        Args:
            name: The arguments that have it.
            memory: A CPU tensor that covers it.
        """
        number = len(self._regions) + _FIRST
        middle = (number << _SHIFT) + (1 << (_SHIFT - 1))
        first = middle + (data_ptr(memory) & _ALIGNMENT)
        as_bytes = (
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory.untyped_storage()).numpy()
        )
        self._regions[number] = Region(name, first, as_bytes, memory.itemsize)
        return first

    def rows(self, pointers: Any, mask: Any, dtype: Any) -> Rows | None:
        """Return a block's rows in a storage, if bounds show them without a look at addresses.

        Args:
            pointers: The handle of the kernel's addresses.
            mask: That of the mask, or None.
            dtype: The dtype that NumPy reads or writes.
        """
        if (
            not isinstance(pointers, OuterSum)
            or self._races
            or self.launch.context.options.uninitialized
        ):
            return None
        found = _axis_of_rows([each.view(np.int64) for each in pointers.terms], dtype.itemsize)
        if found is None:
            return None
        axis, column, rest = found
        shape = pointers.shape
        if mask is not None:
            shape = np.broadcast_shapes(shape, mask.data.shape)
        first = functools.reduce(np.add, rest).take(0, axis) + column.take(0, axis)
        first = np.broadcast_to(first, (*shape[:axis], *shape[axis + 1 :]))
        places = [(..., slice(0, shape[axis]))]
        if mask is not None:
            active = compact(mask.data)
            if not active.all():
                places = _alike(np.moveaxis(active, axis, -1), shape[axis], first.shape)
        parts = self._parts(first, places, dtype)
        if not parts:
            return None
        self.largest = max(self.largest, math.prod(shape[1:]))
        return Rows(parts, axis, shape)

    def _parts(self, first: Any, places: list[tuple[Any, slice]], dtype: Any) -> list[Any]:
        """Return a block's parts (:class:`Rows`); none unless all rows are whole in one storage.

        Args:
            first: The address of the first element of each row.
            places: Which rows each part has, and which lanes of these.
            dtype: The dtype of the elements.
        """
        if not places:
            return []
        which, _ = places[0]
        region = self._regions.get(int(first[which].flat[0]) >> _SHIFT)
        if region is None:
            return []
        size = dtype.itemsize
        offsets = first - region.first
        if (offsets % size).any():
            return []
        elements = region.memory[: len(region.memory) // size * size].view(dtype)
        parts = []
        for which, lanes in places:
            numbers = offsets[which] // size + lanes.start
            length = lanes.stop - lanes.start
            if numbers.min() < 0 or numbers.max() + length > len(elements):
                return []
            windows = as_strided(elements, (len(elements) - length + 1, length), (size, size))
            parts.append((windows, numbers, (which, lanes)))
        return parts

    def addresses(
        self, pointers: Any, active: Any, size: int, access: str, group: Any
    ) -> tuple[Any, Any]:
        """Return the addresses in the process for those of a kernel, and the lanes that are active.

        Args:
            pointers: The kernel's addresses.
            active: The lanes that are active, of the same shape.
            size: The bytes that each reads or writes.
            access: ``"reads"``, ``"writes"`` or ``"updates"`` (an atomic).
            group: The instances, along the first axis.
        """
        found = pointers if active.all() else pointers[active]
        self.largest = max(self.largest, pointers.size // len(pointers))
        if not found.size:
            return pointers, active
        first = int(found.min()) >> _SHIFT
        last = int(found.max()) >> _SHIFT
        if first == last:
            offset = self._offset(first, pointers, active, found, size, access, group)
            return pointers + offset, active
        result = pointers.copy()
        for number in np.unique(found >> np.uint64(_SHIFT)).tolist():
            within = active & (pointers >> np.uint64(_SHIFT) == number)
            result[within] += self._offset(
                number, pointers, within, pointers[within], size, access, group
            )
        return result, active

    def _offset(
        self,
        number: int,
        pointers: Any,
        active: Any,
        found: Any,
        size: int,
        access: str,
        group: Any,
    ) -> Any:
        """Return the offset from a region's addresses to the process's, if all are in storage."""
        region = self._regions.get(number)
        if region is None:
            allocated = self.launch.are_allocated(found, size)
            if not allocated.all():
                where = (
                    f"at the address {int(found[~allocated][0]):#x}, which is no tensor's on the "
                    "device"
                )
                self.launch.fault(f"{access} {size} bytes {where}", group[0])
            return np.uint64(0)
        what = f"{access} {size} bytes"
        end = region.first + len(region.memory)
        if int(found.min()) < region.first or int(found.max()) + size > end:
            outside = active & ((pointers < region.first) | (pointers + np.uint64(size) > end))
            self.launch.fault(*_told(region, pointers, active, outside, what, "are outside", group))
        if self._races is not None:
            elements = (found - np.uint64(region.first)) // np.uint64(region.itemsize)
            self._races.note(region, elements, access)
        offset = np.uint64((region.memory.ctypes.data - region.first) % 2**64)
        if self.launch.context.options.uninitialized and access != "writes":
            unwritten = _unwritten(pointers + offset, active)
            if unwritten.any():
                why = "read what nothing has written"
                self.launch.report_unwritten(
                    *_told(region, pointers, active, unwritten, what, why, group)
                )
        return offset

    # ---- going back ------------------------------------------------------------------------------

    def log(self, at: Any, active: Any, dtype: Any) -> None:
        """Keep the values that a kernel will overwrite, if :meth:`undo` may be called."""
        if self.logs is not None:
            before = memory_windows.read(at, active, np.zeros(at.shape, dtype), dtype)
            self.logs.append(functools.partial(memory_windows.write, at, active, before))

    def undo(self) -> None:
        """Restore the memory from before the logged writes."""
        for restore in reversed(self.logs or []):
            restore()
        self.logs = None


def _axis_of_rows(terms: list[Any], size: int) -> tuple[int, Any, list[Any]] | None:
    """Return the axis along which the elements of a sum of addresses lie one after the other.

    Args:
        terms: The terms of the sum.
        size: The size of an element.

    Returns:
        The axis, the only term that varies along it, and the other terms; None where there is no
        such axis.
    """
    for column in terms:
        rest = [each for each in terms if each is not column]
        for axis in range(1, column.ndim):
            length = column.shape[axis]
            varies_along_it = length > 1 and column[0].size == length
            is_alone = max(each.shape[axis] for each in rest) == 1
            if varies_along_it and is_alone and (np.diff(column, axis=axis) == size).all():
                return axis, column, rest
    return None


def _unwritten(addresses: Any, active: Any) -> Any:
    """Return the lanes that are active and in whose word in memory is the pattern."""
    words = addresses & ~np.uint64(3)
    return active & (memory_windows.read(words, active, words, np.dtype(np.uint32)) == PATTERN)


def _told(
    region: Region, pointers: Any, active: Any, wrong: Any, what: str, why: str, group: Any
) -> tuple[str, Any]:
    """Return a text about the first instance's faulty lanes, and the instance."""
    instance = np.nonzero(wrong)[0][0]
    one = slice(None) if len(pointers) == 1 else slice(instance, instance + 1)
    offset = int(pointers[one][wrong[one]][0]) - region.first
    lanes = (
        f"{int(wrong[one].sum())} of {int(active[one].sum())} lanes that the mask lets through "
        f"{why}"
    )
    where = f"at offset {offset} of the {len(region.memory)} bytes of argument {region.name}"
    return f"{what} {where} ({lanes})", group[instance]


def _alike(active: Any, length: int, outer: tuple[int, ...]) -> list[tuple[Any, slice]]:
    """Return the rows with the same active lanes, and these; none if they are many or apart.

    Args:
        active: The mask. Its last axis is that of the rows, and may have the length 1.
        length: The length of a row.
        outer: The shape of the block without that axis.
    """
    active = np.broadcast_to(active, (*active.shape[:-1], length))
    count = active.sum(-1)
    first = active.argmax(-1)
    end = length - active[..., ::-1].argmax(-1)
    # One number for the first lane and the one after the last; 0 for a row without any.
    codes = np.where(count > 0, first * (length + 1) + end, 0)
    found = [code for code in np.unique(codes).tolist() if code]
    has_gaps = (count > 0) & (count != end - first)
    if len(found) > _PARTS or has_gaps.any():
        return []
    places: list[tuple[Any, slice]] = []
    for code in found:
        which = ... if codes.size == 1 else np.broadcast_to(codes == code, outer)
        places.append((which, slice(*divmod(code, length + 1))))
    return places


class Races:
    """Who last wrote and read each element, and which instances atomics have ordered.

    Args:
        report: Told of a race: what happens, and the number of the earlier instance.

    Attributes:
        instance: The number of the instance that runs.
    """

    def __init__(self, report: Callable[[str, int], None]):
        self._report = report
        self._accesses: dict[str, Any] = {}
        # Instance -> those before it, by atomics on the same address.
        self._before: dict[int, set[int]] = {}
        self._released: dict[tuple[str, int], set[int]] = {}
        self.instance = 0

    def note(self, region: Region, elements: Any, access: str) -> None:
        """Look at an access to elements of a storage."""
        elements = elements.astype(np.int64).ravel()
        before = self._before.setdefault(self.instance, set())
        if access == "updates":
            for element in elements.tolist()[:_ATOMICS]:
                released = self._released.setdefault((region.name, element), set())
                before |= released
                released |= before | {self.instance}
            return
        if region.name not in self._accesses:
            shape = 2, -(-len(region.memory) // region.itemsize)
            self._accesses[region.name] = np.full(shape, _NOBODY, np.int32)
        writers, readers = self._accesses[region.name]
        self._check(region, elements, writers, access, "writes", before)
        if access == "writes":
            self._check(region, elements, readers, access, "reads", before)
            writers[elements] = self.instance
        else:
            known = readers[elements]
            readers[elements] = np.where(
                (known == _NOBODY) | (known == self.instance), self.instance, _MANY
            )

    def _check(
        self, region: Region, elements: Any, known: Any, access: str, earlier: str, before: set[int]
    ) -> None:
        ordered = [_NOBODY, self.instance, *before]
        if before:
            ordered.append(_MANY)
        found = known[elements]
        races = ~np.isin(found, ordered)
        if races.any():
            text = (
                f"{access} element {elements[races][0]} of argument {region.name}, which another "
                f"instance {earlier}"
            )
            self._report(text, int(found[races][0]))


_NOBODY, _MANY = -1, -2
_ATOMICS = 64
"""How many elements of an atomic order instances: locks and counters are one."""
