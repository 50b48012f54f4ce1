"""The cases that are measured: frequent calls of programs, and small programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import torchdevice
from benchmarks import workloads
from benchmarks.measuring import Condition


class Nothing(TorchFunctionMode):
    """A mode that changes nothing, whose cost is the least that a mode can have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BARE = "bare"
NOTHING = "do-nothing mode"
CONTEXT = "torch.device"
CPU = "cpu target"
WRAPPED = "cpu target, wrap"
SIMULATED = "simulated"
SIMULATED_WRAPPED = "simulated, wrap"

CONDITIONS: dict[str, Condition] = {
    BARE: contextlib.nullcontext,
    NOTHING: Nothing,
    CONTEXT: lambda: torch.device("cpu"),
    CPU: lambda: torchdevice.portable("cpu", engine="mode"),
    WRAPPED: lambda: torchdevice.portable("cpu", engine="wrap"),
    SIMULATED: lambda: torchdevice.simulate(engine="mode"),
    SIMULATED_WRAPPED: lambda: torchdevice.simulate(engine="wrap"),
}


class Case(NamedTuple):
    """A call to time.

    Attributes:
        name: The name in the table.
        prepare: Called with the device that the program names, under each condition; returns the
            call to time.
        conditions: The names of the conditions to time the call under.
        seconds: The approximate duration of one measurement.
        rounds: The greatest number of measurements per condition; None for as many as requested.
    """

    name: str
    prepare: Callable[[str], Callable[[], object]]
    conditions: tuple[str, ...]
    seconds: float = 0.02
    rounds: int | None = None


_CALLS = (BARE, NOTHING, CONTEXT, CPU, WRAPPED)
_ALL = (*_CALLS, SIMULATED, SIMULATED_WRAPPED)


def named_device(condition: str) -> str:
    """Return the device that a program names: the accelerator in a scope, the CPU without one."""
    return "cpu" if condition in (BARE, NOTHING, CONTEXT) else "cuda"


CASES = (
    Case("ordinary operator, 4 elements", workloads.add, _ALL),
    Case("512 x 512 product", workloads.product, _ALL),
    Case("linear, 8 x 64 by 64 x 64", workloads.linear, _ALL),
    Case("attention, 4 heads of 16 x 16", workloads.attention, _ALL),
    Case("factory with a device", workloads.factory, _CALLS),
    Case("x.to(device), nothing moves", workloads.no_move, _CALLS),
    Case("x.to(device), which copies", workloads.copy_to, _CALLS),
    Case("torch.device(...)", workloads.device_made, _CALLS),
    Case("x.device", workloads.device_read, _CALLS),
    Case("loss.backward(), 64 x 64", workloads.backward, _ALL),
    Case("small transformer training step", workloads.training_step(32, 2, 16), _ALL, 0.1, 15),
    Case("medium transformer training step", workloads.training_step(256, 4, 64), _ALL, 0.5, 7),
    Case("generate of 50 tokens, 4 layers", workloads.generate, _ALL, 0.5, 5),
    Case("compiled forward pass", workloads.compiled_step, (BARE, NOTHING, CPU, WRAPPED), 0.1),
    Case("DataLoader epoch, 16 batches", workloads.loader_epoch, _CALLS, 0.1, 15),
)
