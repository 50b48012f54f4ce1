"""The rule for dtypes that a device cannot hold: where one is asked for on the device, or such a tensor moves there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchdevice.check.findings import Verdict
from torchdevice.check.rules import Found, rule
from torchdevice.check.source_view import View, argument
from torchdevice.check.target import torch_object
from torchdevice.devices.accelerators import SPELLED

_CONVERSIONS = {"double": "torch.float64", "cdouble": "torch.complex128"}

_LEGACY = "DoubleTensor"

_MOVES = ("to", "cuda")

_NARROWER = {"float64": "float32", "complex128": "complex64"}

_MAX_DEPTH = 12


@rule("dtype", ast.Attribute, ast.Name, ast.Call, ast.Constant)
def _dtype(node: ast.Attribute | ast.Name | ast.Call | ast.Constant, view: View) -> Iterator[Found]:
    """A dtype that the target cannot hold, such as float64 on MPS: `dtype=torch.float64` with a device, `.double()`,
    `torch.cuda.DoubleTensor`, a variable that surely holds such a dtype, and where a tensor of it moves to the device,
    also one made from an array of NumPy. There it is kept in the next narrower dtype, which is approximate;
    `--float64 error` raises at such lines."""
    name = _named(node, view) or _held(node, view)
    if not name and isinstance(node, ast.Call) and view.method(node) in _MOVES and isinstance(node.func, ast.Attribute):
        name = "" if _names_dtype(node, view) or _goes_to_the_cpu(node, view) else _wide(node.func.value, view)
    if name and view.target.lacks_dtype(name):
        wide = str(torch_object(name)).removeprefix("torch.")
        kept = _NARROWER.get(wide)
        yield Found(
            Verdict.APPROXIMATE if kept else Verdict.CHANGE,
            f"Ask for {kept}: {view.target.name} has no {wide}, and keeps tensors in {kept}."
            if kept
            else f"Ask for another dtype: {view.target.name} has no {wide}, and raises an error.",
            leaves_trace=isinstance(node, ast.Call) or not _is_kept(node, view),
        )


def _named(node: ast.AST, view: View) -> str:
    """Return the dotted name of the dtype that a node asks for; empty for any other node."""
    if isinstance(node, ast.Call):
        return _converted(node, view)
    if isinstance(node, ast.Constant):
        legacy = isinstance(node.value, str) and node.value.startswith("torch.") and node.value.endswith(_LEGACY)
        return _CONVERSIONS["double"] if legacy else ""
    if isinstance(view.parent(node), ast.Attribute) or _is_compared(node, view) or _stays_on_the_cpu(node, view):
        return ""
    if view.called(_call_with(node, view) or node) in _ABOUT_DTYPES:
        return ""
    name = view.dotted(node) or ""
    if not name.startswith("torch."):
        return ""
    return _CONVERSIONS["double"] if name.endswith(f".{_LEGACY}") else name if name.count(".") == 1 else ""


def _held(node: ast.AST, view: View) -> str:
    """Return the dotted name of the dtype that a variable surely holds where a tensor on a device is to have it."""
    if not isinstance(node, (ast.Name, ast.Attribute)) or view.dotted(node) is not None:
        return ""
    call = _call_with(node, view)
    if call is None:
        return ""
    made = argument(call, None, "dtype") is node and argument(call, None, "device") is not None
    takes = view.method(call) in _TAKE_DTYPE or (made and view.called(call).startswith("torch."))
    return _surely(node, view) if takes else ""


def _call_with(node: ast.AST, view: View) -> ast.Call | None:
    """Return the call of which a node is an argument."""
    parent = view.parent(node)
    if isinstance(parent, ast.keyword):
        parent = view.parent(parent)
    return parent if isinstance(parent, ast.Call) and node is not parent.func else None


_TAKE_DTYPE = ("to", "type", "new_tensor", "new_zeros", "new_ones", "new_full", "new_empty")
"""Methods of tensors that take a dtype and work on the tensor's device."""


def _surely(node: ast.AST, view: View, seen: frozenset[ast.AST] = frozenset()) -> str:
    """Return the dotted name of the wide dtype that every known value of an expression is; empty where none is known.

    Args:
        node: The expression.
        view: The source.
        seen: The values that this one is asked for: a variable may be made from its own former value.
    """
    name = view.dotted(node)
    if name is not None:
        return _wide_name(name)
    if isinstance(node, ast.Call) and view.called(node) == "torch.promote_types":
        return next(filter(None, (_surely(each, view, seen) for each in node.args)), "")
    if len(seen) > _MAX_DEPTH or (isinstance(node, ast.Attribute) and not _is_of_self(node)):
        return ""
    values = [each for each in view.values(node) if each not in seen]
    found = [_surely(each, view, seen | {each}) for each in values]
    return found[0] if found and all(found) else ""


def _wide_name(name: str) -> str:
    is_wide = name.startswith("torch.") and str(torch_object(name)).removeprefix("torch.") in _NARROWER
    return name if is_wide else ""


