"""A device type without an ordinal means the current device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice

BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "factory": lambda device: torch.ones(2, device=device),
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "like": lambda device: torch.ones_like(torch.ones(1, device="cuda:0"), device=device),
    "new": lambda device: torch.ones(1, device="cuda:0").new_ones(1, device=device),
    "from the CPU": lambda device: torch.ones(2).to(device),
    "from another device": lambda device: torch.ones(2, device="cuda:0").to(device),
    "module": lambda device: torch.nn.Linear(1, 1).to(device).weight,
    "generator": lambda device: torch.Generator(device),
    "storage": lambda device: torch.UntypedStorage(3, device=device),
    "context": lambda device: made_in(device),
}


def made_in(device: Any) -> torch.Tensor:
    with torch.device(device):
        return torch.ones(1)


@pytest.mark.parametrize("spell", [str, torch.device])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("name", BY_TYPE)
def test_the_type_alone_means_the_current_device(
    name: str, engine: Any, spell: Callable[[str], Any]
) -> None:
    """As torch's own code and programs spell it, from the type of a tensor's device."""
    with torchdevice.simulate(count=2, engine=engine, identity="target"):
        device = spell(torch.ones(1, device="cuda").device.type)
        for index in (1, 0):
            torch.cuda.set_device(index)
            assert BY_TYPE[name](device).device == torch.device("cuda", index)
