"""Everything that is in place while a scope is active, in the order of installation."""

from __future__ import annotations

from torchdevice import bindings
from torchdevice._patching import Installation, Patch
from torchdevice.shims import (
    autocast,
    callbacks,
    compiling,
    constructors,
    cuda_module,
    data_parallel,
    distributed,
    generator,
    graphs,
    mps_module,
    profiling,
    scripting,
    serialization,
    stream_types,
    tensor_types,
    threads,
    xpu_module,
)


def _patches() -> list[Patch]:
    shims = (
        cuda_module,
        stream_types,
        xpu_module,
        graphs,
        mps_module,
        generator,
        tensor_types,
        constructors,
        autocast,
        callbacks,
        serialization,
        threads,
        compiling,
        profiling,
        scripting,
        data_parallel,
        distributed,
    )
    return [*bindings.patches(), *(patch for shim in shims for patch in shim.patches())]


INSTALLATION = Installation(_patches)
