"""The options of simulated devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal

from torchdevice.kernel.options import (
    COMMON,
    DEVICES,
    PLAIN,
    Options,
    Target,
    checked_size,
    checked_target,
    choice,
    option,
    switch,
    truth,
)
from torchdevice.kernel.python import byte_sizes

if TYPE_CHECKING:
    import torch

_NEEDS_ONE = ("memory", "context", "races", "uninitialized", "asynchronous", "compute")
"""Options that need simulated devices."""


def _target(name: str, value: Any) -> Any:
    value = checked_target(name, value)
    if not isinstance(value, str) or PLAIN.fullmatch(value):
        return value
    from torchdevice.simulation import model_lookup  # only for a target that may be one

    return model_lookup.canonical(value)


def _quoted_size(size: int) -> str:
    return repr(byte_sizes.exact(size))


@dataclasses.dataclass(frozen=True)
class SimulationOptions(Options):
    """The options of simulated devices.

    Attributes:
        memory: Memory of each simulated device, in bytes or as a text such as 8GiB. Default: that
            of a model with a name (simulated:t4), and otherwise this machine's.
        context: Memory that CUDA and its libraries take from each simulated device, in bytes or as
            a text such as 512MiB. Default: 512MiB for a model with a name (simulated:t4) whose
            memory is not set, and otherwise none.
        races: Look for kernels on different streams of a simulated device that use the same memory
            without anything ordering them: error raises, and warn warns. Default: do not look.
        uninitialized: error: raise where a Triton kernel reads memory of a simulated device to
            which nothing has been written since torch.empty returned it. Default: do not look.
        asynchronous: On simulated devices, let copies with non_blocking=True from and to
            page-locked memory continue after the call, until the program waits for them.
        platform: On a simulated Mac, the computer that Python's module platform describes to a
            program: target for a Mac, host for this one.
        compute: meta: tensors of simulated devices have shapes and memory but no values, which is
            enough to plan a program that is too large for this machine. Default: compute values.
        values: assume: where a program without values (compute='meta') reads one, a number is 0, a
            condition is False, and a result whose size depends on values has the size for ones;
            assume-fewest: for zeros, so that a mask selects nothing. The report lists each such
            line. Default: an error.
    """

    target: str | torch.device | None = option(None, _target, kw_only=False, group=COMMON)  # noqa: RUF009
    memory: int | str | None = option(None, checked_size, quote=_quoted_size, group=COMMON)
    context: int | str | None = option(
        None, functools.partial(checked_size, least=0), quote=_quoted_size, group=DEVICES
    )
    races: Literal["error", "warn"] | None = choice(None, "error", "warn", group=DEVICES)
    uninitialized: Literal["error"] | None = choice(None, "error", group=DEVICES)
    asynchronous: bool = option(
        False, switch, parse=truth, show=lambda value: str(int(value)), group=DEVICES
    )
    platform: Literal["target", "host"] = choice("target", "target", "host", group=DEVICES)
    compute: Literal["meta"] | None = choice(None, "meta", group=DEVICES)
    values: Literal["assume", "assume-fewest"] | None = choice(
        None, "assume", "assume-fewest", group=DEVICES
    )

    @staticmethod
    def implied_by(target: object) -> dict[str, Any]:
        """Return the options a simulated device implies: identity, and its model's figures."""
        if not isinstance(target, str) or PLAIN.fullmatch(target):
            return {}
        from torchdevice.simulation import model_lookup

        return model_lookup.options_of(
            model_lookup.named(target)
        )  # "t4" implies what "simulated:t4" does

    def contradictions(self, target: Target) -> dict[str, str]:
        found: dict[str, str] = {}
        chosen = "no target was given" if self.target is None else f"{self.target!r} is not one"
        for name in _NEEDS_ONE:
            if getattr(self, name) and not target.simulated:
                found[name] = (
                    f"needs a simulated device, and {chosen}. Use a target such as "
                    f"'simulated:cuda', or leave {name} out."
                )
        if self.asynchronous and target.simulated and self.compute == "meta":
            found["asynchronous"] = WITHOUT_VALUES
        if self.values is not None and self.compute is None:
            found["values"] = (
                "is about tensors without values. Use it with compute='meta', or leave it out."
            )
        return {**found, **super().contradictions(target)}


WITHOUT_VALUES = (
    "is about values, and there are none with compute='meta'. Leave one of the two out."
)
"""Why an option contradicts ``compute="meta"``."""

RECORD = SimulationOptions
