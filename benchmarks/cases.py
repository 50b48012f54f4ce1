"""The cases that are measured: frequent calls of programs, and small programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import torchdevice
from benchmarks.measuring import Condition


class Nothing(TorchFunctionMode):
    """A mode that changes nothing, whose cost is the least that a mode can have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


BARE = "bare"
NOTHING = "do-nothing mode"
CONTEXT = "torch.device"
CPU = "cpu target"
WRAPPED = "cpu target, wrap"
SIMULATED = "simulated"
SIMULATED_WRAPPED = "simulated, wrap"

CONDITIONS: dict[str, Condition] = {
    BARE: contextlib.nullcontext,
    NOTHING: Nothing,
    CONTEXT: lambda: torch.device("cpu"),
    CPU: lambda: torchdevice.portable("cpu", engine="mode"),
    WRAPPED: lambda: torchdevice.portable("cpu", engine="wrap"),
    SIMULATED: lambda: torchdevice.simulate(engine="mode"),
    SIMULATED_WRAPPED: lambda: torchdevice.simulate(engine="wrap"),
}


class Case(NamedTuple):
    """A call to time.

    Attributes:
        name: The name in the table.
        prepare: Called with the name of a condition, under that condition; returns the call to time.
        conditions: The names of the conditions to time the call under.
        seconds: The approximate duration of one measurement.
        rounds: The greatest number of measurements per condition; None for as many as requested.
    """

    name: str
    prepare: Callable[[str], Callable[[], object]]
    conditions: tuple[str, ...]
    seconds: float = 0.02
    rounds: int | None = None


_CALLS = (BARE, NOTHING, CONTEXT, CPU, WRAPPED)
_ALL = (*_CALLS, SIMULATED, SIMULATED_WRAPPED)


def _on_device(thing: Any, where: str) -> Any:
    """Return a tensor or module, moved to the device under the simulated conditions."""
    return thing.cuda() if where in (SIMULATED, SIMULATED_WRAPPED) else thing


def _spelled(where: str) -> str:
    """Return the device to name in calls: the accelerator in a scope, the CPU without one."""
    return "cpu" if where in (BARE, NOTHING, CONTEXT) else "cuda"


def _add(where: str) -> Callable[[], object]:
    x = _on_device(torch.ones(4), where)
    return lambda: torch.add(x, x)


def _matmul(where: str) -> Callable[[], object]:
    x = _on_device(torch.ones(512, 512), where)
    return lambda: x @ x


def _factory(where: str) -> Callable[[], object]:
    device = _spelled(where)
    return lambda: torch.zeros(4, device=device)


def _to(where: str) -> Callable[[], object]:
    x, device = _on_device(torch.ones(4), where), _spelled(where)
    return lambda: x.to(device)


def _device(where: str) -> Callable[[], object]:
    device = _spelled(where)
    return lambda: torch.device(device)


def _read(where: str) -> Callable[[], object]:
    x = _on_device(torch.ones(4), where)
    return lambda: x.device


def _attention(where: str) -> Callable[[], object]:
    q = _on_device(torch.randn(1, 4, 16, 16), where)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)


def _linear(where: str) -> Callable[[], object]:
    weight, bias, x = (_on_device(torch.randn(size), where) for size in ((64, 64), (64,), (8, 64)))
    return lambda: torch.nn.functional.linear(x, weight, bias)


def _backward(where: str) -> Callable[[], object]:
    x = _on_device(torch.ones(64, 64), where).requires_grad_()

    def run() -> None:
        (x @ x).relu().sum().backward()
        x.grad = None

    return run


def _training_step(width: int, layers: int, length: int) -> Callable[[str], Callable[[], object]]:
    def prepare(where: str) -> Callable[[], object]:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        model = _on_device(torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = _on_device(torch.randn(4, length, width), where)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        return step

    return prepare


def _generate(where: str) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = _on_device(LlamaForCausalLM(config).eval(), where)
    ids = _on_device(torch.randint(3, 512, (1, 8)), where)
    return lambda: model.generate(ids, max_new_tokens=50, min_new_tokens=50, do_sample=False, pad_token_id=0)


def _compiled_step(where: str) -> Callable[[], object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    compiled = torch.compile(model)
    x = torch.randn(64, 256)
    with torch.no_grad():
        compiled(x)

    def run() -> None:
        with torch.no_grad():
            compiled(x)

    return run


def _loader_epoch(where: str) -> Callable[[], object]:
    rows = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
    device = _spelled(where)

    def epoch() -> None:
        for x, y in loader:
            x.to(device)
            y.to(device)

    return epoch


CASES = (
    Case("ordinary operator, 4 elements", _add, _ALL),
    Case("512 x 512 product", _matmul, _ALL),
    Case("linear, 8 x 64 by 64 x 64", _linear, _ALL),
    Case("attention, 4 heads of 16 x 16", _attention, _ALL),
    Case("factory with a device", _factory, _CALLS),
    Case("x.to(device), nothing moves", _to, _CALLS),
    Case("torch.device(...)", _device, _CALLS),
    Case("x.device", _read, _CALLS),
    Case("loss.backward(), 64 x 64", _backward, _ALL),
    Case("small transformer training step", _training_step(32, 2, 16), _ALL, 0.1, 15),
    Case("medium transformer training step", _training_step(256, 4, 64), _ALL, 0.5, 7),
    Case("generate of 50 tokens, 4 layers", _generate, _ALL, 0.5, 5),
    Case("compiled forward pass", _compiled_step, (BARE, NOTHING, CPU, WRAPPED), 0.1),
    Case("DataLoader epoch, 16 batches", _loader_epoch, _CALLS, 0.1, 15),
)
