"""causal_conv1d and mamba_ssm against loops of their definitions in float64."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from references import convolution, drawn, same_with_gradients, state_space
from torch.nn import functional

import torchdevice

pytestmark = pytest.mark.one_engine


@pytest.fixture(autouse=True)
def scope() -> Iterator[torchdevice.Scope]:
    with torchdevice.portable(target="cpu") as found:
        yield found


class TestConvolution:
    """``causal_conv1d``."""

    @pytest.mark.parametrize("activation", [None, "silu"])
    @pytest.mark.parametrize("sequences", [False, True])
    def test_definition(self, activation: str | None, sequences: bool) -> None:
        from causal_conv1d import causal_conv1d_fn

        x, weight, bias = drawn(2, 3, 7), drawn(3, 4), drawn(3)
        index = (
            torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
            if sequences
            else None
        )
        expected = convolution(x, weight, bias, index)
        expected = functional.silu(expected) if activation else expected
        found = causal_conv1d_fn(x, weight, bias, index, activation=activation)
        same_with_gradients(found, expected, (x, weight, bias))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("sequences", [False, True])
    def test_gradients_of_half_tensors_are_rounded_once(
        self, dtype: torch.dtype, sequences: bool
    ) -> None:
        from causal_conv1d import causal_conv1d_fn

        weight, given = torch.randn(8, 4), torch.randn(2, 8, 40).to(dtype)
        index = (torch.arange(40) // 15).to(torch.int32).expand(2, -1) if sequences else None
        half, wide = given.clone().requires_grad_(), given.float().requires_grad_()
        weights = torch.randn(2, 8, 40).to(dtype)
        causal_conv1d_fn(half, weight, seq_idx=index).backward(weights)
        causal_conv1d_fn(wide, weight, seq_idx=index).backward(weights.float())
        assert half.grad is not None and wide.grad is not None
        assert torch.equal(half.grad, wide.grad.to(dtype))

    def test_states_continue_a_sequence(self) -> None:
        from causal_conv1d import causal_conv1d_fn

        x, weight, bias = torch.randn(2, 3, 9), torch.randn(3, 4), torch.randn(3)
        whole = causal_conv1d_fn(x, weight, bias)
        first, state = causal_conv1d_fn(x[..., :5], weight, bias, return_final_states=True)
        rest = causal_conv1d_fn(x[..., 5:], weight, bias, initial_states=state)
        torch.testing.assert_close(torch.cat([first, rest], 2), whole)
        with pytest.raises(NotImplementedError, match="activation='relu' is not known"):
            causal_conv1d_fn(x, weight, activation="relu")

    @pytest.mark.parametrize("ring", [False, True])
    @pytest.mark.parametrize("kept", [3, 5])
    def test_updates(self, ring: bool, kept: int) -> None:
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update

        x, weight, bias = torch.randn(2, 3, 8), torch.randn(3, 4), torch.randn(3)
        states, rows = torch.zeros(4, 3, kept), torch.tensor([3, 1], dtype=torch.int32)
        found, at = [], 0
        for count in (1, 2, 1, 3, 1):
            length = torch.tensor([at, at], dtype=torch.int32) if ring else None
            new = x[..., at : at + count]
            given = new[..., 0] if count == 1 else new
            out = causal_conv1d_update(given, states, weight, bias, "silu", length, rows)
            found.append(out[..., None] if count == 1 else out)
            at += count
        torch.testing.assert_close(
            torch.cat(found, 2), causal_conv1d_fn(x, weight, bias, activation="silu")
        )
        assert not states[0].any() and not states[2].any()
        if not ring:
            torch.testing.assert_close(states[3], x[0, :, -kept:])


def of_each_step(given: torch.Tensor, batch: int, channels: int, length: int) -> torch.Tensor:
    """Return B or C as (batch, channels, size, length)."""
    if given.dim() == 2:
        return given[None, :, :, None].expand(batch, channels, -1, length)
    given = given[:, None] if given.dim() == 3 else given
    return given.repeat_interleave(channels // given.shape[1], 1)


SCANS = [*itertools.product([5, 1, 150], ["constant", "one", "groups"], [False, True])]


def projected(x: torch.Tensor, of_step: torch.Tensor, is_complex: bool) -> torch.Tensor:
    """Return each step's B or C (batch, size, length) of x (batch, channels, length)."""
    found = torch.einsum("bcl,sc->bsl", x, of_step)
    return torch.complex(found[:, 0::2], found[:, 1::2]) if is_complex else found


