"""The forms in which torch's class of process groups takes a collective: with options, or with their values one by one.

Source: the overloads in ``torch/csrc/distributed/c10d/init.cpp``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.foundation import data_files
from torchdevice.torch_apis.distributed.collective_operators import as_operator

_c10d = dist.distributed_c10d

_OPTIONS = tuple(value for name, value in vars(_c10d).items() if name.endswith("Options"))

_CPU = torch.device("cpu")

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
"""The names that values have as arguments, and in options."""

_AFTER_TENSORS: dict[str, list[str]] = data_files.read(__file__, "method_forms.json")
"""The values after the tensors, without options, of the methods that take one tensor of a rank without a list too."""


def in_every_form(options_class: Any, name: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a method take every form of torch's method of that name, and call the operator of that method.

    The method itself takes lists of tensors, or whatever torch takes one of, and options as its last argument.

    Args:
        options_class: The class of the options, if none are given.
        name: The name of torch's method in all releases, where the method has a newer one.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        count = len(inspect.signature(method).parameters) - 2  # without the group and the options
        names = (*_AFTER_TENSORS.get(method.__name__, ()), "timeout")
        operator = as_operator(method, name or method.__name__)

        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = {name: kwargs.pop(name) for name in ("opts", *_FIELDS) if name in kwargs}
            # The names of the tensors differ between the forms; their order does not.
            args = (*args, *kwargs.values())
            values.update(zip(names, args[count:], strict=False))
            options = next((value for value in values.values() if isinstance(value, _OPTIONS)), None)
            if options is None:
                options = options_class()
                for name, value in values.items():
                    if value is not None:
                        setattr(options, _FIELDS[name], value)
            if isinstance(options, _c10d.BarrierOptions):
                options.device = _CPU  # torch makes a tensor there
            return operator(self, *_listed(method.__name__, args[:count]), options)

        return called

    return decorate


def _listed(name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a form with one tensor of a rank as those of the form with a list of them."""
    if name not in _AFTER_TENSORS or not any(isinstance(each, torch.Tensor) for each in given):
        return given
    # An empty list is that of a rank which neither sends nor gets parts.
    return tuple(each if isinstance(each, list) and not each else [each] for each in given)
