"""Rules for dtypes and operators that a device has no kernels for, and for ``torch.cuda`` names.

The fidelity of the names is that of the table that docs/make_coverage.py shows.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

from torchdevice.check.names import argument
from torchdevice.check.rule_registry import (
    FUNCTIONS_ABOUT_DTYPES,
    FUNCTIONS_OF_ARRAYS,
    FUNCTIONS_THAT_MAKE_FLOAT64,
    KEEP_THE_DTYPE,
    TAKE_A_DTYPE,
    Found,
    Verdict,
    View,
    rule,
    without_trace,
)
from torchdevice.check.target import MAC, torch_object
from torchdevice.kernel.devices.accelerators import FAMILIES, SPELLED

_CONVERSIONS = {"double": "torch.float64", "cdouble": "torch.complex128"}

_LEGACY = "DoubleTensor"

_MOVES = ("to", "cuda")

_NARROWER = {"float64": "float32", "complex128": "complex64"}

_MAX_VALUES = 100


@rule("dtype", ast.Attribute, ast.Name, ast.Call, ast.Constant, of_lacks=True)
def _dtype(node: ast.Attribute | ast.Name | ast.Call | ast.Constant, view: View) -> Iterator[Found]:
    """A dtype that the target cannot hold, such as float64 on MPS: `dtype=torch.float64` with a
    device, `.double()`, `torch.cuda.DoubleTensor`, a variable that surely holds such a dtype, and
    where a tensor of it moves to the device, also one made from an array of NumPy, which may have
    come through functions of the file. There it is kept in the next narrower dtype, which is
    approximate; `--float64 error` raises at such lines.
    """
    name = _named(node, view) or _held(node, view)
    if not name and isinstance(node, ast.Call):
        moved = _moved(node, view)
        name = (
            ""
            if moved is None or _names_dtype(node, view) or _goes_to_the_cpu(node, view)
            else _wide(moved, view)
        )
    if name and view.target.lacks_dtype(name):
        wide = str(torch_object(name)).removeprefix("torch.")
        kept = _NARROWER.get(wide)
        verdict = Verdict.CHANGE
        said = f"Ask for another dtype: {view.target.name} has no {wide}, and raises an error."
        if kept:
            verdict = Verdict.APPROXIMATE
            said = f"Ask for {kept}: {view.target.name} has no {wide}, and keeps tensors in {kept}."
        yield Found(
            verdict, said, leaves_trace=isinstance(node, ast.Call) or not _is_kept(node, view)
        )


def _named(node: ast.AST, view: View) -> str:
    """Return the dotted name of the dtype that a node asks for; empty for any other node."""
    if isinstance(node, ast.Call):
        return _converted(node, view)
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        is_legacy = text.startswith("torch.") and text.endswith(_LEGACY)
        return _CONVERSIONS["double"] if is_legacy else ""
    if (
        isinstance(view.parent(node), ast.Attribute)
        or _is_compared(node, view)
        or _stays_on_the_cpu(node, view)
    ):
        return ""
    if view.called(_call_with(node, view) or node) in FUNCTIONS_ABOUT_DTYPES:
        return ""
    return _dtype_of_name(view.dotted(node) or "")


def _dtype_of_name(name: str) -> str:
    """Return the dotted name of the dtype that a dotted name means; "" for other kinds."""
    if not name.startswith("torch."):
        return ""
    if name.endswith(f".{_LEGACY}"):
        return _CONVERSIONS["double"]
    return name if name.count(".") == 1 else ""


def _held(node: ast.AST, view: View) -> str:
    """Return the dotted name of a variable's sure dtype, where a device's tensor is to get it."""
    if not isinstance(node, (ast.Name, ast.Attribute)) or view.dotted(node) is not None:
        return ""
    call = _call_with(node, view)
    if call is None:
        return ""
    made = argument(call, None, "dtype") is node and argument(call, None, "device") is not None
    takes = view.method(call) in TAKE_A_DTYPE or (made and view.called(call).startswith("torch."))
    return _surely(node, view, {}) if takes else ""


def _call_with(node: ast.AST, view: View) -> ast.Call | None:
    """Return the call of which a node is an argument."""
    parent = view.parent(node)
    if isinstance(parent, ast.keyword):
        parent = view.parent(parent)
    return parent if isinstance(parent, ast.Call) and node is not parent.func else None


def _surely(node: ast.AST, view: View, known: dict[ast.AST, str | None]) -> str:
    """Return the dotted name of the wide dtype that all known values have; "" if none is known.

    Args:
        node: The expression.
        view: The source.
        known: The answers so far; None for values whose answer this one is a part of, as a variable
            may be made from its own former value.
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
    is_wide = (
        name.startswith("torch.") and str(torch_object(name)).removeprefix("torch.") in _NARROWER
    )
    return name if is_wide else ""


