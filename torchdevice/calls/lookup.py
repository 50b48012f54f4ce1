"""Finds the rewriter of a torch function.

A function that no file has registered a rewriter for is classified at first sight from torch's own
operator schemas, so that no list of factories has to be kept.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch

from torchdevice.calls import rewriters
from torchdevice.calls.lacking import half_precision_matmul
from torchdevice.kernel.context import Context

_MAX_TABLE = 50_000

# Positions 0 to 15.
GENERIC: tuple[rewriters.Rewriter, ...] = (
    rewriters.with_device_keyword,
    *map(rewriters.with_device_at, range(16)),
)
"""The rewriters that a function can get by its schema. No function of torch takes a device beyond
position 15.
"""

NUMBERED: list[rewriters.Rewriter | None] = [None]  # Dynamo holds the index as a constant
"""Every rewriter, by number; None for no rewriter. Compiled code can hold a number and not a
function.
"""

_tables: dict[tuple[Any, ...], rewriters.Table] = {}


def table_of(context: Context) -> rewriters.Table:
    """Return the rewriters of a context by torch function, with those found on earlier calls.

    Contexts of one kind share a table: what is seen in one serves the others, and compiled code
    finds the same objects.
    """
    own = context.runtime.rewriters
    blocks = context.runtime.blocking_copies_only
    kind = (
        context.shown_as is not None,
        tuple(own.values()),
        bool(context.dtypes.in_float32),
        blocks,
    )
    found = _tables.get(kind)
    if found is None:
        reads = rewriters.READS if context.shown_as is not None else {}
        products = half_precision_matmul.TABLE if context.dtypes.in_float32 else {}
        copies = rewriters.COPIES if blocks else {}
        # The later ones replace the earlier ones: a runtime knows its device best.
        found = _tables[kind] = {
            **rewriters.REGISTERED,
            **rewriters.DROPS,
            **reads,
            **copies,
            **products,
            **own,
        }
        # Here, before Dynamo traces, because Dynamo sees the list as it was when tracing began.
        NUMBERED.extend({*found.values(), *GENERIC}.difference(NUMBERED))
    return found


def rewriter_of(table: rewriters.Table, func: Any) -> rewriters.Rewriter | None:
    """Return the rewriter of a function in ``table``; None if the function takes no device."""
    # The function itself is the sentinel, because None is an answer.
    found: Any = table.get(func, classify)
    return classify(func, table) if found is classify else found


def classify(func: Any, table: rewriters.Table) -> rewriters.Rewriter | None:
    """Return the rewriter of a function seen for the first time, and remember it in ``table``."""
    # A program that makes functions without end: the general rewriter, without remembering.
    if len(table) > _MAX_TABLE:
        return rewriters.with_device_keyword
    found = _classify(func)
    table[func] = found
    return found


def _classify(func: Any) -> rewriters.Rewriter | None:
    if isinstance(func, torch._ops.OpOverload):
        return _from_schemas([func._schema])
    if isinstance(func, torch._ops.OpOverloadPacket):
        # All overloads, because the packet decides only when it is called.
        return _from_schemas([getattr(func, name)._schema for name in func.overloads()])
    if isinstance(func, types.FunctionType):
        # `follow_wrapped=False`: the decorator is called with its own signature.
        parameters = inspect.signature(func, follow_wrapped=False).parameters
        if "device" not in parameters:
            return None
        if parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY:
            return rewriters.with_device_keyword
        return rewriters.with_device_at(list(parameters).index("device"))
    if isinstance(func, types.MethodWrapperType):  # a property's __get__ or __set__
        return None
    schemas = _schemas(func)
    # Without a schema: Tensor.new.
    return _from_schemas(schemas) if schemas else rewriters.with_device_keyword


def _schemas(func: Any) -> list[Any]:
    """Return the schemas of the overloads that Python can call of a function or method, if any.

    Overloads whose first argument is a device, such as the comparison of two devices, exist in
    TorchScript only.
    """
    schemas = torch._C._jit_get_schemas_for_operator(_qualified(func))
    return [schema for schema in schemas if not any(map(_is_device, schema.arguments[:1]))]


def _qualified(func: Any) -> str:
    return f"aten::{getattr(func, '__name__', '')}"


def takes_device(func: Any) -> bool:
    """Return whether the schemas of a torch function or method have an argument to rewrite."""
    # The text first, because looking at the arguments of thousands of schemas takes long.
    return _mentions_device(_qualified(func)) and _from_schemas(_schemas(func)) is not None


def takes_dtype(func: Any) -> bool:
    """Return whether the schemas of a torch function or method have an argument ``dtype``."""
    return any("ScalarType? dtype" in text for text in _texts(_qualified(func)))


@functools.cache
def _texts(operator: str) -> list[str]:
    return [str(schema) for schema in torch._C._jit_get_schemas_for_operator(operator)]


@functools.cache
def _mentions_device(operator: str) -> bool:
    """Return whether a schema's text may name a device: a quick test before parsing arguments."""
    return any(
        "Device" in text or "device" in text or "pin_memory" in text for text in _texts(operator)
    )


def _from_schemas(schemas: list[Any]) -> rewriters.Rewriter | None:
    """Return the rewriter for the overloads of one function: None if no overload takes a device."""
    arguments = [
        (index, argument) for schema in schemas for index, argument in enumerate(schema.arguments)
    ]
    devices = [(index, argument) for index, argument in arguments if _is_device(argument)]
    # A keyword-only device needs no position.
    positions = {index for index, argument in devices if not argument.kwarg_only}
    if positions:
        return rewriters.with_device_at(min(positions))
    if devices or any(argument.name in ("device", "pin_memory") for _, argument in arguments):
        return rewriters.with_device_keyword
    return None


def _is_device(argument: Any) -> bool:
    kind = argument.type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return kind.kind() == "DeviceObjType"
