"""Recurrent weights lie in one piece, as cuDNN requires, or the program is warned."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchdevice

NETWORKS: list[tuple[Any, dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bias": False, "num_layers": 3}),
    (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
]


def texts(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in given]


def of_weights(call: Callable[[], Any]) -> bool:
    return any(
        each.startswith("RNN module weights are not part of single contiguous")
        for each in texts(call)
    )


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
@pytest.mark.parametrize("compute", [None, "meta"])
def test_modules_flatten_and_pieces_are_told(
    kind: Any, options: dict[str, Any], compute: Any
) -> None:
    with torchdevice.simulate(compute=compute):
        x, made = torch.rand(3, 2, 4, device="cuda"), kind(4, 4, **options)
        network = made.cuda()
        assert len({each.untyped_storage().data_ptr() for each in network.parameters()}) == 1
        assert not texts(lambda: network(x))
        # As on a GPU: a copy of a module has a memory for each weight.
        copied = copy.deepcopy(network)
        assert of_weights(lambda: copied(x))
        with torch.backends.cudnn.flags(enabled=False):
            assert not texts(lambda: copied(x))
        copied.flatten_parameters()
        assert not texts(lambda: copied(x))


@pytest.mark.parametrize(("kind", "options"), NETWORKS, ids=str)
def test_flattened_weights_keep_their_values_and_learn(kind: Any, options: dict[str, Any]) -> None:
    plain, x = kind(4, 4, **options), torch.rand(3, 2, 4)
    with torchdevice.simulate():
        there = copy.deepcopy(plain).cuda()
        for network, given in ((plain, x), (there, x.cuda())):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                network(given)[0].square().sum().backward()
                optimizer.step()
        for mine, wanted in zip(there.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), wanted)
        assert not texts(lambda: there(x.cuda()))


def test_autocast_and_devices_that_report_themselves_are_not_told() -> None:
    with torchdevice.simulate():
        network, x = nn.LSTM(4, 4).cuda(), torch.rand(3, 2, 4, device="cuda")
        with torch.autocast("cuda"):
            assert not texts(lambda: network(x))
    with torchdevice.simulate(identity="target"):
        assert not of_weights(lambda: nn.LSTM(4, 4).cuda()(torch.rand(3, 2, 4, device="cuda")))
