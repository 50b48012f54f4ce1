"""The profilers: CUDA activity is the target's. A CPU's work is CPU activity."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity
from torch.profiler import profiler as kineto_profiler

from torchdevice._journal import Fidelity
from torchdevice._patching import Patch, replaced_function

if TYPE_CHECKING:
    from torchdevice._scope import Scope


def _init_kineto(scope: Scope, original: Any, self: Any, **kwargs: Any) -> None:
    activities = kwargs.get("activities")
    if not scope.runtime.is_torch_accelerator and (activities is None or ProfilerActivity.CUDA in activities):
        scope.report("ProfilerActivity.CUDA", "ProfilerActivity.CPU", Fidelity.APPROXIMATE)
        kwargs["activities"] = {ProfilerActivity.CPU, *(activities or ())} - {ProfilerActivity.CUDA}
    original(self, **kwargs)


def _init_autograd(scope: Scope, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if not scope.runtime.is_torch_accelerator and (
        bound.arguments.get("use_device") == "cuda" or bound.arguments.get("use_cuda")
    ):
        scope.report("profiler of cuda", "profiler of the CPU", Fidelity.APPROXIMATE)
        bound.arguments.update(use_device=None)
        bound.arguments.pop("use_cuda", None)
    original(*bound.args, **bound.kwargs)


def patches() -> list[Patch]:
    """Return the patches of both profilers."""
    assert torch.profiler.profiler is kineto_profiler
    return [
        replaced_function(kineto_profiler._KinetoProfile, "__init__", _init_kineto),
        replaced_function(autograd_profiler.profile, "__init__", _init_autograd),
    ]
