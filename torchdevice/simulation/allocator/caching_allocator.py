"""CUDA's caching allocator as a model: the memory that the tensors of a device would have on a GPU.

``block_allocation.py`` chooses the block for a request. This module has the methods that several
threads may call at any time, and the recovery after an interrupt.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices import out_of_memory
from torchdevice.kernel.devices.device_memory import Block as Place
from torchdevice.kernel.devices.device_memory import Memory
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.python import forks
from torchdevice.simulation.allocator import checkpoints, kept_memory
from torchdevice.simulation.allocator.allocator_settings import Settings
from torchdevice.simulation.allocator.allocator_stats import EXBIBYTE, OF_EXBIBYTES
from torchdevice.simulation.allocator.block_allocation import Blocks, ErrorOf, LimitsOf, release_all
from torchdevice.simulation.allocator.memory_blocks import Block, Owner
from torchdevice.simulation.allocator.rounding import rounded, segment_size


def _tell(
    index: int, observers: Sequence[Observer], action: str, address: int, size: int, stream: int
) -> None:
    """Tell observers of a change of a segment."""
    for observer in observers:
        observer.segment_changed(action, Place(index, address, size, size), stream)


M = TypeVar("M", bound=Callable[..., Any])


def changing(method: M) -> M:
    """Let a device's method hold the lock, and lay the memory out anew if it is interrupted.

    Freed storages are settled first. A destructor may call the method in the middle of another one.
    If it returns nothing, it is called when that one has ended, else it sees the memory as it is.

    A generator that held the lock, as a context manager, would keep it where an interrupt comes
    between its two halves.
    """

    @functools.wraps(method)
    def changing(self: Device, *args: Any, **kwargs: Any) -> Any:
        late = self._blocks.late
        try:
            # Before the lock is taken: a release may call observers, which have locks of their own.
            if self.ended:
                self._blocks.release_ended()
            # Only this thread can hold the lock here: a destructor or handler within a change.
            if self._is_changing():
                # Annotations are texts in this package (`from __future__ import annotations`).
                if method.__annotations__["return"] != "None":
                    return method(self, *args, **kwargs)
                return late.append(functools.partial(method, self, *args, **kwargs))
            # One line: tests interrupt between lines, where Python never interrupts these.
            with self._lock: return method(self._without_freed(late), *args, **kwargs)  # noqa: E701  # fmt: skip
        except BaseException as error:
            self._recover_from(error)
            raise

    return changing  # type: ignore[return-value]


def _change_by(path: str, *, answers: bool = False) -> Any:
    """Return a method that changes or asks the device by one of the blocks' or their parts."""
    method = operator.attrgetter(path)

    def change(self: Device, *args: Any) -> None:
        method(self._blocks)(*args)

    def answer(self: Device, *args: Any) -> Any:
        return method(self._blocks)(*args)

    return changing(answer if answers else change)


