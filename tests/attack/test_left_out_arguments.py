"""The dispatcher calls this package's kernels without arguments that equal their defaults.

The default is the schema's. A kernel with other defaults, or one that calls a function of torch
with other defaults, computes something else. Each operator is therefore called with each optional
argument left out, as its default and otherwise, and compared with the CPU, with autocast and
without.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from sweeping import samples_of
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchdevice
from torchdevice.calls.lacking.missing_operators import overload_of
from torchdevice.calls.lacking.mps_guards import FAULTS
from torchdevice.report.discrepancies import findings_of
from torchdevice.simulation.kernels import fused_attention, handwritten_kernels, recurrent_networks
from torchdevice.simulation.refusals.cuda_rules import COMPOSED
from torchdevice.torch_modules.apis import autocast_lists, batch_norm

KIND, KEY = "hpu", "AutocastHPU"
"""The autocast of a device that is not here, whose kernels come first: under it calls are recorded
as they are made.
"""

LOWER = torch.bfloat16

_below_autocast = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


def operators() -> list[str]:
    """Return the operators that a kernel of this package stands in for, by name with overload."""
    found = {
        *autocast_lists.policies(),
        *handwritten_kernels.SPECIAL,
        *COMPOSED,
        *recurrent_networks.OPERATORS,
    }
    found.update(name for fault in FAULTS for name in fault.operators)
    return sorted(found.difference(autocast_lists.policies().keys() & {"binary_cross_entropy"}))


NOT_ON_THE_CPU = frozenset(
    name
    for name in operators()
    if name.startswith(
        ("_cslt", "_cudnn", "cudnn", "_efficient", "_flash", "_mps", "mps_", "_thnn", "batch_norm_")
    )
    or name.startswith(
        ("set_", "is_set_to", "_fill_mem", "record_stream", "empty", "_efficientzero")
    )
    or name.startswith("_scaled_dot_product")
) | {"linalg_lstsq", "_ctc_loss.Tensor", "_linalg_solve_ex.result", "native_layer_norm_backward"}
"""Operators without a kernel for the CPU that gives the same, those of storages and of memory
without values, and overloads that torch's own tests do not call.
"""


# ---- defaults in Python --------------------------------------------------------------------------

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **handwritten_kernels.SPECIAL,
    **handwritten_kernels._FORMULAS,
    **recurrent_networks.FORMULAS,
    **batch_norm.KERNELS,
    **fused_attention.KERNELS,
    "scaled_dot_product_attention": handwritten_kernels.attend,
}


def test_a_kernel_has_the_defaults_of_its_schema() -> None:
    wrong, compared = [], 0
    for name, function in FUNCTIONS.items():
        # A kernel of torch's, or an object with one of these within.
        if not isinstance(function, types.FunctionType):
            continue
        schema = {argument.name: argument for argument in overload_of(name)._schema.arguments}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in schema or parameter.default is parameter.empty:
                continue
            compared += 1
            wanted = schema[parameter.name]
            if not wanted.has_default_value():
                wrong.append(f"{name}: {parameter}, and the schema has no default")
            elif (
                parameter.default != wanted.default_value
                and list(parameter.default or ()) != wanted.default_value
            ):
                wrong.append(
                    f"{name}: {parameter}, and the schema's default is {wanted.default_value!r}"
                )
    assert not wrong, "\n".join(wrong)
    assert compared > 30


# ---- calls ---------------------------------------------------------------------------------------


Call = dict[str, Any]
"""The arguments of a call by name, without those that the dispatcher left out."""


_recorded: dict[str, list[Call]] = defaultdict(list)


@functools.cache
def recorder() -> list[torch.library.Library]:
    """Register recording kernels once per process: kernels are never taken out."""
    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    if not torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, KEY)):
        fallback.fallback(torch.library.fallthrough_kernel, KEY)
    for name in operators():
        aten.impl(name, _recording(name, overload_of(name)), KEY, with_keyset=True)
    return [fallback, aten]


def _recording(name: str, op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        torch.set_autocast_enabled(KIND, False)  # the copies are no calls of the program's
        kept = pytree.tree_map_only(torch.Tensor, lambda each: each.detach().clone(), given)
        torch.set_autocast_enabled(KIND, True)
        _recorded[name].append(kept)
        return op.redispatch(keys & _below_autocast, *args, **kwargs)

    return kernel


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record the calls of this thread."""
    included = getattr(torch._C.DispatchKey, KEY)
    torch.set_autocast_enabled(KIND, True)
    torch._C._dispatch_tls_set_dispatch_key_included(included, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(included, False)
        torch.set_autocast_enabled(KIND, False)


def _programs(base: str) -> Iterator[Callable[[], Any]]:
    """Yield calls that torch's own tests make of functions with a name."""
    for op in op_db:
        names = {op.name.rpartition(".")[2], op.aten_name, op.name.replace(".", "_")}
        if base.removesuffix("_") in names and torch.float32 in op.supported_dtypes("cpu"):
            for sample in itertools.islice(samples_of(op, torch.float32, requires_grad=False), 6):
                yield functools.partial(op, sample.input, *sample.args, **sample.kwargs)
    lists = AutocastTestLists("cpu")
    spaces = {
        "torch": torch,
        "nn": torch._C._nn,
        "linalg": torch._C._linalg,
        "methods": torch.Tensor,
    }
    for space, kind in itertools.product(
        spaces, ("fp16", "fp32", "need_autocast_promote", "expect_builtin_promote")
    ):
        for listed, args, *kwargs in getattr(lists, f"{space}_{kind}", ()):
            if listed == base and isinstance(args, tuple):
                wide = pytree.tree_map_only(torch.Tensor, lambda each: each.float(), args)
                named = kwargs[0] if kwargs and isinstance(kwargs[0], dict) else {}
                yield functools.partial(getattr(spaces[space], listed), *wide, **named)


def _more(base: str) -> Iterator[Callable[[], Any]]:
    """Yield calls that torch's tests do not make under the name of the operator."""
    square, image = torch.randn(3, 3), torch.randn(1, 2, 4, 4)
    if base in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        options = {"nonlinearity": base[4:]} if base.startswith("rnn") else {}
        model = getattr(torch.nn, base[:3].upper() if options else base.upper())(3, 2, **options)
        packed = torch.nn.utils.rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
        yield from (
            functools.partial(model, torch.randn(4, 2, 3)),
            functools.partial(model, packed),
        )
    if "upsample" in base:
        lines = torch.randn(1, 2, 4)
        volume = torch.randn(1, 2, 4, 4, 4)
        aligned = {} if "nearest" in base else [False]
        given = lines if base.endswith("1d") else volume if base.endswith("3d") else image
        sizes = [6] * (given.dim() - 2)
        yield functools.partial(getattr(torch.ops.aten, base).default, given, sizes, *aligned)
    if base in ("nuclear_norm", "frobenius_norm"):
        yield from (
            functools.partial(getattr(torch, base), square, **more)
            for more in ({}, {"dim": (0, 1)})
        )
    if base == "norm":
        yield functools.partial(torch.ops.aten.norm.ScalarOpt_dim, square, 3, [0, 1])
    direct = {
        "linalg_matrix_norm": lambda: [
            torch.linalg.matrix_norm(square, 1),
            torch.linalg.matrix_norm(square),
        ],
        "norm": lambda: torch.ops.aten.norm.Scalar(square, 1),
        "pow": lambda: torch.pow(2.0, square),
        "_linalg_svd": lambda: torch.linalg.svd(square),
        "_linalg_solve_ex": lambda: torch.linalg.solve(square, square),
        "native_dropout": lambda: torch.native_dropout(square, 0.5, True),
        "random_": lambda: [
            torch.empty(4).random_(),
            torch.empty(4).random_(5),
            torch.empty(4).random_(2, 5),
        ],
        "resize_": lambda: square.clone().resize_(2, 2),
        "_to_copy": lambda: square.double(),
        "copy_": lambda: square.clone().copy_(square + 1),
        "_ctc_loss": lambda: torch.nn.functional.ctc_loss(
            torch.randn(5, 1, 4).log_softmax(2),
            torch.tensor([[1, 2]]),
            torch.tensor([5]),
            torch.tensor([2]),
        ),
    }
    if base in direct:
        yield direct[base]


def calls(name: str) -> list[Call]:
    """Return calls of an operator, recorded from torch's own tests."""
    assert recorder()
    base, _, variant = name.partition(".")
    functional = base.removesuffix("_")
    _recorded.clear()
    torch.manual_seed(0)
    for program in (*_programs(base), *_more(base)):
        # The plain CPU refuses a few of the samples too.
        with contextlib.suppress(Exception), recording():
            program()
    found = _recorded[name]
    if not found and variant == "out":
        found = [{**call, "out": torch.empty(0)} for call in _recorded[base]]
    if not found and functional != base:  # what is written to has the shape of the result
        found = [call for call in _recorded[functional] if call["self"].dim() > 1]
    distinct = {
        str({key: getattr(value, "shape", value) for key, value in call.items()}): call
        for call in found
    }
    return list(distinct.values())[:4]


def variants(name: str, call: Call) -> Iterator[Call]:
    """Yield a call without optional arguments, and with each of them in turn."""
    schema = overload_of(name)._schema.arguments
    optional = [
        argument
        for argument in schema
        if argument.has_default_value() and argument.name not in _NOT_VARIED
    ]
    bare = {
        key: value
        for key, value in call.items()
        if key not in {argument.name for argument in optional}
    }
    yield bare
    yield call
    for argument in optional:
        for value in (argument.default_value, *_others(argument, call.get(argument.name))):
            yield {**bare, argument.name: value}


_NOT_VARIED = frozenset(
    {"device", "layout", "pin_memory", "non_blocking", "generator", "memory_format"}
)
"""Arguments of which the CPU and a device have different values."""


def _others(argument: Any, given: Any) -> list[Any]:
    """Return values of an argument that are not its default."""
    default, kind = argument.default_value, str(argument.real_type)
    if argument.name == "reduction":
        return [0, 1, 2]
    if kind == "bool":
        return [not default]
    if kind == "float" and default is not None:
        return [default + 0.25]
    if kind in ("int", "SymInt") and default is not None:
        return [default + 1]
    if "ScalarType" in kind:
        return [NARROWED]
    return [] if given is None else [given]


# ---- comparison ----------------------------------------------------------------------------------


class Found(NamedTuple):
    """What a call gave: its results, or the type of its error."""

    results: Any
    error: type[Exception] | None = None


def called(op: Any, call: Call) -> Found:
    torch.manual_seed(0)
    positional = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    given = list(itertools.takewhile(call.__contains__, positional))
    args = [call[each] for each in given]
    try:
        return Found(op(*args, **{key: value for key, value in call.items() if key not in given}))
    except Exception as error:
        return Found(None, type(error))


def on_the_cpu(name: str, call: Call, autocast: bool) -> Found:
    """Return the CPU's results in the dtypes to which CUDA's autocast casts the arguments."""
    op, call = overload_of(name), copied(call)
    policy = autocast_lists.policies().get(name.removesuffix(".deprecated"))
    if autocast and policy == autocast_lists._LOWER:
        call = pytree.tree_map_only(
            torch.Tensor, lambda each: each.to(LOWER) if each.dtype is FLOAT else each, call
        )
    return called(op, call)


FLOAT = torch.float32


def copied(call: Call) -> Call:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, call)


