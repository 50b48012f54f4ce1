"""The rule for dtypes that a device cannot hold: where one is asked for on the device, or such a tensor moves there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from torchdevice.check.names import argument
from torchdevice.check.rules import WORDS, Found, Verdict, View, rule
from torchdevice.check.target import torch_object
from torchdevice.devices.accelerators import SPELLED

_CONVERSIONS = {"double": "torch.float64", "cdouble": "torch.complex128"}

_LEGACY = "DoubleTensor"

_MOVES = ("to", "cuda")

_NARROWER = {"float64": "float32", "complex128": "complex64"}

_MAX_VALUES = 100


@rule("dtype", ast.Attribute, ast.Name, ast.Call, ast.Constant, of_lacks=True)
def _dtype(node: ast.Attribute | ast.Name | ast.Call | ast.Constant, view: View) -> Iterator[Found]:
    """A dtype that the target cannot hold, such as float64 on MPS: `dtype=torch.float64` with a device, `.double()`,
    `torch.cuda.DoubleTensor`, a variable that surely holds such a dtype, and where a tensor of it moves to the device,
    also one made from an array of NumPy, which may have come through functions of the file. There it is kept in the
    next narrower dtype, which is approximate; `--float64 error` raises at such lines."""
    name = _named(node, view) or _held(node, view)
    if not name and isinstance(node, ast.Call):
        moved = _moved(node, view)
        name = "" if moved is None or _names_dtype(node, view) or _goes_to_the_cpu(node, view) else _wide(moved, view)
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
    if view.called(_call_with(node, view) or node) in WORDS["functions about dtypes"]:
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
    takes = view.method(call) in WORDS["take a dtype"] or (made and view.called(call).startswith("torch."))
    return _surely(node, view, {}) if takes else ""


def _call_with(node: ast.AST, view: View) -> ast.Call | None:
    """Return the call of which a node is an argument."""
    parent = view.parent(node)
    if isinstance(parent, ast.keyword):
        parent = view.parent(parent)
    return parent if isinstance(parent, ast.Call) and node is not parent.func else None


def _surely(node: ast.AST, view: View, known: dict[ast.AST, str | None]) -> str:
    """Return the dotted name of the wide dtype that every known value of an expression is; empty where none is known.

    Args:
        node: The expression.
        view: The source.
        known: The answers so far; None for values whose answer this one is a part of, as a variable may be made from
            its own former value.
    """
    name = view.dotted(node)
    if name is not None:
        return _wide_name(name)
    if isinstance(node, ast.Call) and view.called(node) == "torch.promote_types":
        return next(filter(None, (_surely(each, view, known) for each in node.args)), "")
    # Of attributes those of the class around it: tensors have attributes of the same names.
    of_others = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self"
    if len(known) > _MAX_VALUES or of_others:
        return ""
    values = view.values(node)
    for each in values:
        if each not in known:
            known[each] = None
            known[each] = _surely(each, view, known)
    found = [answer for each in values if (answer := known[each]) is not None]
    return found[0] if found and all(found) else ""


def _wide_name(name: str) -> str:
    is_wide = name.startswith("torch.") and str(torch_object(name)).removeprefix("torch.") in _NARROWER
    return name if is_wide else ""


def _is_kept(node: ast.AST, view: View) -> bool:
    """Return whether a dtype is only kept where it stands, in a variable or as a default, or passed on to a function
    of the program: a report shows the line that asks torch for a tensor.
    """
    parent = view.parent(node)
    if isinstance(parent, ast.Call) and node is parent.func:
        return False
    call = _call_with(node, view)
    return call is None or not (view.called(call).startswith("torch.") or view.method(call) in WORDS["take a dtype"])


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


def _moved(call: ast.Call, view: View) -> ast.expr | None:
    """Return the tensor that a call moves to a device, or that it makes there from an array."""
    if view.method(call) in _MOVES and isinstance(call.func, ast.Attribute):
        return call.func.value
    makes = view.called(call) in WORDS["functions of arrays"] and argument(call, None, "device") is not None
    return call if makes else None


def _goes_to_the_cpu(call: ast.Call, view: View) -> bool:
    texts = list(view.texts(argument(call, 0, "device")))
    return bool(texts) and not any(SPELLED.fullmatch(str(text.value)) for text in texts)


def _names_dtype(call: ast.Call, view: View) -> bool:
    """Return whether a move names the dtype itself."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
    return any((view.dotted(each) or "").startswith("torch.") for each in given)


def _wide(node: ast.AST, view: View) -> str:
    """Return the dotted name of the wide dtype that a tensor surely has; empty where none is known."""

    def of_call(call: ast.Call) -> Any:
        function = view.called(call)
        if function in WORDS["functions of arrays"] and call.args and _is_wide_array(call.args[0], view):
            names_another = argument(call, 1, "dtype") is not None and not _dtype_of(call, view)
            return "" if names_another else _CONVERSIONS["double"]
        if function.startswith("torch."):
            return _dtype_of(call, view)
        kept = isinstance(call.func, ast.Attribute) and call.func.attr in WORDS["keep the dtype"] and call.func.value
        return _converted(call, view) or kept

    return view.surely(node, of_call) or ""


def _dtype_of(call: ast.Call, view: View) -> str:
    """Return the dtype that a call of torch names, if it is a wide one."""
    return _wide_name(view.dotted(argument(call, None, "dtype")) or "")


def _is_wide_array(node: ast.AST, view: View) -> bool:
    """Return whether an expression is surely an array of NumPy in float64, its default."""

    def of_call(call: ast.Call) -> Any:
        if view.method(call) in ("reshape", "copy", "transpose", "squeeze") and isinstance(call.func, ast.Attribute):
            return call.func.value
        if view.called(call) in ("numpy.array", "numpy.asarray") and argument(call, 1, "dtype") is None:
            parts = ast.walk(call.args[0]) if call.args and isinstance(call.args[0], (ast.List, ast.Tuple)) else ()
            return any(isinstance(each, ast.Constant) and isinstance(each.value, float) for each in parts)
        return view.called(call) in WORDS["functions that make float64"] and argument(call, None, "dtype") is None

    return bool(view.surely(node, of_call))
