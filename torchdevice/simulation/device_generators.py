"""Random numbers: each device has its own generator, a CPU generator, so that a seed gives the CPU's numbers."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.simulation import machine, policy

Drawing = Callable[[Callable[..., Any], int, list[Any], dict[str, Any]], Any]


_PER_KERNEL = 4
"""By how much a kernel moves the offset of a generator. Philox makes four numbers at a time, and counts in them."""


class Generator(torch.Generator):
    """A generator of the simulated device.

    A generator of CUDA has a seed and an offset, and its state can be shared with others. A generator of the CPU has no
    offset and no shared state: here the offset counts kernels that drew numbers, and each offset of a seed means one
    state.

    Args:
        index: The index of the device.
    """

    index: int
    _shared: torch.Generator | None = None

    def __new__(cls, index: int) -> Generator:
        # `own` makes a generator of the CPU, the only kind that torch's CPU kernels accept.
        self = own(cls, index)
        self.index = index
        return self

    def __init__(self, index: int):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device for which this generator draws numbers."""
        with torch._C.DisableTorchFunction():
            return torch.device(policy.spelled(self.index))

    @property
    def numbers(self) -> torch.Generator:
        """The generator of the CPU that draws the numbers: this one, unless it shares its state."""
        return self if self._shared is None else self._shared

    def get_state(self) -> torch.Tensor:
        """Return the state of the CPU's generator that draws the numbers."""
        state = _Plain.get_state(self.numbers)
        _remember(state, self.get_offset())
        # The offset too, so that `set_state` of this state restores it; the CPU's state has no field for it.
        return state

    def set_state(self, new_state: torch.Tensor) -> Generator:  # type: ignore[override]
        """Go on from a state."""
        _Plain.set_state(self.numbers, new_state)
        # A state from elsewhere has no offset that could be known.
        _offsets[self.numbers._cdata] = _known.get(_key(new_state), 0)
        return self

    def manual_seed(self, seed: int) -> Generator:  # type: ignore[override]
        """Begin the numbers of a seed."""
        _Plain.manual_seed(self.numbers, seed)
        _offsets.pop(self.numbers._cdata, None)
        return self

    def seed(self) -> int:
        """Begin the numbers of a new seed, and return it."""
        _offsets.pop(self.numbers._cdata, None)
        return _Plain.seed(self.numbers)

    def initial_seed(self) -> int:
        """Return the seed."""
        return _Plain.initial_seed(self.numbers)

    def get_offset(self) -> int:
        """Return four for each kernel that has drawn numbers since the generator was seeded."""
        offset = _offsets.get(self.numbers._cdata, 0)
        # Remembered when the program asks for an offset, since only those can be asked for again.
        _states[self.initial_seed(), offset] = _Plain.get_state(self.numbers)
        _forget(_states)
        return offset

    def set_offset(self, offset: int) -> Generator:
        """Go on from an offset: as after :meth:`get_offset` returned it, or with numbers that only this offset has.

        Raises:
            RuntimeError: The offset is no multiple of 4. The text is CUDA's.
        """
        if offset % _PER_KERNEL:
            raise RuntimeError("offset must be a multiple of 4")
        seed = self.initial_seed()
        known = _states.get((seed, offset))
        # An offset that no generator has been at needs numbers of its own, the same at each call.
        _Plain.set_state(self.numbers, _state_at(seed, offset) if known is None else known)
        _offsets[self.numbers._cdata] = offset
        return self

    def clone_state(self) -> Generator:
        """Return a new generator in this generator's state, which will draw equal numbers."""
        clone = Generator(self.index)
        clone.set_state(self.get_state())
        return clone

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares this generator's state."""
        other = Generator(self.index)
        other._share(self._shareable())
        return other

    def graphsafe_set_state(self, state: Generator) -> Generator:  # type: ignore[override]
        """Share the state of another generator."""
        self._share(state._shareable())
        return self

    def _shareable(self) -> torch.Generator:
        """Return the generator of the CPU with this generator's state, which is no generator of the program."""
        if self._shared is None:
            shared: torch.Generator = own(_State, self.index)
            # The shared generator begins where this one stands.
            _Plain.set_state(shared, _Plain.get_state(self))
            _offsets[shared._cdata] = _offsets.get(self._cdata, 0)
            self._share(shared)
        assert self._shared is not None
        return self._shared

    def _share(self, numbers: torch.Generator) -> None:
        self._shared = _shared_by_identity[self._cdata] = numbers

    def __reduce__(self) -> Any:
        return _restored, (self.index, self.get_state())


_Plain = torch._C.Generator


class _State(torch._C.Generator):
    """A state that generators share. Up to torch 2.12 only generators of a class in Python take weak references."""


def own(cls: type, index: int) -> Any:
    """Return a new CPU generator of class ``cls`` that draws numbers for device ``index``."""
    generator: Any = _Plain.__new__(cls, "cpu")  # type: ignore[call-arg]
    _index_by_identity[generator._cdata] = index
    # Not at exit: the tables may be gone by then.
    weakref.finalize(generator, _drop, generator._cdata).atexit = False
    return generator


