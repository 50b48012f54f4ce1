"""Kernels above autograd under functorch, and what the device cannot differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_functorch import TRANSFORMS, found
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchdevice
from torchdevice.kernel.registered_kernels import overload
from torchdevice.simulation import backend
from torchdevice.simulation.kernels.derivatives import derivatives_of, in_forward_mode

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

aten = torch.ops.aten

Function = Callable[[torch.Tensor], torch.Tensor]

GATES = {"gru": 3, "lstm": 4, "rnn_relu": 1, "rnn_tanh": 1}


def network(name: str, packed: bool) -> Function:
    op, gates = overload(f"aten::{name}.{'data' if packed else 'input'}"), GATES[name]

    def run(x: torch.Tensor) -> torch.Tensor:
        matrix = torch.ones(gates * 4, 4, device=x.device) / 10
        bias = torch.ones(gates * 4, device=x.device)
        state: Any = torch.zeros(1, 2, 4, device=x.device)
        state = [state, state] if name == "lstm" else state
        weights = [matrix, matrix, bias, bias]
        if packed:
            result = op(
                x[0].reshape(-1, 4),
                torch.tensor([2, 2, 2]),
                state,
                weights,
                True,
                1,
                0.0,
                True,
                False,
            )
        else:
            result = op(x[0].transpose(0, 1), state, weights, True, 1, 0.0, True, False, False)
        return result[0]  # type: ignore[no-any-return]

    return run


def transform_of(name: str) -> Function:
    op = overload(f"aten::{name}")
    return lambda x: torch.view_as_real(op(x)) if op(x).is_complex() else op(x)


def convolution(*settings: bool) -> Function:
    op = aten._convolution.default if len(settings) == 4 else aten._convolution.deprecated

    def run(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(3, 2, 2, 2, device=x.device)
        return op(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, *settings)  # type: ignore[no-any-return]

    return run


REGISTERED: dict[str, Function] = {
    "_convolution": convolution(False, False, True, True),
    "_convolution.deprecated": convolution(False, False, True),
    "istft": lambda x: torch.istft(
        torch.complex(x, x).reshape(2, 3, 8), 4, window=torch.ones(4, device=x.device)
    ),
    "linalg_matrix_rank": lambda x: aten.linalg_matrix_rank.default(x, 0.1),
    "linalg_matrix_rank.atol_rtol_float": lambda x: aten.linalg_matrix_rank.atol_rtol_float(
        x, atol=0.1
    ),
    "linalg_matrix_rank.atol_rtol_tensor": lambda x: aten.linalg_matrix_rank.atol_rtol_tensor(
        x, atol=torch.full((), 0.1, device=x.device)
    ),
    "linalg_matrix_rank.tol_tensor": lambda x: aten.linalg_matrix_rank.tol_tensor(
        x, torch.full((), 0.1, device=x.device)
    ),
    "linalg_pinv": lambda x: aten.linalg_pinv.default(x, 0.1),
    "linalg_pinv.atol_rtol_float": lambda x: aten.linalg_pinv.atol_rtol_float(x, atol=0.1),
    "linalg_pinv.rcond_tensor": lambda x: aten.linalg_pinv.rcond_tensor(
        x, torch.full((), 0.1, device=x.device)
    ),
    "tensor_split.tensor_indices_or_sections": lambda x: (
        torch.tensor_split(x, torch.tensor([1]))[1] ** 2
    ),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    **{
        f"{name}.{kind}": network(name, kind == "data")
        for name in GATES
        for kind in ("data", "input")
    },
    **{
        f"fft_{name}": transform_of(f"fft_{name}")
        for name in (
            "fft",
            "fft2",
            "fftn",
            "ifft",
            "ifft2",
            "ifftn",
            "ihfft",
            "rfft",
            "rfft2",
            "rfftn",
        )
    },
}
"""Operator with a kernel above autograd -> a function that calls it."""

OF_DEVICE = {
    "scaled_dot_product_attention": (
        "Trying to use forward AD with _scaled_dot_product_efficient_attention that",
        "derivative for aten::_scaled_dot_product_efficient_attention_backward",
    ),
    **{
        f"{name}.{kind}": (
            "Trying to use forward AD with _cudnn_rnn that",
            "the derivative for '_cudnn_rnn_backward'",
        )
        for name in GATES
        for kind in ("data", "input")
    },
}
"""Operator -> how CUDA's operator refuses forward mode and a second derivative."""


UNREACHED = ("Cannot access data pointer of Tensor", "output with shape")
"""How the CPU's networks end under a transform: they read wrappers' memory, or write batches to a
tensor without.
"""


def by_autograd(transform: str, function: Function, x: torch.Tensor) -> list[torch.Tensor]:
    """Return what a transform gives from gradients without functorch."""

    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        result = function(x).sum() if transform == "vjp" else (function(x) ** 2).sum()
        return torch.autograd.grad(result, x)[0]

    return [
        torch.stack([gradient(x), gradient(2 * x)]) if transform == "vmap of grad" else gradient(x)
    ]


