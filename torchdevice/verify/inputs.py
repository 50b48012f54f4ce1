"""CPU copies of a call's tensors: their memory, with strides, offsets and sharing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchdevice.calls.rewriters import native_device
from torchdevice.kernel.stand_ins import StandIns, extent, tensors, with_bits

Alias = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the CPU tensor with the memory of a tensor; None where there is none
(``SuppliedDevice.host_alias``).
"""

_CPU = torch.device("cpu")

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)

WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
"""Dtype -> the dtype of a more precise reference."""

_ALIGNED = 16
"""The size of the largest dtype in bytes, so that elements of every dtype begin at a multiple of
it.
"""


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory with strides and values, and no class of the program's."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
        return False
    is_special = tensor.is_quantized or tensor.is_meta or tensor.is_nested
    return not is_special and not tensor._is_zerotensor()


def window(tensor: torch.Tensor, alias: Alias, size: int) -> torch.Tensor:
    """Return a tensor's memory, from first to last element, as a flat CPU tensor, uncopied.

    Memory of a device is read without gaps: copies with strides are among what devices do wrong.

    Args:
        tensor: The tensor.
        alias: See :data:`Alias`.
        size: The number of these elements.
    """
    found = alias(tensor)
    seen = tensor if found is None else found
    bare = with_bits(seen, seen)
    line = bare.as_strided((size,), (1,), bare.storage_offset())
    return line.cpu() if found is None else line


def on_cpu(tensor: torch.Tensor, alias: Alias) -> torch.Tensor:
    """Return a CPU tensor with a tensor's values, uncopied if the CPU can read the memory."""
    found = alias(tensor)
    if found is not None:
        return found
    line = window(tensor, alias, extent(tensor))
    shaped = line.as_strided(tensor.shape, tensor.stride(), 0)
    return with_bits(shaped, tensor)


class Place:
    """Where a tensor lies in a memory.

    Attributes:
        memory: The number of the memory among those of the call.
        dtype: The tensor's dtype.
        shape, stride, offset: As torch has them.
        extent: The number of elements in memory from the first to the last.
        before: How many elements of the tensor's memory come before the first that the copy has.
        is_whole: Whether the copy of the memory has this tensor alone, in its shape.
        like: The tensor itself, for its conjugate and negative bits.
    """

    before: Any = 0
    is_whole = False

    def __init__(self, tensor: torch.Tensor, memory: int = 0):
        self.memory = memory
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.extent = extent(tensor)
        self.like = tensor

    @property
    def bytes(self) -> tuple[int, int]:
        """The first byte in the memory, and the one after the last."""
        first, end = int(self.offset), int(self.offset + self.extent)
        size = self.dtype.itemsize
        return first * size, end * size

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies alike."""
        lies = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        return lies == (self.dtype, self.shape, self.stride, self.offset)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)}, strides {self.stride}, offset {self.offset}"

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor at this place in a memory."""
        if self.is_whole:
            return memory
        return with_bits(self._at(memory, self.shape, self.stride), self.like)

    def line(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the memory from the first to the last element, in the shape that the copy has."""
        is_all = memory.dtype == self.dtype and memory.numel() == self.extent
        return memory if is_all else self._at(memory, (self.extent,), (1,))

    def now(self, alias: Alias) -> torch.Tensor:
        """Return the tensor's present values, not copied, in the form of :meth:`line`."""
        return on_cpu(self.like, alias) if self.is_whole else window(self.like, alias, self.extent)

    def _at(
        self, memory: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...]
    ) -> torch.Tensor:
        # ``memory.view(dtype)`` would ask that the number of its bytes divides evenly.
        offset = self.offset - self.before
        return torch.empty(0, dtype=self.dtype).set_(
            memory.untyped_storage(), offset, shape, stride
        )


