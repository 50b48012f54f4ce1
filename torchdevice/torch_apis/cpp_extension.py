"""Extensions in CUDA's or SYCL's C++, which run on no device that stands in: refused at the call.

A scope makes torch look as if it was built for CUDA. The module therefore sees the machine as it is while it is
imported, when it looks for a compiler, and does not begin a build that cannot succeed. Extensions in plain C++ are
built as ever. For ``torch/utils/cpp_extension.py``.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from torchdevice.core.context import Context
from torchdevice.core.importing import WhenImported
from torchdevice.core.patching import Patch, replaced_function
from torchdevice.errors import ExtensionRefusedError

_LANGUAGES = {"cuda": ("cuda", "_is_cuda_file"), "sycl": ("xpu", "_is_sycl_file")}
"""On which devices the code of a language runs, and torch's function that finds its files."""

_NAME = "torch.utils.cpp_extension"


def _jit_compile(context: Context, original: Any, *args: Any, **kwargs: Any) -> Any:
    """The function by which ``load`` and ``load_inline`` build."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    module = original.__globals__
    for language, (device_type, is_written_in) in _LANGUAGES.items():
        wanted = given[f"with_{language}"]
        if wanted is None:
            wanted = any(map(module[is_written_in], given["sources"]))
        if wanted and context.device_type != device_type:
            raise ExtensionRefusedError(given["name"])
    return original(*args, **kwargs)


def _extension(context: Context, original: Any, name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """``CUDAExtension`` and ``SyclExtension``, by which ``setup.py`` describes one."""
    raise ExtensionRefusedError(name)


def _patches_of(module: ModuleType) -> list[Patch]:
    return [
        replaced_function(module, "_jit_compile", _jit_compile),
        replaced_function(module, "CUDAExtension", _extension, native_to="cuda"),
        replaced_function(module, "SyclExtension", _extension, native_to="xpu"),
    ]


def patches() -> list[Patch]:
    """Return the patch of the module, which programs import themselves."""
    return [WhenImported(_NAME, _patches_of)]
