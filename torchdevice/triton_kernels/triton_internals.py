"""The private names of Triton that this folder uses, and an error for other versions."""

from __future__ import annotations

import importlib
import operator
from typing import TYPE_CHECKING, Any

from torchdevice.errors import TritonVersionError


def _require(module: str, name: str = "") -> Any:
    """Return a module of Triton, or a name in one.

    Raises:
        TritonVersionError: The installed Triton does not have it.
    """
    try:
        found = importlib.import_module(f"triton.{module}")
        return operator.attrgetter(name)(found) if name else found
    except (ImportError, AttributeError) as error:
        if getattr(error, "name", None) == "numpy":
            raise
        version = importlib.import_module("triton").__version__
        raise TritonVersionError(f"triton.{module}.{name}".rstrip("."), version) from error


_NAMES = {
    "ASTSource": "compiler:ASTSource",
    "Autotuner": "runtime.autotuner:Autotuner",
    "CompiledKernel": "compiler:CompiledKernel",
    "CudaDriver": "backends.nvidia.driver:CudaDriver",
    "DriverConfig": "runtime.driver:DriverConfig",
    "InterpretedFunction": "runtime.interpreter:InterpretedFunction",
    "InterpreterBuilder": "runtime.interpreter:InterpreterBuilder",
    "JITCallable": "runtime.jit:JITCallable",
    "JITFunction": "runtime.jit:JITFunction",
    "OutOfResources": "runtime.errors:OutOfResources",
    "TensorDescriptor": "tools.tensor_descriptor:TensorDescriptor",
    "TensorHandle": "runtime.interpreter:TensorHandle",
    "TensorWrapper": "runtime.jit:TensorWrapper",
    "TritonSemantic": "language.semantic:TritonSemantic",
    "compile_kernel": "compiler:compile",
    "compiler": "compiler.compiler",
    "core": "language.core",
    "cuda_libdevice": "language.extra.cuda.libdevice",
    "ir": "_C.libtriton:ir",
    "init_handles": "compiler:CompiledKernel._init_handles",
    "is_builtin": "language.core:is_builtin",
    "knobs": "knobs",
    "make_backend": "compiler:make_backend",
    "numpy_dtype": "runtime.interpreter:_get_np_dtype",
    "summarized": "testing:_summarize_statistics",
    "testing": "testing",
    "stub_libdevice": "language.extra.libdevice",
    "combine_max": "language.standard:_elementwise_max",
    "combine_min": "language.standard:_elementwise_min",
    "combine_sum": "language.standard:_sum_combine",
    "constant": "language.core:_unwrap_if_constexpr",
    "reduce_with_indices": "language.core:_reduce_with_indices",
    "tl": "language",
    "type_of": "language:str_to_ty",
}
"""Name in this folder -> place in Triton."""

globals().update({name: _require(*place.split(":")) for name, place in _NAMES.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
