"""Operators for which CUDA has no deterministic kernel, and what torch does then.

They are those that ``torch.use_deterministic_algorithms`` documents; ``test_cuda_refusals.py`` reads its docstring.
Those that the CPU has no deterministic kernel for either, such as ``max_unpool2d``, refuse on their own. ``cumsum`` and
the backward of ``ReflectionPad2d`` are documented still, but their alerts are gone from ``libtorch_cuda.so`` of torch
2.10 and 2.15, and so is the demand for ``CUBLAS_WORKSPACE_CONFIG``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchdevice.foundation import data_files
from torchdevice.foundation.stand_ins import given_to
from torchdevice.foundation.torch_texts import text


class Nondeterministic(NamedTuple):
    """An operator without a deterministic kernel.

    Attributes:
        kernel: The kernel's name, as torch's error spells it.
        concerns: Whether that holds for a call with these arguments, by name.
    """

    kernel: str
    concerns: Callable[[Mapping[str, Any]], bool]


def _computes_in_floats(given: Mapping[str, Any]) -> bool:
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


_CONCERNS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "nll_loss2d_forward": lambda given: given.get("reduction") != 0,
    "_embedding_bag_backward": lambda given: given.get("mode") == 2,
    "put": lambda given: bool(given.get("accumulate")),
    "histc": _computes_in_floats,
    "bincount": lambda given: given.get("weights") is not None,
    "median": lambda given: "dim" in given,
    "nanmedian": lambda given: "dim" in given,
    "scatter_reduce": lambda given: given.get("reduce") == "prod",
}
"""Operators that have a deterministic kernel for other arguments."""

_RAISING = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[2]
"""The part of the documentation that lists operators without a deterministic kernel."""

OPERATORS: Mapping[str, Nondeterministic] = {
    name: Nondeterministic(kernel, _CONCERNS.get(name, lambda given: True))
    for name, kernel in data_files.read(__file__, "cuda_operators.json")["nondeterministic"].items()
    # torch 2.13 has a deterministic kernel.
    if name != "max_pool3d_with_indices_backward" or "torch.nn.MaxPool3d" in _RAISING
}


def refusal(found: Nondeterministic, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return torch's text for a call where the program asked for deterministic algorithms, or warn if it chose that.

    None is returned for a call that is deterministic. The texts are those of aten/src/ATen/Context.cpp.
    """
    if not found.concerns(given_to(op, args, kwargs)):
        return None
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(text("nondeterministic, and warned", kernel=found.kernel), stacklevel=2)
        return None
    return text("nondeterministic", kernel=found.kernel)
