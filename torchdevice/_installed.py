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
    profiling,
    scripting,
    serialization,
    stream_types,
    tensor_types,
    threads,
)


def _patches() -> list[Patch]:
    shims = (
        cuda_module,
        stream_types,
        graphs,
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
