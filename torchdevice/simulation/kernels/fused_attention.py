"""CUDA's fused attention kernels, which programs and jagged tensors also call, as formulas.

Arguments and results go by their names in torch's schemas, and are those of
aten/src/ATen/native/transformers/cuda/attention.cu. A packed batch is one sequence whose parts do
not see each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from torchdevice.calls.lacking.missing_operators import overload_of
from torchdevice.kernel.stand_ins import given_to
from torchdevice.simulation import device_generators, policy
from torchdevice.simulation.kernels.cpu_kernels import CpuAliases
from torchdevice.simulation.kernels.pipeline import Pipeline

_KERNELS = (
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_backward",
    "_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
)

_NAMES = {
    "attn_bias": "bias",
    "cu_seqlens_k": "cum_seq_k",
    "cu_seqlens_q": "cum_seq_q",
    "custom_mask_type": "is_causal",
    "grad_out_": "grad_out",
    "log_sumexp": "logsumexp",
    "max_seqlen_batch_k": "max_k",
    "max_seqlen_batch_q": "max_q",
    "max_seqlen_k": "max_k",
    "max_seqlen_q": "max_q",
    "philox_seed": "rng_state",
    "softmax_logsumexp": "logsumexp",
}
"""The name of an argument or a result in some kernels -> its name in the others."""

_REFUSED = ("alibi_slopes", "block_table", "seqlen_k", "seqused_k")
"""Arguments that are not computed."""


class _Call:
    """A call's arguments by first name, heads before lengths, in single precision or better."""

    def __init__(self, op: Any, args: Any, kwargs: Any):
        given = {
            _NAMES.get(each, each): value for each, value in given_to(op, args, kwargs).items()
        }
        refused = next((each for each in _REFUSED if given.get(each) is not None), None)
        if refused is not None:
            raise NotImplementedError(
                f"{op} is not simulated with {refused!r}. Call it without {refused!r}."
            )
        self.given = given
        self._name = op._schema.name
        self.is_turned = "_scaled_dot_product_" in self._name
        if self.is_turned:
            self.ends = [None, None]
        else:
            self.ends = [given.get("cum_seq_q"), given.get("cum_seq_k")]
        self.q = self.turned(given["query"])
        self.k = self._for_each_head(given["key"])
        self.v = self._for_each_head(given["value"])
        self.scale = self.q.size(-1) ** -0.5 if given.get("scale") is None else given["scale"]

    def _for_each_head(self, given: torch.Tensor) -> torch.Tensor:
        """Return keys or values with as many heads as the queries have."""
        keys = self.turned(given)
        return keys.repeat_interleave(self.q.size(1) // keys.size(1), 1)

    def turned(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 4:
            tensor = tensor.unsqueeze(0)
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return tensor if self.is_turned else tensor.transpose(1, 2)

    def back(self, result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        result = result.transpose(1, 2).contiguous().to(like.dtype)
        result = result.transpose(1, 2) if self.is_turned else result.view(*like.shape[:-1], -1)
        keeps_strides = "efficient" not in self._name and result.shape == like.shape
        return torch.empty_like(like).copy_(result) if keeps_strides else result

    def _places(self, keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's sequence, and its place from that sequence's end or beginning."""
        tensor = self.k if keys else self.q
        length = tensor.size(-2)
        ends = self.ends[keys]
        ends = torch.tensor([0, length]) if ends is None else ends.long()
        rows = torch.arange(length)
        sequences = torch.bucketize(rows, ends[1:], right=True).clamp(max=len(ends) - 2)
        at_end = "flash" in self._name or self.given.get("is_causal") == 2
        origins = ends[1:] if at_end else ends[:-1]
        return sequences, rows - origins[sequences]

    def _hidden(self) -> torch.Tensor:
        """Return a mask of the keys that each row does not see: (rows, keys)."""
        sequences, places = self._places(False)
        of_keys, places_of_keys = self._places(True)
        away = places_of_keys - places[:, None]
        hidden = of_keys != sequences[:, None]
        left, right = self.given.get("window_size_left"), self.given.get("window_size_right")
        if self.given.get("is_causal"):
            right = 0
        if right is not None and right >= 0:
            hidden = hidden | (away > right)
        if left is not None and left >= 0:
            hidden = hidden | (-away > left)
        return hidden

    def _kept(self, scores: torch.Tensor) -> torch.Tensor:
        """Return dropout's factors of the weights."""
        dropout = self.given.get("dropout_p")
        if not dropout:
            return torch.ones(())
        # A kernel is given both in one tensor, or the offset in another.
        state = [
            *self.given["rng_state"].view(torch.int64).flatten(),
            self.given.get("philox_offset"),
        ]
        numbers = _numbers(seed=state[0], offset=state[1])
        kept = torch.empty_like(scores).bernoulli_(1 - dropout, generator=numbers)
        return kept / (1 - dropout)

    def weights(self) -> tuple[torch.Tensor, ...]:
        """Return the product's softmax, the logarithms of its sums, and the dropout factors."""
        scores = self.q @ self.k.mT * self.scale
        bias = self.given.get("bias")
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(self._hidden(), -math.inf)
        sums = scores.logsumexp(-1)
        weights = (scores - sums[..., None]).exp().nan_to_num(0)  # NaN where a query may see no key
        return weights, sums, self._kept(scores)

    def logarithms(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the logarithms of sums in a kernel's shape."""
        sums = sums.float()
        ends = self.ends[0]
        if "cudnn" in self._name:
            return sums[..., None]
        if "efficient" not in self._name:
            return sums if ends is None else sums[0]
        if ends is not None:
            parts = list(sums[0].mT.tensor_split(ends[1:-1].long()))
            sums = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).mT
        wanted = 0
        if self.given.get("compute_log_sumexp"):
            rows = self.given.get("max_q") or sums.size(-1)
            wanted = -(-rows // 32) * 32  # in tiles of 32
        return F.pad(sums, (0, wanted - sums.size(-1)), value=math.inf)


def _numbers(seed: Any, offset: Any) -> torch.Generator:
    """Return the generator from which a kernel draws that begins at an offset of a seed."""
    return torch.Generator().manual_seed(device_generators.mixed(int(seed), int(offset)))


def _uniform(like: torch.Tensor, dropout_p: float, seed: int, offset: int) -> torch.Tensor:
    """Return numbers above ``dropout_p`` where dropout, at a seed and an offset, keeps a weight."""
    numbers = _numbers(seed, offset)
    kept = torch.empty_like(like).bernoulli_(1 - dropout_p, generator=numbers).bool()
    # Rounding must not reach `dropout_p`.
    drawn = torch.rand(like.shape, generator=numbers).clamp(max=0.999)
    return torch.where(kept, 1 - drawn * (1 - dropout_p), drawn * dropout_p)


def _drops(op: Any, args: Any, kwargs: Any) -> bool:
    return bool(given_to(op, args, kwargs).get("dropout_p"))


def _forward(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    if _drops(op, args, kwargs):
        seed = torch.randint(2**62, (2,))
    else:
        seed = torch.zeros(2, dtype=torch.int64)
    call = _Call(op, args, {**kwargs, "rng_state": seed})
    weights, sums, kept = call.weights()
    mask = call.given["query"].new_empty(0)
    # In tiles of 128, negative where a weight was dropped.
    if call.given.get("return_debug_mask") and kept.dim():
        tiles = (0, -call.k.size(2) % 128, 0, -call.q.size(2) % 128)
        mask = F.pad(weights.where(kept > 0, -weights), tiles).to(mask.dtype)
    results = {
        "output": call.back(weights * kept @ call.v, call.given["query"]),
        "logsumexp": call.logarithms(sums),
        "max_q": call.given.get("max_q") or call.q.size(2),
        "max_k": call.given.get("max_k") or call.k.size(2),
        "rng_state": seed.view(torch.uint64) if "flash" in op._schema.name else seed[0],
        "unused": torch.zeros((), dtype=torch.uint64),
        "philox_offset": seed[1],
        "debug_attn_mask": mask,
    }
    return tuple(results.get(_NAMES.get(each.name, each.name)) for each in op._schema.returns)


def _backward(op: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    call = _Call(op, args, kwargs)
    if call.given["grad_out"] is None:
        return (None,) * len(op._schema.returns)
    weights, _, kept = call.weights()
    grad, bias = call.turned(call.given["grad_out"]), call.given.get("bias")
    above = grad @ call.v.mT * kept
    above = weights * (above - (above * weights).sum(-1, keepdim=True))
    found = {
        "query": above @ call.k * call.scale,
        "key": above.mT @ call.q * call.scale,
        "value": (weights * kept).mT @ grad,
    }
    results: list[Any] = []
    for name, gradient in found.items():
        given = call.given[name]
        heads = call.turned(given).size(1)  # several heads of queries may share one
        results.append(call.back(gradient.unflatten(1, (heads, -1)).sum(2), given))
    results.append(None if bias is None else above.sum_to_size(bias.shape).to(bias.dtype))
    return tuple(results[: len(op._schema.returns)])


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    if not policy.stands_for_cuda():
        return Pipeline(op).run(*args, **kwargs)  # which refuses what the device lacks
    backward = op._schema.name.endswith("backward")
    draws = not backward and _drops(op, args, kwargs)
    formula = functools.partial(_backward if backward else _forward, op)
    return CpuAliases(formula, random=device_generators.from_default if draws else None).call(
        args, kwargs
    )


def _fill_mask(mask: torch.Tensor, *given: Any) -> torch.Tensor:
    return mask.copy_(CpuAliases(_uniform).call((mask, *given), {}))


KERNELS: dict[str, Callable[..., Any]] = {
    "_fill_mem_eff_dropout_mask_": _fill_mask,
    **{each: functools.partial(_run, overload_of(each)) for each in _KERNELS},
}
"""The kernels of the operators by their names."""
