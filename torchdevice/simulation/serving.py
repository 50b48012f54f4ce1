"""Lets kernels and allocator of ``kernels.cpp`` serve contexts whose policy has no checks.

Either the ledger in C++ leads or the model of the allocator in Python does. The ledger serves
default settings, without private pools, observers, and blocks that another stream may use or that
storages of Python have. Any other question to the device lets the model lead, with the same blocks
and figures. The next allocation lets the ledger lead again, if it can.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from torchdevice.errors import NativeKernelsError
from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices import current_streams
from torchdevice.kernel.devices.device_memory import Memory
from torchdevice.kernel.python import forks
from torchdevice.kernel.stand_ins import is_written
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.native import building
from torchdevice.random_numbers import drawing_gpu, philox
from torchdevice.simulation import device_generators
from torchdevice.simulation.allocator import kept_memory, storages
from torchdevice.simulation.allocator.allocator_settings import DEFAULT
from torchdevice.simulation.allocator.block_allocation import Blocks
from torchdevice.simulation.allocator.caching_allocator import Device, changing
from torchdevice.simulation.allocator.memory_blocks import FREE, NOBODY, USED, Block, chain_of
from torchdevice.simulation.kernels import cpu_kernels, cuda_values, device_mismatch

devices: weakref.WeakValueDictionary[int, NativeDevice] = weakref.WeakValueDictionary()
"""Number of a ledger -> its device."""

_NAMES = ("allocated", "requested", "count", "inactive", "inactive_count", "reserved", "segments")
_FIGURES = [kind + name for kind in ("", "peak_", "total_") for name in _NAMES]
"""The figures in the order of the ledger's."""