def _drop(identity: int) -> None:
    for table in (_index_by_identity, _shared_by_identity, _offsets):
        table.pop(identity, None)  # type: ignore[attr-defined]


def _restored(index: int, state: torch.Tensor) -> Generator:
    generator = Generator(index)
    generator.set_state(state)
    return generator


_index_by_identity: dict[int, int] = {}
"""``_cdata`` of each live generator -> its device. A kernel gets another Python object for the same C++ generator."""

_shared_by_identity: dict[int, torch.Generator] = {}
"""``_cdata`` of each generator that shares its state -> the generator of the CPU with the state."""

_offsets: dict[int, int] = {}
"""``_cdata`` of a generator that has drawn numbers -> its offset."""

_known: dict[bytes, int] = {}
"""States that programs were given -> the offset."""

_states: dict[tuple[int, int], torch.Tensor] = {}
"""Seed and offset as a program read them -> the state."""

_REMEMBERED = 1000
"""How many states are remembered."""


def _key(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _remember(state: torch.Tensor, offset: int) -> None:
    if offset:
        _known[_key(state)] = offset
        _forget(_known)


def _forget(table: dict[Any, Any]) -> None:
    while len(table) > _REMEMBERED:
        # Dictionaries keep the order of insertion: the oldest goes.
        del table[next(iter(table))]


def _state_at(seed: int, offset: int) -> torch.Tensor:
    """Return the state for an offset at which no generator has been: that of a seed made of both."""
    made = _Plain("cpu").manual_seed(seed)
    if offset:
        # 7 bytes: a seed fits into an int64 in any case.
        mixed = hashlib.blake2b(f"{seed} {offset}".encode(), digest_size=7).digest()
        state = made.manual_seed(int.from_bytes(mixed, "little")).get_state()
        state[:8] = torch.tensor(list((seed & _WORD).to_bytes(8, "little")), dtype=torch.uint8)  # the seed it tells
        return state
    return made.get_state()


_WORD = 2**64 - 1


def numbers_of(generator: torch.Generator) -> torch.Generator:
    """Return the generator of the CPU that draws the numbers for a generator, as it is now."""
    return _shared_by_identity.get(generator._cdata, generator)


def next_numbers(generator: torch.Generator) -> torch.Generator:
    """Return the generator of the CPU from which a kernel draws that was given a generator, and count the kernel."""
    numbers = numbers_of(generator)
    _drew(numbers)
    return numbers


def _drew(generator: torch.Generator) -> None:
    # One step for each kernel, as Philox's counter on CUDA.
    _offsets[generator._cdata] = _offsets.get(generator._cdata, 0) + _PER_KERNEL


def default_generator(index: int) -> Generator:
    """Return the generator that the device's operators draw from when the program passes none."""
    generators = machine.current().generators
    found: Generator | None = generators.get(index)
    if found is None:
        found = generators.setdefault(index, Generator(index))
        # A new device begins with the program's seed, as a CUDA device does that is initialised late.
        found.manual_seed(torch.default_generator.initial_seed())
    return found


def kind_of(op: Any) -> Drawing | None:
    """Return the function that runs an operator with the right generator; None if it draws no numbers."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "generator":
            # A generator by position is the last argument of old operators.
            return _from_argument if argument.kwarg_only else functools.partial(_from_position, place)
    return from_default if torch.Tag.nondeterministic_seeded in op.tags else None


def _from_argument(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel with the generator that the program passed, or with the device's."""
    given = kwargs.get("generator")
    if given is not None and index < 0 and _index_by_identity.get(given._cdata) is None:
        return run(*args, **kwargs)
    return run(*args, **{**kwargs, "generator": drawing_for(index, given)})


def drawing_for(index: int, given: torch.Generator | None) -> torch.Generator:
    """Return the CPU's generator from which a kernel draws: that of the device, or the one that the program passed.

    Raises:
        RuntimeError: The program passed a generator of the CPU that it made itself.
    """
    if given is not None and _index_by_identity.get(given._cdata) is None:
        raise RuntimeError(
            f"Expected a {policy.spelled(index).split(':')[0]!r} device type for generator but found 'cpu'"
        )
    return next_numbers(default_generator(index) if given is None else given)


def _from_position(place: int, run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel whose generator is its last argument, which may have no name in the call, as ``poisson``'s."""
    named = {**kwargs, "generator": args[place]} if len(args) > place else kwargs
    return _from_argument(run, index, args[:place], named)


def from_default(run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel that takes no generator and draws from the CPU's."""
    return drawing(index, run, *args, **kwargs)


def drawing(index: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws from the CPU's generator, and let it draw the device's next numbers.

    The CPU's generator has the state of the device's during the call, and its own state afterwards.
    """
    cpu, numbers = torch.default_generator, numbers_of(default_generator(index))
    before = cpu.get_state()
    cpu.set_state(_Plain.get_state(numbers))
    try:
        # Under the CPU's own generator, since the kernel takes none.
        return run(*args, **kwargs)
    finally:
        _Plain.set_state(numbers, cpu.get_state())
        _drew(numbers)
        # Restored last, so that an error in between cannot leave the device's state there.
        cpu.set_state(before)
