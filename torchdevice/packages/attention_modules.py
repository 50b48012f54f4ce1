"""``flash_attn.modules``: layers around attention, with the package's names of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages import attention
from torchdevice.packages.attention import Rule
from torchdevice.packages.flash_attention import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torchdevice.packages.fused_dense import swiglu
from torchdevice.packages.registry import on_simulated_gpu, refuses, stands_in
from torchdevice.packages.rotary_embedding import RotaryEmbedding

_MHA, _MLP = "flash_attn.modules.mha", "flash_attn.modules.mlp"

_HIDDEN = -10000.0
"""The package's summand for the score of a key that a row does not see, without its kernels."""

_MODEL = "Use the model of the transformers library."
_PARALLEL = "Use torch.distributed.tensor.parallel.parallelize_module."

refuses(f"{_MHA}.ParallelMHA {_MLP}.ParallelMLP {_MLP}.ParallelGatedMlp", _PARALLEL)
refuses(
    "flash_attn.modules.block.Block flash_attn.modules.block.ParallelBlock",
    "Use torch.nn.TransformerEncoderLayer, or write the block with flash_attn.modules.mha.MHA.",
)
refuses(
    "flash_attn.modules.embedding.GPT2Embeddings flash_attn.modules.embedding.BertEmbeddings",
    "Use torch.nn.Embedding.",
)
refuses(
    "flash_attn.models.gpt.GPTModel flash_attn.models.gpt.GPTLMHeadModel "
    "flash_attn.models.bert.BertModel flash_attn.models.bert.BertEncoder "
    "flash_attn.models.bert.BertForPreTraining flash_attn.models.vit.VisionTransformer "
    "flash_attn.models.vit.vit_base_patch16_224 flash_attn.utils.generation.GenerationMixin "
    "flash_attn.utils.pretrained.state_dict_from_pretrained",
    _MODEL,
)
refuses(
    "flash_attn.utils.benchmark.benchmark_forward flash_attn.utils.benchmark.benchmark_backward "
    "flash_attn.utils.benchmark.benchmark_combined flash_attn.utils.benchmark.benchmark_all",
    "Use torch.utils.benchmark.",
)


# ---- attention -----------------------------------------------------------------------------------


@stands_in("flash_attn.flash_attn_triton.flash_attn_func")
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Return attention of q (batch, rows, heads, size), with a bias added to the scores.

    Args:
        q: (batch, rows, heads, size).
        k: (batch, keys, heads, size).
        v: (batch, keys, heads, size).
        bias: Of a shape that fits (batch, heads, rows, keys).
        causal: Whether row i sees the keys up to i.
        softmax_scale: The factor of the scores.
    """
    _check_half(q, k, v)
    _check_triton(q, bias)
    right = q.shape[1] - k.shape[1] if causal else None
    return attention.attend(q, k, v, Rule(softmax_scale, right=right, bias=bias)).out


def _check_triton(q: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise the errors of the kernels in Triton, on a simulated GPU.

    Raises:
        AssertionError: They do not take it.
    """
    if not on_simulated_gpu():
        return
    if q.shape[-1] > 128:
        raise AssertionError(f"the kernel takes heads of at most 128, and not of {q.shape[-1]}.")
    if bias is not None and bias.requires_grad:
        raise AssertionError("the kernel gives a bias no gradient. Detach the bias.")


def _check_half(*given: torch.Tensor) -> None:
    """Check that tensors for the kernels of a simulated GPU are in half precision.

    Raises:
        AssertionError: One is not.
    """
    half = torch.float16, torch.bfloat16
    other = [each.dtype for each in given if each.dtype not in half]
    if on_simulated_gpu() and other:
        raise AssertionError(f"the kernel takes {half}, and not {other[0]}.")


class _Attention(nn.Module):
    """Attention with its settings, and without parameters."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def _dropout(self) -> float:
        return self.drop.p if self.training else 0.0

    def _by_mask(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None,
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return attention of q to kv (batch, keys, 2, heads, size), of which a mask keeps some."""
        rows, keys = q.shape[1], kv.shape[1]
        bias = torch.zeros(q.shape[0], 1, rows, keys, device=q.device, dtype=torch.float32)
        if key_padding_mask is not None:
            bias = bias.masked_fill(~key_padding_mask[:, None, None], _HIDDEN)
        if self.causal if causal is None else causal:
            last = torch.full((), keys - rows, device=q.device)
            bias = bias + torch.where(_is_later(rows, keys, last), _HIDDEN, 0.0)
        rule = Rule(self.softmax_scale, bias=bias.to(q.dtype), dropout=self._dropout())
        keys_of, values = kv.unbind(2)
        return attention.attend(q, keys_of, values, rule).out


def _is_later(rows: int, keys: int, last: torch.Tensor) -> torch.Tensor:
    """Return for (rows, keys) whether a key comes after those that a row sees.

    Args:
        rows: The number of rows.
        keys: The number of keys.
        last: The last key that row 0 sees.
    """
    row = torch.arange(rows, device=last.device)[:, None]
    return torch.arange(keys, device=last.device) > row + last


