"""The rules for operators without a kernel on a device."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from torchdevice.check.names import argument
from torchdevice.check.rules import Found, Verdict, View, rule
from torchdevice.check.target import MAC
from torchdevice.devices.accelerators import SPELLED


@rule("operator", ast.Attribute, ast.Name, of_lacks=True)
def _operator(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A function, a module or a method of tensors that needs an operator without a kernel on the target, by torch's own
    table of operators: it runs on the CPU, which is approximate, and raises `NotImplementedError` on `simulated:strict`
    and with `strict`. A method counts where its object is known to be a tensor, or where no other usual object has a
    method of that name."""
    name = _used(node, view)
    missing = view.target.missing(name) if name else None
    if missing is None:
        return
    shown = name.removeprefix("torch.")
    why = f"it needs {missing}, for which {view.target.name} has no kernel."
    if view.target.refuses_operators:
        yield Found(Verdict.CHANGE, f"Call {shown} on a CPU tensor: {why}")
    else:
        yield Found(Verdict.APPROXIMATE, f"Expect {shown} to run on the CPU: {why}")


@rule("operator-tests", ast.Attribute, ast.Name, of_lacks=True)
def _operator_tests(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A function that has a kernel on MPS, and that torch's own tests nevertheless expect to fail there for some inputs
    (`torch/testing/_internal/common_mps.py`): approximate."""
    name = _used(node, view)
    if not name or not view.target.refused_by_tests(name) or view.target.missing(name):
        return
    call = view.parent(node)
    size = argument(call, 1, "output_size") if isinstance(call, ast.Call) else None
    sizes = size.elts if isinstance(size, (ast.Tuple, ast.List)) else [size]
    # An output size of 1 divides every input size, which is what pooling on MPS asks for.
    if all(isinstance(each, ast.Constant) and each.value == 1 for each in sizes):
        return
    remedy = f"Compare {name.removeprefix('torch.')} with the CPU: torch's own tests expect failures of it on MPS."
    yield Found(Verdict.APPROXIMATE, remedy, leaves_trace=False)


@rule("mps-arguments", ast.Call)
def _mps_arguments(node: ast.Call, view: View) -> Iterator[Found]:
    """A call that MPS refuses for its arguments: an LSTM with `proj_size`, a compressed sparse layout,
    `ConvTranspose3d` in half precision. It runs on the CPU, which is approximate. `share_memory_` of a tensor that was
    just made on the device or moved there raises, and must be changed."""
    if view.target.column != MAC.column:
        return
    made = node.func.value if isinstance(node.func, ast.Attribute) else None
    origin = made
    while isinstance(origin, ast.Call) and isinstance(origin.func, ast.Attribute) and not view.called(origin):
        origin = origin.func.value  # of `Layer(...).cuda().half()` the layer
    function, method, maker = view.called(node), view.method(node), view.called(origin) if origin is not None else ""
    moved = isinstance(made, ast.Call) and (view.method(made) == "cuda" or _on_device(made, view))
    if method == "share_memory_" and moved:
        yield Found(Verdict.CHANGE, f"Share a CPU tensor: share_memory_ raises for one on {view.target.name}.")
    projects = argument(node, None, "proj_size") if function == "torch.nn.LSTM" else None
    for said, refused in (
        ("an LSTM with proj_size", projects is not None and getattr(projects, "value", None) != 0),
        (method, method.startswith(_COMPRESSED) and view.is_tensor(node)),
        (function.removeprefix("torch."), function in _MAKES_COMPRESSED and _on_device(node, view)),
        ("ConvTranspose3d in half precision", "torch.nn.ConvTranspose3d" in (function, maker) and _halves(node, view)),
    ):
        if refused:
            remedy = f"Expect {said} to run on the CPU: {view.target.name} refuses it."
            yield Found(Verdict.APPROXIMATE, remedy, leaves_trace=False)


_COMPRESSED = ("to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc")
_MAKES_COMPRESSED = tuple(f"torch.{each.removeprefix('to_')}_tensor" for each in _COMPRESSED)


def _halves(call: ast.Call, view: View) -> bool:
    given = {view.dotted(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))}
    return view.method(call) in _HALF or any(f"torch.{name}" in given for name in ("float16", *_HALF))


_HALF = ("half", "bfloat16")


def _on_device(call: ast.Call, view: View) -> bool:
    return any(SPELLED.fullmatch(str(text.value)) for text in view.texts(argument(call, None, "device")))


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
    return f"torch.Tensor.{node.attr}" if known and view.uses_torch else ""


@functools.cache
def _methods_of_others() -> frozenset[str]:
    """Return the methods of objects that programs use beside tensors: of Python's own types, and of NumPy's arrays."""
    import numpy

    kinds = (str, bytes, list, dict, set, int, float, complex, numpy.ndarray, numpy.random.Generator)
    return frozenset(name for kind in kinds for name in dir(kind)) | {"mode"}  # pandas has it, too
