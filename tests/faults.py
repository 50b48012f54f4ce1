"""Faults that are planted in the simulated device: kernels that do what real devices have been seen to do wrong."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchdevice.simulation import backend, handwritten_kernels
from torchdevice.simulation.kernels import Kernel, kernel_of


@contextlib.contextmanager
def planted(name: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Replace the kernel of an operator of the simulated device.

    Args:
        name: The operator with its overload, such as ``"add.Tensor"``.
        fault: Called with the right kernel and the arguments of each call.
    """
    right: Kernel = handwritten_kernels.SPECIAL.get(name) or kernel_of(backend._overload(name))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return fault(right, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once in a process that there was a kernel
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