class NativeDevice(Device):
    """The memory of one simulated device.

    ``_blocks`` is missing while the ledger leads; reading it lets the model in Python lead.

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
        # One line: tests interrupt between lines, where Python never interrupts these.
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
        self.kept.update(self.ledger.take_kept())
        vars(self)["_blocks"] = blocks
        return blocks

    def hand_over(self) -> bool:
        """Let the ledger lead, if it can serve the present blocks. Return whether it leads."""
        if self.ledger.leads:
            return True
        # Looked at after 1, 2, 4 ... allocations, since a look takes as long as there are blocks.
        count = next(self._waits)
        return not (count & (count - 1)) and not self._is_changing() and self._hand_over()

    @changing
    def _hand_over(self) -> bool:
        blocks, segments = self._blocks, self._blocks.segments
        # A copy is made at once. A list of the items may collect garbage on the way, and other
        # threads release memory.
        numbers = {block: number for number, (block, _) in blocks.held.copy().items()}
        heads = [head for _, head in sorted(segments.heads.items())]
        if self._has_work(numbers) or not self._is_usual(heads):
            return False
        used = sum(each.state != FREE for head in heads for each in chain_of(head))
        if used > len(numbers):  # storages of Python have blocks too
            return False
        rows = [
            (head.pool.stream, head.pool.is_small, _listed(chain_of(head), numbers))
            for head in heads
        ]
        counting = blocks.statistics.counting
        figures = tuple([getattr(of, name) for name in _FIGURES] for of in counting)
        obtained = blocks.statistics.numbers["num_device_alloc"]
        led: bool = self.ledger.lead(
            vars(self), (segments.first, segments.end, obtained, figures, rows)
        )
        if led:
            self.ledger.give_kept(self.kept)
            self.kept.clear()
        return led

    def _has_work(self, held: Iterable[Block]) -> bool:
        """Return whether blocks wait for a stream or a release, or somebody watches them."""
        blocks = self._blocks
        waiting = blocks.pending or blocks.late or blocks.freed
        return bool(waiting or self.observers) or any(each.uses for each in held)

    def _is_usual(self, heads: Iterable[Block]) -> bool:
        """Return whether the allocator has its default settings, and no private pools."""
        blocks = self._blocks
        are_default = not blocks.pools.routes and blocks.settings == DEFAULT
        return are_default and all(head.pool.is_usual for head in heads)

    def hold(self, block: Block, number: int, memory: Any) -> None:
        """Note that C++ memory, with values of a CPU tensor, has this block in Python."""
        self._blocks.held[number] = block, data_ptr(memory)

    def release(self, number: int) -> None:
        """Free the block of memory of C++ that has ended. May be called again."""
        block, values = self._blocks.held.pop(number, (None, 0))
        memory = self.ledger.take_ended(number)
        if block is not None:
            if memory is not None:
                kept_memory.keep(self.kept, block.address, memory)
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


def _listed(
    chain: Iterable[Block], numbers: Mapping[Block, int]
) -> list[tuple[int, int, int, int]]:
    """Return the blocks of a segment as the ledger takes them; 0 is the number of a free one."""
    return [(each.address, each.size, each.requested, numbers.get(each, 0)) for each in chain]


_COPIES = ("aten::copy_", "aten::_to_copy")

_ATTENTION = "aten::scaled_dot_product_attention"

_HANDWRITTEN = frozenset(
    {
        "aten::clone",
        *_COPIES,
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::convolution",
        _ATTENTION,
    }
    | {"aten::native_dropout", "aten::native_dropout_backward"}
)
"""Operators with a handwritten kernel that C++ serves too."""

answers: dict[str, Callable[..., Any]] = {}
"""The functions of kernels in Python that C++ calls, by name. Their files register them, because
they import this one.
"""

_contexts: set[Context] = set()
"""The contexts that the kernels serve. They are in place while there is one."""

_active: dict[Context, None] = {}
"""The contexts on simulated devices, with kernels of either kind."""

_lock = forks.lock(globals())

_in_place: list[bool] = []
"""Not empty once the kernels are in place."""

_offers: dict[Any, tuple[list[torch.dtype], bool, bool]] = {}
"""Operator that C++ does not know yet -> the further arguments of :func:`offer`."""


def put_in_place(context: Context | None = None) -> bool:
    """Put the kernels in place, once, where they are built. Return whether they are.

    The dispatcher's tables are not made for a change while a thread looks a kernel up. So this is
    done before there is a tensor of a simulated device, and for kernels that are built later, while
    no other thread is in a scope on one.

    Args:
        context: The context that this thread enters, if any.
    """
    if not _in_place:
        # On one line: an interrupt between two lines would leave the lock held.
        with _lock: _put_in_place(context)  # noqa: E701  # fmt: skip
    return bool(_in_place)


def _put_in_place(context: Context | None) -> None:
    others = (
        entry
        for each in list(_active)
        if each is not context
        for entry in each.entries.active.copy()
    )
    if building.is_loaded() and all(entry in thread_state.state.entries for entry in others):
        building.load().put_all()
        _in_place.append(True)


def begin(context: Context) -> None:
    """Let the built kernels serve a context, if its option allows it. May be called again.

    Raises:
        NativeKernelsError: They are not built, and the option demands them.
    """
    option = context.options.native
    _active[context] = None
    if option != "never" and building.is_built() and put_in_place(context):
        module = building.load()
        if storages.native is None:
            _connect(module)
        for op, facts in _offers.copy().items():
            _serve(op, *facts)
        context.policy.native = module.Context()
        context.policy.native.draws_as_gpu = drawing_gpu.draws_as_gpu(context)
        _contexts.add(context)
        module.install()
    elif option == "always":
        raise NativeKernelsError(_LATE if building.is_built() else building.why_not())


_LATE = (
    "they were built after another thread had entered a scope on simulated devices, and are put in "
    "place while no other thread is in one; enter this scope before the threads start"
)


def end(context: Context) -> None:
    """Serve a context no more. May be called again."""
    _active.pop(context, None)
    if context in _contexts:
        if context.policy is not None:
            context.policy.native.serves = False
        _contexts.discard(context)
        if not _contexts:
            building.load().uninstall()


def follow(context: Context | None) -> None:
    """Tell loaded kernels this thread's context, and whether it ever chose a stream."""
    if storages.native is not None:
        native = None if context is None or context.policy is None else context.policy.native
        changes = (
            native is not None
            and context is not None
            and context.thread.streams.history.has_changes
        )
        building.load().follow(native, changes)


def _connect(module: Any) -> None:
    """Let C++ and Python know each other."""
    module.answer_by(
        SimpleNamespace(
            fresh=storages.fresh,
            limit=lambda number: devices[number].limit(),
            settled=lambda number: devices[number].release_ended(),
            stream=storages.stream,
            waited=storages.host_waited,
            ended=Blocks.ended.append,
            release=_release,
            known=lambda tensor: storages.owner_of(tensor.untyped_storage()),
            wrapped=cpu_kernels.wrapped,
            settle=cpu_kernels.settle,
            copied=cpu_kernels.count_copy,
            numbers=device_generators.taken,
            undrawn=device_generators.give_back,
            gpu_numbers=device_generators.taken_by_gpu,
            **answers,
        )
    )
    calls = {name: getattr(module, name) for name in ("known", "disown", "keep")}
    calls |= {"fresh": _fresh, "adopt": _adopt}
    storages.native = SimpleNamespace(Device=NativeDevice, devices=devices, **calls)
    philox.compiled[:] = [_fill_random]
    philox.scaling[:] = [_scale_random]
    thread_state.on_context = follow
    current_streams.on_change = module.stream_changed


