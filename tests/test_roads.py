"""By any road to the device, autograd knows of a tensor what it does on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import sweeping
import torch
from conftest import plain_torch
from torch.testing._internal import common_methods_invocations as database

import torchdevice

pytestmark = pytest.mark.filterwarnings("ignore")


class Facts(NamedTuple):
    """What autograd knows of a tensor."""

    is_view: bool
    has_base: bool
    is_leaf: bool
    requires_grad: bool
    version: int
    kind: str


def facts(tensor: torch.Tensor) -> Facts:
    return Facts(
        tensor._is_view(),
        tensor._base is not None,
        tensor.is_leaf,
        tensor.requires_grad,
        tensor._version,
        type(tensor).__name__,
    )


def linear() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def with_data(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor.data = value
    return tensor


def written_twice(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.add_(1).add_(1)


def with_gradient(device: str, *, first: bool) -> torch.nn.Module:
    model = linear().to(device) if first else linear()
    model(torch.ones(1, 2, device=device if first else "cpu")).sum().backward()
    return model.to(device)


def loaded(device: str, *, assign: bool) -> torch.nn.Module:
    model = linear().to(device)
    model.load_state_dict(linear().to(device).state_dict(), assign=assign)
    return model


def state_of_adam(device: str, **options: Any) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.Adam([parameter], **options)
    parameter.sum().backward()
    optimizer.step()
    return optimizer.state[parameter]["exp_avg_sq"]


ROADS: dict[str, Callable[[str], torch.Tensor]] = {
    "to": lambda device: torch.ones(2).to(device),
    "to, copy": lambda device: torch.ones(2).to(device, copy=True),
    "to where it is": lambda device: torch.ones(2, device=device).to(device),
    "to, a dtype": lambda device: torch.ones(2, device=device).to(torch.float64),
    "to the CPU": lambda device: torch.ones(2, device=device).to("cpu"),
    "factory": lambda device: torch.ones(2, device=device),
    "factory of a leaf": lambda device: torch.ones(2, device=device, requires_grad=True),
    "random factory": lambda device: torch.randn(2, device=device),
    "tensor": lambda device: torch.tensor([1.0, 2.0], device=device),
    "as_tensor": lambda device: torch.as_tensor(torch.ones(2), device=device),
    "module": lambda device: linear().to(device).weight,
    "module on the device": lambda device: torch.nn.Linear(2, 2, device=device).weight,
    "module, there and back": lambda device: linear().to(device).to("cpu").to(device).weight,
    "module, converted": lambda device: linear().to(device).half().weight,
    "module, emptied": lambda device: (
        torch.nn.Linear(2, 2, device="meta").to_empty(device=device).weight
    ),
    "module, frozen": lambda device: linear().to(device).requires_grad_(False).weight,
    "recurrent module": lambda device: torch.nn.LSTM(2, 2).to(device).weight_ih_l0,
    "gradient, then moved": lambda device: with_gradient(device, first=False).weight.grad,
    "moved, then gradient": lambda device: with_gradient(device, first=True).weight.grad,
    "deepcopy": lambda device: copy.deepcopy(torch.ones(2, device=device)),
    "deepcopy of a module": lambda device: copy.deepcopy(linear().to(device)).weight,
    "pickle": lambda device: pickle.loads(pickle.dumps(torch.ones(2, device=device))),
    "pickle of a module": lambda device: pickle.loads(pickle.dumps(linear().to(device))).weight,
    "load": lambda device: saved(torch.ones(2, device=device)),
    "load to the device": lambda device: saved(torch.ones(2), map_location=device),
    "load of a module": lambda device: saved(linear().to(device), weights_only=False).weight,
    "load_state_dict": lambda device: loaded(device, assign=False).weight,
    "load_state_dict, assigned": lambda device: loaded(device, assign=True).weight,
    "state_dict": lambda device: linear().to(device).state_dict()["weight"],
    "data": lambda device: linear().to(device).weight.data,
    "data of a parameter": lambda device: with_data(
        torch.nn.Parameter(torch.ones(2)), torch.zeros(2, device=device)
    ),
    "data of a tensor": lambda device: with_data(torch.ones(2), torch.zeros(2, device=device)),
    "data that is a view": lambda device: with_data(
        torch.ones(2), torch.zeros(4, device=device).add_(1)[:2]
    ),
    "data of a written one": lambda device: with_data(
        written_twice(torch.ones(2)), torch.zeros(2, device=device)
    ),
    "parameter": lambda device: torch.nn.Parameter(torch.ones(2).to(device)),
    "detach": lambda device: torch.ones(2, device=device).add_(1).detach(),
    "view": lambda device: torch.ones(2, device=device).view(1, 2),
    "part": lambda device: torch.ones(2, 2, device=device).chunk(2)[0],
    "written": lambda device: torch.ones(2, device=device).add_(1),
    "written as out": lambda device: torch.add(
        torch.ones(2, device=device), 1, out=torch.empty(0, device=device)
    ),
    "set": lambda device: torch.empty(0, device=device).set_(torch.ones(2, device=device)),
    "resized": lambda device: torch.ones(2, device=device).resize_(4),
    "state of an optimizer": lambda device: state_of_adam(device),
    "state of an optimizer, foreach": lambda device: state_of_adam(device, foreach=True),
    "sparse": lambda device: torch.eye(2, device=device).to_sparse(),
}


@pytest.mark.parametrize("road", ROADS)
def test_what_autograd_knows(cuda: torchdevice.Scope, road: str) -> None:
    with plain_torch():
        expected = facts(ROADS[road]("cpu"))
    assert facts(ROADS[road]("cuda")) == expected


@pytest.mark.parametrize("write", ["copy_", "add_", "mul_"])
def test_a_gradient_can_be_written_to_a_moved_parameter(
    cuda: torchdevice.Scope, write: str
) -> None:
    """As programs fuse a convolution with its normalization."""
    fused = torch.nn.Linear(2, 2).cuda().requires_grad_(False)
    scale = torch.full((2, 2), 3.0, device="cuda", requires_grad=True)
    fused.weight.data.fill_(1)
    getattr(fused.weight, write)(scale * 2)
    fused(torch.ones(1, 2, device="cuda")).sum().backward()
    assert scale.grad is not None and scale.grad.tolist() == [[2.0] * 2] * 2


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, device) for each in value)
    return value


def written_versions(op: Any, sample: Any, device: str) -> Any:
    """Return what autograd counts after an operator in place, or the type of its error."""
    target, arguments = moved(sample.input, device), moved(list(sample.args), device)
    try:
        op.inplace_variant(
            target,
            *arguments,
            **{name: moved(each, device) for name, each in sample.kwargs.items()},
        )
    except (RuntimeError, TypeError) as error:
        return type(error)
    return (
        [each._version for each in target] if isinstance(target, (list, tuple)) else target._version
    )


IN_PLACE = {
    f"{op.name} {op.variant_test_name}".strip(): op
    for op in (
        *database.op_db,
        *database.foreach_unary_op_db,
        *database.foreach_binary_op_db,
        *database.foreach_pointwise_op_db,
        *database.foreach_other_op_db,
    )
    if op.inplace_variant is not None and torch.float32 in op.dtypes
}


def test_writes_in_place_are_counted_and_refused_as_on_the_cpu(sweep: tuple[bool, int]) -> None:
    differing = {}
    for name, op in sweeping.choose(list(IN_PLACE.items()), sweep, 50):
        for _, sample in zip(range(3), sweeping.samples_of(op, torch.float32), strict=False):
            if name.startswith("_foreach") and not isinstance(sample.input, (list, tuple)):
                continue
            expected = written_versions(op, sample, "cpu")
            with torchdevice.simulate():
                found = written_versions(op, sample, "cuda")
            if found != expected:
                differing[name] = expected, found
    assert len(IN_PLACE) > 150 and differing == {}
