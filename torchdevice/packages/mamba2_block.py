"""``mamba_ssm.Mamba2``: the block around the state space of Mamba2 (arXiv 2405.21060, figure 6).

The names of its parameters are the package's, so that checkpoints fit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.causal_convolution import (
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from torchdevice.packages.gated_normalization import RMSNorm
from torchdevice.packages.registry import stands_in, widened
from torchdevice.packages.selective_scan import selective_state_update
from torchdevice.packages.state_space_duality import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

_States = tuple[torch.Tensor, torch.Tensor]


@stands_in("mamba_ssm.modules.mamba2.Mamba2 mamba_ssm.Mamba2")
class Mamba2(nn.Module):
    """A Mamba2 block: projection, short convolution, state space, gated norm, projection.

    Args:
        d_model: The size of the input and the result.
        d_state: The size of the state of each channel.
        d_conv: The width of the convolution.
        conv_init: The bound of the convolution's weight at the start. Default: torch's.
        expand: How many times as many channels the block has inside.
        headdim: The size of a head.
        d_ssm: How many channels the state space has; the others are a gated layer beside it.
            Default: all.
        ngroups: How many groups of heads have a B and a C of their own.
        A_init_range: The bounds of the decay at the start.
        D_has_hdim: Whether ``D`` has a number for each channel, and not for each head.
        rmsnorm: Whether the gate comes with a normalization.
        norm_before_gate: Whether the gate comes after it.
        dt_min: The least step size at the start.
        dt_max: The largest.
        dt_init_floor: The bound of step sizes at the start.
        dt_limit: The smallest step and the largest.
        bias: Whether the projections have a bias.
        conv_bias: Whether the convolution has one.
        chunk_size: How many steps are computed at once.
        use_mem_eff_path: Means nothing here.
        layer_idx: The place of the block in a model, the key of its state in ``inference_params``.
        process_group: Not stood in for: a block whose heads are in several processes.
        sequence_parallel: Means nothing without ``process_group``.
        device: Where the parameters are.
        dtype: Their dtype.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if process_group is not None:
            refuse(
                "mamba_ssm.Mamba2(process_group=...)", "Use torch.distributed.fsdp, or one process."
            )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model = d_model
        self.d_state = d_state
        self.d_conv = d_conv
        self.conv_init = conv_init
        self.expand = expand
        self.headdim = headdim
        self.ngroups = ngroups
        self.layer_idx = layer_idx
        self.d_inner = expand * d_model
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        if self.d_ssm % headdim:
            raise AssertionError(
                f"headdim={headdim} does not divide the {self.d_ssm} channels of the state space."
            )
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim = D_has_hdim
        self.rmsnorm = rmsnorm
        self.norm_before_gate = norm_before_gate
        self.dt_limit = dt_limit
        self.chunk_size = chunk_size
        self.use_mem_eff_path = use_mem_eff_path
        self.activation = "silu"
        channels = self.d_ssm + 2 * ngroups * d_state
        inside = 2 * self.d_inner + 2 * ngroups * d_state + self.nheads
        self.in_proj = nn.Linear(d_model, inside, bias=bias, **place)
        self.conv1d = nn.Conv1d(
            channels, channels, d_conv, groups=channels, padding=d_conv - 1, bias=conv_bias, **place
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        # Step sizes at the start are spread evenly on a logarithmic scale; the bias is the inverse
        # of the softplus.
        spread = torch.rand(self.nheads, **place) * (math.log(dt_max) - math.log(dt_min))
        steps = torch.exp(spread + math.log(dt_min)).clamp(min=dt_init_floor)
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        rates = torch.empty(self.nheads, dtype=torch.float32, device=device).uniform_(*A_init_range)
        self.A_log = nn.Parameter(torch.log(rates).to(dtype=dtype))
        self.D = nn.Parameter(torch.ones(self.d_ssm if D_has_hdim else self.nheads, device=device))
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # type: ignore[attr-defined]
        if rmsnorm:
            self.norm = RMSNorm(self.d_ssm, 1e-5, self.d_ssm // ngroups, norm_before_gate, **place)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **place)

    def forward(
        self,
        u: torch.Tensor,
        seqlen: int | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        inference_params: Any = None,
    ) -> torch.Tensor:
        """Return the output for (batch, length, size), or (batch * length, size) with ``seqlen``.

        Args:
            u: The input.
            seqlen: The length of each sequence.
            seq_idx: Which sequence each value belongs to: (batch, length).
            cu_seqlens: Where each sequence of a batch of 1 begins, and the end of the last, for
                their states.
            inference_params: Keeps the states between calls.
        """
        given = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        if inference_params is None:
            out = self._whole(self.in_proj(given), seq_idx)
        else:
            count = given.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            states = self._states_of(inference_params, count)
            if inference_params.seqlen_offset > 0:
                return self.step(u, *states)[0]
            out = self._first(self.in_proj(given), states, seq_idx, cu_seqlens)
        return out if seqlen is None else out.flatten(0, 1)

    def _whole(self, projected: torch.Tensor, seq_idx: torch.Tensor | None) -> torch.Tensor:
        """Return the output where no state is kept."""
        return mamba_split_conv1d_scan_combined(
            projected,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            self._rates(),
            self._skip(),
            self.chunk_size,
            seq_idx=seq_idx,
            dt_limit=self.dt_limit,
            activation=self.activation,
            rmsnorm_weight=self.norm.weight if self.rmsnorm else None,
            rmsnorm_eps=self.norm.eps if self.rmsnorm else 1e-6,
            outproj_weight=self.out_proj.weight,
            outproj_bias=self.out_proj.bias,
            headdim=None if self.D_has_hdim else self.headdim,
            ngroups=self.ngroups,
            norm_before_gate=self.norm_before_gate,
        )

    def _first(
        self,
        projected: torch.Tensor,
        states: _States,
        seq_idx: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output of the first call with states, and write them."""
        conv_state, ssm_state = states
        beside, z, conv, dt = self._parts(projected)
        if cu_seqlens is None:
            conv_state.copy_(functional.pad(conv.transpose(1, 2), (self.d_conv - conv.shape[1], 0)))
        else:
            conv_state.copy_(
                causal_conv1d_varlen_states(conv.squeeze(0), cu_seqlens, conv_state.shape[-1])
            )
        weight = self.conv1d.weight.squeeze(1)
        conv = causal_conv1d_fn(
            conv.transpose(1, 2), weight, self.conv1d.bias, seq_idx, activation=self.activation
        )
        x, b, c = self._of_state_space(conv.transpose(1, 2))
        out, *last = mamba_chunk_scan_combined(
            x,
            dt,
            self._rates(),
            b,
            c,
            self.chunk_size,
            D=self._skip(),
            z=None if self.rmsnorm else z.unflatten(-1, (self.nheads, self.headdim)),
            dt_bias=self.dt_bias,
            seq_idx=seq_idx,
            cu_seqlens=cu_seqlens,
            dt_softplus=True,
            dt_limit=self.dt_limit,
            return_final_states=True,
            return_varlen_states=cu_seqlens is not None,
        )
        ssm_state.copy_(last[-1])
        return self._after(out.flatten(-2), z, beside)

    def step(
        self, hidden_states: torch.Tensor, conv_state: torch.Tensor, ssm_state: torch.Tensor
    ) -> Any:
        """Return one step's output (batch, 1, size), and the states, updated in place.

        Raises:
            AssertionError: There is more than one step.
        """
        if hidden_states.shape[1] != 1:
            raise AssertionError("Only support decoding with 1 token at a time for now")
        beside, z, conv, dt = self._parts(self.in_proj(hidden_states.squeeze(1)))
        conv = causal_conv1d_update(
            conv, conv_state, self.conv1d.weight.squeeze(1), self.conv1d.bias, self.activation
        )
        x, b, c = self._of_state_space(conv)
        shape = self.nheads, self.headdim
        rates = self._rates()[:, None, None].expand(*shape, self.d_state)
        skip = self._skip() if self.D_has_hdim else self.D[:, None].expand(*shape)
        out = selective_state_update(
            ssm_state,
            x,
            dt[..., None].expand(-1, *shape),
            rates,
            b,
            c,
            skip,
            None if self.rmsnorm else z.unflatten(-1, shape),
            self.dt_bias[:, None].expand(*shape),
            True,
        )
        return self._after(out.flatten(-2), z, beside)[:, None], conv_state, ssm_state

    def _parts(
        self, projected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return gated layer beside the state space, gate, convolution input, and steps."""
        channels = self.conv1d.weight.shape[0]
        beside = projected.shape[-1] - self.d_ssm - channels - self.nheads
        first, z, conv, dt = projected.split([beside, self.d_ssm, channels, self.nheads], -1)
        return first, z, conv, dt

    def _of_state_space(
        self, conv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, b, c = conv.split([self.d_ssm, *2 * [self.ngroups * self.d_state]], -1)
        b, c = (each.unflatten(-1, (self.ngroups, self.d_state)) for each in (b, c))
        return x.unflatten(-1, (self.nheads, self.headdim)), b, c

    def _after(self, out: torch.Tensor, z: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Return the block's output from that of the state space."""
        out = self.norm(out, z) if self.rmsnorm else out
        if beside.shape[-1]:
            values, linear = beside.chunk(2, -1)
            out = torch.cat([functional.silu(values) * linear, out], -1)
        return self.out_proj(out)

    def _rates(self) -> torch.Tensor:
        return -torch.exp(*widened(self.A_log))

    def _skip(self) -> torch.Tensor:
        return self.D.unflatten(0, (self.nheads, self.headdim)) if self.D_has_hdim else self.D

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: Any = None, **kwargs: Any
    ) -> _States:
        """Return the states of so many sequences before their first step, which are zeros."""
        weight = self.conv1d.weight
        place: dict[str, Any] = {
            "device": weight.device,
            "dtype": weight.dtype if dtype is None else dtype,
        }
        conv_state = torch.zeros(batch_size, self.d_conv, weight.shape[0], **place).transpose(1, 2)
        return conv_state, torch.zeros(batch_size, self.nheads, self.headdim, self.d_state, **place)

    def _states_of(self, inference_params: Any, batch: int) -> _States:
        if self.layer_idx is None:
            raise AssertionError(
                "the block has no layer_idx, the key of its state in inference_params."
            )
        kept = inference_params.key_value_memory_dict
        if self.layer_idx not in kept:
            kept[self.layer_idx] = self.allocate_inference_cache(batch, 0)
        return kept[self.layer_idx]
