"""The list of all patches that are installed while a scope is active, in the order of installation."""

from __future__ import annotations

from importlib import import_module

from torchdevice import accelerator, supplied
from torchdevice.compile import torch_compile
from torchdevice.cuda import (
    comm,
    cudart,
    cudnn,
    devices,
    gds,
    graphs,
    green_contexts,
    memory,
    memory_history,
    memory_pools,
    monitoring,
    nccl,
    nvtx,
    random,
    settings,
    streams,
    unsupported,
    versions,
)
from torchdevice.families import FAMILIES
from torchdevice.patching import Installation, Patch
from torchdevice.torch_apis import (
    autocast,
    autograd,
    batch_norm,
    cpp_extension,
    cuda_checks,
    data_parallel,
    default_device,
    distributed,
    divided_attention,
    dtensor,
    factories,
    flex_attention,
    generator,
    jit,
    legacy_types,
    library,
    modules,
    optimizers,
    profiler,
    sanitizer,
    serialization,
    storage,
    subclasses,
    tensor_cycles,
    test_case,
    threads,
    warned_lines,
)

FAMILY_MODULES = tuple(import_module(f"torchdevice.{family}") for family in FAMILIES if family != "cuda")
"""``mps.py`` and the others beside it: each has the name of its family. CUDA has a folder, listed below."""

AREAS = (
    devices,
    cudart,
    nvtx,
    monitoring,
    settings,
    memory,
    memory_pools,
    cudnn,
    random,
    comm,
    green_contexts,
    streams,
    *FAMILY_MODULES,
    graphs,
    accelerator,
    generator,
    legacy_types,
    storage,
    factories,
    subclasses,
    flex_attention,
    default_device,
    modules,
    batch_norm,
    optimizers,
    autocast,
    autograd,
    library,
    cpp_extension,
    test_case,
    serialization,
    threads,
    warned_lines,
    torch_compile,
    profiler,
    sanitizer,
    tensor_cycles,
    jit,
    data_parallel,
    distributed,
    dtensor,
    divided_attention,
    cuda_checks,
)
"""The modules of this package with a function ``patches()``."""

ONLY_SUPPLYING = (gds, memory_history, nccl, unsupported, versions)
"""The modules of this package that only register supplied names and rewriters when they are imported."""


def _patches() -> list[Patch]:
    return [*supplied.patches(), *(patch for area in AREAS for patch in area.patches())]


INSTALLATION = Installation(_patches)
