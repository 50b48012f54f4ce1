"""Memory that nothing has written yet is told by a pattern, with which ``torch.empty`` fills it.

So whatever writes the memory, an operator, a kernel, a collective or the host, need not be
followed. The pattern is a word of 4 bytes, which is NaN in every floating dtype of 2 bytes and
more: a value is mistaken for it where a program writes this one integer of 2**32. A word of smaller
elements counts as written when one of them is.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel.devices.observer import Observer
from torchdevice.simulation.kernels.cpu_kernels import aliased

PATTERN = 0x7FF17FF1

_MAKE_EMPTY = frozenset({"aten::empty", "aten::empty_strided"})


class Pattern(Observer):
    """Fills the tensors that kernels of one context return without values."""

    def run(self, op: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel."""
        result = kernel(*args, **kwargs)
        if op._schema.name in _MAKE_EMPTY:
            with torch._C.DisableTorchFunction():
                words = torch.empty(0, dtype=torch.int32, device="cpu")
                words.set_(aliased(result).untyped_storage()).fill_(PATTERN)
        return result
