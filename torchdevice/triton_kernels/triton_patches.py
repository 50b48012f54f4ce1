"""The patches of Triton in a scope, put in when the program imports it."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

import torch

from torchdevice.kernel import thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import Patch, Replaced, replaced_function, without_cache
from torchdevice.triton_kernels import driver, kernel_functions, launching
from torchdevice.triton_kernels import triton_internals as triton
from torchdevice.triton_kernels.triton_internals import core


def _active(original: Any) -> property:
    """``driver.active``, also for torch's compilers, which ask Triton what a kernel writes."""

    def active(config: Any) -> Any:
        context = thread_state.answering()
        if context is None or context.runtime.support.makes_kernels:
            return original.fget(config)
        return context.settings.setdefault(driver.StandInDriver, driver.StandInDriver(context))

    return property(active)


def _bench(context: Context, original: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
    """``do_bench``, which would call even a slow function seven times more."""
    given = inspect.signature(original).bind(fn, *args, **kwargs)
    given.apply_defaults()
    begun = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    spent = 1000 * (time.perf_counter() - begun)
    if context.runtime.support.makes_kernels or spent < given.arguments["rep"]:
        return original(fn, *args, **kwargs)
    return triton.summarized([spent], given.arguments["quantiles"], given.arguments["return_mode"])


def patches() -> list[Patch]:
    """Return the patches of Triton."""
    native = functools.partial(replaced_function, native_to="cuda")
    return [
        native(triton.JITFunction, "run", launching.run),
        native(triton.InterpretedFunction, "run", launching.run),
        Replaced(triton.JITCallable, "parse", kernel_functions.parsed_alone),
        *map(launching.of_each_scope, launching.OF_SCOPES),
        native(triton.Autotuner, "run", launching.run_tuned),
        native(triton.compiler, "max_shared_mem", without_cache),
        Replaced(triton.compiler, "CompiledKernel", lambda original: launching.OnNoDevice),
        native(triton.testing, "do_bench", _bench),
        Replaced(triton.DriverConfig, "active", _active),
        Replaced(triton.DriverConfig, "default", _active),
        # The other patches fall through to Triton outside one of our launches.
        *(
            Replaced(core.tensor, name, kernel_functions.with_semantic)
            for name in kernel_functions.OPERATORS
        ),
        Replaced(core.dtype, "to_ir", kernel_functions.dtype_to_ir),
    ]
