"""A kernel's source as a function of Python, and the meanings of its calls while it runs.

Triton's interpreter changes ``triton.language`` for the time of a launch. Here each call in a
kernel's source is rewritten instead, so that other threads see Triton's own, and so that functions
which a kernel's module has imported by value, functions of ``libdevice`` and kernels decorated
before the scope are found at the call.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from torchdevice.kernel.python import forks
from torchdevice.kernel.python.per_thread import PerThread
from torchdevice.triton_kernels import triton_internals as triton
from torchdevice.triton_kernels.numpy_builder import SMALL_FLOATS, NumpyBuilder, encoded
from torchdevice.triton_kernels.triton_internals import TensorHandle, core, numpy_dtype, tl

running = PerThread(semantic=None)
"""What this thread runs: Triton's semantic over the builder of the launch; None where no kernel
runs.
"""


# ---- source --------------------------------------------------------------------------------------


class _Rewriter(ast.NodeTransformer):
    """Rewrites syntax that Triton's compiler reads its own way: calls, conditions, assignments."""

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        match node:
            case ast.FunctionDef():
                node.decorator_list = []
                # It gets the original's values, which Python evaluated at its definition.
                node.args.defaults = []
                node.args.kw_defaults = [None] * len(node.args.kwonlyargs)
            case ast.Assign():
                node.value = _call("assigned", node.value)
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                node.func = _call("attribute", value, ast.Constant(name))
            case ast.Call():
                node.func = _call("function", node.func)
            case ast.If() | ast.While() | ast.IfExp():
                node.test = _call("truth", node.test)
            case ast.Compare(ops=[ast.Is() | ast.IsNot(), *_]):
                node.left = _call("constant", node.left)
            case ast.BoolOp():
                name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
                nothing = ast.arguments(
                    posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
                )
                operands = [ast.Lambda(nothing, value) for value in node.values]
                return _call("logical", ast.Constant(name), *operands)
            case ast.UnaryOp(op=ast.Not()):
                return _call("not", node.operand)
            case ast.Attribute(attr="T"):
                return _call("transposed", node.value)
            case ast.Assert():
                return ast.Expr(_call("asserted", node.test, node.msg or ast.Constant("")))
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(f"_triton_{name}", ast.Load()), list(args), [])


_lock = forks.lock(globals())
"""Held while source is parsed.

Some releases of Python count the depth of all threads' trees in one place, and raise SystemError
where two threads parse at once (python/cpython#106905).
"""


def parsed_alone(original: Callable[[Any], ast.Module]) -> Callable[[Any], ast.Module]:
    """Return the parsing method of Triton's compiler, for one thread at a time."""

    @functools.wraps(original)
    def parse(kernel: Any) -> ast.Module:
        with _lock: return original(kernel)  # noqa: E701  # fmt: skip

    return parse


@functools.lru_cache(maxsize=4096)
def _code_of(source: str, file: str, line: int, free: tuple[str, ...]) -> types.CodeType:
    tree = ast.parse(source)
    tree.body = [_Rewriter().visit(tree.body[0])]
    # A function around it makes the names below free variables, so that the kernel's module gets
    # none of them.
    around = ast.parse(f"def outer({', '.join(free)}): pass")
    around.body[0].body = tree.body  # type: ignore[attr-defined]
    ast.increment_lineno(ast.fix_missing_locations(around), line - 1)
    # Like this file, it leaves annotations unevaluated: compile() inherits __future__ imports.
    return _first_inside(_first_inside(compile(around, file, "exec")))


def _first_inside(code: types.CodeType) -> types.CodeType:
    """Return the code of the first function that is defined in some code."""
    return next(each for each in code.co_consts if isinstance(each, types.CodeType))


def function_of(kernel: Any) -> Callable[..., Any]:
    """Return the function of Python that a kernel, or a function that kernels call, is run by."""
    original = kernel.fn
    own = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    free = (*own, *_FREE)
    first = _line_of_def(kernel)
    # On one line: an interrupt between two lines would leave the lock held.
    with _lock: code = _code_of(kernel.src, original.__code__.co_filename, first, free)  # noqa: E701  # fmt: skip
    cells = tuple(
        own[name] if name in own else types.CellType(_FREE[name]) for name in code.co_freevars
    )
    function = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, cells
    )
    function.__kwdefaults__ = original.__kwdefaults__
    return function


