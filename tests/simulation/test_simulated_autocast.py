"""Autocast on simulated devices: CUDA's policies, and its cache of cast weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice


class TestAutocast:
    def test_cudas_policies(self, devices: torchdevice.Scope) -> None:
        x = torch.randn(4, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            half = x @ x
            assert (
                half.dtype is torch.float16
                and torch.nn.functional.linear(x, x).dtype is torch.float16
            )
            assert torch.nn.Conv1d(4, 4, 1).cuda()(x).dtype is torch.float16
            for function in (
                torch.exp,
                torch.sum,
                torch.cumsum,
                torch.nn.functional.layer_norm,
                torch.norm,
            ):
                arguments = {torch.cumsum: (0,), torch.nn.functional.layer_norm: ((4,),)}.get(
                    function, ()
                )
                assert function(half, *arguments).dtype is torch.float32, function
            assert (
                half.softmax(0).dtype is torch.float32
                and half.softmax(0, dtype=torch.float16).dtype is torch.float16
            )
            assert (
                torch.addcmul(half, x, half).dtype is torch.float32
                and (half + half).dtype is torch.float16
            )
            assert (x.double() @ x.double()).dtype is torch.float64
            with pytest.raises(RuntimeError, match="are unsafe to autocast"):
                torch.nn.functional.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        assert (x @ x).dtype is torch.float32

    def test_a_weight_is_cast_once_in_a_region(self, devices: torchdevice.Scope) -> None:
        weight = torch.nn.Parameter(torch.randn(4, 4, device="cuda"))
        x = torch.randn(2, 4, device="cuda")

        def casts(function: Callable[[], Any]) -> int:
            counted = 0

            class Counting(TorchDispatchMode):
                def __torch_dispatch__(
                    self, func: Any, types: Any, args: Any = (), kwargs: Any = None
                ) -> Any:
                    nonlocal counted
                    counted += (
                        func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape
                    )
                    return func(*args, **kwargs or {})

            with Counting():
                function()
            return counted

        def twice(**options: Any) -> None:
            with torch.autocast("cuda", dtype=torch.float16, **options):
                (x @ weight) @ weight

        def nested() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                twice()
                with torch.autocast("cuda", enabled=False):
                    assert (x @ weight).dtype is torch.float32
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    assert (x @ weight).dtype is torch.bfloat16
                twice()

        assert casts(twice) == 1 and casts(twice) == 1
        assert casts(lambda: twice(cache_enabled=False)) == 2
        assert casts(nested) == 2  # one for each dtype
        weight.requires_grad_(False)
        assert casts(twice) == 2
        weight.requires_grad_()

        def changed() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                first = x @ weight
                torch.clear_autocast_cache()
                weight.data.mul_(2)
                assert torch.equal(x @ weight, first * 2)

        assert casts(changed) == 2

    def test_gradients_through_a_cached_cast(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 4, device="cuda"))
        x, found = torch.randn(2, 4, device="cuda"), []
        for cached in (True, False):
            for _ in range(2):
                weight.grad = None
                with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached):
                    loss = ((x @ weight) @ weight).float().sum()
                loss.backward()
                found.append(weight.grad.clone())
        assert (
            all(torch.allclose(each, found[0], atol=0.05) for each in found)
            and found[0].dtype is torch.float32
        )
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])

    @pytest.mark.usefixtures("no_collections")
    def test_cached_casts_keep_no_memory(self, devices: torchdevice.Scope) -> None:
        weight = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
        x = torch.randn(2, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.float16), torch.no_grad():
            y = x @ weight
            assert torch.cuda.memory_allocated() - before >= weight.numel() * 2
            torch.nn.Parameter(torch.zeros(512, 512, device="cuda")) @ y.t()
        del y
        assert torch.cuda.memory_allocated() == before
        region = torch.autocast("cuda", dtype=torch.float16)
        with torchdevice.simulate(), region:
            x @ weight
        assert torch.cuda.memory_allocated() == before

    def test_training_with_a_scaler(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)
        ).cuda()
        x = torch.randn(32, 8, device="cuda")
        y = x.sum(1, keepdim=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda")
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2
