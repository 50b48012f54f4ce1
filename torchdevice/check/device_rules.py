"""The rules for devices: those that a source spells, and branches that ask where a tensor is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchdevice.check.names import argument
from torchdevice.check.rule_registry import (
    CLASSES_OF_DEVICES,
    FUNCTIONS_OF_RANKS,
    FUNCTIONS_OF_WORDS,
    KEYWORDS_OF_WORDS,
    PUT_ON_A_DEVICE,
    Found,
    Verdict,
    View,
    names_option,
    rule,
    without_trace,
)
from torchdevice.kernel.devices.accelerators import FAMILIES, SPELLED

_PREFIX = re.compile(rf"({'|'.join(FAMILIES)}):(?:%[ds]|\{{[^}}]*\}})?")
"""The beginning of a text that becomes a device when a number is put into it or behind it."""

_LEGACY = re.compile(rf"torch\.({'|'.join(FAMILIES)})\.(?:sparse\.)?\w+Tensor")


@rule("device", ast.Constant, ast.JoinedStr, ast.Call)
def _device(node: ast.Constant | ast.JoinedStr | ast.Call, view: View) -> Iterator[Found]:
    """A device that is written by hand: `"cuda"`, `"cuda:1"`, `f"cuda:{rank}"`, `.cuda()`,
    `.to(0)`, `.to(rank)`, `"torch.cuda.FloatTensor"`, or a variable that holds such a text where a
    tensor is put on it. The device means the target. An ordinal beyond the target's devices means
    the first one, which is approximate; on simulated GPUs it raises CUDA's error.
    """
    if isinstance(node, ast.Call):
        yield from (found._replace(leaves_trace=_puts(node, view)) for found in _moved(node, view))
        return
    text = _text(node, view)
    place = _place(node, view) if text else None
    if place is not None:
        yield from (found._replace(leaves_trace=place) for found in _spelled(text, view))


def _text(node: ast.AST, view: View) -> str:
    """Return the device that a literal spells: the ordinal is left out where it is put in later."""
    if isinstance(node, ast.JoinedStr):
        # One literal and one value behind it, as in f"cuda:{rank}".
        if len(node.values) == 2 and isinstance(node.values[1], ast.FormattedValue):
            first = node.values[0]
        else:
            first = None
        text = first.value if isinstance(first, ast.Constant) else None
        return text[:-1] if isinstance(text, str) and _PREFIX.fullmatch(text) else ""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return ""
    if SPELLED.fullmatch(node.value):
        return node.value
    legacy = _LEGACY.fullmatch(node.value)
    if legacy:
        return legacy[1]
    prefix = _PREFIX.fullmatch(node.value)
    if prefix and not isinstance(view.parent(node), ast.JoinedStr):
        return prefix[1]
    return ""


def _spelled(text: str, view: View) -> Iterator[Found]:
    family, _, ordinal = text.partition(":")
    target = view.target
    if family == target.native:
        return
    if not ordinal or int(ordinal) < target.devices:
        yield Found(Verdict.HANDLED, f"{text!r} means {target.name}.")
    elif target.folds:
        yield Found(
            Verdict.APPROXIMATE,
            f"{text!r} means the only device of {target.name}, which is reported.",
        )
    else:
        said = "there is one" if target.devices == 1 else f"there are {target.devices}"
        remedy = (
            f"Use an ordinal that exists or a target with more devices: {text!r} raises, {said}."
        )
        yield Found(Verdict.CHANGE, remedy)


def _place(node: ast.AST, view: View) -> bool | None:
    """Return whether a text is passed on where it is written, or only kept; None if no device.

    It is none in a comparison, in a key, in a message, and alone.
    """
    for part, each in view.upwards(node):
        if isinstance(each, ast.keyword):
            is_default = each.arg == "default"
            if is_default:
                fits = names_option(view.parents[each], "dev")
            else:
                fits = each.arg not in KEYWORDS_OF_WORDS
            return (not is_default and _puts(view.parents[each], view)) if fits else None
        if isinstance(each, ast.Call) and part is not each.func:
            return _puts(each, view) if _name(each.func) not in FUNCTIONS_OF_WORDS else None
        if isinstance(each, ast.Dict):
            return False if part in each.values else None
        if not _is_part(part, each):
            kept = isinstance(
                each, (ast.Assign, ast.AnnAssign, ast.Return, ast.arguments, ast.Yield)
            )
            return False if kept else None
    return None


def _puts(call: ast.AST, view: View) -> bool:
    """Return whether a call is one of torch's, or of a method that tensors and modules have."""
    return view.called(call).startswith("torch.") or view.method(call) in PUT_ON_A_DEVICE


def _is_part(node: ast.AST, whole: ast.AST) -> bool:
    """Return whether an expression may have the value of a part, or begin with it."""
    if isinstance(whole, ast.IfExp):
        return node is not whole.test
    if isinstance(whole, ast.BinOp):
        return node is whole.left and isinstance(whole.op, (ast.Add, ast.Mod))
    if isinstance(whole, ast.Attribute):
        return whole.attr == "format"
    return isinstance(
        whole, (ast.BoolOp, ast.Tuple, ast.List, ast.Starred, ast.NamedExpr, ast.Call)
    )


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _moved(call: ast.Call, view: View) -> Iterator[Found]:
    """Yield what a call that puts something on a device names by another word than a literal."""
    if view.method(call) == "cuda":
        placed = argument(call, 0, "device")
        # A text is found by itself, as a literal.
        if not isinstance(placed, ast.Constant) or not isinstance(placed.value, str):
            yield from _spelled(_ordinal_spelled(placed), view)
        return
    takes_first = view.method(call) == "to" or view.called(call) in CLASSES_OF_DEVICES
    placed = argument(call, 0, "device") if takes_first else argument(call, None, *_KEYWORDS)
    if placed is None:
        return
    if _is_ordinal(placed, view):
        yield from _spelled(_ordinal_spelled(placed), view)
    elif not isinstance(placed, ast.Constant):
        yield from _spelled_elsewhere(placed, view)


