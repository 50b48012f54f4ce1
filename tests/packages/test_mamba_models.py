"""What models of mamba_ssm are made of, against the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import drawn, same_with_gradients

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


def normed(x: torch.Tensor, norm: Any, is_rms: bool) -> torch.Tensor:
    """Return the normalized rows of x, by the definition."""
    centred = x if is_rms else x - x.mean(-1, keepdim=True)
    found = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
    return found if norm.bias is None else found + norm.bias


class Mixer(torch.nn.Linear):
    """A mixer without a memory, which takes the arguments of one that has a memory."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, dtype=torch.float64)

    def forward(self, x: torch.Tensor, inference_params: Any = None) -> torch.Tensor:
        assert inference_params is None
        return super().forward(x)

    def allocate_inference_cache(self, *args: Any, dtype: Any) -> Any:
        return (*args, dtype)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_rms", [False, True])
@pytest.mark.parametrize("has_network", [False, True])
def test_block(fused: bool, is_rms: bool, has_network: bool) -> None:
    from mamba_ssm.modules.block import Block
    from mamba_ssm.ops.triton.layer_norm import RMSNorm

    kind: Any = RMSNorm if is_rms else torch.nn.LayerNorm
    mlp = Mixer if has_network else torch.nn.Identity
    block = Block(4, Mixer, mlp, kind, fused_add_norm=fused, residual_in_fp32=True).double()
    x, before = drawn(2, 3, 4), drawn(2, 3, 4)
    out, residual = block(x, before)
    total = x + before
    expected = normed(total, block.norm, is_rms) @ block.mixer.weight.T + block.mixer.bias
    if has_network:
        total = total + expected
        expected = normed(total, block.norm2, is_rms) @ block.mlp.weight.T + block.mlp.bias
    same_with_gradients(out, expected, (x, before, *block.parameters()))
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(block(x)[1], x if not has_network else block(x, x * 0)[1])
    assert block.allocate_inference_cache(2, 8) == (2, 8, None)


def test_normalizations_of_both_releases() -> None:
    from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn
    from mamba_ssm.ops.triton.layernorm import layer_norm_fn as older
    from mamba_ssm.ops.triton.layernorm import rms_norm_fn

    assert older is layer_norm_fn
    layer = RMSNorm(4, eps=1e-3).double()
    x, residual = drawn(3, 4), drawn(3, 4)
    expected = normed(x + residual, layer, True)
    found, total = layer(x, residual, prenorm=True)
    same_with_gradients(found, expected, (x, residual, layer.weight))
    torch.testing.assert_close(total, x + residual)
    given = x, layer.weight, None, residual
    torch.testing.assert_close(rms_norm_fn(*given, eps=1e-3), expected)
    torch.testing.assert_close(layer_norm_fn(*given, eps=1e-3, is_rms_norm=True), expected)


def test_settings_and_what_is_refused() -> None:
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.utils.generation import GenerationMixin, InferenceParams

    assert MambaConfig(d_model=8) == MambaConfig(8) and MambaConfig().ssm_cfg == {}
    states = InferenceParams(4, 2, seqlen_offset=3, lengths_per_sample=torch.ones(2))
    states.reset(5, 1)
    assert (states.max_seqlen, states.max_batch_size, states.seqlen_offset) == (5, 1, 0)
    assert states.lengths_per_sample.tolist() == [0, 0]
    with pytest.raises(torchdevice.errors.NotSupportedError, match="transformers"):
        GenerationMixin().generate()
    with pytest.raises(NotImplementedError):
        GenerationMixin().allocate_inference_cache()
