"""The cost of ``torch.cuda`` in a scope, against torch's own Python on empty C functions.

The cost of CUDA's C functions cannot be measured without CUDA; what a scope adds to torch's Python
can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torchdevice
from benchmarks.measuring import Condition, Timing, compare

CALLS: dict[str, Callable[[], object]] = {
    "torch.cuda.is_available()": torch.cuda.is_available,
    "torch.cuda.is_initialized()": torch.cuda.is_initialized,
    "torch.cuda.device_count()": torch.cuda.device_count,
    "torch.cuda.current_device()": torch.cuda.current_device,
    "torch.cuda.synchronize()": torch.cuda.synchronize,
    "torch.cuda.current_stream()": torch.cuda.current_stream,
    "torch.cuda.set_device(0)": lambda: torch.cuda.set_device(0),
}

_BINDINGS: dict[str, Callable[..., Any]] = {
    "_cuda_getDeviceCount": lambda: 1,
    "_cuda_getDevice": lambda: 0,
    "_cuda_setDevice": lambda device: None,
    "_cuda_synchronize": lambda: None,
    "_cuda_getCurrentStream": lambda device: (0, 0, 1),
    "_cuda_isInBadFork": lambda: False,
    "_cuda_exchangeDevice": lambda device: 0,
    "_cuda_maybeExchangeDevice": lambda device: 0,
}


def _bare_stream(stream_id: int, device_index: int, device_type: int) -> torch.Stream:
    """Make a stream of torch's class in C, at the cost that CUDA's class has."""
    return torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """Run torch's own Python on C functions that do nothing."""
    with contextlib.ExitStack() as undo:
        for name, function in _BINDINGS.items():
            _put(undo, torch._C, name, function)
        _put(undo, torch.cuda, "_exchange_device", _BINDINGS["_cuda_exchangeDevice"])
        _put(undo, torch.cuda, "_maybe_exchange_device", _BINDINGS["_cuda_maybeExchangeDevice"])
        _put(undo, torch.cuda, "_initialized", True)
        _put(undo, torch.cuda, "_cached_device_count", 1)
        _put(undo, torch.cuda, "Stream", _bare_stream)
        yield


def _put(undo: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    if name in vars(module):
        undo.callback(setattr, module, name, vars(module)[name])
    else:
        undo.callback(delattr, module, name)
    setattr(module, name, value)


def conditions() -> dict[str, Condition]:
    """Return the conditions under which each call is timed, by name."""
    return {
        "torch's own Python": torchs_own,
        "cpu": lambda: torchdevice.portable("cpu"),
        "simulated": lambda: torchdevice.simulate(),
    }


def measure(rounds: int) -> dict[str, dict[str, Timing]]:
    """Return call -> condition -> timing."""
    return {
        name: compare(conditions(), dict.fromkeys(conditions(), call), rounds=rounds)
        for name, call in CALLS.items()
    }
