"""Layers of a generating model that ask for memory as another one did, and need not run for it.

At each token the layers of a model differ in nothing that memory depends on: the same code gets
arguments of the same shapes. So one layer of each kind runs, and what it asked of the allocator is
repeated for the others, request by request, in the same order and with the same ends. The other
parts of the model and of ``generate`` run as always. The prompt, the first tokens and the last one
run wholly, and the layers that then ask for something else than the one of their kind are not
repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices.device_memory import Block
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.journal.callers import Site
from torchdevice.kernel.lowlevel.dlpack_alias import on_device
from torchdevice.plan.peaks import Peaks, sites_here
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.caching_allocator import Device

WHOLE = 3
"""How many calls of a layer run wholly: that of the prompt, and those of the first tokens."""

_INDEX = "layer_idx"
"""The attribute of a layer's part with the index of its part of a cache."""

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


class _NotUnderstood(Exception):
    """A call of a layer cannot be repeated."""


# ---- what a layer asked for ----------------------------------------------------------------------


class _New(NamedTuple):
    """A block was given out.

    Attributes:
        requested: The bytes.
        device: The index of the device.
        sites: The lines that asked for it, as a peak shows them.
    """

    requested: int
    device: int
    sites: tuple[Site, ...]


class _End(NamedTuple):
    """A block was given back: the one with this number among those of the call."""

    number: int


class _Left(NamedTuple):
    """A block that was there before the call was given back: that of these slots of the cache."""

    slots: tuple[int, ...]


class _View(NamedTuple):
    """A tensor in a block of the call. Sizes and the offset are those of torch, in elements."""

    number: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Given(NamedTuple):
    """An argument, by its place among the tensors that were given."""

    place: int


class _Call(NamedTuple):
    """The effect of a layer's call on memory.

    Attributes:
        events: Its requests to the allocator, in order.
        kept: Number of a block of the call -> the slots of the cache that it is for, with their new
            tensors.
        numbers: The values of the cache's other attributes after the call.
        result: Its result, with a :class:`_View` or a :class:`_Given` instead of each tensor.
    """

    events: tuple[_New | _End | _Left, ...]
    kept: tuple[tuple[int, _View], ...]
    numbers: tuple[tuple[int, str, Any], ...]
    result: Any

    @property
    def asked(self) -> Any:
        """Equal for two layers that ask for the same memory."""
        events = [each[:2] if isinstance(each, _New) else each for each in self.events]
        return events, self.kept, self.numbers, self.result


class _Requests(Observer):
    """Records the requests to the allocator while a layer runs."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, ...]] | None = None

    def begin(self) -> list[tuple[Any, ...]]:
        self._events = []
        return self._events

    def end(self) -> None:
        self._events = None

    def allocated(self, block: Block) -> None:
        if self._events is not None:
            self._events.append((block.address, block.requested, block.device, sites_here()))

    def freed(self, address: int) -> None:
        if self._events is not None:
            self._events.append((address,))


# ---- the parts of a cache ------------------------------------------------------------------------


class _Slot(NamedTuple):
    """A tensor of a part of a cache: the number of the part, and the attribute."""

    part: int
    name: str


@dataclass
class _State:
    """The parts of the caches that belong to a layer, as they are at one moment.

    No tensor is held, because its end is part of what a layer does.

    Attributes:
        mark: The key of a call's memory.
        slots: Slot -> the ``id`` and the address of its tensor.
        numbers: Number of a part, and attribute -> a value that is no tensor.
        fixed: The values that a call must leave as they are: tensors deeper within, and how often
            the values of integers changed.
    """

    mark: list[Any] = field(default_factory=list)
    slots: dict[_Slot, tuple[int, int]] = field(default_factory=dict)
    numbers: dict[tuple[int, str], Any] = field(default_factory=dict)
    fixed: list[Any] = field(default_factory=list)

    def add(self, part: Any, number: int) -> None:
        """Add a part of a cache."""
        self.mark.append(type(part))
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                self.slots[_Slot(number, name)] = (id(value), value.untyped_storage().data_ptr())
                self.mark.append((name, _mark_of(value)))
                self._fix_integers(value)
            elif isinstance(value, _PLAIN):
                self.numbers[number, name] = value
                self.mark.append((name, value))
            elif isinstance(value, dict):
                self._fix(value)
                self.mark.append((name, *value, *map(_mark, value.values())))
            else:
                raise _NotUnderstood

    def _fix(self, values: dict[Any, Any]) -> None:
        for each in values.values():
            if isinstance(each, torch.Tensor):
                self.fixed.append(id(each))
                self._fix_integers(each)
            else:
                self.fixed.append(each)

    def _fix_integers(self, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            self.fixed.append(tensor._version)


def _mark_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that a kernel's memory depends on."""
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.get_device(),
    )


