"""Random numbers as CUDA counts them: a seed, and an offset that each drawing kernel advances.

A state of 16 bytes determines all numbers that follow, on any machine. With ``random="cuda"``, the
default of simulated GPUs, they are the GPU's own for the operators of
:mod:`torchdevice.random_numbers.operators`. Those of other operators, and all with
``random="device"``, are made by the CPU's kernels, from a generator of the CPU that is seeded anew
for each kernel, by the seed and the offset. With ``random="cpu"`` a seed gives the CPU's numbers,
and a state is one of the CPU's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.random_numbers import drawing_gpu, operators
from torchdevice.random_numbers.philox import Source
from torchdevice.simulation import machine, policy
from torchdevice.torch_modules.cuda.capture_rules import current_capture, not_while_capturing

Drawing = Callable[[Callable[..., Any], int, list[Any], dict[str, Any]], Any]


_PER_KERNEL = 4
"""By how much a kernel moves the offset of a generator. Philox makes four numbers at a time, and
counts in them.
"""

_WORD = 2**64 - 1

_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
"""The constants of splitmix64, which makes one seed of a seed and an offset."""


class _State:
    """A seed and an offset, which generators may share, and the CPU generator that draws."""

    def __init__(self, index: int) -> None:
        context = thread_state.state.context
        self.is_cpus = context is not None and context.options.random == "cpu"
        self._gpu = drawing_gpu.of_context(context, index)
        self.numbers: torch.Generator = _Plain("cpu")
        self.seed, self.offset = self.numbers.initial_seed(), 0
        self._remembered: dict[bytes, torch.Tensor] = {}

    def begin(self, seed: int, offset: int = 0) -> None:
        """Go on from an offset of a seed."""
        if offset % _PER_KERNEL:
            raise RuntimeError("offset must be a multiple of 4")
        self.seed, self.offset = seed & _WORD, offset
        self.numbers.manual_seed(mixed(self.seed, offset) if offset else seed)

    def read(self) -> torch.Tensor:
        """Return the seed and the offset as 16 bytes, or the state of the CPU's generator."""
        if self.is_cpus:
            return self.numbers.get_state()
        words = self.seed.to_bytes(8, "little") + self.offset.to_bytes(8, "little")
        return torch.tensor(list(words), dtype=torch.uint8, device="cpu")

    def load(self, state: torch.Tensor) -> None:
        """Go on from what :meth:`read` has returned, or from a seed of 8 bytes."""
        if self.is_cpus:
            self.numbers.set_state(state)
            self.offset = 0
        else:
            words = bytes(state.tolist())
            self.begin(int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little"))

    def remember(self, state: torch.Tensor) -> None:
        """Note the present state as what this state was during the capture."""
        self._remembered[bytes(state.tolist())] = self.read()

    def restore(self, state: torch.Tensor) -> None:
        """Go on from the state that was noted as this one."""
        self.load(self._remembered.get(bytes(state.tolist()), state))

    @property
    def drawing(self) -> operators.Drawing | None:
        """Draws the numbers of a GPU from this state; None where they are not the GPU's."""
        return None if self._gpu is None else operators.Drawing(self._gpu, self._take)

    def _take(self, increment: int) -> Source:
        source = Source(self.seed, self.offset)
        self.offset = (self.offset + increment) & _WORD
        return source

    def upcoming(self) -> torch.Generator:
        """Return the CPU generator that draws the next kernel's numbers."""
        if not self.is_cpus:
            self.numbers.manual_seed(mixed(self.seed, self.offset))
        return self.numbers


def mixed(seed: int, offset: int) -> int:
    """Return the CPU generator's seed for the kernel at an offset of a device's seed."""
    word = (seed + (offset // _PER_KERNEL + 1) * _STEP) & _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return (word ^ word >> 31) >> 1  # a seed fits into an int64


_ANOTHER_SEED = (
    "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is "
    "the same as the original seed."
)


class Generator(torch.Generator):
    """A generator of the simulated device.

    Args:
        index: The index of the device.
    """

    # As `repr` shows it.
    __module__, __qualname__ = torch.Generator.__module__, torch.Generator.__qualname__
    index: int

    def __new__(cls, index: int) -> Generator:
        not_while_capturing("Cannot construct a new CUDAGeneratorImpl")
        return _with_state(index, _State(index))

    def __init__(self, index: int):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device for which this generator draws numbers."""
        with torch._C.DisableTorchFunction():
            return torch.device(policy.spelled(self.index))

    @property
    def _state(self) -> Any:
        return _known[self._cdata][1]  # type: ignore[attr-defined]

    def get_state(self) -> torch.Tensor:
        """Return seed and offset as 16 bytes; the CPU's state if ``random="cpu"``."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            state, capture = self._state.read(), current_capture()
            if capture is not None:
                capture.do(self._state.remember, state)
            return state

    def set_state(self, new_state: torch.Tensor) -> Generator:  # type: ignore[override]
        """Go on from a state. One of 8 bytes is a seed.

        Raises:
            RuntimeError: It is no state of CUDA's. The texts are torch's.
        """
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            capture = current_capture()
            if not self._state.is_cpus:
                if new_state.dtype is not torch.uint8 or not new_state.is_cpu:
                    raise TypeError("RNG state must be a torch.ByteTensor")
                if new_state.numel() not in (8, 16):
                    raise RuntimeError("RNG state is wrong size")
                if (
                    capture is not None
                    and new_state[:8].tolist() != self._state.read()[:8].tolist()
                ):
                    raise RuntimeError(_ANOTHER_SEED)
            if capture is None:
                self._state.load(new_state)
            else:
                capture.do(self._state.restore, new_state)
            return self

    def manual_seed(self, seed: int) -> Generator:  # type: ignore[override]
        """Begin the numbers of a seed."""
        if current_capture() is None:
            self._state.begin(seed)
        elif seed != self.initial_seed():
            raise RuntimeError(_ANOTHER_SEED)
        return self

    def seed(self) -> int:
        """Begin the numbers of a new seed, and return it."""
        not_while_capturing("Cannot call CUDAGeneratorImpl::seed")
        self.manual_seed(_Plain("cpu").seed())
        return self.initial_seed()

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._state.numbers.initial_seed() if self._state.is_cpus else self._state.seed

    def get_offset(self) -> int:
        """Return four for each kernel that has drawn numbers since the generator was seeded."""
        not_while_capturing("Cannot call CUDAGeneratorImpl::get_offset")
        return self._state.offset

    def set_offset(self, offset: int) -> Generator:
        """Go on from an offset.

        Raises:
            RuntimeError: The offset is no multiple of 4. The text is CUDA's.
        """
        not_while_capturing("Cannot call CUDAGeneratorImpl::set_offset")
        self._state.begin(self.initial_seed(), offset)
        return self

    def clone_state(self) -> Generator:
        """Return a new generator in this generator's state, which will draw equal numbers."""
        return Generator(self.index).set_state(self.get_state()).set_offset(self.get_offset())

    def graphsafe_get_state(self) -> Generator:
        """Return a generator that shares this generator's state."""
        return _with_state(self.index, self._state)

    def graphsafe_set_state(self, state: Generator) -> Generator:  # type: ignore[override]
        """Share the state of another generator."""
        _known[self._cdata] = self.index, state._state  # type: ignore[attr-defined]
        return self

    def __reduce__(self) -> Any:
        return _restored, (self.index, self.get_state())


_Plain = torch._C.Generator


def own(cls: type, index: int, state: _State | None = None) -> Any:
    """Return a new CPU generator of class ``cls`` that draws numbers for device ``index``."""
    generator: Any = _Plain.__new__(cls, "cpu")  # type: ignore[call-arg]
    _known[generator._cdata] = index, state
    # Not at exit: the table may be gone by then.
    weakref.finalize(generator, _known.pop, generator._cdata, None).atexit = False
    return generator


def _with_state(index: int, state: _State) -> Generator:
    # A generator of the CPU, the only kind that torch's CPU kernels accept.
    generator: Generator = own(Generator, index, state)
    generator.index = index
    return generator


def _restored(index: int, state: torch.Tensor) -> Generator:
    return Generator(index).set_state(state)


_known: dict[int, tuple[int, _State | None]] = {}
"""``_cdata`` of each live generator of a device -> its device and its state; no state for a
program's own class.

A kernel gets another Python object for the same C++ generator.
"""


def is_of_device(generator: torch.Generator) -> bool:
    """Return whether a generator is one of a simulated device."""
    return generator._cdata in _known  # type: ignore[attr-defined]


def draws_for_gpu(generator: torch.Generator) -> bool:
    """Return whether a generator gives the numbers of a GPU, which the CPU cannot draw."""
    state = _known.get(generator._cdata, (0, None))[1]  # type: ignore[attr-defined]
    return state is not None and state.drawing is not None


def upcoming(generator: torch.Generator) -> torch.Generator:
    """Return the CPU generator that draws the next kernel's numbers for a device generator."""
    state = _known[generator._cdata][1] if is_of_device(generator) else None  # type: ignore[attr-defined]
    return generator if state is None else state.upcoming()


def next_numbers(generator: torch.Generator) -> torch.Generator:
    """Return the CPU generator that draws a kernel's numbers for a given one; count the kernel."""
    state = _known[generator._cdata][1]  # type: ignore[attr-defined]
    if state is None:
        return generator
    numbers, state.offset = state.upcoming(), state.offset + _PER_KERNEL
    return numbers


def numbers_of(generator: torch.Generator) -> torch.Generator:
    """Return an object that draws from a generator's present state, also after it is replaced."""
    index, state = _known.get(generator._cdata, (0, None))  # type: ignore[attr-defined]
    return generator if state is None else _with_state(index, state)


def default_generator(index: int) -> Generator:
    """Return the generator that the device's operators draw from when the program passes none."""
    generators = machine.current().generators
    found: Generator | None = generators.get(index)
    if found is None:
        found = generators.setdefault(index, Generator(index))
        # A new device begins with the program's seed, as a lately initialised CUDA device does.
        found.manual_seed(torch.default_generator.initial_seed())
    return found


def taken(given: torch.Generator | None, index: int) -> tuple[torch.Generator, int, int] | None:
    """Return the CPU generator that a C++ kernel draws from, and its first seed and offset.

    None for a generator that a kernel in Python refuses, of a class of the program's, or with the
    CPU's numbers.
    """
    state = _known.get((given or default_generator(index))._cdata, (0, None))[1]  # type: ignore[attr-defined]
    if state is None or state.is_cpus or state.drawing is not None:
        return None
    state.offset += _PER_KERNEL
    return state.numbers, state.seed, state.offset - _PER_KERNEL


def taken_by_gpu(
    given: torch.Generator | None, index: int, count: int, of_each_counter: int
) -> tuple[int, int, int] | None:
    """Return seed, offset and threads of a GPU's kernel in C++ that makes ``count`` numbers.

    If ``of_each_counter`` is 0, advances the generator by ``count``. None for a generator that a
    kernel in Python refuses, or whose numbers are not a GPU's.
    """
    drawing = drawing_of(given, index)
    if drawing is None:
        return None
    increment = count
    if of_each_counter:
        increment = drawing.gpu.offsets_for(count, of_each_counter)
    source = drawing.take(increment)
    return source.seed, source.offset, drawing.gpu.threads_for(count)


def give_back(given: torch.Generator | None, index: int) -> None:
    """Let the next kernel draw the numbers of the last one in C++, which failed."""
    state = _known[(given or default_generator(index))._cdata][1]  # type: ignore[attr-defined]
    assert state is not None
    state.offset -= _PER_KERNEL


def place_of(op: Any) -> int:
    """Return an operator's generator position; the arity if it takes none, -1 if it draws none."""
    arguments = op._schema.arguments
    seeded = torch.Tag.nondeterministic_seeded in op.tags and op.name() != _DRAWS_NOTHING
    named = (place for place, argument in enumerate(arguments) if argument.name == "generator")
    return next(named, len(arguments) if seeded else -1)


_DRAWS_NOTHING = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""An operator that is marked as drawing numbers, and refuses dropout."""


def kind_of(op: Any) -> Drawing | None:
    """Return the function that runs an operator with its generator; None if it draws nothing."""
    place, count = place_of(op), len(op._schema.arguments)
    if place < 0 or place == count:
        return None if place < 0 else from_default
    return functools.partial(_from_argument, place, operators.OPERATORS.get(op.name()))


def drawing_of(given: torch.Generator | None, index: int) -> operators.Drawing | None:
    """Return a source of a GPU's numbers for a generator, or for its device's; else None."""
    state = _known.get((given or default_generator(index))._cdata, (0, None))[1]  # type: ignore[attr-defined]
    return None if state is None else state.drawing


_GENERATOR_OF_THE_CPU = "Expected a {kind!r} device type for generator but found 'cpu'"


def _from_argument(
    place: int,
    of_gpu: Callable[..., Any] | None,
    run: Callable[..., Any],
    index: int,
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a kernel with the generator passed by the program, or else with the device's own."""
    # In old operators such as `poisson` it comes last, and may have no name in the call.
    given = args[place] if len(args) > place else kwargs.get("generator")
    # A generator of the CPU that the program made, given to a kernel of the device.
    if given is not None and not is_of_device(given):
        if index >= 0:
            raise RuntimeError(
                _GENERATOR_OF_THE_CPU.format(kind=policy.spelled(index).split(":")[0])
            )
        return run(*args, **kwargs)
    drawing = None if of_gpu is None else drawing_of(given, index)
    if of_gpu is not None and drawing is not None:
        return of_gpu(drawing, *args[:place], *args[place + 1 :], **operators.named(kwargs))
    numbers = next_numbers(default_generator(index) if given is None else given)
    return run(*args[:place], **{**kwargs, "generator": numbers})


def from_default(
    run: Callable[..., Any], index: int, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a kernel without a generator argument, and let it draw the device's next numbers.

    The CPU's generator has the state of the device's during the call, and its own state afterwards.
    """
    cpu, numbers = torch.default_generator, next_numbers(default_generator(index))
    before = cpu.get_state()
    cpu.set_state(numbers.get_state())
    try:
        # Under the CPU's own generator, since the kernel takes none.
        return run(*args, **kwargs)
    finally:
        numbers.set_state(cpu.get_state())
        # Restored last, so that an error in between cannot leave the device's state there.
        cpu.set_state(before)
