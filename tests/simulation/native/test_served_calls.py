"""Calls that C++ serves its own way: random numbers, attention, ``out=``, resizing, copies."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d, dropout, scaled_dot_product_attention
from torch.utils._pytree import tree_map

import torchdevice
from torchdevice.simulation import machine
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.kernels import pipeline
from torchdevice.simulation.serving import NativeDevice

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("native_kernels")]


def _range(*bounds: int) -> torch.Tensor:
    return torch.arange(*bounds, device="cuda")


def _seen(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(5, 5, dtype=torch.bool, device=x.device).tril()


CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dropout": lambda x: dropout(x, 0.3),
    "dropout of all": lambda x: dropout(x, 1.0),
    "dropout of halves": lambda x: torch.native_dropout(x.half(), 0.5, None),
    "dropout of integers": lambda x: torch.native_dropout(_range(5), 0.5, True),
    "dropout in evaluation": lambda x: torch.native_dropout(x, 0.5, False),
    "multinomial": lambda x: x[0, 0].softmax(-1).multinomial(3, replacement=True),
    "multinomial of negative weights": lambda x: (-x[0, 0].exp()).multinomial(1),
    "a generator": lambda x: x.detach().normal_(generator=torch.Generator("cuda").manual_seed(3)),
    "a generator of the CPU": lambda x: x.detach().normal_(generator=torch.Generator()),
    "a draw that fails": lambda x: x.detach().normal_(std=-1.0),
    "a permutation": lambda x: torch.randperm(9, device="cuda"),
    "factories": lambda x: (torch.rand(2, device="cuda"), torch.randint(7, (3,), device="cuda")),
    "a causal mask": lambda x: scaled_dot_product_attention(x, x, x, is_causal=True),
    "a mask": lambda x: scaled_dot_product_attention(x, x, x, _seen(x)),
    "a mask that is added": lambda x: scaled_dot_product_attention(x, x, x, _seen(x).float()),
    "a mask that learns": lambda x: scaled_dot_product_attention(x, x, x, x[0, 0] @ x[0, 0].T),
    "attention with dropout": lambda x: scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "attention of groups": lambda x: scaled_dot_product_attention(
        x, x[:, :1], x[:, :1], enable_gqa=True
    ),
    "attention of other shapes": lambda x: scaled_dot_product_attention(x, x[..., :3], x),
    "attention of other dtypes": lambda x: scaled_dot_product_attention(x, x.double(), x),
    "attention of the CPU's keys": lambda x: scaled_dot_product_attention(x, x.cpu(), x),
    "a convolution": lambda x: conv2d(x, x[:1, :, :2, :2]),
    "a transposed convolution": lambda x: conv_transpose2d(x, x[:, :, :2, :2]),
    "a convolution of other shapes": lambda x: conv2d(x, x[:1, :1]),
    "remainders": lambda x: (
        x % 0.7,
        _range(5) % 3,
        _range(5) // 2,
        x.fmod(2),
        _range(7, 12) % x.int()[0, 0, 0],
    ),
    "remainders of zero": lambda x: (
        _range(5) % _range(5),
        _range(5) // 0,
        torch.div(_range(5), 0 * _range(5)),
    ),
    "remainders in place": lambda x: _range(5).remainder_(_range(5)),
    "copies to the host": lambda x: (
        x.cpu(),
        x.to("cpu", torch.int32),
        x.to("cpu", non_blocking=True),
        x.tolist(),
    ),
    "copies to the device": lambda x: (
        torch.ones(2, 3).to("cuda"),
        torch.ones(3).mT.to("cuda", torch.half),
    ),
    "copies in place": lambda x: (
        torch.zeros(5).copy_(x[0, 0, 0]),
        x.detach()[0].copy_(torch.ones(5)),
    ),
    "a copy of another shape": lambda x: x.detach().copy_(torch.ones(4)),
    "an argument twice": lambda x: torch.add(y := x.detach().clone(), y, out=y),
    "an empty result": lambda x: torch.mul(x.detach()[:0], 2, out=torch.empty(0, device="cuda")),
    "a result with an offset": lambda x: torch.mul(
        x.detach(), 2, out=torch.ones(9, device="cuda")[3:3]
    ),
    "a result that grows": lambda x: torch.mul(x.detach(), 2, out=torch.ones(9, device="cuda")),
    "a result of another dtype": lambda x: torch.mul(
        x.detach(), 2, out=torch.empty(0, 3, device="cuda").int()
    ),
    "a result of the CPU": lambda x: torch.mul(x.detach(), 2, out=torch.empty(0)),
    "a result that requires a gradient": lambda x: torch.mul(
        x, 2, out=torch.empty(0, device="cuda")
    ),
    "two results": lambda x: torch.sort(
        x.detach(), out=(torch.empty(0, device="cuda"), torch.empty(0, device="cuda").long())
    ),
    "results in a list": lambda x: torch.ops.aten.split_copy.Tensor_out(
        x.detach(), 1, out=[torch.empty(0, device="cuda") for _ in range(2)]
    ),
    "a result that shares its storage": lambda x: (
        out := torch.empty(0, device="cuda"),
        other := out.view(0, 3),
        torch.mul(x.detach(), 2, out=out),
        other.untyped_storage().nbytes(),
        out.resize_(3).storage_offset(),
    ),
}


def _shown(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes()
    values = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return (
        str(value.device),
        value.dtype,
        value.shape,
        value.stride(),
        size,
        value._version,
        values.tolist(),
    )


def _made(call: Callable[[torch.Tensor], Any], found: list[Any]) -> None:
    """Make a call, and note results, gradient and memory statistics, or its error."""
    try:
        x = torch.randn(2, 2, 5, 5).to("cuda").requires_grad_()
        result = call(x)
        found.append((tree_map(_shown, result), torch.cuda.memory_stats()))
        leaf = result[0] if isinstance(result, tuple) else result
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            # Autograd adds gradients in place where nobody else has them, which it cannot know of
            # storages of Python.
            (gradient,) = torch.autograd.grad(leaf.float().square().sum(), x)
            found.append(gradient.tolist())
    except Exception as error:
        found.append((type(error), str(error)))
        error.__traceback__ = None  # whose frames hold tensors


def _outcome(call: Callable[[torch.Tensor], Any], native: str) -> list[Any]:
    """Return all visible effects of two calls: the first may offer the call to C++."""
    found: list[Any] = []
    with torchdevice.simulate(native=native), warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        torch.manual_seed(5)
        for _ in range(2):
            _made(call, found)
            gc.collect(1)  # frames of errors that were handled
            found.append((torch.cuda.get_rng_state().tolist(), torch.get_rng_state().tolist()))
            found.append((torch.cuda.memory_allocated(), [str(each.message) for each in given]))
            found.append((dict(machine.current().copies), dict(machine.current().copied_bytes)))
            torch.cuda.reset_accumulated_memory_stats()
            torch.cuda.reset_peak_memory_stats()
    return found


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_is_the_same_both_ways(call: Callable[[torch.Tensor], Any]) -> None:
    assert _outcome(call, "always") == _outcome(call, "never")


@pytest.mark.parametrize("random", ["device", "cpu"])
def test_a_seed_gives_the_same_numbers_both_ways(random: Any) -> None:
    found = []
    for native in ("never", "always"):
        with torchdevice.simulate(native=native, random=random):
            torch.manual_seed(3)
            for _ in range(2):
                x = torch.randn(40, device="cuda")
                numbers = dropout(x, 0.4), x.exponential_(), x.softmax(0).multinomial(5)
            found.append(
                [*[each.tolist() for each in numbers], torch.cuda.get_rng_state().tolist()]
            )
    assert found[0] == found[1]


def test_attention_without_dropout_draws_no_numbers() -> None:
    for native in ("never", "always"):
        with torchdevice.simulate(native=native):
            x = torch.randn(1, 2, 5, 4, device="cuda")
            before = torch.cuda.get_rng_state()
            scaled_dot_product_attention(x, x, x)
            assert torch.equal(torch.cuda.get_rng_state(), before)


def _program() -> None:
    """Call what a training step of a transformer calls."""
    ids = torch.arange(6, device="cuda")[None] % 5
    embedded = torch.nn.functional.embedding(
        ids, torch.ones(5, 8, device="cuda", requires_grad=True)
    )
    x = dropout(embedded.view(1, 2, 3, 8), 0.1)
    y = scaled_dot_product_attention(x, x, x, dropout_p=0.1) + scaled_dot_product_attention(x, x, x)
    y = torch.cat(
        [torch.tensor([], device="cuda"), conv2d(y, torch.ones(1, 2, 1, 1, device="cuda"))]
    )
    (y.logsumexp(-1).sum() + torch.where(y > 0, y, 0).sum()).backward()
    torch.multinomial(y.detach()[0, 0].softmax(-1), 1).cpu()


def test_a_program_reaches_no_kernel_in_python() -> None:
    reached: list[str] = []

    def look(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is pipeline.Pipeline.run.__code__:
            reached.append(frame.f_locals["self"]._op.name())

    with torchdevice.simulate(native="always", random="device"):
        for _ in range(2):
            _program()  # the first call of an operator is Python's
        before = sys.getprofile()
        sys.setprofile(look)
        try:
            _program()
        finally:
            sys.setprofile(before)
    assert not reached, reached


@pytest.mark.usefixtures("no_collections")
def test_the_ledger_leads_while_tensors_live_that_python_resized() -> None:
    with torchdevice.simulate(native="always"):
        held = [torch.arange(4, device="cuda"), torch.empty(3, device="cuda")]
        held[1].untyped_storage().resize_(4096)
        held.append(held[0] + held[0])
        on = storages.device(0)
        assert isinstance(on, NativeDevice)
        assert on.ledger.leads
        assert torch.cuda.memory_allocated() == 512 + 4096 + 512
        held[1].untyped_storage().resize_(0)
        held[1].untyped_storage().resize_(12)
        held[1].fill_(2)
        assert held[1].tolist() == [2, 2, 2]
        assert torch.cuda.memory_allocated() == 3 * 512
        held.clear()
        assert torch.cuda.memory_allocated() == 0
