"""Moves to and from simulated devices, and `tensor.data = value`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.simulation import machine


class TestMoves:
    def test_parameters_stay_the_same_objects(self, devices: torchdevice.Scope) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        seen: list[torch.Size] = []
        model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
        before = model[0].weight.grad.clone()
        model.cuda()
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert model[0].weight is model[1].weight and all(
            p.is_cuda and p.is_leaf and p.requires_grad for p in parameters
        )
        assert model[0].weight.grad.is_cuda and torch.equal(model[0].weight.grad.cpu(), before)
        optimizer.zero_grad()
        model(torch.ones(1, 3, device="cuda")).sum().backward()
        optimizer.step()
        assert seen, "a hook was lost on the way"
        model.cpu()
        assert not model[0].weight.is_cuda and model[0].weight is model[1].weight
        model(torch.ones(1, 3)).sum().backward()

    @pytest.mark.parametrize("options", [{}, {"compute": "meta"}], ids=str)
    @pytest.mark.parametrize(
        "device", [None, "cuda:0", "cuda:1", "cpu", torch.device("cpu", 0), "meta"], ids=str
    )
    def test_a_tensor_like_another_is_where_the_program_says(
        self, device: Any, options: dict[str, Any]
    ) -> None:
        made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            **{
                name: lambda x, name=name: getattr(torch, f"{name}_like")(x, device=device)
                for name in ("empty", "zeros", "ones", "rand", "randn")
            },
            "full": lambda x: torch.full_like(x, 3, device=device),
            "randint": lambda x: torch.randint_like(x, 9, device=device),
            "new_empty": lambda x: x.new_empty(2, device=device),
            "new_full": lambda x: x.new_full((2,), 3, device=device),
            "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (1, 2), device=device),
        }
        with torchdevice.simulate(count=2, **options):
            x, of_cpu = torch.ones(2, 3, device="cuda:1").t(), torch.ones(2, 3).t()
            for name, make in made.items():
                found, expected = make(x), make(of_cpu)
                assert found.device == (x.device if device is None else expected.device), name
                assert (found.stride(), found.dtype) == (expected.stride(), expected.dtype), name

    def test_setting_data(self, devices: torchdevice.Scope) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.data = parameter.data.cuda()
        assert (
            parameter.is_cuda
            and parameter.requires_grad
            and isinstance(parameter, torch.nn.Parameter)
        )
        (parameter * 2).sum().backward()
        assert parameter.grad is not None and parameter.grad.is_cuda

    def test_to_the_meta_device_and_back(self, devices: torchdevice.Scope) -> None:
        x = torch.ones(2, 3, device="cuda").t()
        shape = x.to("meta", torch.float16)
        assert (shape.device.type, shape.stride(), shape.dtype) == ("meta", (1, 3), torch.float16)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
            x.copy_(shape)
        assert torch.empty(3, 2, device="meta").copy_(x).is_meta

    def test_copies_are_counted(self, devices: torchdevice.Scope) -> None:
        before = machine.current().copies.copy()
        x = torch.ones(1000).cuda()
        x.to("cuda:1").cpu()
        x.cpu()
        counted = machine.current().copies - before
        assert counted == {
            ("cpu", "simulated:0"): 1,
            ("simulated:0", "simulated:1"): 1,
            ("simulated:1", "cpu"): 1,
            ("simulated:0", "cpu"): 1,
        }
        assert machine.current().copied_bytes["simulated:0", "cpu"] >= 4000

    def test_a_move_does_not_share_memory(self, devices: torchdevice.Scope) -> None:
        x = torch.zeros(3)
        y = x.cuda()
        x += 1
        z = y.cpu()
        y += 5
        assert (x.tolist(), y.tolist(), z.tolist()) == ([1.0] * 3, [5.0] * 3, [0.0] * 3)


class TestData:
    """``tensor.data = value`` between the devices leaves the C++ tensor in place, as on CUDA."""

    def test_a_gradient_arrives_after_the_data_has_moved_away(
        self, devices: torchdevice.Scope
    ) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        address = parameter._cdata
        parameter.data = parameter.data.cuda()
        result = (parameter * 2).sum()
        parameter.data = parameter.data.cpu()
        result.backward()
        assert parameter._cdata == address and parameter.get_device() == -1
        assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3

    def test_a_failed_assignment_changes_nothing(self, devices: torchdevice.Scope) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(RuntimeError):
            parameter.data = torch.ones(3, dtype=torch.int64, device="cuda")
        assert parameter.get_device() == -1 and (parameter * 2).tolist() == [2.0] * 3

    def test_a_scripted_module_moves(self, devices: torchdevice.Scope) -> None:
        module = torch.jit.script(torch.nn.Linear(2, 2))
        weight = module.weight
        assert module.cuda().weight is weight and weight.get_device() == 0
        assert module(torch.ones(1, 2, device="cuda")).get_device() == 0
