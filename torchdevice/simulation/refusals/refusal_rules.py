"""Rules: calls that a real device's kernels refuse and the CPU's do not.

A rule is a predicate over all arguments of an operator's call that returns the text of the error.
The tables of rules are in ``cuda_rules.py`` and ``device_refusals.py``. The pipeline of an operator
looks its rules up once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from torchdevice.simulation import policy
from torchdevice.simulation.kernels.cpu_kernels import without_mode

Kernel = Callable[..., Any]

Refusals = tuple[Callable[[Any, Any], None], ...]
"""Functions that raise a device's errors, given the arguments of a call."""


class Rule(NamedTuple):
    """One refusal.

    Attributes:
        operators: Names of operators without overload, separated by spaces.
        refuses: Takes the arguments of a call. Returns the error's text; a false value accepts the
            call.
        source: The place in torch or in the device's library.
        error: The class of the error.
        holds: Returns whether this thread's scope stands for the device of the rule.
        only: The dtypes of the first tensor in which a call whose tensors have one dtype may be
            refused; None for all.
    """

    operators: str
    refuses: Callable[..., Any]
    source: str
    error: type[Exception] = RuntimeError
    holds: Callable[[], bool] = policy.stands_for_cuda
    only: frozenset[torch.dtype] | None = None


def name_of(op: Any) -> str:
    """Return an operator's name without overload and without an in-place underscore."""
    name = op._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def by_operator(
    *rules: Rule, holds: Callable[[], bool] = policy.stands_for_cuda
) -> dict[str, list[Rule]]:
    """Return a device's rules by operator name; ``holds`` applies to all of them."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        for name in rule.operators.split():
            found.setdefault(name, []).append(rule._replace(holds=holds))
    return found


def checks(rules: Iterable[Rule]) -> Refusals:
    """Return functions that raise rules' errors for the arguments of a call, a tuple and a dict."""
    return tuple(functools.partial(_check, rule.refuses, rule) for rule in rules)


def _check(refuses: Callable[..., Any], rule: Rule, args: Any, kwargs: Any) -> None:
    if torch._C._get_tracing_state() is not None:  # sizes are tensors while `torch.jit.trace` runs
        return
    # The scope comes last: most calls end at the rule's cheaper test of the arguments.
    text = refuses(*args, **kwargs)
    if text and rule.holds():
        raise rule.error(text)


def guarded(refusals: Refusals, kernel: Kernel) -> Kernel:
    """Return a kernel with refusals before it; the kernel itself where there are none."""
    if not refusals:
        return kernel

    @without_mode
    @functools.wraps(kernel)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        for refuse in refusals:
            refuse(args, kwargs)
        return kernel(*args, **kwargs)

    return refusing