class Device:
    """The memory of one simulated device.

    Storages may end, by the garbage collector, between any two lines of this class. One that ends
    is therefore only appended to ``ended``, by a function in C, which no interrupt can come into.
    The next allocation or query releases it, and frees its block.

    Args:
        index: The index of the device.
        limits: Returns the limits of the device; asked where a new segment is needed.
        observers: Are told of each change of a segment.
        error: Returns the error where memory runs out, given the bytes that were wanted, those in
            use, those of the device and those that the program may use; None for CUDA's.

    Attributes:
        ended: The ended storages of all devices, in this order. Its ``release`` gives the block to
            its device's ``freed``.
        freed: The blocks without an owner, in this order.
        kept: The memory of free blocks whose address the program has read.
        live: Returns the blocks of a device that have an owner, with the address of the values of
            each.
        observers: Are told of each change of a segment.
    """

    def __init__(
        self,
        index: int,
        limits: LimitsOf = lambda index: (None, None, 0),
        error: ErrorOf = lambda *bytes_: None,
        observers: list[Observer] | None = None,
    ) -> None:
        self.index = index
        self.observers: list[Observer] = [] if observers is None else observers
        self.live: Callable[[Device], Mapping[Block, int]] = lambda device: {}
        self.kept: kept_memory.Kept = {}
        self.renew_lock()  # before a forked child can find the device
        number = _take_number(self)
        # The function for observers holds no device, so that one ends with its last user.
        self._blocks = Blocks(
            index, number, limits, error, functools.partial(_tell, index, self.observers)
        )
        # Shortcuts for `allocate`, which is called for every tensor.
        self.ended, self.freed = self._blocks.ended, self._blocks.freed

    def renew_lock(self) -> None:
        """Make a new lock."""
        self._lock = threading.RLock()
        # A private method of RLock, and the only way to ask whether this thread holds the lock.
        self._is_changing: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]

    def begin_in_child(self) -> None:
        """Start anew in a forked child, where another thread's change would never end."""
        # In the child no other thread exists that could release it.
        is_whole = self._lock.acquire(blocking=False)
        self.renew_lock()
        if not is_whole:
            self._recover()

    def _without_freed(self, late: deque[Callable[[], object]]) -> Device:
        """Return the device, on which nothing that was freed or that a destructor left waits."""
        return self._settled() if self.freed or late else self

    def _settled(self) -> Device:
        self._blocks.settle()
        return self

    def lead(self) -> Blocks:
        """Give blocks by this model from now on, which tells observers. Return the blocks."""
        return self._blocks

    @property
    def settings(self) -> Settings:
        """The settings of the allocator."""
        return self._blocks.settings

    def configure(self, settings: Settings) -> None:
        """Use other settings from now on. Blocks and segments stay as they are."""
        self._blocks.configure(settings)

    # ---- interrupts ------------------------------------------------------------------------------

    def _recover_from(self, error: BaseException) -> None:
        """Lay the memory out anew after an interrupt: any error that is not a refusal."""
        # Refusals leave everything whole, and a change handles its own errors where it ends.
        if error is not self._blocks.refused and not self._is_changing():
            self._recover()
        self._blocks.refused = None

    def _recover(self) -> None:
        """Lay the memory out anew after an interrupt, which may hit between any two lines.

        What is certain is which blocks storages have. Each becomes a segment of its own, and
        nothing is cached.
        """
        self._blocks.release_ended()
        # On one line: see `changing`.
        with self._lock: self._blocks.lay_out_anew(self.live(self))  # noqa: E701  # fmt: skip

    # ---- blocks ----------------------------------------------------------------------------------

    def allocate(self, requested: int, stream: int = 0) -> Block:
        """Return a block for a request of ``requested`` bytes on a stream.

        Raises:
            torch.OutOfMemoryError: The device has too little memory left. The text is CUDA's.
            torch.AcceleratorError: The same, where the allocator is disabled.
        """
        try:  # as ``changing`` does it, without the time of its frame
            # The usual case has nothing to release, and costs no call.
            if self.ended:
                self._blocks.release_ended()
            if self._is_changing():
                return self._blocks.allocate_meanwhile(requested, stream)
            with self._lock: return self._blocks.allocate(requested, stream)  # noqa: E701  # fmt: skip
        except BaseException as error:  # also after the block was found: nobody has it then
            self._recover_from(error)
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Tell the observers of this thread's context if memory ran out.

        Here, because not all operators pass a function that explains errors.
        """
        context = thread_state.state.context
        if isinstance(error, torch.OutOfMemoryError) and context is not None:
            out_of_memory.tell(context, error, self.index)

    def release_ended(self) -> None:
        """Release ended blocks to the CPU, also if there are no further allocations.

        The lock is not held: observers have locks of their own.
        """
        # The list itself: to ask the blocks for it would end C++'s lead. While C++ leads, no block
        # of Python's ends.
        ended = self.ended
        try:  # as the blocks do it, without the time of its frame: most kernels come here
            while ended:
                ended.popleft().release()
        except IndexError:  # another thread was faster
            return
        except BaseException as error:
            self._recover_from(error)
            raise

    def use(self, block: Block, stream: Any) -> None:
        """Note another stream's use of a block, which defers reuse until the host has waited."""
        # Its own stream needs no mark: the allocator reuses memory in the order of that stream.
        if stream != (self.index, block.pool.stream):
            # A new set, so that an interrupt leaves the old one whole.
            block.uses = (block.uses or set()) | {stream}

    @property
    def has_pending(self) -> bool:
        """Whether there may be blocks that another stream uses and that are freed."""
        # "May be": blocks that have ended are not sorted yet.
        return bool(self._blocks.pending or self.freed or self.ended)

    host_waited = _change_by("host_waited")
    """Free the blocks that were freed while another stream used them: the host has waited for the
    device.
    """

    def empty_cache(self) -> None:
        """Return the segments without a block in use to the driver, and drop kept memory."""
        self._release_cached()
        self.kept.clear()

    _release_cached = _change_by("release_cached")

    @changing
    def begin(self, settings: Settings) -> None:
        """Begin as in a new process: these settings, no cached segments, peaks or sums."""
        self._blocks.configure(settings)
        self._blocks.release_cached()
        self._blocks.statistics.forget_peaks()
        self._blocks.statistics.forget_totals()

    # ---- private pools ---------------------------------------------------------------------------

    keep_private = _change_by("pools.keep")
    """Count one more use of a private pool, which is made if there is none of this id."""

    release_private = _change_by("pools.release")
    """Count one use of a private pool less. Its segments may be returned to the driver after the
    last.
    """

    def uses_of(self, owner: Owner) -> int:
        """Return how often a private pool is in use."""
        return self._blocks.pools.uses_of(owner)

    @changing
    def empty_private(self, owner: Owner) -> None:
        """Return a private pool's unused segments to the driver, if the pool is not in use."""
        blocks = self._blocks
        # Blocks that wait for another stream belong to the pool's segments too.
        blocks.host_waited()
        unused = [pool for pool in blocks.pools.unused() if pool.owner == owner]
        release_all(blocks.segments, unused, blocks.settings)

    @changing
    def live_in(self, owner: Owner) -> set[int]:
        """Return the addresses of the values of the blocks that tensors have of a private pool."""
        return {*checkpoints.live(self.live(self), owner)}

    @changing
    def checkpoint(self, owner: Owner) -> checkpoints.Checkpoint:
        """Return the segments of a private pool."""
        return checkpoints.taken(self._blocks, self.live(self), owner)

    @changing
    def restore(
        self, owner: Owner, checkpoint: checkpoints.Checkpoint, stale: Set[int]
    ) -> dict[int, Block]:
        """Lay the segments of a private pool out as they were, see :func:`.checkpoints.restore`."""
        self._blocks.host_waited()
        return checkpoints.restore(self._blocks, self.live(self), owner, checkpoint, stale)

    @changing
    def route(self, owner: Owner, takes: Callable[[], bool]) -> None:
        """Let a private pool serve the allocations of a thread where ``takes()`` is true."""
        self._blocks.pools.routes.append((owner, takes))

    unroute = _change_by("pools.unroute")
    """End the first route of a private pool."""

    @property
    def held(self) -> Mapping[int, tuple[Block, int]]:
        """The blocks of storages made by C++, and their values' addresses, by memory number."""
        return self._blocks.held

    # ---- figures ---------------------------------------------------------------------------------

    @changing
    def figures(self) -> Memory:
        """Return the current values and the peaks, in bytes."""
        whole = self._blocks.statistics.whole
        return Memory(whole.allocated, whole.reserved, whole.peak_allocated, whole.peak_reserved)

    highest = _change_by("statistics.highest", answers=True)
    """Return the highest allocated and reserved bytes ever, whether or not peaks were reset."""

    statistics = _change_by("statistics.shown", answers=True)
    """Return all statistics, under the keys of ``torch.cuda.memory_stats``."""

    reset_peak = _change_by("statistics.forget_peaks")
    """Reset the peaks to the current values."""

    reset_accumulated = _change_by("statistics.forget_totals")
    """Reset the sums of allocated and freed memory, and the numbers of calls of the driver, to 0.
    """

    segments = _change_by("segments.shown", answers=True)
    """Return the segments by address. ``data`` has the addresses of the values of blocks in use."""

    def refusal(self, requested: int, total: int) -> str:
        """Count a request that this machine cannot serve, and return the text of CUDA's error."""
        blocks = self._blocks
        blocks.statistics.numbers["num_ooms"] += 1
        # CUDA refuses such a request before it computes a size, with another text.
        if requested >= EXBIBYTE:
            return OF_EXBIBYTES
        wanted = segment_size(rounded(requested, blocks.settings), blocks.settings)
        return blocks.out_of_memory(wanted, blocks.limits()._replace(total=total))


# Not a WeakValueDictionary: its callback in Python, at the end of a device, would swallow the error
# of an interrupt.
_in_use: dict[int, weakref.ref[Device]] = {}
"""Number -> device, of all machines: each device has addresses of its own."""

_lock = forks.lock(globals())


def _take_number(device: Device) -> int:
    """Return the least number that no living device has."""
    # On one line: see `changing`.
    with _lock: return _numbered(device)  # noqa: E701  # fmt: skip


def _numbered(device: Device) -> int:
    number = next(
        number for number in itertools.count() if number not in _in_use or _in_use[number]() is None
    )
    _in_use[number] = weakref.ref(device)
    return number


def _begin_in_child() -> None:
    for each in filter(None, [known() for known in _in_use.values()]):
        each.begin_in_child()


forks.in_child(_begin_in_child)