def _mark(value: Any) -> Any:
    """Return the properties of an argument without caches that a call's memory depends on.

    Raises:
        _NotUnderstood: It is of an unknown class.
    """
    if isinstance(value, torch.Tensor):
        return _mark_of(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_mark, value))
    raise _NotUnderstood


# ---- layers --------------------------------------------------------------------------------------


def _description(layer: torch.nn.Module) -> Any:
    """Return the properties of a layer that its memory may depend on, without its index."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        found.append((name, type(module)))
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN) and key != _INDEX:
                found.append((key, value))
        own = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
        found += [(key, _mark_of(each)) for key, each in own]
    return tuple(found)


def _index_of(layer: torch.nn.Module) -> int:
    """Return the index of a layer's part of a cache.

    Raises:
        _NotUnderstood: It names none, or several.
    """
    found = {vars(each)[_INDEX] for each in layer.modules() if _INDEX in vars(each)}
    if len(found) != 1 or not isinstance(next(iter(found)), int):
        raise _NotUnderstood
    return next(iter(found))


def _repeating(model: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Yield the outermost lists of layers of a model."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield [*child]
        else:
            yield from _repeating(child)


class _Kind:
    """Layers that are alike.

    Attributes:
        differs: Whether two of them asked for different memory, or one is not understood.
        calls: The key of a call's memory -> the record of the first call with it.
    """

    def __init__(self) -> None:
        self.differs = False
        self.calls: dict[Any, _Call] = {}
        self._token = 0

    def at(self, token: int) -> dict[Any, _Call]:
        """Return the calls for a token, and forget those for the one before."""
        if token != self._token:
            self._token, self.calls = token, {}
        return self.calls


class _Layer:
    """A layer, and the function that runs instead of its ``forward``.

    Args:
        layer: The layer.
        kind: Those like it.
        requests: Records what is asked of the allocator.
        calls: How often the layer will be called.

    Attributes:
        token: How often it was called.
        runs: Whether it ran at the last call.
    """

    def __init__(self, layer: torch.nn.Module, kind: _Kind, requests: _Requests, calls: int):
        self._run: Callable[..., Any] = layer.forward
        self._layer = layer
        self._kind = kind
        self._requests = requests
        self._last = calls
        self.token = 0
        self.runs = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.token += 1
        self.runs = True
        if self._kind.differs:
            return self._run(*args, **kwargs)
        try:
            parts: list[Any] = []
            with torch._C.DisableTorchFunction():
                key = self._key((*args, *kwargs.items()), parts)
                before = _state(parts)
        except _NotUnderstood:
            # A cache has no part for a layer before the first call.
            self._kind.differs = self.token > 1
            return self._run(*args, **kwargs)
        calls = self._kind.at(self.token)
        known = calls.get((key, *before.mark))
        if known is not None and WHOLE < self.token < self._last:
            self.runs = False
            return _repeated(known, parts, [*before.slots], [*_tensors((args, kwargs))])
        events = self._requests.begin()
        try:
            result = self._run(*args, **kwargs)
        finally:
            self._requests.end()
        with torch._C.DisableTorchFunction():
            try:
                call = _call(events, before, parts, result, [*_tensors((args, kwargs))])
            except _NotUnderstood:
                self._kind.differs = self.token > 1
                return result
        if known is not None and known.asked != call.asked:
            self._kind.differs = True
        calls.setdefault((key, *before.mark), call)
        return result

    def _key(self, given: Any, parts: list[Any]) -> Any:
        """Return a key of a call's memory, and collect the call's parts of caches."""
        found: list[Any] = []
        for each in given:
            name, value = each if isinstance(each, tuple) and len(each) == 2 else ("", each)
            of_cache = _parts(value, self._layer)
            if of_cache is None:
                found.append((name, _mark(value)))
            else:
                found.append((name, type(value)))
                parts += of_cache
        return tuple(found)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for each in values:
            yield from _tensors(each)
    elif isinstance(values, dict):
        yield from _tensors([*values.values()])


def _parts(value: Any, layer: torch.nn.Module) -> list[Any] | None:
    """Return the parts of a cache that are a layer's; None for what is no cache.

    Raises:
        _NotUnderstood: There is no such part.
    """
    from transformers.cache_utils import Cache, EncoderDecoderCache

    if isinstance(value, EncoderDecoderCache):
        caches: list[Cache] = [value.self_attention_cache, value.cross_attention_cache]
    elif isinstance(value, Cache):
        caches = [value]
    else:
        return None
    index = _index_of(layer)
    if any(index >= len(each.layers) or each.offloading for each in caches):
        raise _NotUnderstood
    return [each.layers[index] for each in caches]


def _state(parts: list[Any]) -> _State:
    found = _State()
    for number, part in enumerate(parts):
        found.add(part, number)
    return found


def _call(
    recorded: list[tuple[Any, ...]],
    before: _State,
    parts: list[Any],
    result: Any,
    given: list[torch.Tensor],
) -> _Call:
    """Return the record of a call that ran.

    Raises:
        _NotUnderstood: It cannot be repeated.
    """
    events, there = _events(recorded, before)
    after = _state(parts)
    if after.fixed != before.fixed or [*after.slots] != [*before.slots]:
        raise _NotUnderstood
    numbers = tuple(
        (*key, value) for key, value in after.numbers.items() if value != before.numbers.get(key)
    )
    changed = {
        place: slot
        for place, slot in enumerate(after.slots)
        if after.slots[slot][0] != before.slots[slot][0]
    }
    kept = tuple(
        (place, _view(getattr(parts[slot.part], slot.name), there))
        for place, slot in changed.items()
    )
    left = {place for each in events if isinstance(each, _Left) for place in each.slots}
    if left - set(changed):
        raise _NotUnderstood
    returned = _described(result, there, given)
    numbered = {each.number for _, each in kept} | {each.number for each in _views(returned)}
    if numbered != set(there.values()):
        raise _NotUnderstood  # somebody else holds a block
    return _Call(tuple(events), kept, numbers, returned)


def _events(
    recorded: list[tuple[Any, ...]], before: _State
) -> tuple[list[_New | _End | _Left], dict[int, int]]:
    """Return the requests to the allocator, and the blocks that are left: address -> number."""
    events: list[_New | _End | _Left] = []
    there: dict[int, int] = {}
    count = 0
    for address, *new in recorded:
        if new:
            there[address] = count
            count += 1
            events.append(_New(*new))
        elif address in there:
            events.append(_End(there.pop(address)))
        else:
            slots = [at for at, slot in enumerate(before.slots.values()) if slot[1] == address]
            if not slots:
                raise _NotUnderstood
            events.append(_Left(tuple(slots)))
    return events, there


def _view(tensor: torch.Tensor, there: dict[int, int]) -> _View:
    """Return how a tensor is made in a block of the call."""
    storage = tensor.untyped_storage()
    number = there.get(storage.data_ptr())
    if number is None or not storages.has_no_values(storage):
        raise _NotUnderstood
    return _View(
        number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
    )


def _described(result: Any, there: dict[int, int], given: list[torch.Tensor]) -> Any:
    """Return a result with a description instead of each tensor."""
    if isinstance(result, torch.Tensor):
        place = next((at for at, each in enumerate(given) if each is result), None)
        return _view(result, there) if place is None else _Given(place)
    if type(result) in (tuple, list):
        return type(result)(_described(each, there, given) for each in result)
    if isinstance(result, _PLAIN):
        return result
    raise _NotUnderstood


def _views(described: Any) -> Iterator[_View]:
    if isinstance(described, _View):
        yield described
    elif type(described) in (tuple, list):
        for each in described:
            yield from _views(each)


# ---- repeating -----------------------------------------------------------------------------------


def _repeated(call: _Call, parts: list[Any], slots: list[_Slot], given: list[torch.Tensor]) -> Any:
    """Repeat the requests of another layer's call.

    Args:
        call: The call.
        parts: The parts of caches that are the layer's, which get its new tensors.
        slots: The tensors of the parts.
        given: The tensors that were given.

    Returns:
        What the layer would return.
    """
    memory = _Memory(call)
    try:
        with torch._C.DisableTorchFunction():
            for event in call.events:
                if isinstance(event, _New):
                    memory.give(event)
                elif isinstance(event, _End):
                    memory.take(event.number)
                else:
                    for place in event.slots:
                        setattr(parts[slots[place].part], slots[place].name, None)
            for place, view in call.kept:
                setattr(parts[slots[place].part], slots[place].name, memory.tensor(view))
            for part, name, value in call.numbers:
                setattr(parts[part], name, value)
            return _made(call.result, memory, given)
    finally:
        memory.end()


def _made(described: Any, memory: _Memory, given: list[torch.Tensor]) -> Any:
    if isinstance(described, _View):
        return memory.tensor(described)
    if isinstance(described, _Given):
        return given[described.place]
    if type(described) in (tuple, list):
        return type(described)(_made(each, memory, given) for each in described)
    return described


class _Memory:
    """The blocks of a call that is repeated: with a tensor where the program gets one, else
    without.
    """

    def __init__(self, call: _Call):
        self._kept = {view.number for _, view in call.kept}
        self._kept |= {view.number for view in _views(call.result)}
        self._count = 0
        self._blocks: dict[int, tuple[Device, Any]] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._placed: list[Peaks] = []

    def give(self, event: _New) -> None:
        number = self._count
        self._count += 1
        on = storages.device(event.device)
        if not self._placed:
            self._placed = [each for each in on.observers if isinstance(each, Peaks)]
        for each in self._placed:
            each.placed = event.sites
        if number in self._kept:
            meta = torch.empty(event.requested, dtype=torch.uint8, device="meta")
            self._tensors[number] = storages.fresh(meta, event.device)
            return
        block = on.allocate(event.requested, storages.stream(event.device))
        self._blocks[number] = on, block
        seen = storages.shown(event.device, block, block.address)
        for observer in on.observers:
            observer.allocated(seen)

    def take(self, number: int) -> None:
        on, block = self._blocks.pop(number)
        on.freed.append(block)
        for observer in on.observers:
            observer.freed(block.address)

    def tensor(self, view: _View) -> torch.Tensor:
        base = self._tensors[view.number]
        empty = on_device(torch.empty(0, dtype=view.dtype, device="cpu"), base.get_device())
        return storages.set_storage(
            empty, base.untyped_storage(), view.offset, view.shape, view.stride
        )

    def end(self) -> None:
        """Free the blocks that an error left, such as that of exhausted memory."""
        for each in self._placed:
            each.placed = None
        for number in [*self._blocks]:
            self.take(number)


# ---- the whole model -----------------------------------------------------------------------------


@contextlib.contextmanager
def repeated(model: torch.nn.Module, tokens: int) -> Iterator[None]:
    """Let a model generate tokens with one layer of each kind, whose requests to the allocator the
    others repeat.

    Args:
        model: A model of transformers without values, on simulated devices.
        tokens: How many tokens it generates: as often its layers are called.
    """
    context = thread_state.state.context
    if context is None or context.options.compute != "meta":
        yield
        return
    requests = _Requests()
    kinds: dict[Any, _Kind] = {}
    modules = [each for found in _repeating(model) for each in found]
    layers: list[_Layer] = []

    def doing() -> str:
        token = max((each.token for each in layers), default=0)
        whole = sum(each.runs for each in layers)
        return f", token {token} of {tokens}, {whole} of {len(layers)} layers run"

    followers = [each for each in context.observers.kernels if isinstance(each, Peaks)]
    stop = context.observers.add(requests)
    try:
        for each in modules:
            kind = kinds.setdefault(_description(each), _Kind())
            layers.append(_Layer(each, kind, requests, tokens))
            each.forward = layers[-1]  # type: ignore[assignment]
        for follower in followers:
            follower.doing = doing
        yield
    finally:
        for follower in followers:
            follower.doing = str
        for each in modules:
            vars(each).pop("forward", None)
        stop()
