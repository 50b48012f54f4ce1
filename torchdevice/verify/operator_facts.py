"""The facts about an operator, from its schema and from the lists below."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.kernel.stand_ins import given_to, is_written
from torchdevice.torch_modules.apis import dispatch

_UNSEEN = frozenset(
    {
        "_assert_async",
        "_assert_scalar",
        "_pin_memory",
        "_print",
        "lift_fresh",
        "record_stream",
        "set_",
        "set_data",
        "sym_constrain_range",
    }
)
"""Operators whose call does something that must not be done twice, or has no result to compare."""

_COMMUNICATING = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})
"""Libraries of torch's own whose operators do more than they return."""

_WITHOUT_VALUES = frozenset(
    {
        "_efficientzerotensor",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    }
)
"""Operators whose results have no values yet."""

_BY_BITS = frozenset(
    {
        "_local_scalar_dense",
        "_unsafe_view",
        "frexp",
        "nan_to_num",
        "nan_to_num_",
        "nextafter",
        "nextafter_",
    }
)
"""Operators for which float64 is no reference: the result depends on the dtype, or has the bits of
the argument.
"""

_CHOOSING = frozenset(
    {
        "argmax",
        "argmin",
        "argsort",
        "kthvalue",
        "max",
        "median",
        "min",
        "mode",
        "nanmedian",
        "sort",
        "topk",
    }
)
"""Operators that return the indices of elements along a dimension; which one of equal elements is
free.
"""

_ROUNDING = frozenset(
    {"_to_copy", "ceil", "clone", "copy", "copy_", "floor", "round", "sgn", "sign", "trunc"}
)
"""Operators whose inputs' rounding excuses nothing: they compute nothing that they would have to
round.
"""


class Operator:
    """An operator, as verify sees it.

    Args:
        op: The overload.

    Attributes:
        name: Its full name, such as ``"aten::add.Tensor"``.
        is_view: Whether its results are views of its arguments.
        has_values: Whether its results have values.
        is_random: Whether it draws random numbers.
        is_pointwise: Whether each element of the result depends on one element of each argument.
        rounds_only: Whether it computes nothing but a rounding.
        chooses: Whether results of int64 are the indices of elements, all of which differ along the
            dimension.
        has_wide: Whether float64 is a reference for it.
        names: The names of its arguments.
        written: The names of those to which it writes.
        declares: Whether its schema declares all writes of the CPU's kernel: torch's operators that
            keep running statistics may write to more.
        made: For each result, whether it is a new tensor.
    """

    def __init__(self, op: Any):
        schema = op._schema
        base = schema.name.partition("::")[2]
        plain = base[:-1] if base.endswith("_") and not base.startswith("_") else base
        self.op = op
        self.name = op.name()
        self.is_view = bool(op.is_view)
        self.has_values = base not in _WITHOUT_VALUES
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.is_pointwise = torch.Tag.pointwise in op.tags
        self.rounds_only = not _ROUNDING.isdisjoint((base, plain))
        self.chooses = base in _CHOOSING
        self.has_wide = base not in _BY_BITS
        self.names = [each.name for each in schema.arguments]
        self.written = [each.name for each in filter(is_written, schema.arguments)]
        self.declares = op.namespace == "aten" and "running_mean" not in self.names
        self.made = [each.alias_info is None for each in schema.returns]

    def draws(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call draws random numbers: dropout with a probability of 0 does not."""
        if not self.is_random:
            return False
        given = given_to(self.op, args, kwargs)
        return bool(given.get("dropout_p", True)) and given.get("train") is not False

    def results(self, result: Any) -> list[tuple[str, Any, bool]]:
        """Return each result, with its name, and whether it is a new tensor or a list of them."""
        several = len(self.made) > 1
        values = result if several else [result]
        if several:
            names = [f"result {number}" for number in range(len(self.made))]
        else:
            names = ["the result"]
        return list(zip(names, values, self.made, strict=True)) if self.made else []


def looked_at(op: Any, only: tuple[str, ...] | None, runtime: Any) -> Operator | str | None:
    """Return verify's facts of an operator, or why it is skipped; None if nothing is compared.

    The program did not ask for it, or float64 on the CPU would show nothing of a kernel that is the
    CPU's.

    Operators of other libraries may do more than they return, so they are called twice only where
    they are named, or have one kernel for the target and another one that is the CPU's.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return None
    base = op._schema.name.partition("::")[2]
    if only is not None:
        if {base, op._schema.name, op.name(), op.name().removeprefix("aten::")}.isdisjoint(only):
            return None
    elif op.namespace != "aten" and (
        op.namespace in _COMMUNICATING or not _has_two_kernels(op, runtime.device_type)
    ):
        return "foreign"
    elif base in _UNSEEN or torch.Tag.inplace_view in op.tags:
        return "unseen"
    known = Operator(op)
    shows_nothing = known.is_view or not (known.has_wide and known.has_values)
    return None if runtime.shares_host_memory and shows_nothing else known


def _has_two_kernels(op: Any, device_type: str) -> bool:
    """Return whether a program's operator has separate kernels for the target and the CPU."""
    name, key = op.name(), torch._C._dispatch_key_for_device(device_type)
    has_own = torch._C._dispatch_has_kernel_for_dispatch_key(name, key) or dispatch.serves(op)
    return has_own and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")


def unknown(only: tuple[str, ...] | None) -> str | None:
    """Return the first name that is no operator's; None where all are."""
    for name in only or ():
        namespace, _, rest = name.rpartition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
        if packet is None or (overload and overload not in packet.overloads()):
            return name
    return None