def _fill_random(*call: Any) -> bool:
    """Fill memory with a GPU's random numbers, unless the scope has chosen Python."""
    if _chose_python():
        return False
    filled: bool = building.load().fill_random(*call)
    return filled


def _scale_random(*call: Any) -> bool:
    """Multiply and add in memory, unless the scope has chosen Python."""
    if _chose_python():
        return False
    building.load().scale_random(*call)
    return True


def _chose_python() -> bool:
    context = thread_state.state.context
    return context is not None and context.options.native == "never"


def _release(ledger: int, number: int) -> None:
    if ledger in devices:
        devices[ledger].release(number)


def _serves(native: Any, on: Any, block: Block | None = None) -> bool:
    """Return whether C++ may make a device's storages, perhaps with a block of Python's."""
    usual = block is None or block.pool.is_usual
    return bool(
        native and native.serves and isinstance(on, NativeDevice) and not on.observers and usual
    )


def _leads(native: Any, on: Any) -> bool:
    """Return whether the ledger of a device gives blocks to a context's storages from now on."""
    serves = _serves(native, on)
    if serves:
        native.use(on.index, on.ledger)
        if on.ended:
            on.release_ended()
    return serves and on.hand_over()


def _fresh(
    result: torch.Tensor, native: Any, on: Any, block: Block | None = None
) -> torch.Tensor | None:
    """Return a tensor in a CPU tensor's memory; None if its storage must be Python's.

    The ledger gives it a block, or the model in Python has given it one.
    """
    made: torch.Tensor | None = None
    if block is not None:
        if _serves(native, on, block):
            made, number = building.load().made_for(result, on.ledger)
            on.hold(block, number, result)
        return made
    return building.load().made(result, native, on.index) if _leads(native, on) else made


def _adopt(storage: Any, memory: torch.Tensor, on: Any, block: Block | None = None) -> bool:
    """Put a storage in a CPU tensor's memory. Return False if its memory is, or must be, Python's.

    It needs no block, or the ledger gives it one, or the model in Python has given it one.
    """
    context = thread_state.state.context
    native = None if context is None or context.policy is None else context.policy.native
    if not (_serves(native, on, block) if block else not memory.nbytes or _leads(native, on)):
        return False
    number = building.load().adopt(
        storage._cdata, memory, block and on.ledger, None if block else native
    )
    if number and block:
        on.hold(block, number, memory)
    return bool(number)


def can_serve(op: Any, is_handwritten: bool) -> bool:
    """Return whether C++ has an operator's kernel. Python has a handwritten one for it, or none."""
    if is_handwritten:
        return op.name() in _HANDWRITTEN
    arguments, outs = op._schema.arguments, cpu_kernels.outs_of(op)
    if any(str(arguments[i].type) != "Tensor" for i in outs) or cpu_kernels.makes_of_nothing(op):
        return False
    # A division in place that ends at a zero has written some of the quotients.
    divides = cuda_values.divides(op._schema) and any(map(is_written, arguments))
    return not divides and device_generators.place_of(op) < len(arguments)


def offer(
    op: Any, refused: Iterable[torch.dtype] = (), *, mixes: bool = True, rounds_numbers: bool = True
) -> None:
    """Let C++ serve an operator whose kernel in Python does no more than the CPU's.

    Args:
        op: The operator.
        refused: The dtypes in which the first tensor of a call may be refused.
        mixes: Whether C++ serves calls whose tensors have several dtypes.
        rounds_numbers: Whether CUDA rounds numbers among the arguments to the dtype of a tensor of
            halves, as the CPU does.
    """
    facts = _offers[op] = list(refused), mixes, rounds_numbers
    if storages.native is not None:
        _serve(op, *facts)


def _serve(op: Any, refused: list[torch.dtype], mixes: bool, rounds_numbers: bool) -> None:
    name, schema = op.name(), op._schema
    results = cpu_kernels.Results(op)
    scalars = name not in _HANDWRITTEN and device_mismatch.accepts_cpu_scalars(op)
    allowed = scalars, mixes, rounds_numbers
    facts = cpu_kernels.is_view(schema), *allowed, results.counts_writes, name in _COPIES
    places = device_generators.place_of(op), cpu_kernels.outs_of(op), results.positions
    building.load().offer(schema.name, schema.overload_name, *facts, *places, refused)
    _offers.pop(op, None)