_NEARLY = {"rtol": 2e-2, "atol": 1e-2}

# A Mac computes attention of three dimensions by other operators, here of values up to 20.
_ROUNDED = {"rtol": 1e-5, "atol": 1e-4}


def difference(expected: Found, actual: Found, autocast: bool, values: bool) -> str:
    if expected.error is not None or actual.error is not None:
        # A call that one refuses for its dtypes is compared elsewhere; here a default may be wrong.
        return "" if expected.error is not None else f"raises {actual.error}"
    pairs = list(
        zip(pytree.tree_leaves(expected.results), pytree.tree_leaves(actual.results), strict=True)
    )
    for one, other in pairs:
        if not isinstance(one, torch.Tensor):
            if one != other:
                return f"{other!r} instead of {one!r}"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{other.dtype} {tuple(other.shape)} instead of {one.dtype} {tuple(one.shape)}"
        elif values and not torch.allclose(
            one, other.cpu(), **(_NEARLY if autocast else _ROUNDED), equal_nan=True
        ):
            return "other values"
    return ""


@contextlib.contextmanager
def a_gpu(**options: Any) -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(**options) as scope:
        yield scope


@contextlib.contextmanager
def a_mac() -> Iterator[torchdevice.Scope]:
    """A CUDA program on a simulated Mac: with guards, and kernels for operators MPS lacks."""
    with torchdevice.simulate("mps", written_for="mps"), torchdevice.portable("mps") as scope:
        yield scope


