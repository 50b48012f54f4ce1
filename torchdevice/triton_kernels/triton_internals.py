"""The private names of Triton that this folder uses, looked up in one place, with an error for other versions."""

from __future__ import annotations

import importlib
import operator
from typing import Any

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


ASTSource = _require("compiler", "ASTSource")
Autotuner = _require("runtime.autotuner", "Autotuner")
DriverBase = _require("backends.driver", "DriverBase")
DriverConfig = _require("runtime.driver", "DriverConfig")
GPUTarget = _require("backends.compiler", "GPUTarget")
InterpretedFunction = _require("runtime.interpreter", "InterpretedFunction")
InterpreterBuilder = _require("runtime.interpreter", "InterpreterBuilder")
JITFunction = _require("runtime.jit", "JITFunction")
OutOfResources = _require("runtime.errors", "OutOfResources")
TensorDescriptor = _require("tools.tensor_descriptor", "TensorDescriptor")
TensorHandle = _require("runtime.interpreter", "TensorHandle")
TensorWrapper = _require("runtime.jit", "TensorWrapper")
TritonSemantic = _require("language.semantic", "TritonSemantic")
binder_of = _require("runtime.jit", "create_function_from_signature")
compile_kernel = _require("compiler", "compile")
compiler = _require("compiler.compiler")
core = _require("language.core")
cuda_libdevice = _require("language.extra.cuda.libdevice")
ir = _require("_C.libtriton", "ir")
is_builtin = _require("language.core", "is_builtin")
knobs = _require("knobs")
make_backend = _require("compiler", "make_backend")
numpy_dtype = _require("runtime.interpreter", "_get_np_dtype")
stub_libdevice = _require("language.extra.libdevice")
combine_max = _require("language.standard", "_elementwise_max")
combine_min = _require("language.standard", "_elementwise_min")
combine_sum = _require("language.standard", "_sum_combine")
constant = _require("language.core", "_unwrap_if_constexpr")
pack_args = _require("runtime.jit", "JITFunction._pack_args")
reduce_with_indices = _require("language.core", "_reduce_with_indices")
tl = _require("language")
type_of = _require("language", "str_to_ty")
