"""Tensors that are sent to other processes."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import torchdevice
from torchdevice.errors import ScopeError


class TestTensorsForOtherProcesses:
    """What a queue of ``torch.multiprocessing`` pickles, and what the other process makes of it."""

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
    def test_they_arrive_on_the_same_device(
        self, devices: torchdevice.Scope, kind: type[torch.Tensor], requires_grad: bool
    ) -> None:
        x = torch.arange(6.0, device="cuda:1").view(2, 3)
        sent = (
            torch.nn.Parameter(x, requires_grad)
            if kind is torch.nn.Parameter
            else x.requires_grad_(requires_grad)
        )
        found = pickle.loads(ForkingPickler.dumps(sent))
        assert type(found) is kind and found.device == torch.device("cuda", 1)
        assert torch.equal(found, sent) and found.requires_grad is requires_grad and found.is_leaf
        (entry,) = [
            each
            for each in devices.journal.entries
            if each.requested == "a tensor for another process"
        ]
        assert (entry.count, entry.bytes) == (1, 24)

    def test_what_torch_refuses_to_send_is_refused(self, devices: torchdevice.Scope) -> None:
        for device in ("cuda", "cpu"):
            x = torch.ones(2, device=device, requires_grad=True)
            with pytest.raises(
                RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"
            ):
                ForkingPickler.dumps(x * 2)

    def test_a_process_without_a_scope_is_told_to_enter_one(self) -> None:
        with torchdevice.simulate():
            x = torch.ones(2, device="cuda")
        # As the thread of a queue does, which is in no scope.
        sent = [ForkingPickler.dumps(x) for _ in range(2)]
        with pytest.raises(ScopeError, match="Start the process in a scope, or after enable"):
            pickle.loads(sent[0])
        with torchdevice.simulate():
            assert pickle.loads(sent[1]).tolist() == [1, 1]
