"""The history of allocations, as ``torch.cuda.memory._record_memory_history`` asks for it.

A device with an allocator of its own tells a :class:`History` of each allocation. For the others an
:class:`OperatorWatcher` tells it of the storages that operators of one thread return; what a kernel needs on its way,
and what was there before, it does not see.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

from torchdevice._private import require

_stack = require(_python_dispatch, "_get_current_dispatch_mode_stack")
_pop = require(_python_dispatch, "_pop_mode")
_push = require(_python_dispatch, "_push_mode")


class Block(NamedTuple):
    """Memory that a tensor has: its device's index, its address, its size in bytes, and what was asked for of it."""

    device: int
    address: int
    size: int
    requested: int


class Observer(Protocol):
    """Who is told of allocations."""

    def allocated(self, block: Block) -> None: ...

    def freed(self, address: int) -> None: ...


class History:
    """Allocations and ends of allocations, in order, with the lines of the program that caused them.

    Args:
        stream: Returns the id of the current stream of a device index.
    """

    def __init__(self, stream: Callable[[int], int]):
        self._stream = stream
        self._lock = threading.RLock()
        self._blocks: dict[int, tuple[Block, list[dict[str, Any]]]] = {}
        self._metadata = threading.local()
        self.configure("state", None, 1, frozenset())

    def configure(self, kept: str, context: str | None, entries: int, skipped: frozenset[str]) -> None:
        """Set what is kept from now on.

        Args:
            kept: ``"all"`` events, or the ``"state"`` alone.
            context: For which events the stack is kept: None, ``"state"``, ``"alloc"`` or ``"all"``.
            entries: How many events are kept, the last ones.
            skipped: Kinds of events that are not kept.
        """
        with self._lock:
            self._context, self._skipped = context, skipped
            self._entries = collections.deque(
                getattr(self, "_entries", ()), maxlen=max(1, entries) if kept == "all" else 1
            )

    def clear(self) -> None:
        """Forget the events."""
        with self._lock:
            self._entries.clear()

    @property
    def metadata(self) -> str:
        """What this thread's events are labelled with."""
        return getattr(self._metadata, "text", "")

    @metadata.setter
    def metadata(self, text: str) -> None:
        self._metadata.text = text

    def allocated(self, block: Block) -> None:
        """Note a new block."""
        with self._lock:
            frames = _frames() if self._context else []
            self._blocks[block.address] = (block, frames)
            self._note("alloc", block, frames if self._context in ("alloc", "all") else [])

    def freed(self, address: int) -> None:
        """Note the end of a block; one that was there before the history began is unknown."""
        with self._lock:
            block, _ = self._blocks.pop(address, (None, None))
            if block is not None:
                frames = _frames() if self._context == "all" else []
                self._note("free_requested", block, frames)
                self._note("free_completed", block, frames)

    def annotate(self, address: int, text: str) -> None:
        """Note a label for a block."""
        with self._lock:
            block, frames = self._blocks.get(address, (None, []))
            if block is None:
                raise RuntimeError(f"no allocation at {address} is recorded")
            self._note("annotate", block, frames, text)

    def out_of_memory(self, index: int, size: int, free: int) -> None:
        """Note an allocation that failed."""
        with self._lock:
            self._note("oom", Block(index, 0, size, size), _frames() if self._context else [], free=free)

    def _note(
        self, action: str, block: Block, frames: list[dict[str, Any]], label: str = "", free: int | None = None
    ) -> None:
        if action in self._skipped:
            return
        entry = {
            "action": action,
            "addr": block.address,
            "size": block.size,
            "stream": self._stream(block.device),
            "time_us": time.time_ns() // 1000,
            "compile_context": "N/A",
            "user_metadata": label or self.metadata,
            "pool_id": (0, 0),
            "frames": frames,
        }
        if free is not None:
            del entry["addr"]
            entry["device_free"] = free
        self._entries.append((block.device, entry))

    def frames(self, address: int) -> list[dict[str, Any]] | None:
        """Return the lines that allocated a block, innermost first; None if it is not known."""
        found = self._blocks.get(address)
        return found[1] if found is not None else None

    def traces(self, count: int) -> list[list[dict[str, Any]]]:
        """Return the events of each of ``count`` devices."""
        with self._lock:
            traces: list[list[dict[str, Any]]] = [[] for _ in range(count)]
            for index, entry in self._entries:
                traces[index].append(entry)
            return traces


class OperatorWatcher(_python_dispatch.TorchDispatchMode):
    """Tells an observer of the storages on a kind of device that operators of this thread return, until stopped."""

    def __init__(self, device_type: str, observer: Observer):
        super().__init__()
        self._device_type = device_type
        self._observer = observer
        self._known: dict[int, weakref.ref[Any]] = {}
        self._stopped = False
        self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._stopped:
            return result
        given: set[int] | None = None
        for tensor in _dense(result, self._device_type):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if not size or address in self._known:
                continue
            if given is None:
                given = {each.untyped_storage().data_ptr() for each in _dense((args, kwargs), self._device_type)}
            if address not in given:
                self._known[address] = weakref.ref(storage, self._ended_at(address))
                self._observer.allocated(Block(tensor.device.index or 0, address, size, size))
        return result

    def _ended_at(self, address: int) -> Callable[[Any], None]:
        def ended(storage: Any) -> None:
            if self._known.pop(address, None) is not None:
                self._observer.freed(address)

        return ended

    def stop(self) -> None:
        """Tell nothing from now on, also where other modes were entered since, or from another thread."""
        self._known.clear()
        self._stopped = True
        if self not in _stack():
            return
        above = []
        while _stack()[-1] is not self:
            above.append(_pop())
        self.__exit__(None, None, None)
        for mode in reversed(above):
            _push(mode)


def held_by_python(device_type: str, index: int) -> list[Block]:
    """Return the memory of the tensors of a device that Python holds."""
    import gc

    found: dict[int, Block] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            for tensor in _dense(each, device_type):
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if size and (tensor.device.index or 0) == index:
                    found[address] = Block(index, address, size, size)
    return list(found.values())


def _dense(tree: Any, device_type: str) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree that have memory of their own on a kind of device."""
    with torch._C.DisableTorchFunction():
        for leaf in pytree.tree_leaves(tree):
            if type(leaf) in _PLAIN and leaf.layout is torch.strided and leaf.device.type == device_type:
                yield leaf


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _frames() -> list[dict[str, Any]]:
    """Return the stack, innermost first, without this package."""
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
            code = frame.f_code
            found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back  # type: ignore[assignment]
    return found
