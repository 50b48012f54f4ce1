"""The GPU whose random numbers a scope gives: its options' GPU, or else an A100."""

from __future__ import annotations

from torchdevice.kernel.context import Context
from torchdevice.random_numbers.philox import Gpu

A100 = {"multi_processor_count": 108, "max_threads_per_multi_processor": 2048}
"""The GPU whose numbers a scope gives that names none. Compute capability 8.0, the default of a
scope, is its own.
"""


def draws_as_gpu(context: Context) -> bool:
    """Return whether the numbers of a context's devices are a GPU's."""
    if context.options.random is None:
        return context.runtime.supplied.is_gpu
    return context.options.random == "cuda"


def of_context(context: Context | None, index: int = 0) -> Gpu | None:
    """Return the GPU whose numbers a context's device gives; None if they are no GPU's."""
    if context is None or not draws_as_gpu(context):
        return None
    figures = {**A100, **(context.devices.figure("properties", index) or {})}
    return Gpu(figures["multi_processor_count"], figures["max_threads_per_multi_processor"])
