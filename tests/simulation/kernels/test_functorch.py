"""functorch on simulated devices: kernels above autograd get memory-less wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree

import torchdevice

# The CPU's kernels of attention have no rule for batches.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

Function = Callable[[torch.Tensor], torch.Tensor]


def _mask(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(3, 3, device=x.device).tril()


def _weights(x: torch.Tensor, gates: int) -> list[torch.Tensor]:
    matrix = torch.ones(gates * 4, 4, device=x.device) / 10
    bias = torch.ones(gates * 4, device=x.device)
    return [matrix, matrix, bias, bias]


def _network(name: str, gates: int, train: bool = True) -> Function:
    def run(x: torch.Tensor) -> torch.Tensor:
        state: Any = torch.zeros(1, 3, 4, device=x.device)
        state = [state, state] if name == "lstm" else state
        result: torch.Tensor = getattr(torch, name)(
            x[0], state, _weights(x, gates), True, 1, 0.0, train, False, False
        )[0]
        return result

    return run


ABOVE_AUTOGRAD: dict[str, Function] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "causal attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=_mask(x)),
    "attention with a mask of bools": lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=_mask(x).bool()
    ),
    "attention of three dimensions": lambda x: F.scaled_dot_product_attention(x[0], x[0], x[0]),
    "attention with another stride": lambda x: F.scaled_dot_product_attention(
        *[x.transpose(-1, -2)] * 3
    ),
    "convolution": lambda x: F.conv2d(x, torch.ones(3, 2, 2, 2, device=x.device)),
    "transposed convolution": lambda x: F.conv_transpose1d(
        x[0], torch.ones(2, 2, 2, device=x.device)
    ),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1], device=x.device), x[0, 0]),
    "a move": lambda x: x.cpu().to(x.device),
    "least squares": lambda x: torch.linalg.lstsq(x[0].mT, x[0].mT).solution,
    "pseudo-inverse": lambda x: torch.linalg.pinv(x[0]),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "a product": lambda x: torch.einsum("abcd,abed->abce", x, x),
}


def _squares(function: Function) -> Function:
    return lambda x: (function(x) ** 2).sum()


TRANSFORMS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "grad": lambda f, x: grad(_squares(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(f(x))),
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "vmap": lambda f, x: vmap(f)(torch.stack([x, 2 * x])),
    "vmap of grad": lambda f, x: vmap(grad(_squares(f)))(torch.stack([x, 2 * x])),
    "grad of vmap": lambda f, x: grad(lambda y: vmap(_squares(f))(y).sum())(
        torch.stack([x, 2 * x])
    ),
    "jacrev": lambda f, x: jacrev(_squares(f))(x),
    "jacfwd": lambda f, x: jacfwd(_squares(f))(x),
    "hessian": lambda f, x: hessian(_squares(f))(x),
    "grad of grad": lambda f, x: grad(lambda y: grad(_squares(f))(y).sum())(x),
}


def found(transform: Callable[..., Any], function: Any, x: torch.Tensor) -> Any:
    """Return what a transform gives, on the CPU, or the class and the first line of its error."""
    try:
        return [each.detach().cpu() for each in _pytree.tree_leaves(transform(function, x))]
    except (RuntimeError, NotImplementedError) as error:
        return type(error), str(error).partition("\n")[0]


@pytest.mark.parametrize("native", ["never", "auto"])
@pytest.mark.parametrize("function", ABOVE_AUTOGRAD)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sampled(90, of="transforms of functorch")
def test_a_transform_gives_what_it_gives_on_the_cpu(
    transform: str, function: str, native: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 3, 4)
    expected = found(TRANSFORMS[transform], ABOVE_AUTOGRAD[function], x)
    with torchdevice.simulate(native=native):
        given = found(TRANSFORMS[transform], ABOVE_AUTOGRAD[function], x.to("cuda"))
    if isinstance(expected, tuple):
        # CUDA's kernel of attention is refused in its own name.
        assert given == (
            expected[0],
            expected[1].replace("flash_attention_for_cpu", "efficient_attention"),
        )
    else:
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "attention": lambda: torch.nn.MultiheadAttention(4, 2, batch_first=True),
    "an encoder": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "an encoder that is evaluated": lambda: torch.nn.TransformerEncoderLayer(
        4, 2, 8, batch_first=True
    ).eval(),
}


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_each_sample_of_a_transformer(name: str) -> None:
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(3, 5, 4)

    def gradients(x: torch.Tensor) -> Any:
        parameters = {key: each.detach() for key, each in module.named_parameters()}

        def loss(parameters: Any, sample: torch.Tensor) -> torch.Tensor:
            given = (sample[None],) * (3 if name == "attention" else 1)
            result = functional_call(module, parameters, given)
            return ((result[0] if name == "attention" else result) ** 2).sum()

        each = (
            vmap(grad(loss), (None, 0))(parameters, x),
            grad(loss)(parameters, x[0]),
            jacrev(loss)(parameters, x[0]),
        )
        return [found.cpu() for found in _pytree.tree_leaves(each)]

    expected = gradients(x)
    with torchdevice.simulate():
        module.to("cuda")
        torch.testing.assert_close(gradients(x.to("cuda")), expected, rtol=1e-4, atol=1e-5)


class TestNetworksOfCudnn:
    """cuDNN differentiates a network once, in training mode, and backwards alone."""

    @pytest.mark.parametrize(("name", "gates"), [("gru", 3), ("lstm", 4), ("rnn_tanh", 1)])
    def test_first_derivatives(self, name: str, gates: int) -> None:
        run, x = _network(name, gates), torch.arange(48.0).reshape(2, 2, 3, 4) / 48
        once = ("grad", "vjp", "jacrev")
        expected = [found(TRANSFORMS[each], run, x) for each in once]
        with torchdevice.simulate():
            given = [found(TRANSFORMS[each], run, x.to("cuda")) for each in once]
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            samples = TRANSFORMS["vmap of grad"](run, x.to("cuda")).cpu()
            torch.testing.assert_close(samples[0], expected[0][0], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("name", "gates"), [("gru", 3), ("lstm", 4), ("rnn_tanh", 1)])
    def test_what_cudnn_cannot(self, name: str, gates: int) -> None:
        x = torch.arange(48.0).reshape(2, 2, 3, 4) / 48
        with (
            torchdevice.simulate(),
            pytest.raises(NotImplementedError, match="_cudnn_rnn_backward"),
        ):
            TRANSFORMS["grad of grad"](_network(name, gates), x.to("cuda"))
        with (
            torchdevice.simulate(),
            pytest.raises(NotImplementedError, match="forward AD with _cudnn_rnn"),
        ):
            TRANSFORMS["hessian"](_network(name, gates), x.to("cuda"))
        with (
            torchdevice.simulate(),
            pytest.raises(RuntimeError, match="only be called in training mode"),
        ):
            TRANSFORMS["grad"](_network(name, gates, train=False), x.to("cuda"))