def _line_of_def(kernel: Any) -> int:
    """Return the number of the line with a kernel's ``def``, which is below its decorators."""
    lines = enumerate(kernel.raw_src, kernel.starting_line_number)
    return next(number for number, text in lines if text.lstrip().startswith("def "))


@functools.cache
def as_jit(kernel: Any) -> Any:
    """Return a kernel as JITFunction, even if decorated while ``TRITON_INTERPRET`` was set."""
    if isinstance(kernel, triton.InterpretedFunction):
        return triton.JITFunction(kernel.fn, **kernel.kwargs)
    return kernel


# ---- calls ---------------------------------------------------------------------------------------


_KERNELS = triton.JITFunction, triton.InterpretedFunction


def called(function: Any) -> Callable[..., Any]:
    """Return the function that a call in a kernel runs."""
    function = triton.constant(function)
    # Others may have no hash.
    if isinstance(function, (type, types.FunctionType, types.BuiltinFunctionType)):
        function = _OWN.get(function, function)
    if isinstance(function, _KERNELS):
        return function_of(as_jit(function))
    if getattr(function, "__module__", None) == triton.stub_libdevice.__name__:
        # Triton's compiler takes the module of its backend instead of the one without code.
        function = getattr(triton.cuda_libdevice, function.__name__)
    if triton.is_builtin(function):
        return functools.partial(function, _semantic=running.semantic)
    return function  # type: ignore[no-any-return]


def attribute(value: Any, name: str) -> Callable[..., Any]:
    """Return the function that a call of an attribute in a kernel runs, of a module or a class."""
    found = getattr(value, name)
    if isinstance(value, core.tensor):
        plain = getattr(core.tensor, name, found)
        if isinstance(plain, _KERNELS) or getattr(plain, "__name__", "") in _METHODS:
            return functools.partial(called(_METHODS.get(name, plain)), value)
    return called(found)


def _logical(name: str, *operands: Callable[[], Any]) -> Any:
    """``and`` and ``or`` as in Triton's compiler: elementwise, but ended early by constants."""
    result: Any = None
    for operand in operands:
        value = operand()
        if not isinstance(value, core.tensor) and bool(value) is (name == "logical_or"):
            return value
        if not isinstance(result, core.tensor):
            result = value
        elif isinstance(value, core.tensor):
            result = getattr(running.semantic, name)(result, value)
    return result


def _truth(value: Any) -> bool:
    """Return whether a condition holds, of one element, since Triton's compiler refuses others."""
    if isinstance(value, core.tensor):
        value = running.semantic.builder.one(value.handle)
    return bool(value)


def tensor_of(value: Any, dtype: Any) -> Any:
    """Return a scalar of a kernel."""
    if dtype.is_floating():
        handle = encoded(np.array([value], np.float64), dtype)
    else:
        handle = TensorHandle(np.array([value], numpy_dtype(dtype)), dtype)
    return core.tensor(handle, dtype)