class _Flash(_Attention):
    """Attention by the kernels, with their settings."""

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)
        self.alibi_slopes: torch.Tensor | None
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def _settings(self, causal: bool | None, *given: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of the functions."""
        _check_half(*given)
        return {
            "dropout_p": self._dropout(),
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "alibi_slopes": self.alibi_slopes,
            "window_size": self.window_size,
        }


@stands_in(f"{_MHA}.FlashSelfAttention")
class FlashSelfAttention(_Flash):
    """Attention within (batch, rows, 3, heads, size), or within sequences with ``cu_seqlens``."""

    def forward(
        self,
        qkv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Any:
        settings = self._settings(causal, qkv)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **settings)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **settings)  # type: ignore[arg-type]


@stands_in(f"{_MHA}.FlashCrossAttention")
class FlashCrossAttention(_Flash):
    """Attention of q (batch, rows, heads, size) to kv (batch, keys, 2, heads, size)."""

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:
        settings = self._settings(causal, q, kv)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **settings)
        lengths: Any = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        return flash_attn_varlen_kvpacked_func(q, kv, *lengths, **settings)


@stands_in(f"{_MHA}.SelfAttention")
class SelfAttention(_Attention):
    """Attention within (batch, rows, 3, heads, size). ``key_padding_mask`` keeps keys."""

    def forward(
        self,
        qkv: torch.Tensor,
        causal: bool | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._by_mask(qkv[:, :, 0], qkv[:, :, 1:], causal, key_padding_mask)


@stands_in(f"{_MHA}.CrossAttention")
class CrossAttention(_Attention):
    """Attention of q (batch, rows, heads, size) to kv (batch, keys, 2, heads, size)."""

    def forward(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        causal: bool | None = None,
        key_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not (self.causal if causal is None else causal):
            return self._by_mask(q, kv, causal, key_padding_mask)
        rows, keys = q.shape[1], kv.shape[1]
        # With fewer heads of keys and values, heads that follow each other share one.
        keys_of, values = kv.repeat_interleave(q.shape[2] // kv.shape[3], dim=3).unbind(2)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = torch.einsum("bthd,bshd->bhts", q, keys_of * scale)
        last = torch.full((1, 1, 1, 1), keys - rows, device=q.device)
        if key_padding_mask is not None:
            # The last row sees the last key that is kept.
            last = key_padding_mask.sum(-1)[:, None, None, None] - rows
            scores = scores + torch.where(key_padding_mask[:, None, None], 0.0, _HIDDEN)
        # Instead of the scores, so that a row without a key weighs all keys equally.
        scores = scores.masked_fill(_is_later(rows, keys, last), _HIDDEN)
        weights = self.drop(scores.softmax(-1, dtype=values.dtype))
        return torch.einsum("bhts,bshd->bthd", weights, values)


def alibi_slopes_of(heads: int) -> torch.Tensor:
    """Return each head's slope of ALiBi (arXiv 2108.12409): powers of ``2 ** (-8 / heads)``.

    Where the number is no power of 2, the heads beyond the last one take every second slope of
    twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, power + 1) * (8 / power)
    between = torch.arange(1, 2 * power + 1, 2)[: heads - power] * (4 / power)
    return 2.0 ** -torch.cat([exponents, between])


