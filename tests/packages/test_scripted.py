"""Stand-ins that programs compile with TorchScript."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.packages import scripted

pytestmark = pytest.mark.one_engine


torch_scatter: Any = None


def summed(src: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return sums by index, by a stand-in that the compiler finds in the function's module."""
    return torch_scatter.scatter(src, index, 0, dim_size=3)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
def test_a_function_that_calls_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torchdevice.portable(target=target) as scope:
        stand_in = importlib.import_module("torch_scatter")
        monkeypatch.setitem(globals(), "torch_scatter", stand_in)
        script = torch.jit.script(summed)
        src = torch.arange(4.0, device="cuda", requires_grad=True)
        found = script(src, torch.tensor([0, 2, 0, 2], device="cuda"))
        (gradient,) = torch.autograd.grad(found.square().sum(), src)
        assert (found.tolist(), gradient.tolist()) == ([2, 0, 4], [4, 8, 4, 8])
        assert "torch_scatter.scatter" in str(scope.report())


def test_one_that_is_compiled_itself_keeps_its_defaults() -> None:
    with torchdevice.portable(target="cpu"):
        from torch_scatter import scatter_max
        from xformers.ops import memory_efficient_attention

        largest, places = torch.jit.script(scatter_max)(
            torch.arange(4.0), torch.tensor([0, 0, 1, 1])
        )
        assert (largest.tolist(), places.tolist()) == ([1, 3], [1, 3])
        q = torch.randn(1, 4, 2, 8)
        script = torch.jit.script(memory_efficient_attention)
        torch.testing.assert_close(script(q, q, q), memory_efficient_attention(q, q, q))


def test_a_module_with_a_module_of_a_package(tmp_path: Path) -> None:
    with torchdevice.portable(target="cpu"):
        from apex.normalization import FusedLayerNorm
        from flash_attn.ops.rms_norm import RMSNorm

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), FusedLayerNorm(4), RMSNorm(4))
        script, x = torch.jit.script(model), torch.randn(2, 4)
        torch.testing.assert_close(script(x), model(x))
        script(x).sum().backward()
        assert all(each.grad is not None for each in model.parameters())
        with pytest.raises(RuntimeError, match="Could not export Python function"):
            torch.jit.save(script, tmp_path / "model.pt")


def test_a_module_that_inherits_torch_s_forward_leaves_it_as_it_is(tmp_path: Path) -> None:
    class Inherits(torch.nn.Linear):
        """A module without a ``forward`` of its own."""

    before = dict(vars(torch.nn.Linear.forward)), torch.nn.Linear.forward.__annotations__
    scripted.module_in_scripts(Inherits)
    after = dict(vars(torch.nn.Linear.forward)), torch.nn.Linear.forward.__annotations__
    assert after == before and after[1] is before[1]
    module, x = Inherits(3, 2), torch.randn(4, 3)
    script = torch.jit.script(module)
    torch.jit.save(script, tmp_path / "model.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(x), module(x))
