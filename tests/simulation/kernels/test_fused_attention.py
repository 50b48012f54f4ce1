"""CUDA's kernels of attention by their names: their results, gradients, sums and seeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchdevice

aten = torch.ops.aten

CALLS = {
    "flash": lambda q, k, v, p, causal: aten._scaled_dot_product_flash_attention(
        q, k, v, p, causal
    ),
    "efficient": lambda q, k, v, p, causal: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, p, causal
    ),
    "cudnn": lambda q, k, v, p, causal: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, p, causal
    ),
}


@pytest.fixture(autouse=True)
def scope(request: pytest.FixtureRequest) -> Iterator[None]:
    with torchdevice.simulate("a100", **getattr(request, "param", {})):
        torch.manual_seed(0)
        yield


def on_device(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(shape).to("cuda", dtype).requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", CALLS)
def test_values_and_gradients_are_those_of_the_composed_operator(kernel: str, causal: bool) -> None:
    given = [on_device(2, 4, 9, 16) for _ in range(3)]
    results = CALLS[kernel](*given, 0.0, causal)
    here = [each.detach().cpu().float().requires_grad_() for each in given]
    expected = F.scaled_dot_product_attention(*here, is_causal=causal)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    results[0].backward(gradient.to("cuda", torch.float16))
    close = {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(results[0].detach().cpu().float(), expected.detach(), **close)
    for one, other in zip(given, here, strict=True):
        torch.testing.assert_close(one.grad.cpu().float(), other.grad, **close)
    q, k, _ = (each.detach() for each in here)
    scores = q @ k.mT / 4
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf) if causal else scores
    torch.testing.assert_close(
        results[1].cpu().reshape(2, 4, -1)[..., :9], scores.logsumexp(-1), **close
    )


@pytest.mark.parametrize("kernel", CALLS)
def test_results_have_the_shapes_of_torchs_meta_kernels(kernel: str) -> None:
    given = [on_device(2, 4, 40, 16) for _ in range(3)]
    results = CALLS[kernel](*given, 0.0, False)
    for one, other in zip(
        results, CALLS[kernel](*(each.to("meta") for each in given), 0.0, False), strict=True
    ):
        if isinstance(other, torch.Tensor) and other.numel() > 2:
            assert (one.shape, one.dtype, one.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            )
        elif not isinstance(other, torch.Tensor) and other is not None:
            assert one == other


@pytest.mark.parametrize("causal", [0, 1])
def test_a_packed_batch_is_its_sequences_one_by_one(causal: int) -> None:
    given = [on_device(9, 4, 16) for _ in range(3)]
    ends = torch.tensor([0, 3, 8, 9], dtype=torch.int32, device="cuda")
    flash = aten._flash_attention_forward(*given, ends, ends, 5, 5, 0.0, bool(causal), False)
    batch = [each.unsqueeze(0) for each in given]
    efficient = aten._efficient_attention_forward(*batch, None, ends, ends, 5, 5, 0.0, causal, True)
    one_by_one = []
    for begin, end in ((0, 3), (3, 8), (8, 9)):
        parts = [each.detach().cpu().float()[begin:end].transpose(0, 1) for each in given]
        one_by_one.append(
            F.scaled_dot_product_attention(*parts, is_causal=bool(causal)).transpose(0, 1)
        )
    for result in (flash[0], efficient[0][0]):
        torch.testing.assert_close(
            result.detach().cpu().float(), torch.cat(one_by_one), atol=3e-3, rtol=3e-3
        )
    assert flash[1].shape == (4, 9) and efficient[1].shape == (3, 4, 32) and efficient[4:] == (5, 5)
    torch.testing.assert_close(efficient[1][1, :, :5], flash[1][:, 3:8])


def test_dropout_and_a_bias_and_shared_heads_have_right_gradients() -> None:
    k, v = on_device(1, 2, 4, 8, dtype=torch.float64), on_device(1, 2, 4, 8, dtype=torch.float64)
    q, bias = on_device(1, 4, 4, 8, dtype=torch.float64), on_device(1, 1, 4, 4, dtype=torch.float64)
    state = torch.cuda.get_rng_state()

    def attend(*given: torch.Tensor) -> torch.Tensor:
        torch.cuda.set_rng_state(state)
        return aten._scaled_dot_product_efficient_attention(*given, True, 0.5)[0]

    assert torch.autograd.gradcheck(attend, (q, k, v, bias), check_undefined_grad=False)


def test_a_seed_decides_what_dropout_drops() -> None:
    given = [on_device(1, 2, 8, 8) for _ in range(3)]
    torch.cuda.manual_seed(3)
    one, other = (CALLS["flash"](*given, 0.5, False) for _ in range(2))
    torch.cuda.manual_seed(3)
    again = CALLS["flash"](*given, 0.5, False)
    assert (
        torch.equal(one[0], again[0])
        and torch.equal(one[6], again[6])
        and not torch.equal(one[0], other[0])
    )
    assert one[6].dtype is torch.uint64 and one[6].shape == (2,)


def place_of(kernel: str, results: Any) -> tuple[int, int]:
    if kernel == "flash":
        seed, offset = results[6].view(torch.int64).tolist()
        return seed, offset
    seed, offset = results[2:4] if kernel == "efficient" else results[6:8]
    return int(seed), int(offset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", CALLS)
def test_what_a_kernel_drops_can_be_filled_into_a_mask(kernel: str, dtype: torch.dtype) -> None:
    q, k, v = (on_device(2, 3, 140, 16, dtype=dtype).detach() for _ in range(3))
    results = CALLS[kernel](q, k, v, 0.3, False)
    numbers = aten._fill_mem_eff_dropout_mask_(
        torch.empty(2, 3, 140, 140, device="cuda"), 0.3, *place_of(kernel, results)
    )
    expected = aten._scaled_dot_product_attention_math(
        q, k, v, None, 0.3, dropout_mask=numbers > 0.3
    )[0]
    torch.testing.assert_close(results[0], expected, atol=3e-2, rtol=3e-2)
    assert (
        numbers.min() >= 0
        and numbers.max() <= 1
        and abs((numbers > 0.3).float().mean().item() - 0.7) < 0.02
    )


@pytest.mark.parametrize("scope", [{"random": "device"}], indirect=True)
def test_the_mask_is_that_of_the_operator_limited_to_a_kernel(scope: None) -> None:
    q, k, v = (on_device(2, 3, 20, 16).detach() for _ in range(3))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        torch.manual_seed(42)
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    state = torch.cuda.get_rng_state()
    numbers = aten._fill_mem_eff_dropout_mask_(torch.empty(2, 3, 20, 20, device="cuda"), 0.3, 42, 0)
    assert torch.equal(state, torch.cuda.get_rng_state()), "the device's generator is not moved on"
    expected = aten._scaled_dot_product_attention_math(
        q, k, v, None, 0.3, dropout_mask=numbers > 0.3
    )[0]
    torch.testing.assert_close(found, expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_returns_its_weights_with_the_sign_of_what_it_dropped(causal: bool) -> None:
    q, k, v = (on_device(2, 3, 140, 16).detach() for _ in range(3))
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.3, causal, True)
    assert results[8].shape == (2, 3, 256, 256) and results[8].dtype is torch.float16
    weights = results[8][..., :140, :140].float()
    torch.testing.assert_close(
        weights.abs().sum(-1), torch.ones(2, 3, 140, device="cuda"), atol=1e-2, rtol=1e-2
    )
    torch.testing.assert_close(
        weights.relu() @ v.float() / 0.7, results[0].float(), atol=1e-2, rtol=1e-2
    )
    assert aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, True)[8].numel() == 0


def test_a_window_hides_keys_that_are_far() -> None:
    q, k, v = (on_device(1, 6, 1, 8).detach() for _ in range(3))
    near = aten._flash_attention_forward(
        q, k, v, None, None, 6, 6, 0.0, False, False, window_size_left=0, window_size_right=0
    )
    assert torch.equal(near[0], v)


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_jagged_tensors(backend: SDPBackend) -> None:
    parts = [torch.randn(length, 2, 16).to("cuda", torch.float16) for length in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3)
    for one, part in zip(y.unbind(), parts, strict=True):
        expected = F.scaled_dot_product_attention(*[part.cpu().float().transpose(0, 1)] * 3)
        torch.testing.assert_close(one.detach().cpu().float(), expected, atol=3e-3, rtol=3e-3)
    y.values().sum().backward()
    assert x.grad.values().abs().sum() > 0


REFUSED: dict[str, Any] = {
    "FlashAttention only support fp16": lambda: on_device(1, 4, 2, 8, dtype=torch.float32),
    "head_size must be a multiple of 8": lambda: on_device(1, 4, 2, 12),
    "FlashAttention forward only supports head dimension": lambda: on_device(1, 4, 2, 264),
    "Input tensor must have contiguous last dimension": lambda: on_device(1, 4, 8, 16).transpose(
        2, 3
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_flash_refuses_as_on_cuda(text: str) -> None:
    x = REFUSED[text]()
    with pytest.raises(RuntimeError, match=text):
        aten._flash_attention_forward(x, x, x, None, None, 4, 4, 0.0, False, False)


def test_flash_refuses_an_older_gpu() -> None:
    with torchdevice.simulate("t4"):
        x = on_device(1, 4, 2, 8)
        with pytest.raises(
            RuntimeError, match=r"FlashAttention only supports Ampere GPUs or newer\."
        ):
            aten._flash_attention_forward(x, x, x, None, None, 4, 4, 0.0, False, False)


def test_an_argument_that_is_not_computed_is_refused_by_name() -> None:
    x = on_device(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="'alibi_slopes'"):
        aten._flash_attention_forward(
            x, x, x, None, None, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(2, device="cuda")
        )


def test_a_mac_has_none_of_them() -> None:
    with torchdevice.simulate("mps", written_for="mps"):
        x = torch.ones(1, 4, 2, 8, dtype=torch.float16, device="mps")
        with pytest.raises(NotImplementedError, match="aten::_flash_attention_forward"):
            aten._flash_attention_forward(x, x, x, None, None, 4, 4, 0.0, False, False)
