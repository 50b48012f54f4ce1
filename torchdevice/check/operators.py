"""The rules for what a device computes: operators without a kernel, and dtypes that it cannot hold."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from torchdevice.check.findings import Verdict
from torchdevice.check.rules import Found, rule
from torchdevice.check.target import torch_object
from torchdevice.check.view import View, argument

_METHODS = "torch.Tensor."


@rule("operator", ast.Attribute, ast.Name)
def _operator(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A function, a module or a method of tensors that needs an operator without a kernel on the target, by torch's own
    table of operators: it raises `NotImplementedError` unless `PYTORCH_ENABLE_MPS_FALLBACK=1` is set. A method counts
    where its object is known to be a tensor, or where no other usual object has a method of that name."""
    name = _used(node, view)
    missing = view.target.missing(name) if name else None
    if missing is None:
        return
    shown = name.removeprefix("torch.")
    yield Found(
        Verdict.CHANGE,
        f"Call {shown} on a CPU tensor, or set PYTORCH_ENABLE_MPS_FALLBACK=1: it needs {missing}, for which "
        f"{view.target.name} has no kernel.",
    )


@rule("operator-tests", ast.Attribute, ast.Name)
def _operator_tests(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A function that has a kernel on MPS, and that torch's own tests nevertheless expect to fail there for some inputs
    (`torch/testing/_internal/common_mps.py`): approximate."""
    name = _used(node, view)
    if not name or not view.target.refused_by_tests(name) or view.target.missing(name):
        return
    call = view.parent(node)
    if isinstance(call, ast.Call) and _is_one(argument(call, 1, "output_size")):
        return
    remedy = f"Compare {name.removeprefix('torch.')} with the CPU: torch's own tests expect failures of it on MPS."
    yield Found(Verdict.APPROXIMATE, remedy, leaves_trace=False)


def _is_one(size: ast.expr | None) -> bool:
    """Return whether an output size divides every input size, which is what pooling on MPS asks for."""
    sizes = size.elts if isinstance(size, (ast.Tuple, ast.List)) else [size]
    return all(isinstance(each, ast.Constant) and each.value == 1 for each in sizes)


def _used(node: ast.Attribute | ast.Name, view: View) -> str:
    """Return the public name of torch that a node uses; empty for any other node."""
    if isinstance(view.parent(node), ast.Attribute) and view.dotted(node) is not None:
        return ""
    name = view.dotted(node)
    if name is not None:
        return name if name.startswith("torch.") else ""
    call = view.parent(node)
    if not isinstance(node, ast.Attribute) or not isinstance(call, ast.Call) or call.func is not node:
        return ""
    known = view.is_tensor(node.value) or (node.attr not in _methods_of_others() and node.attr not in view.defined)
    return f"{_METHODS}{node.attr}" if known and view.uses_torch else ""


@functools.cache
def _methods_of_others() -> frozenset[str]:
    """Return the methods of objects that programs use beside tensors: of Python's own types, and of NumPy's arrays."""
    import numpy

    kinds = (str, bytes, list, dict, set, int, float, complex, numpy.ndarray, numpy.random.Generator)
    return frozenset(name for kind in kinds for name in dir(kind)) | {"mode"}  # pandas has it, too


# ---- dtypes ----------------------------------------------------------------------------------------------------------

_CONVERSIONS = {"double": "torch.float64", "cdouble": "torch.complex128"}

_LEGACY = "DoubleTensor"


@rule("dtype", ast.Attribute, ast.Name, ast.Call, ast.Constant)
def _dtype(node: ast.Attribute | ast.Name | ast.Call | ast.Constant, view: View) -> Iterator[Found]:
    """A dtype that the target cannot hold, such as `torch.float64` and `.double()` on MPS: tensors on the device are
    kept in the next narrower one, which is approximate; `--float64 error` raises at such lines."""
    name = _dtype_named(node, view)
    if not name or not view.target.lacks_dtype(name):
        return
    wide = str(torch_object(name)).removeprefix("torch.")
    kept = _NARROWER[wide]
    yield Found(Verdict.APPROXIMATE, f"Ask for {kept}: {view.target.name} has no {wide}, and keeps tensors in {kept}.")


_NARROWER = {"float64": "float32", "complex128": "complex64"}


def _dtype_named(node: ast.AST, view: View) -> str:
    """Return the dotted name of the dtype that a node asks for; empty for any other node."""
    if isinstance(node, ast.Call):
        method = view.method(node)
        converts = method in _CONVERSIONS and not node.args and not node.keywords and view.uses_torch
        return _CONVERSIONS[method] if converts else ""
    if isinstance(node, ast.Constant):
        legacy = isinstance(node.value, str) and node.value.startswith("torch.") and node.value.endswith(_LEGACY)
        return _CONVERSIONS["double"] if legacy else ""
    if isinstance(view.parent(node), ast.Attribute):
        return ""
    name = view.dotted(node) or ""
    if not name.startswith("torch."):
        return ""
    return _CONVERSIONS["double"] if name.endswith(f".{_LEGACY}") else name if name.count(".") == 1 else ""