def _is_kept(node: ast.AST, view: View) -> bool:
    """Return whether a dtype is only stored, as a default too, or passed to a program's function.

    The report shows the line that asks torch for a tensor.
    """
    parent = view.parent(node)
    if isinstance(parent, ast.Call) and node is parent.func:
        return False
    call = _call_with(node, view)
    if call is None:
        return True
    takes_it = view.called(call).startswith("torch.") or view.method(call) in TAKE_A_DTYPE
    return not takes_it


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
    """Return whether a dtype is a tensor's that a torch function makes without a device."""
    call = _call_with(node, view)
    if (
        call is None
        or argument(call, None, "dtype") is not node
        or not view.called(call).startswith("torch.")
    ):
        return False
    return argument(call, None, "device") is None


def _moved(call: ast.Call, view: View) -> ast.expr | None:
    """Return the tensor that a call moves to a device, or that it makes there from an array."""
    if view.method(call) in _MOVES and isinstance(call.func, ast.Attribute):
        return call.func.value
    makes = view.called(call) in FUNCTIONS_OF_ARRAYS and argument(call, None, "device") is not None
    return call if makes else None


def _goes_to_the_cpu(call: ast.Call, view: View) -> bool:
    texts = list(view.texts(argument(call, 0, "device")))
    return bool(texts) and not any(SPELLED.fullmatch(str(text.value)) for text in texts)


def _names_dtype(call: ast.Call, view: View) -> bool:
    """Return whether a move names the dtype itself."""
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
    return any((view.dotted(each) or "").startswith("torch.") for each in given)


def _wide(node: ast.AST, view: View) -> str:
    """Return the dotted name of the wide dtype that a tensor surely has, or ""."""

    def of_call(call: ast.Call) -> Any:
        function = view.called(call)
        if function in FUNCTIONS_OF_ARRAYS and call.args and _is_wide_array(call.args[0], view):
            names_another = argument(call, 1, "dtype") is not None and not _dtype_of(call, view)
            return "" if names_another else _CONVERSIONS["double"]
        if function.startswith("torch."):
            return _dtype_of(call, view)
        kept = (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in KEEP_THE_DTYPE
            and call.func.value
        )
        return _converted(call, view) or kept

    return view.surely(node, of_call) or ""


def _dtype_of(call: ast.Call, view: View) -> str:
    """Return the dtype that a call of torch names, if it is a wide one."""
    return _wide_name(view.dotted(argument(call, None, "dtype")) or "")


def _is_wide_array(node: ast.AST, view: View) -> bool:
    """Return whether an expression is surely an array of NumPy in float64, its default."""

    def of_call(call: ast.Call) -> Any:
        is_same = view.method(call) in ("reshape", "copy", "transpose", "squeeze")
        if is_same and isinstance(call.func, ast.Attribute):
            return call.func.value
        if view.called(call) == "numpy.arange" and argument(call, 3, "dtype") is None:
            return any(
                isinstance(each, ast.Constant) and isinstance(each.value, float)
                for each in call.args
            )
        if (
            view.called(call) in ("numpy.array", "numpy.asarray")
            and argument(call, 1, "dtype") is None
        ):
            parts = (
                ast.walk(call.args[0])
                if call.args and isinstance(call.args[0], (ast.List, ast.Tuple))
                else ()
            )
            return any(
                isinstance(each, ast.Constant) and isinstance(each.value, float) for each in parts
            )
        return (
            view.called(call) in FUNCTIONS_THAT_MAKE_FLOAT64
            and argument(call, None, "dtype") is None
        )

    return bool(view.surely(node, of_call))


