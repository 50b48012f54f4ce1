"""Tables of rules, their wrapper, and attention's kernels against torch's order of checks."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchdevice
from torchdevice.simulation.kernels import pipeline
from torchdevice.simulation.refusals import attention, cuda_rules, device_refusals, refusal_rules


def test_each_rule_is_of_an_operator_and_has_a_source() -> None:
    for table in (cuda_rules.RULES, device_refusals.MPS_RULES):
        for name, found in table.items():
            assert hasattr(torch.ops.aten, name)
            assert all(name in rule.operators.split() and rule.source for rule in found)


@pytest.mark.parametrize(
    "op", [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.relu.default]
)
def test_a_kernel_without_rules_stays_as_it_is(op: Any) -> None:
    def kernel(*args: Any) -> None:
        raise AssertionError

    assert refusal_rules.guarded(pipeline.refusals_of(op), kernel) is kernel


def test_the_device_is_asked_last() -> None:
    asked = []
    rule = refusal_rules.Rule(
        "add",
        lambda x: x < 0 and f"{x} is too small",
        "here",
        holds=lambda: asked.append(1) or True,
    )
    kernel = refusal_rules.guarded(refusal_rules.checks([rule]), lambda x: x)
    assert kernel(3) == 3 and asked == []
    with pytest.raises(RuntimeError, match=r"^-1 is too small$"):
        kernel(-1)
    assert asked == [1]


def test_every_check_of_attention_has_a_text_that_can_be_written() -> None:
    checks = set(itertools.chain(*attention._ORDER.values()))
    assert checks == attention._CHECKS.keys() == attention._TEXTS.keys()
    x = torch.ones(1, 2, 4, 8)
    facts = attention._Facts(torch.backends.cuda.SDPAParams(x, x, x, None, 0.0, False, False))
    assert all(text.format(facts) for text in attention._TEXTS.values())


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@pytest.mark.parametrize("model", ["t4", "a100", "rtx4090", "h100"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_can_be_used_is_what_runs(model: str, dtype: torch.dtype) -> None:
    """``can_use_*_attention`` agrees with calls of the kernel alone; numbers are products'."""
    asks = {
        "flash": torch.backends.cuda.can_use_flash_attention,
        "mem_efficient": torch.backends.cuda.can_use_efficient_attention,
        "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    }
    with torchdevice.simulate(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size, masked, causal in itertools.product(
            (8, 20, 64, 288), (False, True), (False, True)
        ):
            x = torch.randn(1, 2, 6, size, device="cuda").to(dtype)
            mask = torch.ones(6, 6, dtype=torch.bool, device="cuda") if masked else None
            if masked and causal:
                continue  # torch refuses both together
            params = torch.backends.cuda.SDPAParams(x, x, x, mask, 0.0, causal, False)
            for name, backend in BACKENDS.items():
                possible = asks[name](params)
                with sdpa_kernel(backend):
                    try:
                        result = F.scaled_dot_product_attention(
                            x, x, x, attn_mask=mask, is_causal=causal
                        )
                    except RuntimeError as error:
                        assert (
                            not possible
                            and str(error) == "No available kernel. Aborting execution."
                        )
                        continue
                assert possible
                expected = F.scaled_dot_product_attention(
                    x.cpu(), x.cpu(), x.cpu(), is_causal=causal
                )
                torch.testing.assert_close(result.cpu(), expected, atol=2e-2, rtol=2e-2)


def test_no_kernel_at_all() -> None:
    with torchdevice.simulate():
        x = torch.ones(1, 1, 4, 8, device="cuda").half()
        with (
            sdpa_kernel([SDPBackend.OVERRIDEABLE]),
            pytest.raises(RuntimeError, match="No viable backend"),
        ):
            F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("network", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_of_a_network_are_the_cpus(network: Any, enabled: bool) -> None:
    torch.manual_seed(0)
    plain, x = network(3, 4, num_layers=2, bidirectional=True), torch.randn(5, 2, 3)
    plain(x)[0].sum().backward()
    with torchdevice.simulate(), torch.backends.cudnn.flags(enabled=enabled):
        model = network(3, 4, num_layers=2, bidirectional=True)
        model.load_state_dict(plain.state_dict())
        model.cuda()
        model(x.cuda())[0].sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_conversions_within_the_range_are_the_cpus(dtype: torch.dtype) -> None:
    x = torch.randn(1000) * 1e6
    with torchdevice.simulate():
        assert torch.equal(x.cuda().to(dtype).cpu(), x.to(dtype))
        limits = torch.iinfo(dtype)
        beyond = torch.tensor(
            [1e30, -1e30, float("inf"), float("-inf")], device="cuda", dtype=torch.float64
        )
        assert beyond.to(dtype).tolist() == [limits.max, limits.min, limits.max, limits.min]


DIVISIONS = {
    "floor": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "fmod": torch.fmod,
    "truncated": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder of a number": lambda x, y: torch.remainder(9, y),
    "quotient of a number": lambda x, y: 9 // y,
    "in place": lambda x, y: x.clone().remainder_(y),
    "into": lambda x, y: torch.floor_divide(x, y, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_are_divided_by_zero(name: str, dtype: torch.dtype) -> None:
    x, y = torch.tensor([7, 8, 9], dtype=dtype), torch.tensor([2, 0, 4], dtype=dtype)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        DIVISIONS[name](x, y)
    expected = DIVISIONS[name](x, torch.tensor([2, 1, 4], dtype=dtype))
    with torchdevice.simulate():
        given = y.cuda()
        found = DIVISIONS[name](x.cuda(), given).cpu()
        assert torch.equal(given.cpu(), y)
    assert found[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert found[1].item() == {torch.uint8: 255, torch.int32: -1, torch.int64: 2**32 - 1}[dtype]


def test_factors_without_pivoting() -> None:
    a = torch.rand(3, 4, 4) + 4 * torch.eye(4)
    with torchdevice.simulate():
        factors, pivots = torch.linalg.lu_factor(a.cuda(), pivot=False)
        lower, upper = factors.tril(-1) + torch.eye(4, device="cuda"), factors.triu()
        torch.testing.assert_close((lower @ upper).cpu(), a)
        assert pivots.tolist() == [[1, 2, 3, 4]] * 3
        _, lower, upper = torch.linalg.lu(a.cuda(), pivot=False)
        torch.testing.assert_close((lower @ upper).cpu(), a)


def test_the_array_interface() -> None:
    with torchdevice.simulate():
        x = torch.arange(6.0, device="cuda").view(2, 3)
        found = x.t().__cuda_array_interface__
        assert (
            found["data"] == (x.data_ptr(), False)
            and found["shape"] == (3, 2)
            and found["strides"] == (4, 12)
        )
        assert not hasattr(x.cpu(), "__cuda_array_interface__")
        with pytest.raises(RuntimeError, match="requires grad"):
            print(x.requires_grad_().__cuda_array_interface__)
