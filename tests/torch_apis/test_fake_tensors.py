"""FakeTensors show the device of the tensors they stand for, to program and torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchdevice


@pytest.fixture(
    params=[(kind, engine) for kind in ("cuda", "mps") for engine in ("mode", "wrap")], ids="-".join
)
def scope(request: pytest.FixtureRequest) -> Any:
    kind, engine = request.param
    with torchdevice.simulate(kind, engine=engine, identity="program") as entered:
        yield entered


def test_the_device_of_fakes(scope: torchdevice.Scope) -> None:
    x = torch.ones(2, device="cuda")
    with FakeTensorMode() as mode:
        fake, made = mode.from_tensor(x), torch.empty(2, device="cuda")
        made_of = [
            fake + made,
            torch.zeros(2, device=fake.device),
            fake.to(made.device),
            fake.clone(),
            fake.new_ones(2),
        ]
        layer = torch.nn.Linear(2, 2, device=fake.device)
        for each in (fake, made, *made_of, torch.empty_like(fake), layer(made), layer.weight):
            assert each.device == x.device and each.device.type == "cuda" and each.is_cuda
            if hasattr(FakeTensor, "fake_device"):  # torch 2.13 and later
                assert each.fake_device == x.device
        assert fake.cpu().device.type == "cpu"


def test_a_fake_kernel_asks_for_the_device(
    scope: torchdevice.Scope, request: pytest.FixtureRequest
) -> None:
    name = f"torchdevice_fakes::{request.node.callspec.id.replace('-', '_')}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @op.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, device=x.device)

    op.register_autograd(lambda context, gradient: gradient * 5)
    x = torch.ones(2, device="cuda")
    assert set(torch.library.opcheck(op, (x,)).values()) == {"SUCCESS"}
    graph = make_fx(lambda x: op(x) + torch.ones(2, device=x.device), tracing_mode="fake")(x)
    assert graph(x).tolist() == [3, 3] and "cuda" in graph.code and "simulated" not in graph.code
    assert {str(node.meta["val"].device) for node in graph.graph.nodes if "val" in node.meta} == {
        "cuda:0"
    }
