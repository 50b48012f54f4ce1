"""The list of all patches that are installed while a scope is active, in the order of installation."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from torchdevice.accelerators import accelerator_api
from torchdevice.compile import torch_compile
from torchdevice.core import bindings
from torchdevice.core.importing import Refusing, WhenImported
from torchdevice.core.patching import Installation, Patch
from torchdevice.cuda import (
    comm,
    cudart,
    cudnn,
    device_queries,
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
from torchdevice.devices.accelerators import FAMILIES
from torchdevice.errors import PATCHERS, AnotherPatcherError, TritonVersionError
from torchdevice.foundation.logs import warn_once
from torchdevice.torch_apis import (
    autocast,
    autograd,
    batch_norm,
    cpp_extension,
    default_device,
    factories,
    flex_attention,
    generator,
    jit,
    legacy_types,
    library,
    library_patches,
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
    warning_locations,
)
from torchdevice.torch_apis.distributed import data_parallel, dtensor, process_groups, sharded_attention

FAMILY_MODULES = tuple(import_module(f"torchdevice.accelerators.{family}") for family in FAMILIES if family != "cuda")
"""Each file of ``accelerators/`` has the name of its family. CUDA has a folder, listed below."""

AREAS = (
    device_queries,
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
    accelerator_api,
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
    warning_locations,
    torch_compile,
    profiler,
    sanitizer,
    tensor_cycles,
    jit,
    data_parallel,
    process_groups,
    dtensor,
    sharded_attention,
    library_patches,
)
"""The modules of this package with a function ``patches()``."""

ONLY_SUPPLYING = (gds, memory_history, nccl, unsupported, versions)
"""The modules of this package that only register supplied names and rewriters when they are imported."""


def _patches_of_triton(module: ModuleType) -> list[Patch]:
    # Imported when the program imports Triton, which is no dependency.
    try:
        from torchdevice.triton_kernels import patching
    except TritonVersionError as error:  # what uses no kernel runs with any version
        warn_once(str(error))
        return []
    return patching.patches()


def _patches() -> list[Patch]:
    rivals = Refusing(PATCHERS, AnotherPatcherError)
    triton = WhenImported("triton", _patches_of_triton, sees_scope=True)
    return [rivals, *bindings.patches(), *(patch for area in AREAS for patch in area.patches()), triton]


INSTALLATION = Installation(_patches)