def _is_of_self(node: ast.Attribute) -> bool:
    """Return whether an attribute is that of the class around it. Tensors have attributes of the same names."""
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _is_kept(node: ast.AST, view: View) -> bool:
    """Return whether a dtype is only kept where it stands, in a variable or as a default, or passed on to a function
    of the program: a report shows the line that asks torch for a tensor.
    """
    parent = view.parent(node)
    if isinstance(parent, ast.Call) and node is parent.func:
        return False
    call = _call_with(node, view)
    return call is None or not (view.called(call).startswith("torch.") or view.method(call) in _TAKE_DTYPE)


_ABOUT_DTYPES = frozenset(["torch.finfo", "torch.promote_types", "torch.can_cast"])
"""Functions that answer something of a dtype, and make no tensor."""


def _converted(call: ast.Call, view: View) -> str:
    method = view.method(call)
    converts = method in _CONVERSIONS and not call.args and not call.keywords and view.uses_torch
    return _CONVERSIONS[method] if converts else ""


def _is_compared(node: ast.AST, view: View) -> bool:
    """Return whether a dtype is only compared with others, or looked up by."""
    parent = view.parent(node)
    while isinstance(parent, (ast.Tuple, ast.List, ast.Set)):
        node, parent = parent, view.parent(parent)
    return isinstance(parent, ast.Compare) or (isinstance(parent, ast.Dict) and node in parent.keys)


def _stays_on_the_cpu(node: ast.AST, view: View) -> bool:
    """Return whether a dtype is that of a tensor that a function of torch makes without a device."""
    keyword = view.parent(node)
    call = view.parent(keyword) if isinstance(keyword, ast.keyword) and keyword.arg == "dtype" else None
    if not isinstance(call, ast.Call) or not view.called(call).startswith("torch."):
        return False
    return argument(call, None, "device") is None


def _goes_to_the_cpu(call: ast.Call, view: View) -> bool:
    texts = list(view.texts(argument(call, 0, "device")))
    return bool(texts) and not any(SPELLED.fullmatch(str(text.value)) for text in texts)


def _names_dtype(call: ast.Call, view: View) -> bool:
    """Return whether a move names the dtype itself."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
    return any((view.dotted(each) or "").startswith("torch.") for each in given)


def _wide(node: ast.AST, view: View, depth: int = 0) -> str:
    """Return the dotted name of the wide dtype that a tensor surely has; empty where none is known."""
    if depth > _MAX_DEPTH:
        return ""
    if isinstance(node, ast.Call):
        function = view.called(node)
        if function in _FROM_NUMPY and _is_wide_array(node.args[0] if node.args else node, view):
            return "" if _has_dtype(node) and not _dtype_of(node, view) else _CONVERSIONS["double"]
        if function.startswith("torch."):
            return _dtype_of(node, view)
        if isinstance(node.func, ast.Attribute):
            kept = node.func.attr in _KEEP_DTYPE
            return _converted(node, view) or (_wide(node.func.value, view, depth + 1) if kept else "")
        return ""
    if isinstance(node, ast.Subscript):
        return _wide(node.value, view, depth + 1)
    found = [_wide(value, view, depth + 1) for value in view.values(node)]
    return found[0] if found and all(found) else ""


_KEEP = "view reshape unsqueeze squeeze transpose permute clone detach contiguous requires_grad_"
_KEEP_DTYPE = frozenset(_KEEP.split())
"""Methods whose result has the dtype of its tensor."""

_FROM_NUMPY = ("torch.from_numpy", "torch.tensor", "torch.as_tensor", "torch.asarray")


def _has_dtype(call: ast.Call) -> bool:
    return argument(call, 1, "dtype") is not None


def _dtype_of(call: ast.Call, view: View) -> str:
    """Return the dtype that a call of torch names, if it is a wide one."""
    return _wide_name(view.dotted(argument(call, None, "dtype")) or "")


def _is_wide_array(node: ast.AST, view: View, depth: int = 0) -> bool:
    """Return whether an expression is surely an array of NumPy in float64, its default."""
    if depth > _MAX_DEPTH:
        return False
    if isinstance(node, ast.BinOp):
        return _is_wide_array(node.left, view, depth + 1) or _is_wide_array(node.right, view, depth + 1)
    if isinstance(node, ast.Subscript):
        return _is_wide_array(node.value, view, depth + 1)
    if isinstance(node, ast.Call):
        if view.method(node) in ("reshape", "copy", "transpose", "squeeze") and isinstance(node.func, ast.Attribute):
            return _is_wide_array(node.func.value, view, depth + 1)
        return view.called(node) in _WIDE_ARRAYS and argument(node, None, "dtype") is None
    values = view.values(node)
    return bool(values) and all(_is_wide_array(value, view, depth + 1) for value in values)


_WIDE = "zeros ones empty eye linspace logspace random.rand random.randn random.random random.uniform random.normal"

_WIDE_ARRAYS = frozenset(f"numpy.{name}" for name in _WIDE.split())
"""Functions of NumPy that make float64 where no dtype is named."""
