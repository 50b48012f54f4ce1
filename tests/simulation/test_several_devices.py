"""Moves among a program's several devices, also if one machine's device is all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchdevice

SEVERAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to a text": lambda x: x.to("cuda:1"),
    "to a device": lambda x: x.to(torch.device("cuda", 1)),
    "to a number": lambda x: x.to(1),
    "to by keyword": lambda x: x.to(device="cuda:1"),
    "to with a dtype": lambda x: x.to("cuda:1", torch.float32),
    "to another tensor": lambda x: x.to(torch.ones(1, device="cuda:1")),
    "to its own device": lambda x: x.to(torch.ones(1, device="cuda:1").device),
    "cuda": lambda x: x.cuda(1),
    "cuda by keyword": lambda x: x.cuda(device="cuda:1"),
    "type_as": lambda x: x.type_as(torch.ones(1, device="cuda:1")),
    "as_tensor": lambda x: torch.as_tensor(x, device="cuda:1"),
    "as_tensor by keyword": lambda x: torch.as_tensor(data=x, device="cuda:1"),
    "asarray": lambda x: torch.asarray(x, device="cuda:1"),
    "an operator": lambda x: torch.ops.aten.to.device(x, "cuda:1", torch.float32),
    "an operator by keyword": lambda x: torch.ops.aten.to.device(
        x, device="cuda:1", dtype=torch.float32
    ),
    "a frozen parameter": lambda x: torch.nn.Parameter(x, requires_grad=False).to("cuda:1"),
    "what an operator made": lambda x: (x.requires_grad_() * 1).to("cuda:1").detach(),
}
"""Moves from the first to the second of several devices."""


@pytest.mark.parametrize("road", SEVERAL)
@pytest.mark.parametrize("target", ["cpu", "simulated:mps", "simulated:cuda"])
def test_a_move_among_several_devices_copies(target: str, road: str) -> None:
    with torchdevice.portable(target, devices=2):
        x = torch.zeros(3, device="cuda:0")
        moved = SEVERAL[road](x)
        assert moved.device.type == x.device.type
        moved += 1
        assert x.tolist() == [0.0] * 3 and moved.tolist() == [1.0] * 3


@pytest.mark.parametrize("target", ["cpu", "simulated:mps", "simulated:cuda"])
def test_a_module_among_several_devices(target: str) -> None:
    """Parameters stay the objects they were; what somebody else holds too gets new memory."""
    with torchdevice.portable(target, devices=2):
        module = torch.nn.BatchNorm1d(2).to("cuda:0")
        weight, held = module.weight, module.state_dict()
        module.to("cuda:1")
        with torch.no_grad():
            module.weight.add_(1)
            assert module.running_mean is not None
            module.running_mean.add_(1)
        assert module.weight is weight and weight.is_leaf and weight.requires_grad
        assert held["weight"].tolist() == [1.0, 1.0] and held["running_mean"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("target", ["simulated:mps"])
def test_a_move_among_several_devices_keeps_leaves_and_what_is_on_the_cpu(target: str) -> None:
    with torchdevice.portable(target, devices=2):
        leaf, host = torch.zeros(3, device="cuda:0", requires_grad=True), torch.zeros(3)
        assert leaf.to("cuda:1") is leaf and host.to("cpu") is host and host.cpu() is host
        x = torch.zeros(3, device="cuda:0")
        assert x.to(torch.float32) is x and x.to(dtype=torch.float32) is x
    with torchdevice.portable(target):
        x = torch.zeros(3, device="cuda")
        assert x.to("cuda:0") is x and x.cuda() is x
