"""``mamba_ssm.Mamba``: the block around the selective state space (arXiv 2312.00752, figure 3).

The names of its parameters are the package's, so that checkpoints fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdevice.packages.causal_convolution import causal_conv1d_update, of_channels
from torchdevice.packages.registry import stands_in, widened
from torchdevice.packages.selective_scan import scanned, selective_state_update

_MODULE = "mamba_ssm.ops.selective_scan_interface"


@stands_in(f"{_MODULE}.mamba_inner_fn")
def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
) -> torch.Tensor:
    """Return a block's output (batch, length, size) for xz (batch, 2 channels, length)."""
    x, z = xz.chunk(2, 1)
    x = of_channels(x, conv1d_weight.squeeze(1), conv1d_bias, activation="silu")
    size = A.shape[-1] * (2 if A.is_complex() else 1)
    rank = delta_proj_weight.shape[1]
    chosen = functional.linear(x.transpose(1, 2), x_proj_weight)
    step, rest = chosen[..., :rank], chosen[..., rank:]
    delta = functional.linear(step, delta_proj_weight).transpose(1, 2)
    if B is None:
        B, rest = _of_steps(rest[..., :size], B_proj_bias, A), rest[..., size:]
    if C is None:
        C = _of_steps(rest[..., :size], C_proj_bias, A)
    y = scanned(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    return functional.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def _of_steps(projected: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor) -> torch.Tensor:
    """Return B or C of each step (batch, size, length) from its projection (batch, length, size).

    With a complex A the projection has pairs of real numbers, and the result too: (batch, size, 2
    length).
    """
    projected = projected if bias is None else projected + bias
    if not a.is_complex():
        return projected.transpose(1, 2)
    return projected.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(2)


@stands_in("mamba_ssm.modules.mamba_simple.Mamba mamba_ssm.Mamba")
class Mamba(nn.Module):
    """A Mamba block: projection, short convolution, gated selective state space, projection.

    Args:
        d_model: The size of the input and the result.
        d_state: The size of the state of each channel.
        d_conv: The width of the convolution.
        expand: How many times as many channels the block has inside.
        dt_rank: The rank of the projection of step sizes. Default: a sixteenth of ``d_model``.
        dt_min: The least step size at the start.
        dt_max: The largest.
        dt_init: "random" or "constant": the weight of the projection of step sizes at the start.
        dt_scale: The factor of that weight.
        dt_init_floor: The bound of step sizes at the start.
        conv_bias: Whether the convolution has a bias.
        bias: Whether the projections have one.
        use_fast_path: Means nothing here.
        layer_idx: The place of the block in a model, the key of its state in ``inference_params``.
        device: Where the parameters are.
        dtype: Their dtype.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: int = 2,
        dt_rank: int | str = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.expand = expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if isinstance(dt_rank, str) else dt_rank
        self.use_fast_path, self.layer_idx = use_fast_path, layer_idx
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **place)
        self.conv1d = nn.Conv1d(
            self.d_inner,
            self.d_inner,
            d_conv,
            groups=self.d_inner,
            padding=d_conv - 1,
            bias=conv_bias,
            **place,
        )
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **place)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **place)
        self._set_steps(dt_init, dt_scale, dt_min, dt_max, dt_init_floor)
        # Kept in float32, and out of weight decay, as published.
        rates = torch.arange(1, d_state + 1, dtype=torch.float32, device=device).repeat(
            self.d_inner, 1
        )
        self.A_log = nn.Parameter(torch.log(rates))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device))
        for parameter in (self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def _set_steps(self, init: str, scale: float, least: float, most: float, floor: float) -> None:
        """Spread the initial step sizes evenly on a logarithmic scale between two bounds."""
        bound = self.dt_rank**-0.5 * scale
        if init not in ("random", "constant"):
            raise NotImplementedError(f"dt_init={init!r} is not known. Use 'random' or 'constant'.")
        if init == "random":
            nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        else:
            nn.init.constant_(self.dt_proj.weight, bound)
        spread = torch.rand(self.d_inner, device=self.dt_proj.bias.device) * (
            math.log(most) - math.log(least)
        )
        steps = torch.exp(spread + math.log(least)).clamp(min=floor)
        with torch.no_grad():
            # The inverse of softplus.
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))
        self.dt_proj.bias._no_reinit = True  # type: ignore[attr-defined]

    def forward(self, hidden_states: torch.Tensor, inference_params: Any = None) -> torch.Tensor:
        """Return the output of (batch, length, size). ``inference_params`` keeps the state."""
        state = None
        if inference_params is not None:
            state = self._state_of(inference_params, hidden_states.shape[0])
            if inference_params.seqlen_offset > 0:
                return self.step(hidden_states, *state)[0]
        xz = self.in_proj(hidden_states).transpose(1, 2)
        (skip,) = widened(self.D)
        (step_bias,) = widened(self.dt_proj.bias)
        if state is None:
            weights = self.conv1d.weight, self.conv1d.bias, self.x_proj.weight, self.dt_proj.weight
            last = self.out_proj.weight, self.out_proj.bias
            return mamba_inner_fn(xz, *weights, *last, self._rates(), D=skip, delta_bias=step_bias)
        x, z = xz.chunk(2, 1)
        conv_state, ssm_state = state
        conv_state.copy_(functional.pad(x, (self.d_conv - x.shape[-1], 0)))
        x = of_channels(x, self.conv1d.weight.squeeze(1), self.conv1d.bias, activation="silu")
        delta, b, c = self._chosen(x.transpose(1, 2))
        given = (
            delta.transpose(1, 2),
            self._rates(),
            b.transpose(1, 2),
            c.transpose(1, 2),
            skip,
            z,
        )
        y, last = scanned(x, *given, step_bias, True, True)
        ssm_state.copy_(last)
        return self.out_proj(y.transpose(1, 2))

    def _rates(self) -> torch.Tensor:
        return -torch.exp(*widened(self.A_log))

    def _chosen(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return step sizes, B and C of values (..., channels)."""
        step, b, c = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], -1)
        return functional.linear(step, self.dt_proj.weight), b, c

    def step(
        self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return one step's output (batch, 1, size), and the states, updated in place.

        Raises:
            ValueError: There is more than one step.
        """
        if hidden_states.shape[1] != 1:
            raise ValueError(
                f"{hidden_states.shape[1]} steps were given. Give one step of (batch, 1, size) at "
                "a time."
            )
        x, z = self.in_proj(hidden_states.squeeze(1)).chunk(2, -1)
        x = causal_conv1d_update(
            x, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, "silu"
        )
        delta, b, c = self._chosen(x)
        y = selective_state_update(
            ssm_state, x, delta, self._rates(), b, c, self.D, z, self.dt_proj.bias, True
        )
        return self.out_proj(y)[:, None], conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states of so many sequences before their first step, which are zeros."""
        weight = self.conv1d.weight
        place: dict[str, Any] = {
            "device": weight.device,
            "dtype": weight.dtype if dtype is None else dtype,
        }
        conv_state = torch.zeros(batch_size, self.d_inner, self.d_conv, **place)
        return conv_state, torch.zeros(batch_size, self.d_inner, self.d_state, **place)

    def _state_of(self, inference_params: Any, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layer_idx is None:
            raise ValueError(
                "the block has no layer_idx, the key of its state in inference_params. Give "
                "layer_idx."
            )
        kept = inference_params.key_value_memory_dict
        if self.layer_idx not in kept:
            kept[self.layer_idx] = self.allocate_inference_cache(batch, 0)
        return kept[self.layer_idx]
