"""``torchdevice.plan(...)`` in Python."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.plan import calls

pytestmark = pytest.mark.one_engine

MIB = 1 << 20


def train(size: int, steps: int = 2) -> None:
    model = torch.nn.Linear(size, size, bias=False, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(steps):
        model(torch.rand(4, size, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("no_collections")
def test_a_function() -> None:
    found = torchdevice.plan(train, 1024, steps=2)
    (device,) = found["devices"]
    assert (device["weights"], device["gradients"], device["optimizer state"]) == (
        4 * MIB,
        4 * MIB,
        8 * MIB,
    )
    assert found["finished"] and found["smallest"] == "a100-1g.5gb" and found["program"] == "train"
    assert found["needs"] == device["peak"] + found["context"]
    assert torchdevice.current() is None


@pytest.mark.usefixtures("no_collections")
def test_a_model_stays_as_it_is() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 1024)
    )
    model[2].weight = model[0].weight  # tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.rand(8, 1024)
    called, trained = (
        torchdevice.plan(model, x, train=each)["devices"][0] for each in (False, True)
    )
    assert called["weights"] == trained["weights"] == pytest.approx(4 * MIB, rel=0.01)
    assert called["optimizer state"] == 0 and trained["optimizer state"] == pytest.approx(
        8 * MIB, rel=0.01
    )
    assert x.device.type == "cpu" and all(each.device.type == "cpu" for each in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_integers_and_truth_values_are_copied() -> None:
    model = torch.nn.Module()
    for dtype in (torch.long, torch.bool, torch.float32, torch.bfloat16, torch.complex64):
        model.register_buffer(f"{dtype}".replace(".", " "), torch.ones(3, dtype=dtype))
    with torchdevice.simulate():
        copied = calls._without_values(model)
        # A buffer without the values of its model is made of zeros.
        kept = {name for name, value in copied.named_buffers() if value.any()}
    assert kept == {"torch int64", "torch bool"}


def test_memory_that_runs_out_is_in_the_plan() -> None:
    def large() -> None:
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

    found = torchdevice.plan(large, target="t4")
    fits = {each["model"]: each["fits"] for each in found["fits"]}
    assert not found["finished"] and fits["t4"] == "no" and fits["h100"] == "unknown"
    assert torchdevice.plan(large)["finished"]
    assert not torchdevice.plan(large, memory="8GiB")["finished"]


def test_other_errors_are_the_callers() -> None:
    def wrong() -> None:
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        torchdevice.plan(wrong)
    with pytest.raises(TypeError, match=r"train=True is for a model, and .* is a function"):
        torchdevice.plan(train, 4, train=True)
    assert torchdevice.current() is None


def test_the_name_is_that_of_the_package_too() -> None:
    module: Any = importlib.import_module("torchdevice.plan")
    assert module(train, 64)["finished"] and torchdevice.plan(train, 64)["finished"]
    from torchdevice.plan import peaks

    assert peaks.Peaks


@pytest.mark.usefixtures("no_collections")
def test_variables_name_what_the_call_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted() -> tuple[int, int, str]:
        free = torch.cuda.mem_get_info()[1]
        seen.append((torch.cuda.device_count(), free, torch.cuda.get_device_name()))
        return seen[-1]

    seen: list[tuple[int, int, str]] = []
    monkeypatch.setenv("TORCHDEVICE_TARGET", "cpu")  # for other commands
    monkeypatch.setenv("TORCHDEVICE_DEVICES", "3")
    monkeypatch.setenv("TORCHDEVICE_MEMORY", "2GiB")
    torchdevice.plan(counted)
    torchdevice.plan(counted, target="cuda", devices=2, memory="1GiB")
    assert [each[:2] for each in seen] == [(3, 2 << 30), (2, 1 << 30)]
    monkeypatch.setenv("TORCHDEVICE_TARGET", "t4")
    torchdevice.plan(counted)
    assert seen[-1] == (3, 2 << 30, "Tesla T4")
    torchdevice.plan(counted, target="a100:2")
    assert seen[-1][0] == 2 and "A100" in seen[-1][2]
