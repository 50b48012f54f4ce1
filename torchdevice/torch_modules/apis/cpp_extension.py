"""Extensions in CUDA's or SYCL's C++, which run on no device that stands in: refused at the call.

A scope makes torch look as if it was built for CUDA. The module therefore sees the machine as it is
while it is imported, when it looks for a compiler, and does not begin a build that cannot succeed.
Extensions in plain C++ are built as ever. For ``torch/utils/cpp_extension.py``.
"""

from __future__ import annotations

import inspect
from typing import Any

from torchdevice.errors import ExtensionRefusedError
from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context

_LANGUAGES = {"cuda": ("cuda", "_is_cuda_file"), "sycl": ("xpu", "_is_sycl_file")}
"""On which devices the code of a language runs, and torch's function that finds its files."""

_NAME = "torch.utils.cpp_extension"


@replaces(_NAME, "_jit_compile")
def _jit_compile(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The function that builds for ``load`` and ``load_inline``."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    module = original.__globals__
    for language, (device_type, is_written_in) in _LANGUAGES.items():
        wanted = given[f"with_{language}"]
        if wanted is None:
            wanted = any(map(module[is_written_in], given["sources"]))
        if wanted and context.device_type != device_type:
            raise ExtensionRefusedError(given["name"])
    return original(*args, **kwargs)


@replaces(_NAME, "CUDAExtension", native_to="cuda")
@replaces(_NAME, "SyclExtension", native_to="xpu")
def _extension(
    context: Context, original: Any, name: str, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    """``CUDAExtension`` and ``SyclExtension``, the descriptions in ``setup.py``."""
    raise ExtensionRefusedError(name)
