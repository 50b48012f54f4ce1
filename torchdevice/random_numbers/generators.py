"""Generators with seed and offset that draw a GPU's numbers on targets that simulate none."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.random_numbers import drawing_gpu
from torchdevice.random_numbers.operators import Drawing
from torchdevice.random_numbers.philox import Source

_Plain = torch._C.Generator

_WORD = 2**64 - 1


class GpuGenerator(torch.Generator):
    """A generator of a GPU's numbers.

    torch's kernels take it for a generator of the CPU with the same seed, from which operators draw
    that have no numbers of a GPU here.

    Args:
        index: The index of the device.
    """

    # As `repr` shows it.
    __module__, __qualname__ = torch.Generator.__module__, torch.Generator.__qualname__
    _index: int
    _source: Source
    _targets: torch.Generator | None
    """The target's generator, from which operators draw without numbers of a GPU. It gets the same
    seeds.
    """

    def __new__(cls, index: int) -> GpuGenerator:
        made: GpuGenerator = _Plain.__new__(cls, "cpu")  # type: ignore[call-arg]
        made._index, made._targets = index, None
        made._source = Source(_Plain.initial_seed(made) & _WORD, 0)
        return made

    def __init__(self, index: int):
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device for which this generator draws numbers."""
        context = thread_state.state.context
        if context is None:
            return torch.device("cpu")
        return context.devices.shown(context.runtime.device(self._index))

    def drawing(self, context: Context) -> Drawing | None:
        """Return the source that draws in a context; None if it draws no GPU's numbers."""
        gpu = drawing_gpu.of_context(context, self._index)
        return None if gpu is None else Drawing(gpu, self._take)

    def _take(self, increment: int) -> Source:
        found = self._source
        self._source = Source(found.seed, (found.offset + increment) & _WORD)
        return found

    def manual_seed(self, seed: int) -> GpuGenerator:  # type: ignore[override]
        """Begin the numbers of a seed."""
        super().manual_seed(seed)
        if self._targets is not None:
            self._targets.manual_seed(seed)
        self._source = Source(seed & _WORD, 0)
        return self

    def seed(self) -> int:
        """Begin the numbers of a new seed, and return it."""
        return self.manual_seed(_Plain("cpu").seed()).initial_seed()

    def initial_seed(self) -> int:
        """Return the seed."""
        return self._source.seed

    def get_offset(self) -> int:
        """Return the offset."""
        return self._source.offset

    def set_offset(self, offset: int) -> GpuGenerator:
        """Go on from an offset.

        Raises:
            RuntimeError: The offset is no multiple of 4. The text is CUDA's.
        """
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self._source = Source(self._source.seed, offset)
        return self

    def get_state(self) -> torch.Tensor:
        """Return the seed and the offset as 16 bytes."""
        words = b"".join(each.to_bytes(8, "little") for each in self._source)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.tensor(list(words), dtype=torch.uint8, device="cpu")

    def set_state(self, new_state: torch.Tensor) -> GpuGenerator:  # type: ignore[override]
        """Go on from a state. One of 8 bytes is a seed.

        Raises:
            RuntimeError: It is no state of CUDA's. The texts are torch's.
        """
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if new_state.dtype is not torch.uint8 or not new_state.is_cpu:
                raise TypeError("RNG state must be a torch.ByteTensor")
            if new_state.numel() not in (8, 16):
                raise RuntimeError("RNG state is wrong size")
            words = bytes(new_state.tolist())
        self.manual_seed(int.from_bytes(words[:8], "little"))
        return self.set_offset(int.from_bytes(words[8:], "little"))

    def clone_state(self) -> GpuGenerator:
        """Return a new generator in this generator's state, which will draw equal numbers."""
        return GpuGenerator(self._index).set_state(self.get_state())

    def __reduce__(self) -> Any:
        return _restored, (self._index, self.get_state())


def _restored(index: int, state: torch.Tensor) -> GpuGenerator:
    return GpuGenerator(index).set_state(state)


def default_generator(
    context: Context, index: int, targets: torch.Generator | None
) -> GpuGenerator:
    """Return the generator that a context draws from for a device where the program passes none.

    Args:
        context: The context.
        index: The index of the device.
        targets: The target's generator for the device; None for that of the CPU, which draws for
            the host too.
    """
    key = GpuGenerator, index
    found: GpuGenerator | None = context.settings.get(key)
    if found is None:
        found = context.settings.setdefault(key, GpuGenerator(index))
        found._targets = targets
        # A new device begins with the program's seed, as a lately initialised CUDA device does.
        found.manual_seed(torch.default_generator.initial_seed())
    return found