def _ordinal_spelled(node: ast.expr | None) -> str:
    """Return the device of an ordinal: with its number, if that is a constant."""
    number = node.value if isinstance(node, ast.Constant) else None
    return f"cuda:{number}" if type(number) is int else "cuda"  # True is an int too, and no ordinal


def _spelled_elsewhere(placed: ast.expr, view: View) -> Iterator[Found]:
    """Yield the devices that an expression has from other lines."""
    for text in view.texts(placed):
        # A text within the call is found by itself, as a literal.
        if text not in ast.walk(placed) and SPELLED.fullmatch(str(text.value)):
            yield from _spelled(str(text.value), view)


_ORDINAL = re.compile(
    r"(?:local|global|world)?_?rank|(?:gpu|cuda|device)_(?:id|index|idx|num|number|rank)|gpu"
)


def _is_ordinal(node: ast.expr, view: View) -> bool:
    """Return whether an expression is a device's number: an int, or a variable named as a rank."""
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if _ORDINAL.fullmatch(_name(node).lower()):
        return not any(
            isinstance(each, ast.Constant) and isinstance(each.value, str)
            for each in view.values(node)
        )
    calls = [value for value in view.values(node) if isinstance(value, ast.Call)]
    return any(view.called(call) in FUNCTIONS_OF_RANKS for call in (node, *calls))


_KEYWORDS = ("device", "map_location", "device_map")


# ---- what identity decides -----------------------------------------------------------------------

_PROGRAM = "a simulated GPU answers as CUDA does"


@rule("is-cuda", ast.Attribute)
def _is_cuda(node: ast.Attribute, view: View) -> Iterator[Found]:
    """A branch on `x.is_cuda` (or `is_mps`, `is_xpu`), which is False on another real target: the
    program takes the other branch, which is approximate. Where the program raises or asserts for
    it, it must be changed.
    """
    family = node.attr.removeprefix("is_")
    is_asked = node.attr.startswith("is_") and family in FAMILIES and view.dotted(node) is None
    if is_asked and not view.target.reports({family}):
        yield _branch(node, view, f"x.{node.attr} is False")


@rule("device-type", ast.Compare)
def _device_type(node: ast.Compare, view: View) -> Iterator[Found]:
    """A comparison of a tensor's device with a text: `x.device.type == "cuda"`, `"cuda" in
    str(x.device)`. On a real target the device is the target's, so the program takes the other
    branch, which is approximate. Where the program raises or asserts for it, it must be changed.
    """
    sides = [node.left, *node.comparators]
    texts = {text for side in sides for text in _compared(side, view)}
    families = {text.partition(":")[0] for text in texts} & set(FAMILIES)
    if (
        not families
        or view.target.reports(families)
        or not any(_reads_device(side, view) for side in sides)
    ):
        return
    yield _branch(
        node, view, f"the device's type is not {' or '.join(sorted(map(repr, families)))}"
    )


def _compared(side: ast.expr, view: View) -> Iterator[str]:
    parts = side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]
    for part in parts:
        if (
            isinstance(part, ast.Constant)
            and isinstance(part.value, str)
            and SPELLED.fullmatch(part.value)
        ):
            yield part.value


def _reads_device(side: ast.expr, view: View, depth: int = 0) -> bool:
    """Return whether an expression reads the device of a tensor as a text."""
    if (
        isinstance(side, ast.Call)
        and isinstance(side.func, ast.Name)
        and side.func.id == "str"
        and side.args
    ):
        return _is_device(side.args[0], view)
    if isinstance(side, ast.Attribute) and side.attr == "type":
        return _is_device(side.value, view)
    # A variable may be made from its own former value, so the way has an end.
    values = view.values(side) if isinstance(side, ast.Name) and depth < 3 else []
    return any(_reads_device(value, view, depth + 1) for value in values)


def _is_device(node: ast.expr, view: View) -> bool:
    """Return whether an expression is a ``torch.device``, as its name or its value shows.

    An item of a list has no name. Its ``type`` is compared with a device's, so it is taken for one.
    """
    if isinstance(node, ast.Attribute):
        return "device" in node.attr
    if isinstance(node, ast.Subscript):
        return True
    if isinstance(node, ast.Name) and (node.id == "d" or "dev" in node.id):
        return True
    return any(view.called(each) == "torch.device" for each in (node, *view.values(node)))


def _branch(node: ast.expr, view: View, said: str) -> Found:
    if _is_demanded(node, view):
        remedy = f"Ask torch.cuda.is_available() instead: {said} on {view.target.name}; {_PROGRAM}."
        return Found(Verdict.CHANGE, remedy)
    return without_trace(
        f"The program takes the other branch, because {said} on {view.target.name}; {_PROGRAM}."
    )


def _is_demanded(node: ast.AST, view: View) -> bool:
    """Return whether the program fails unless an expression is true."""
    operators = node.ops if isinstance(node, ast.Compare) else []
    negated = any(isinstance(each, (ast.NotEq, ast.NotIn)) for each in operators)
    for part, each in view.upwards(node):
        if isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.Not):
            negated = not negated
        elif isinstance(each, ast.Assert):
            return part is each.test and not negated
        elif isinstance(each, ast.If) and part is each.test:
            return negated and isinstance(each.body[0], ast.Raise)
        elif not isinstance(each, ast.BoolOp):
            return False
    return False