class Inputs:
    """The tensors that a call is given, as they are before it.

    Args:
        args: The arguments of the call.
        kwargs: Its keyword arguments.
        given: The tensors among them.
        alias: See :data:`Alias`.
        values: Whether the values are copied. If not, the memories are as large as the tensors'
            own, without values.

    Attributes:
        places: ``id`` of each tensor -> where it is.
        memories: The copies of the memories, as bytes or in the dtype of the only tensor in it. The
            memory before the first element of any tensor is left out.
        has_values: Whether the values were copied.
    """

    def __init__(
        self,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        alias: Alias,
        *,
        values: bool = True,
    ):
        self.args = args
        self.kwargs = kwargs
        self.has_values = values
        self.places: dict[int, Place] = {}
        within: dict[int, list[Place]] = {}
        for tensor in given:
            if id(tensor) in self.places:
                continue
            shared = within.setdefault(tensor.untyped_storage()._cdata, [])
            memory = shared[0].memory if shared else len(within) - 1
            place = Place(tensor, memory)
            self.places[id(tensor)] = place
            shared.append(place)
        self.memories = [self._copied(each, alias) for each in within.values()]

    def _copied(self, places: list[Place], alias: Alias) -> torch.Tensor:
        """Return the copy of the memory that tensors share."""
        first = places[0]
        if not self.has_values:
            return torch.empty(first.like.untyped_storage().nbytes(), dtype=torch.uint8)
        is_aligned = not first.offset * first.dtype.itemsize % _ALIGNED
        if len(places) == 1 and is_aligned:  # the usual case
            has_bits = first.like.is_conj() or first.like.is_neg()
            first.before = first.offset
            first.is_whole = first.like.is_contiguous() and not has_bits
            return first.now(alias).clone()
        begins, ends = zip(*(place.bytes for place in places), strict=True)
        # Down to a multiple of the largest dtype, so that copies are aligned as the tensors are.
        start = min(begins) // _ALIGNED * _ALIGNED
        memory = torch.empty(max(ends) - start, dtype=torch.uint8)
        for place in places:
            place.before = start // place.dtype.itemsize
            place.line(memory).copy_(place.now(alias))
        return memory

    def index_on(self, device_type: str) -> int:
        """Return the index of a call's device of a type: its tensors', or the one it names."""
        devices = [native_device(each) for each in tensors((self.args, self.kwargs))]
        devices += [each for each in self.kwargs.values() if isinstance(each, torch.device)]
        return next((each.index or 0 for each in devices if each.type == device_type), 0)

    def elements(self, place: Place) -> torch.Tensor:
        """Return the copied memory of a place in its dtype, as many elements as are whole."""
        memory = self.memories[place.memory]
        if memory.dtype == place.dtype:
            return memory
        size = place.dtype.itemsize
        whole = memory.nbytes // size * size
        return memory[:whole].view(place.dtype)

    def copies(self, *, again: bool) -> Copies:
        """Return the arguments as CPU tensors in these memories or copies; sharing is kept."""
        memories = [memory.clone() for memory in self.memories] if again else self.memories
        return Copies(self, lambda place: place.of(memories[place.memory]), {})

    def wide(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Copies:
        """Return the arguments in float64, the numbers of each memory changed by a function.

        Tensors that share memory and have different dtypes do not share it here.
        """
        memories: dict[tuple[int, torch.dtype], torch.Tensor] = {}

        def made(place: Place) -> torch.Tensor:
            at = place.memory, place.dtype
            if at not in memories:
                wide = WIDE.get(place.dtype, place.dtype)
                values = self.elements(place).to(wide, copy=True)
                memories[at] = change(values) if place.dtype in WIDE else values
            memory = memories[at]
            if place.is_whole:
                return memory
            offset = place.offset - place.before
            shaped = memory.as_strided(place.shape, place.stride, offset)
            return with_bits(shaped, place.like)

        return Copies(self, made, WIDE)


class Copies(StandIns):
    """CPU tensors instead of a call's arguments.

    Args:
        inputs: The arguments of the call.
        made: Returns the CPU tensor for a tensor.
        dtypes: The dtypes that replace others.
    """

    def __init__(
        self,
        inputs: Inputs,
        made: Callable[[Place], torch.Tensor],
        dtypes: Mapping[torch.dtype, torch.dtype],
    ):
        super().__init__(None)
        self._places = inputs.places
        self._made = made
        self._dtypes = dtypes
        self.args, self.kwargs = self.take((inputs.args, inputs.kwargs))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._made(self._places[id(tensor)])

    def other(self, value: Any) -> Any:
        """Return an argument for the CPU, without generators: the default one has the state."""
        if isinstance(value, torch.device):
            return value if value.type == "meta" else _CPU
        if isinstance(value, torch.dtype):
            return self._dtypes.get(value, value)
        return None if isinstance(value, torch.Generator) else value