class TestScan:
    """``selective_scan_fn``."""

    @pytest.mark.sampled(10)
    @pytest.mark.parametrize(("length", "kind", "more"), SCANS)
    def test_definition(self, length: int, kind: str, more: bool) -> None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        shapes = {"constant": (4, 3), "one": (2, 3, length), "groups": (2, 2, 3, length)}
        u = drawn(2, 4, length)
        delta = drawn(2, 4, length)
        b = drawn(*shapes[kind])
        c = drawn(*shapes[kind])
        a = (-torch.rand(4, 3, dtype=torch.float64) * 3).requires_grad_()
        d, z, bias = (drawn(4), drawn(2, 4, length), drawn(4)) if more else (None, None, None)
        dt = functional.softplus(delta + bias[:, None]) if bias is not None else delta.abs()
        given = (delta if more else delta.abs(), a, b, c, d, z, bias)
        b_of_step, c_of_step = (of_each_step(each, 2, 4, length) for each in (b, c))
        expected, state = state_space(u, dt, a, b_of_step, c_of_step)
        if d is not None and z is not None:
            expected = (expected + d[:, None] * u) * functional.silu(z)
        out, last = selective_scan_fn(u, *given, delta_softplus=more, return_last_state=True)
        torch.testing.assert_close(last, state)
        inputs = tuple(each for each in (u, delta, a, b, c, d, z, bias) if each is not None)
        same_with_gradients(out, expected, inputs)

    @pytest.mark.parametrize("is_complex", [False, True])
    @pytest.mark.parametrize("constant", [(), ("B",), ("C",), ("B", "C")])
    def test_a_block(self, constant: tuple[str, ...], is_complex: bool) -> None:
        from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn

        channels, size, rank, length = 4, 3, 2, 5
        kind, count = (torch.complex128, 2) if is_complex else (torch.float64, 1)
        xz, conv, bias = drawn(2, 2 * channels, length), drawn(channels, 3), drawn(channels)
        a = (-torch.rand(channels, size, dtype=torch.float64)).to(kind).requires_grad_()
        given = {
            name: torch.randn(channels, size, dtype=kind, requires_grad=True) for name in constant
        }
        weight = drawn(rank + (2 - len(constant)) * count * size, channels)
        step_weight, out_weight, d = drawn(channels, rank), drawn(6, channels), drawn(channels)
        found = mamba_inner_fn(
            xz,
            conv[:, None],
            bias,
            weight,
            step_weight,
            out_weight,
            None,
            a,
            given.get("B"),
            given.get("C"),
            d,
        )
        x, z = xz.chunk(2, 1)
        x = functional.silu(convolution(x, conv, bias, None))
        step = functional.softplus(torch.einsum("bcl,rc,kr->bkl", x, weight[:rank], step_weight))
        rows, both = iter(weight[rank:].split(count * size)), []
        for name in ("B", "C"):
            each = given[name] if name in given else projected(x, next(rows), is_complex)
            both.append(of_each_step(each, 2, channels, length))
        y, _ = state_space(x.to(kind), step.to(kind), a, *both)
        y = (2 * y.real if is_complex else y) + d[:, None] * x
        expected = torch.einsum("bcl,oc->blo", y * functional.silu(z), out_weight)
        same_with_gradients(
            found,
            expected,
            (xz, conv, bias, a, weight, step_weight, out_weight, d, *given.values()),
        )

    def test_the_reference_takes_every_dtype_on_a_simulated_gpu(self) -> None:
        with torchdevice.portable(target="simulated:a100"):
            from mamba_ssm.ops.selective_scan_interface import selective_scan_fn, selective_scan_ref

            u, dt, a, b = (
                torch.rand(shape, device="cuda", dtype=torch.float64)
                for shape in [(1, 2, 5)] * 2 + [(2, 3)] * 2
            )
            with pytest.raises(RuntimeError, match="Float"):
                selective_scan_fn(u, dt, -a, b, b)
            expected = selective_scan_fn(u.float(), dt.float(), -a.float(), b.float(), b.float())
            torch.testing.assert_close(selective_scan_ref(u, dt, -a, b, b).float(), expected)

    def test_a_complex_state(self) -> None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u, dt = drawn(2, 3, 6), torch.rand(2, 3, 6, dtype=torch.float64)
        a = torch.complex(
            -torch.rand(3, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
        )
        b, c = (torch.randn(2, 2, 12, dtype=torch.float64) for _ in range(2))
        pairs = [
            torch.complex(each[..., 0::2], each[..., 1::2])[:, None].expand(2, 3, 2, 6)
            for each in (b, c)
        ]
        expected, _ = state_space(u, dt, a, *pairs)
        same_with_gradients(selective_scan_fn(u, dt, a, b, c), 2 * expected.real, (u,))

    def test_no_overflow_where_states_decay_fast(self) -> None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u = torch.ones(1, 1, 200)
        out = selective_scan_fn(
            u, u * 5, torch.tensor([[-100.0]]), torch.ones(1, 1), torch.ones(1, 1)
        )
        torch.testing.assert_close(out, u * 5)

    def test_torch_func_differentiates_it(self) -> None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u, dt = drawn(1, 2, 100), torch.rand(1, 2, 100, dtype=torch.float64)
        more = (
            dt,
            -torch.ones(2, 3, dtype=torch.float64),
            *(torch.randn(2, 3, dtype=torch.float64) for _ in range(2)),
        )
        gradient = torch.func.grad(lambda given: selective_scan_fn(given, *more).sum())(u.detach())
        selective_scan_fn(u, *more).sum().backward()
        torch.testing.assert_close(gradient, u.grad)

    def test_torch_compile_traces_it(self) -> None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        u, dt, b = torch.randn(1, 2, 100), torch.rand(1, 2, 100), torch.randn(2, 3)
        total = lambda given: selective_scan_fn(given, dt, -torch.ones(2, 3), b, b).sum()  # noqa: E731
        given, same = u.clone().requires_grad_(), u.clone().requires_grad_()
        torch.compile(total, backend="aot_eager", fullgraph=True)(given).backward()
        total(same).backward()
        torch.testing.assert_close(given.grad, same.grad)

    def test_what_is_kept_for_gradients_is_linear_in_the_length(self) -> None:
        """Not the states of each step, which have the size of the state as a factor."""
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

        def kept(length: int) -> int:
            sizes: dict[int, int] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            u, b = torch.randn(1, 8, length, requires_grad=True), torch.randn(1, 16, length)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                selective_scan_fn(u, u.detach().abs(), -torch.ones(8, 16), b, b)
            return sum(sizes.values())

        states = 8 * 16 * 1024 * 4
        assert kept(1024) < states and kept(2048) < 2.2 * kept(1024)


@pytest.mark.parametrize("heads", [False, True])
def test_one_step(heads: bool) -> None:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    channels = (4, 3) if heads else (3,)
    groups = (2,) if heads else ()
    states = torch.randn(5, *channels, 6, dtype=torch.float64)
    rows, before = torch.tensor([4, 1]), states.clone()
    x, dt, z = (torch.randn(2, *channels, dtype=torch.float64) for _ in range(3))
    a, d, bias = (
        -torch.rand(*channels, 6, dtype=torch.float64),
        *(torch.randn(*channels).double() for _ in range(2)),
    )
    b, c = (torch.randn(2, *groups, 6, dtype=torch.float64) for _ in range(2))
    out = selective_state_update(states, x, dt, a, b, c, d, z, bias, True, rows)
    for index, row in enumerate(rows):
        spread = [
            each[index].repeat_interleave(2, 0)[:, None] if heads else each[index]
            for each in (b, c)
        ]
        step = functional.softplus(dt[index] + bias)[..., None]
        after = before[row] * torch.exp(step * a) + step * x[index][..., None] * spread[0]
        torch.testing.assert_close(states[row], after)
        expected = ((after * spread[1]).sum(-1) + d * x[index]) * functional.silu(z[index])
        torch.testing.assert_close(out[index], expected)
    torch.testing.assert_close(states[[0, 2, 3]], before[[0, 2, 3]])


class TestBlock:
    """``mamba_ssm.Mamba``."""

    def test_of_the_paper(self) -> None:
        from mamba_ssm import Mamba

        torch.manual_seed(0)
        module, x = Mamba(8, d_state=4).double(), drawn(2, 6, 8)
        names = {"A_log", "D", "in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight"}
        assert module.state_dict().keys() == names | {
            "dt_proj.weight",
            "dt_proj.bias",
            "out_proj.weight",
        }
        values, gate = module.in_proj(x).chunk(2, -1)
        after = functional.silu(
            convolution(
                values.transpose(1, 2), module.conv1d.weight[:, 0], module.conv1d.bias, None
            )
        )
        step, b, c = module.x_proj(after.transpose(1, 2)).split([1, 4, 4], -1)
        dt = functional.softplus(module.dt_proj(step)).transpose(1, 2)
        of_steps = [of_each_step(each.transpose(1, 2), 2, 16, 6) for each in (b, c)]
        y, _ = state_space(after, dt, -torch.exp(module.A_log), *of_steps)
        expected = module.out_proj(
            ((y + module.D[:, None] * after).transpose(1, 2)) * functional.silu(gate)
        )
        found = module(x)
        # Rates are in float32, as published.
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        found.sum().backward()
        assert all(each.grad is not None for each in module.parameters())

    def test_step_by_step(self) -> None:
        from mamba_ssm.modules.mamba_simple import Mamba

        module, x = Mamba(8, d_state=4, layer_idx=0), torch.randn(2, 6, 8)
        kept: Any = types.SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
        with torch.no_grad():
            whole = module(x)
            found = [module(x[:, :3], kept)]
            for index in range(3, 6):
                kept.seqlen_offset = index
                found.append(module(x[:, index : index + 1], kept))
        torch.testing.assert_close(torch.cat(found, 1), whole)


def test_a_block_on_a_simulated_gpu() -> None:
    with torchdevice.simulate("a100"):
        from mamba_ssm import Mamba

        module = Mamba(16, d_state=4).cuda().half()
        out = module(torch.randn(1, 70, 16, device="cuda", dtype=torch.float16))
        out.float().sum().backward()
        assert out.is_cuda and out.isfinite().all() and module.in_proj.weight.grad.is_cuda