def _range(start: Any, stop: Any = None, step: Any = 1, **options: Any) -> Iterator[Any]:
    """``tl.range``. Instances stay together if their loops have as many turns."""
    tensors = [running.semantic.to_tensor(each) for each in _bounds(start, stop, step)]
    dtype = tl.int64 if any(each.dtype == tl.int64 for each in tensors) else tl.int32
    first, last, by = (each.handle.data.astype(numpy_dtype(dtype)) for each in tensors)
    count = -((first - last) // by)  # rounded up
    turns = running.semantic.builder.one(TensorHandle(count, dtype))
    for turn in builtins.range(turns):
        yield core.tensor(TensorHandle(first + turn * by, dtype), dtype)


def _static_range(start: Any, stop: Any = None, step: Any = 1, **options: Any) -> Any:
    return builtins.range(*map(operator.index, _bounds(start, stop, step)))


def _bounds(start: Any, stop: Any, step: Any) -> tuple[Any, Any, Any]:
    """Return a range's start, end and step, as Python reads these arguments."""
    if step is None:
        step = 1
    return (0, start, step) if stop is None else (start, stop, step)


# ---- reductions and scans ------------------------------------------------------------------------

_UFUNCS: dict[Any, Any] = {
    triton.combine_sum: np.add,
    triton.combine_max: np.fmax,
    triton.combine_min: np.fmin,
}
"""Functions of Triton with which NumPy reduces in one call, of dtypes that it has."""


def _as_tensors(arrays: list[Any], like: Any) -> Any:
    """Return tensors of a kernel; the first axis of the arrays is that of the instances."""
    made = []
    for array, each in zip(arrays, like, strict=True):
        scalar = each.dtype.scalar
        data = array.astype(numpy_dtype(scalar), copy=False)
        block = core.block_type(scalar, list(data.shape[1:])) if data.ndim > 1 else scalar
        made.append(core.tensor(TensorHandle(data, scalar), block))
    return tuple(made)


def _combined(function: Any, one: list[Any], other: list[Any], like: tuple[Any, ...]) -> list[Any]:
    """Combine two elements by a function of a kernel. Each is one or several arrays."""
    found = called(function)(*_as_tensors(one, like), *_as_tensors(other, like))
    made = []
    for each, old in zip(_several(found), one, strict=True):
        data = running.semantic.to_tensor(each).handle.data
        made.append(np.broadcast_arrays(data, old)[0])
    return made


def _several(value: Any) -> Any:
    """Return the elements of a tuple; another value as the only element of one."""
    return value if isinstance(value, (tuple, core.tuple)) else (value,)


def _inputs(input: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the tensors of a reduction or scan, and their values for the same instances."""
    like = tuple(_several(input))
    return like, list(np.broadcast_arrays(*(each.handle.data for each in like)))


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any) -> Any:
    """``tl.reduce``: neighbours first, so a non-commutative function gets them in order."""
    axis = triton.constant(axis)
    like, arrays = _inputs(input)
    count, *shape = arrays[0].shape
    kept = [1] * len(shape)
    if axis is None:
        arrays = [each.reshape(count, -1) for each in arrays]
    else:
        axis %= len(shape)
        kept = [*shape[:axis], 1, *shape[axis + 1 :]]
        arrays = [np.moveaxis(each, axis + 1, -1) for each in arrays]
    arrays = _reduced(arrays, combine_fn, like)
    if triton.constant(keep_dims):
        arrays = [each.reshape(-1, *kept) for each in arrays]
    made = _as_tensors(arrays, like)
    return made if isinstance(input, (tuple, core.tuple)) else made[0]


def _reduced(arrays: list[Any], combine_fn: Any, like: tuple[Any, ...]) -> list[Any]:
    """Return arrays without their last axis, along which they are combined."""
    ufunc = _UFUNCS.get(combine_fn)
    if ufunc is not None and like[0].dtype.scalar not in _INEXACT:
        return [ufunc.reduce(arrays[0], axis=-1, dtype=arrays[0].dtype)]
    while arrays[0].shape[-1] > 1:
        even = [each[..., 0::2] for each in arrays]
        odd = [each[..., 1::2] for each in arrays]
        arrays = _combined(combine_fn, even, odd, like)
    return [each[..., 0] for each in arrays]


def _reduce_with_indices(
    input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **options: Any
) -> Any:
    axis = triton.constant(axis)
    shape = list(input.handle.data.shape[1:])
    if axis is None:
        shape, axis = [math.prod(shape)], 0
        input = running.semantic.reshape(input, shape, can_reorder=False)
    places = np.indices((1, *shape), np.int32, sparse=True)[axis % len(shape) + 1]
    handle = TensorHandle(np.broadcast_to(places, (1, *shape)), tl.int32)
    indices = core.tensor(handle, core.block_type(tl.int32, shape))
    return _reduce((input, indices), axis, combine_fn, keep_dims)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **options: Any) -> Any:
    """``tl.associative_scan``: step by step, combine elements with those 1, 2, 4, ... before."""
    step = -1 if triton.constant(reverse) else 1
    like, arrays = _inputs(input)
    axis = triton.constant(axis) % (arrays[0].ndim - 1) + 1
    arrays = [np.moveaxis(each, axis, -1)[..., ::step] for each in arrays]
    length = arrays[0].shape[-1]
    for power in builtins.range((length - 1).bit_length()):
        distance = 2**power
        before = [np.roll(each, distance, axis=-1) for each in arrays]
        found = _combined(combine_fn, before, arrays, like)
        has_none = np.arange(length) < distance
        arrays = [np.where(has_none, old, new) for old, new in zip(arrays, found, strict=True)]
    arrays = [np.moveaxis(each[..., ::step], -1, axis) for each in arrays]
    made = _as_tensors(arrays, like)
    return made if isinstance(input, (tuple, core.tuple)) else made[0]


def _dot_scaled(*args: Any, **kwargs: Any) -> Any:
    given = [_as_constant(each) for each in args]
    named = {name: _as_constant(each) for name, each in kwargs.items()}
    return tl.dot_scaled(*given, _semantic=running.semantic, **named)


def _as_constant(value: Any) -> Any:
    """Return a format as a constant, of which Triton's semantic takes the value."""
    return core.constexpr(value) if isinstance(value, str) else value


def _hinted(input: Any, *hints: Any, **options: Any) -> Any:
    """Return the argument of a hint for the compiler."""
    return input


def _not(value: Any) -> Any:
    return core.tensor.__not__(value) if isinstance(value, core.tensor) else not value


def _assert(test: Any, text: Any) -> Any:
    return running.semantic.device_assert(running.semantic.to_tensor(test), text, None)


def _transposed(value: Any) -> Any:
    return running.semantic.permute(value, (1, 0)) if isinstance(value, core.tensor) else value.T


def _assigned(value: Any) -> Any:
    return running.semantic.to_tensor(value, False)


_INEXACT = frozenset((tl.int1, *SMALL_FLOATS))

_OWN: dict[Any, Callable[..., Any]] = {
    builtins.range: _range,
    tl.range: _range,
    tl.static_range: _static_range,
    builtins.print: tl.device_print,
    builtins.min: core.builtin_min,
    builtins.max: core.builtin_max,
    tl.dot_scaled: _dot_scaled,
    core.reduce: _reduce,
    triton.reduce_with_indices: _reduce_with_indices,
    core.associative_scan: _scan,
    tl.multiple_of: _hinted,
    tl.max_contiguous: _hinted,
    tl.max_constancy: _hinted,
}
"""Function that Triton's compiler treats in its own way -> the function that runs here."""

_METHODS = {"reduce": core.reduce, "associative_scan": core.associative_scan}

_CALLED: dict[str, Callable[..., Any]] = {
    "function": called,
    "attribute": attribute,
    "logical": _logical,
    "constant": triton.constant,
    "truth": _truth,
    "not": _not,
    "asserted": _assert,
    "transposed": _transposed,
    "assigned": _assigned,
}
"""The functions behind the names that :class:`_Rewriter` puts into a kernel."""

_FREE = {f"_triton_{name}": function for name, function in _CALLED.items()}


# ---- tensors of a kernel -------------------------------------------------------------------------


def with_semantic(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Triton operator that finds the semantic of this thread's running kernel."""

    @functools.wraps(original)
    def operate(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"_semantic": running.semantic, **kwargs})

    return operate


def dtype_to_ir(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``dtype.to_ir``, which in MLIR does not tell signed integers from unsigned ones."""

    def to_ir(self: Any, builder: Any) -> Any:
        return tl.dtype(self.name) if isinstance(builder, NumpyBuilder) else original(self, builder)

    return to_ir


OPERATORS = [
    name for name, each in vars(core.tensor).items() if name[:2] == "__" and triton.is_builtin(each)
]
"""The operators of Triton's tensors."""