def test_each_kernel_above_autograd_has_a_case() -> None:
    backend.register()
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutogradPrivateUse1")
    assert {name.removeprefix("aten::") for name in registered if name.startswith("aten::")} == set(
        REGISTERED
    )


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sampled(60)
def test_a_registered_kernel_has_the_derivatives_of_the_devices_operator(
    transform: str, name: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 4)
    expected = found(TRANSFORMS[transform], REGISTERED[name], x)
    if (
        name.partition(".")[0] in GATES
        and isinstance(expected, tuple)
        and expected[1].startswith(UNREACHED)
    ):
        expected = by_autograd(transform, REGISTERED[name], x)
    with torchdevice.simulate():
        given = found(TRANSFORMS[transform], REGISTERED[name], x.to("cuda"))
    forward, second = OF_DEVICE.get(name, ("", ""))
    refusal = {"jvp": forward, "jacfwd": forward, "hessian": forward, "grad of grad": second}.get(
        transform
    )
    if refusal:
        assert isinstance(given, tuple) and given[1].startswith(refusal)
    elif isinstance(expected, tuple):
        assert given == expected
    else:
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def second_derivative(backends: list[SDPBackend], dtype: torch.dtype, **options: Any) -> None:
    q, k, v = (
        torch.randn(1, 2, 8, 16, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)
    )
    with sdpa_kernel(backends):
        result = F.scaled_dot_product_attention(q, k, v, **options)
    (gradient,) = torch.autograd.grad(result.sum(), q, create_graph=True)
    gradient.pow(2).sum().backward()


FUSED = [
    ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], torch.float32, "efficient"),
    ([SDPBackend.EFFICIENT_ATTENTION], torch.float16, "efficient"),
    ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], torch.bfloat16, "flash"),
    ([SDPBackend.CUDNN_ATTENTION], torch.float16, "cudnn"),
]


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"is_causal": True}])
@pytest.mark.parametrize(("backends", "dtype", "kernel"), FUSED)
def test_fused_attention_has_no_second_derivative(
    backends: list[SDPBackend], dtype: torch.dtype, kernel: str, options: Any
) -> None:
    text = (
        f"^derivative for aten::_scaled_dot_product_{kernel}_attention_backward is not implemented"
    )
    with torchdevice.simulate("a100"), pytest.raises(RuntimeError, match=text):
        second_derivative(backends, dtype, **options)


@pytest.mark.parametrize(
    ("target", "backends", "dtype"),
    [
        ("a100", [SDPBackend.MATH], torch.float32),
        ("a100", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], torch.float32),
        ("a100", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], torch.float64),
        ("t4", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], torch.float16),
    ],
)
def test_composed_attention_has_one(
    target: str, backends: list[SDPBackend], dtype: torch.dtype
) -> None:
    with torchdevice.simulate(target):
        second_derivative(backends, dtype)


def test_gradients_of_fused_attention_may_be_kept() -> None:
    with torchdevice.simulate():
        q = torch.randn(1, 2, 8, 16, device="cuda").requires_grad_()
        result = F.scaled_dot_product_attention(q, q, q)
        (gradient,) = torch.autograd.grad(result.sum(), q, create_graph=True)
        # A penalty on another path than attention's is differentiated.
        (gradient.detach() * q).sum().backward()
        assert q.grad is not None and torch.equal(q.grad, gradient)


def network_twice(kind: str) -> None:
    module = getattr(torch.nn, kind)(4, 4).to("mps")
    x = torch.randn(3, 2, 4, device="mps", requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x)[0].sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def test_what_mps_cannot() -> None:
    with torchdevice.simulate("mps"):
        with pytest.raises(
            RuntimeError, match=r"^derivative for aten::lstm_mps_backward is not implemented"
        ):
            network_twice("LSTM")
        network_twice("GRU")  # is composed there
        q = torch.randn(1, 2, 8, 16, device="mps")
        for run in (
            lambda x: F.scaled_dot_product_attention(x, x, x),
            torch.nn.LSTM(16, 4).to("mps"),
        ):
            given = q if not isinstance(run, torch.nn.Module) else q[0]
            with pytest.raises(
                NotImplementedError, match=r"forward AD with (aten::_scaled_dot_|_lstm_mps)"
            ):
                torch.func.jvp(run, (given,), (given,))
        torch.func.jvp(lambda x: F.scaled_dot_product_attention(*[x.mT] * 3), (q,), (q,))


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


ON_META: dict[str, Callable[[torch.Tensor], Any]] = {
    "_scaled_dot_product_cudnn_attention": lambda x: aten._scaled_dot_product_cudnn_attention(
        x, x, x, None, True
    ),
    "_scaled_dot_product_efficient_attention": lambda x: (
        aten._scaled_dot_product_efficient_attention(x, x, x, None, True)
    ),
    "_scaled_dot_product_flash_attention": lambda x: aten._scaled_dot_product_flash_attention(
        x, x, x
    ),
    "native_layer_norm": lambda x: aten.native_layer_norm(x, [16], None, None, 1e-5),
}


@pytest.mark.parametrize("operator", ON_META)
def test_the_table_is_what_torch_raises_on_the_meta_device(operator: str) -> None:
    x = meta(1, 2, 8, 16)
    (gradient,) = torch.autograd.grad(ON_META[operator](x)[0].sum(), x, create_graph=True)
    second = derivatives_of(operator, f"{operator}_backward").second
    if second is None:
        gradient.sum().backward()
    else:
        with pytest.raises(second[0]) as raised:
            gradient.sum().backward()
        assert str(raised.value) == second[1]
    assert second is None or operator != "native_layer_norm"


def test_forward_mode_is_asked_of_torch() -> None:
    refused: Iterable[str] = (*list(ON_META)[:3], "_cudnn_rnn", "_lstm_mps")
    for operator in refused:
        refusal = in_forward_mode(operator)
        assert refusal is not None and f"forward AD with {operator} that" in refusal[1]
    assert in_forward_mode("sin") is None