WAYS: dict[str, Callable[[], Any]] = {
    "gpu": a_gpu,
    "mac": a_mac,
    "verify": functools.partial(a_gpu, verify=True),
    "meta": functools.partial(a_gpu, compute="meta"),
}


NARROWED = torch.float64
"""The dtype that MPS lacks: a scope on it has float32."""

OTHERWISE = {
    (
        "conv_transpose3d.input",
        "mac",
    ): "MPS has no kernel in half precision; the CPU computes the call in float32",
    ("multi_margin_loss", "meta"): "torch's meta kernel gives a loss for each of no rows",
    ("multilabel_margin_loss", "meta"): "torch's meta kernel gives a loss for each of no rows",
}
"""Operators that have other results on a kind of device for a reason that is not ours."""


@pytest.mark.sampled(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        each
        for each in itertools.product(
            [name for name in operators() if name not in NOT_ON_THE_CPU], WAYS
        )
        if each not in OTHERWISE
    ],
)
def test_an_argument_left_out_has_the_default_of_the_schema(name: str, way: str) -> None:
    made = calls(name)
    assert made, f"no call of {name} was recorded"
    op, wrong, compared = overload_of(name), [], 0
    tried = [
        each
        for call in made
        for each in variants(name, call)
        if way != "mac" or NARROWED not in each.values()
    ]
    for call, autocast in itertools.product(tried, (False, True)):
        expected = on_the_cpu(name, call, autocast)
        with WAYS[way]() as scope, torch.autocast("cuda", LOWER, enabled=autocast):
            found = called(op, pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, copied(call)))
            compared += 1
            text = difference(expected, found, autocast, values=way != "meta")
        text = text or "\n".join(map(str, findings_of(scope.journal)))
        if text:
            spelled = {key: getattr(value, "shape", value) for key, value in call.items()}
            wrong.append(f"{name}({spelled}) {'in autocast' if autocast else ''}: {text}")
    assert not wrong, "\n".join(wrong)
    assert compared
