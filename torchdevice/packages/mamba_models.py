"""The parts of models of ``mamba_ssm``: fused norms, residual blocks and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.normalization import layer_norm_fn as of_flash_attn
from torchdevice.packages.registry import refuses, stands_in, widened

_INSTEAD = "Use the model of the transformers library, which has a path without CUDA."

refuses(
    "mamba_ssm.models.mixer_seq_simple.MambaLMHeadModel mamba_ssm.MambaLMHeadModel "
    "mamba_ssm.models.mixer_seq_simple.create_block mamba_ssm.utils.generation.decode "
    "mamba_ssm.utils.generation.update_graph_cache mamba_ssm.utils.hf.load_config_hf "
    "mamba_ssm.utils.hf.load_state_dict_hf",
    _INSTEAD,
)


# ---- normalizations ------------------------------------------------------------------------------


def _named(name: str) -> str:
    """Return a name in the module of this release, and in that of releases before 2."""
    return f"mamba_ssm.ops.triton.layer_norm.{name} mamba_ssm.ops.triton.layernorm.{name}"


@stands_in(_named("layer_norm_fn"))
def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the norm of dropped-out x plus a residual; with ``prenorm`` the sum too."""
    more = eps, dropout_p, rowscale, prenorm, residual_in_fp32, False, is_rms_norm
    return _NORM(x, weight, bias, residual, x1, weight1, bias1, *more, return_dropout_mask)


@stands_in(_named("rms_norm_fn"))
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """Return the root mean square normalization of the sum of x, after dropout, and a residual."""
    more = eps, dropout_p, rowscale, prenorm, residual_in_fp32, False, True
    return _NORM(x, weight, bias, residual, x1, weight1, bias1, *more, return_dropout_mask)


# Without its report: the program has called nothing of flash_attn.
_NORM: Any = of_flash_attn.__wrapped__  # type: ignore[attr-defined]


@stands_in(_named("RMSNorm"))
class RMSNorm(nn.Module):
    """The root mean square normalization of a sum with a residual."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        p = self.drop.p if self.drop is not None and self.training else 0.0
        more = self.eps, p, None, prenorm, residual_in_fp32, False, True
        return _NORM(x, self.weight, None, residual, None, None, None, *more)


# ---- blocks --------------------------------------------------------------------------------------


@stands_in("mamba_ssm.modules.block.Block")
class Block(nn.Module):
    """A mixer, and possibly a network after it, each behind a normalization of the residual.

    Args:
        dim: The size of the last dimension.
        mixer_cls: Makes the mixer from ``dim``.
        mlp_cls: Makes the network from ``dim``. ``torch.nn.Identity`` stands for none.
        norm_cls: Makes a normalization from ``dim``.
        fused_add_norm: Whether the residual is added and normalized by one function.
        residual_in_fp32: Whether the residual is kept in float32.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], Any],
        mlp_cls: Any,
        norm_cls: Callable[[int], Any] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm = norm_cls(dim)
        self.mixer = mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2 = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, (nn.LayerNorm, RMSNorm)):
            raise AssertionError("Only LayerNorm and RMSNorm are supported for fused_add_norm")

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        inference_params: Any = None,
        **mixer_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last part's output, and the residual, to which it is not yet added."""
        normed, residual = self._normed(self.norm, hidden_states, residual)
        out = self.mixer(normed, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            normed, residual = self._normed(self.norm2, out, residual)
            out = self.mlp(normed)
        return out, residual

    def _normed(
        self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum of x and the residual, and the sum."""
        if self.fused_add_norm:
            more = norm.eps, 0.0, None, True, self.residual_in_fp32, False
            given = x, norm.weight, norm.bias, residual, None, None, None
            return _NORM(*given, *more, isinstance(norm, RMSNorm))
        total = x if residual is None else x + residual
        normed = norm(total.to(norm.weight.dtype))
        return normed, widened(total)[0] if self.residual_in_fp32 else total

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> Any:
        """Return the states with which the mixer begins."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)


# ---- settings ------------------------------------------------------------------------------------


@stands_in("mamba_ssm.models.config_mamba.MambaConfig")
@dataclasses.dataclass
class MambaConfig:
    """The sizes of a model of Mamba blocks, by the package's names."""

    d_model: int = 2560
    d_intermediate: int = 0
    n_layer: int = 64
    vocab_size: int = 50277
    ssm_cfg: dict[str, Any] = dataclasses.field(default_factory=dict)
    attn_layer_idx: list[int] = dataclasses.field(default_factory=list)
    attn_cfg: dict[str, Any] = dataclasses.field(default_factory=dict)
    rms_norm: bool = True
    residual_in_fp32: bool = True
    fused_add_norm: bool = True
    pad_vocab_size_multiple: int = 8
    tie_embeddings: bool = True


@stands_in("mamba_ssm.utils.generation.InferenceParams")
@dataclasses.dataclass
class InferenceParams:
    """The states of a model's blocks between steps of a generation, and how far it is."""

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = dataclasses.field(default_factory=dict)
    lengths_per_sample: torch.Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin again, with other limits."""
        self.max_seqlen, self.max_batch_size = max_seqlen, max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@stands_in("mamba_ssm.utils.generation.GenerationMixin", Fidelity.UNSUPPORTED, _INSTEAD)
class GenerationMixin:
    """A base class of models that generate: calls of ``generate`` raise."""

    def allocate_inference_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: each model has its own."""
        raise NotImplementedError

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: nothing stands in for it."""
        refuse("mamba_ssm.utils.generation.GenerationMixin.generate", _INSTEAD)