@stands_in(f"{_MHA}.MHA")
class MHA(nn.Module):
    """Attention with its linear maps.

    Args:
        embed_dim: The size of the input and of the result.
        num_heads: The number of heads.
        num_heads_kv: Of keys and values. Default: as many.
        cross_attn: Whether queries see another input.
        qkv_proj_bias: Whether the maps before attention have biases.
        out_proj_bias: Whether the map after it has one.
        dropout: The probability with which a weight is left out.
        softmax_scale: The factor of the scores.
        causal: Whether a row sees only the keys up to its own.
        layer_idx: The number of the layer, which only generation needs.
        dwconv: Refused.
        rotary_emb_dim: How much of a head is rotated; 0 for nothing.
        rotary_emb_base: The base of the rotation's wavelengths.
        rotary_emb_scale_base: Refused.
        rotary_emb_interleaved: Whether rotated pairs are neighbours.
        use_alibi: Whether scores fall with the distance.
        window_size: How many keys before and after its own a row sees.
        fused_bias_fc: Means nothing here.
        use_flash_attn: Whether attention is that of flash_attn's functions.
        return_residual: Whether the input is returned too.
        checkpointing: Whether attention is recomputed for gradients.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if dwconv:
            refuse(f"{_MHA}.MHA(dwconv=True)", "Leave dwconv out, or write the layer in torch.nn.")
        self.embed_dim = embed_dim
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim = embed_dim // num_heads
        self._check(use_alibi, window_size)
        if rotary_emb_dim > 0:
            base, scale = rotary_emb_base, rotary_emb_scale_base
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, base, rotary_emb_interleaved, scale, device=device
            )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        both = 2 * self.head_dim * self.num_heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **place)
            self.Wkv = nn.Linear(embed_dim, both, bias=qkv_proj_bias, **place)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + both, bias=qkv_proj_bias, **place)
        settings = causal, softmax_scale, dropout
        self.inner_attn: _Attention
        self.inner_cross_attn: _Attention
        if use_flash_attn:
            slopes = alibi_slopes_of(num_heads).to(device) if use_alibi else None
            self.inner_attn = FlashSelfAttention(*settings, window_size, slopes)
            self.inner_cross_attn = FlashCrossAttention(*settings, window_size, slopes)
        else:
            self.inner_attn = SelfAttention(*settings)
            self.inner_cross_attn = CrossAttention(*settings)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **place)

    def _check(self, use_alibi: bool, window_size: tuple[int, int]) -> None:
        """Check settings that do not fit each other.

        Raises:
            AssertionError: Some do not.
        """
        if self.num_heads % self.num_heads_kv or self.embed_dim % self.num_heads:
            raise AssertionError(
                f"embed_dim={self.embed_dim} must be a multiple of num_heads={self.num_heads}, "
                f"which must be one of num_heads_kv={self.num_heads_kv}."
            )
        if self.rotary_emb_dim > 0 and self.cross_attn:
            raise AssertionError("attention to another input cannot have rotary embeddings.")
        if not self.use_flash_attn and (use_alibi or tuple(window_size) != (-1, -1)):
            raise AssertionError("use_alibi and window_size need use_flash_attn=True.")

    def forward(
        self,
        x: torch.Tensor,
        x_kv: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the output of (batch, rows, size), or of (rows of all sequences, size).

        Args:
            x: The input.
            x_kv: What is attended to, with ``cross_attn``. Default: the input.
            key_padding_mask: Which keys count, without ``use_flash_attn``.
            cu_seqlens: Where each sequence begins, and the end of the last.
            max_seqlen: The most rows of a sequence.
            mixer_subset: Which rows attend, with ``cross_attn``.
            inference_params: Refused.
        """
        if inference_params is not None:
            refuse(f"{_MHA}.MHA(inference_params=...)", _MODEL)
        if cu_seqlens is not None and (not self.use_flash_attn or self.rotary_emb_dim):
            raise AssertionError("cu_seqlens need use_flash_attn=True and rotary_emb_dim=0.")
        if key_padding_mask is not None and self.use_flash_attn:
            raise AssertionError("key_padding_mask needs use_flash_attn=False.")
        if self.use_flash_attn:
            kwargs |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        else:
            kwargs["key_padding_mask"] = key_padding_mask
        inner, given = self._before(x, x_kv, mixer_subset)
        if self.checkpointing:
            context = checkpoint(inner, *given, use_reentrant=False, **kwargs)
        else:
            context = inner(*given, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _before(
        self, x: torch.Tensor, x_kv: torch.Tensor | None, subset: Any
    ) -> tuple[_Attention, tuple[torch.Tensor, ...]]:
        """Return the attention, and queries, keys and values as it takes them."""
        heads = self.num_heads, self.num_heads_kv
        if self.cross_attn:
            q = self.Wq(x if subset is None else x[:, subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            joined = self.Wqkv(x)
            if heads[0] == heads[1]:
                qkv = joined.unflatten(-1, (3, heads[0], self.head_dim))
                if self.rotary_emb_dim:
                    qkv = self.rotary_emb(qkv)
                return self.inner_attn, (qkv,)
            q, kv = joined.split([self.embed_dim, joined.shape[-1] - self.embed_dim], -1)
        q = q.unflatten(-1, (heads[0], self.head_dim))
        kv = kv.unflatten(-1, (2, heads[1], self.head_dim))
        if self.rotary_emb_dim:
            # The rotation writes them, and they are views of one tensor.
            q, kv = self.rotary_emb(q.clone(), kv.clone())
        return self.inner_cross_attn, (q, kv)


# ---- networks ------------------------------------------------------------------------------------


@stands_in(f"{_MLP}.Mlp")
class Mlp(nn.Module):
    """Two linear maps with an activation between them."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Any = functional.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = in_features * 4 if hidden_features is None else hidden_features
        size = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, size, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.fc2(self.activation(self.fc1(x)))
        return (out, x) if self.return_residual else out


@stands_in(f"{_MLP}.GatedMlp")
class GatedMlp(nn.Module):
    """Two linear maps, between them half of the values times the activation of the others."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Any = functional.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        asked = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-asked // multiple_of) * multiple_of
        size = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, size, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> Any:
        values, gate = self.fc1(x).chunk(2, -1)
        if self.activation is functional.silu:
            hidden = swiglu(gate, values)
        else:
            hidden = values * self.activation(gate)
        out = self.fc2(hidden)
        return (out, x) if self.return_residual else out
