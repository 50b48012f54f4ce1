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

from torchdevice.foundation.stand_ins import given_to


class Nondeterministic(NamedTuple):
    """An operator without a deterministic kernel.

    Attributes:
        kernel: The kernel's name, as torch's error spells it.
        concerns: Whether that holds for a call with these arguments, by name.
    """

    kernel: str
    concerns: Callable[[Mapping[str, Any]], bool] = lambda given: True


def _computes_in_floats(given: Mapping[str, Any]) -> bool:
    dtype = given.get("dtype") or given["self"].dtype
    return dtype.is_floating_point or dtype.is_complex


_RAISING = (torch.use_deterministic_algorithms.__doc__ or "").partition("operations will throw a")[2]
"""The part of the documentation that lists operators without a deterministic kernel."""

OPERATORS: Mapping[str, Nondeterministic] = {
    # Torch 2.13 has a deterministic kernel.
    **(
        {"max_pool3d_with_indices_backward": Nondeterministic("max_pool3d_with_indices_backward_cuda")}
        if "torch.nn.MaxPool3d" in _RAISING
        else {}
    ),
    "avg_pool3d_backward": Nondeterministic("avg_pool3d_backward_cuda"),
    "_adaptive_avg_pool2d_backward": Nondeterministic("adaptive_avg_pool2d_backward_cuda"),
    "_adaptive_avg_pool3d_backward": Nondeterministic("adaptive_avg_pool3d_backward_cuda"),
    "adaptive_max_pool2d_backward": Nondeterministic("adaptive_max_pool2d_backward_cuda"),
    "fractional_max_pool2d_backward": Nondeterministic("fractional_max_pool2d_backward_cuda"),
    "fractional_max_pool3d_backward": Nondeterministic("fractional_max_pool3d_backward_cuda"),
    "upsample_linear1d_backward": Nondeterministic("upsample_linear1d_backward_out_cuda"),
    "upsample_bilinear2d_backward": Nondeterministic("upsample_bilinear2d_backward_out_cuda"),
    "upsample_bicubic2d_backward": Nondeterministic("upsample_bicubic2d_backward_out_cuda"),
    "upsample_trilinear3d_backward": Nondeterministic("upsample_trilinear3d_backward_out_cuda"),
    "reflection_pad1d_backward": Nondeterministic("reflection_pad1d_backward_out_cuda"),
    "reflection_pad3d_backward": Nondeterministic("reflection_pad3d_backward_out_cuda"),
    "replication_pad1d_backward": Nondeterministic("replication_pad1d_backward_cuda"),
    "replication_pad2d_backward": Nondeterministic("replication_pad2d_backward_cuda"),
    "replication_pad3d_backward": Nondeterministic("replication_pad3d_backward_cuda"),
    "nll_loss2d_forward": Nondeterministic(
        "nll_loss2d_forward_out_cuda_template", lambda given: given.get("reduction") != 0
    ),
    "_ctc_loss_backward": Nondeterministic("ctc_loss_backward_gpu"),
    "_embedding_bag_backward": Nondeterministic(
        "embedding_bag_backward_cuda_max", lambda given: given.get("mode") == 2
    ),
    "put": Nondeterministic("put_", lambda given: bool(given.get("accumulate"))),
    "histc": Nondeterministic("_histc_cuda with floating point input", _computes_in_floats),
    "bincount": Nondeterministic("_bincount_cuda", lambda given: given.get("weights") is not None),
    "median": Nondeterministic("median CUDA with indices output", lambda given: "dim" in given),
    "nanmedian": Nondeterministic("median CUDA with indices output", lambda given: "dim" in given),
    "grid_sampler_2d_backward": Nondeterministic("grid_sampler_2d_backward_cuda"),
    "grid_sampler_3d_backward": Nondeterministic("grid_sampler_3d_backward_cuda"),
    "scatter_reduce": Nondeterministic("scatter_reduce_cuda_prod_", lambda given: given.get("reduce") == "prod"),
}


def refusal(found: Nondeterministic, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return torch's text for a call where the program asked for deterministic algorithms, or warn if it chose that.

    None is returned for a call that is deterministic. The texts are those of aten/src/ATen/Context.cpp.
    """
    if not found.concerns(given_to(op, args, kwargs)):
        return None
    if torch.is_deterministic_algorithms_warn_only_enabled():
        warnings.warn(
            f"{found.kernel} does not have a deterministic implementation, but you set "
            f"'torch.use_deterministic_algorithms(True, warn_only=True)'. {_FILE}",
            stacklevel=2,
        )
        return None
    return (
        f"{found.kernel} does not have a deterministic implementation, but you set "
        f"'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you can "
        f"use the 'warn_only=True' option, if that's acceptable for your application. {_FILE_ALSO}"
    )


_FILE = (
    "You can file an issue at https://github.com/pytorch/pytorch/issues to help us prioritize adding deterministic "
    "support for this operation."
)
_FILE_ALSO = _FILE.replace("can file", "can also file")
