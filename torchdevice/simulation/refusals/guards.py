"""Puts the refusals of the real devices before the kernels of a simulated one."""

from __future__ import annotations

from typing import Any

from torchdevice.simulation.kernels import cuda_values
from torchdevice.simulation.refusals import cuda_refusals, mps_refusals, rules


def guarded(op: Any, kernel: rules.Kernel) -> rules.Kernel:
    """Return a kernel that refuses what the real devices refuse of an operator; else the kernel itself."""
    refused = [*mps_refusals.rules_of(op), *cuda_refusals.rules_of(op)]
    return rules.guarded(refused, cuda_values.dividing(op, cuda_refusals.asserting(op, kernel)))