@rule("operator", ast.Attribute, ast.Name, of_lacks=True)
def _operator(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A function, a module or a method of tensors that needs an operator without a kernel on the
    target, by torch's own table of operators: it runs on the CPU, which is approximate, and raises
    `NotImplementedError` on `simulated:strict` and with `strict`. A method counts where its object
    is known to be a tensor, or where no other usual object has a method of that name.
    """
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
    """A function that has a kernel on MPS, and that torch's own tests nevertheless expect to fail
    there for some inputs (`torch/testing/_internal/common_mps.py`): approximate.
    """
    name = _used(node, view)
    if not name or not view.target.refused_by_tests(name) or view.target.missing(name):
        return
    call = view.parent(node)
    size = argument(call, 1, "output_size") if isinstance(call, ast.Call) else None
    sizes = size.elts if isinstance(size, (ast.Tuple, ast.List)) else [size]
    # An output size of 1 divides every input size, which is what pooling on MPS asks for.
    if all(isinstance(each, ast.Constant) and each.value == 1 for each in sizes):
        return
    remedy = (
        f"Compare {name.removeprefix('torch.')} with the CPU: torch's own tests expect failures of "
        "it on MPS."
    )
    yield without_trace(remedy)


@rule("mps-arguments", ast.Call)
def _mps_arguments(node: ast.Call, view: View) -> Iterator[Found]:
    """A call that MPS refuses for its arguments: an LSTM with `proj_size`, a compressed sparse
    layout, `ConvTranspose3d` in half precision. It runs on the CPU, which is approximate.
    `share_memory_` of a tensor that was just made on the device or moved there raises, and must be
    changed.
    """
    if view.target.column != MAC.column:
        return
    if view.method(node) == "share_memory_" and _is_of_device(node, view):
        yield Found(
            Verdict.CHANGE,
            f"Share a CPU tensor: share_memory_ raises for one on {view.target.name}.",
        )
    for said in _refused_arguments(node, view):
        yield without_trace(f"Expect {said} to run on the CPU: {view.target.name} refuses it.")


def _is_of_device(call: ast.Call, view: View) -> bool:
    """Return whether a method's object was made on the device, or moved there just before."""
    made = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(made, ast.Call) and (view.method(made) == "cuda" or _on_device(made, view))


def _refused_arguments(node: ast.Call, view: View) -> Iterator[str]:
    """Yield the names of a call's parts that MPS refuses."""
    function, method = view.called(node), view.method(node)
    if function == "torch.nn.LSTM":
        projects = argument(node, None, "proj_size")
        if projects is not None and getattr(projects, "value", None) != 0:
            yield "an LSTM with proj_size"
    if method.startswith(_COMPRESSED) and view.is_tensor(node):
        yield method
    if function in _MAKES_COMPRESSED and _on_device(node, view):
        yield function.removeprefix("torch.")
    if "torch.nn.ConvTranspose3d" in (function, _first_called(node, view)) and _halves(node, view):
        yield "ConvTranspose3d in half precision"


def _first_called(call: ast.Call, view: View) -> str:
    """Return the first call's dotted name in a chain: ``Layer`` of ``Layer(...).cuda().half()``."""
    origin: ast.expr = call
    while isinstance(origin, ast.Call) and isinstance(origin.func, ast.Attribute):
        origin = origin.func.value
        if view.called(origin):
            break
    return view.called(origin)


_COMPRESSED = ("to_sparse_csr", "to_sparse_csc", "to_sparse_bsr", "to_sparse_bsc")
_MAKES_COMPRESSED = tuple(f"torch.{each.removeprefix('to_')}_tensor" for each in _COMPRESSED)


def _halves(call: ast.Call, view: View) -> bool:
    given = {
        view.dotted(each) for each in (*call.args, *(keyword.value for keyword in call.keywords))
    }
    if view.method(call) in _HALF:
        return True
    return any(f"torch.{name}" in given for name in ("float16", *_HALF))


_HALF = ("half", "bfloat16")


def _on_device(call: ast.Call, view: View) -> bool:
    return any(
        SPELLED.fullmatch(str(text.value)) for text in view.texts(argument(call, None, "device"))
    )


def _used(node: ast.Attribute | ast.Name, view: View) -> str:
    """Return the public name of torch that a node uses; empty for any other node."""
    if isinstance(view.parent(node), ast.Attribute) and view.dotted(node) is not None:
        return ""
    name = view.dotted(node)
    if name is not None:
        return name if name.startswith("torch.") else ""
    call = view.parent(node)
    if (
        not isinstance(node, ast.Attribute)
        or not isinstance(call, ast.Call)
        or call.func is not node
    ):
        return ""
    known = view.is_tensor(node.value) or (
        node.attr not in _methods_of_others() and node.attr not in view.defined
    )
    return f"torch.Tensor.{node.attr}" if known and view.uses_torch else ""


@functools.cache
def _methods_of_others() -> frozenset[str]:
    """Return the methods of other objects in programs: Python's own types and NumPy's arrays."""
    import numpy

    kinds = (
        str,
        bytes,
        list,
        dict,
        set,
        int,
        float,
        complex,
        numpy.ndarray,
        numpy.random.Generator,
    )
    return frozenset(name for kind in kinds for name in dir(kind)) | {"mode"}  # pandas has it, too


_MODULES = (*(f"torch.{family}." for family in FAMILIES), "torch.backends.", "torch.version.")

_VERDICTS = {"exact": Verdict.HANDLED, "declared": Verdict.HANDLED, "unsupported": Verdict.CHANGE}


@rule("torch-name", ast.Attribute, ast.Name)
def _torch_name(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A name of `torch.cuda`, `torch.mps`, `torch.xpu`, `torch.backends` or `torch.version`, with
    the fidelity that [coverage](coverage.md) declares for it: exact and declared names are handled,
    approximate and inert ones are approximate, and those that raise must be changed.
    """
    parent = view.parent(node)
    is_written = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    if is_written or not view.uses_torch or isinstance(parent, ast.Attribute):
        return
    name = view.dotted(node) or ""
    found = view.target.fidelity(name) if name.startswith(_MODULES) else None
    if found is None:
        return
    known, fidelity, note = found
    verdict = _VERDICTS.get(fidelity.value, Verdict.APPROXIMATE)
    note = note.split(". ")[0].rstrip(".").replace("`", "'")
    if verdict is Verdict.CHANGE:
        remedy = (
            f"Leave {known} out, which raises NotSupportedError: no stand-in does what it says "
            f"({note})."
        )
        yield Found(verdict, remedy)
    else:
        said = f"{known} is {fidelity.value} on {view.target.name}: it {_third_person(note)}."
        yield Found(verdict, said, leaves_trace=fidelity.changes_numbers)


_BEFORE = {
    "torch's": "is ",
    "No": "has ",
    **dict.fromkeys(("MPS's", "Figures", "Memory", "A", "The"), "gives "),
}
"""The beginning of a sentence for a note whose first word is no verb."""


def _third_person(note: str) -> str:
    """Return a note of the table, which begins with an imperative, in the third person."""
    first, _, rest = note.removeprefix("It ").partition(" ")
    said = first if first == "MPS's" else first.lower()
    if first in _BEFORE or first.endswith("s"):
        return f"{_BEFORE.get(first, '')}{said} {rest}"
    others = re.sub(r"\b(or|and) (set|return|ignore|free|select|reduce|run)\b", r"\1 \2s", rest)
    return f"{re.sub('y$', 'ie', said)}s {others}"
