"""Measured work: programs' frequent calls, and small programs, for a given device.

Each function returns the call to time. It makes tensors and modules on the device first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Call = Callable[[], object]


def add(device: str) -> Call:
    x = torch.ones(4, device=device)
    return lambda: torch.add(x, x)


def product(device: str) -> Call:
    x = torch.ones(512, 512, device=device)
    return lambda: x @ x


def factory(device: str) -> Call:
    return lambda: torch.zeros(4, device=device)


def no_move(device: str) -> Call:
    """Move a tensor to where it is."""
    x = torch.ones(4, device=device)
    return lambda: x.to(device)


def copy_to(device: str) -> Call:
    """Move a tensor from the host's memory to the device's. The CPU's own program copies it."""
    x = torch.ones(4)
    return x.clone if device == "cpu" else lambda: x.to(device)


def device_made(device: str) -> Call:
    return lambda: torch.device(device)


def device_read(device: str) -> Call:
    x = torch.ones(4, device=device)
    return lambda: x.device


def attention(device: str) -> Call:
    q = torch.randn(1, 4, 16, 16, device=device)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)


def linear(device: str) -> Call:
    weight, bias, x = (torch.randn(size, device=device) for size in ((64, 64), (64,), (8, 64)))
    return lambda: torch.nn.functional.linear(x, weight, bias)


def backward(device: str) -> Call:
    x = torch.ones(64, 64, device=device, requires_grad=True)

    def run() -> None:
        (x @ x).relu().sum().backward()
        x.grad = None

    return run


def training_step(width: int, layers: int, length: int) -> Callable[[str], Call]:
    """Return the workload of one step of a small transformer, with AdamW, on batches of 4."""

    def prepare(device: str) -> Call:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(4, length, width, device=device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        return step

    return prepare


def generate(device: str) -> Call:
    """Write 50 tokens with a Llama of 4 layers."""
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
    model = LlamaForCausalLM(config).eval().to(device)
    ids = torch.randint(3, 512, (1, 8), device=device)
    return lambda: model.generate(
        ids, max_new_tokens=50, min_new_tokens=50, do_sample=False, pad_token_id=0
    )


def compiled_step(device: str) -> Call:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).to(device)
    compiled = torch.compile(model)
    x = torch.randn(64, 256, device=device)
    with torch.no_grad():
        compiled(x)

    def run() -> None:
        with torch.no_grad():
            compiled(x)

    return run


def loader_epoch(device: str) -> Call:
    rows = torch.utils.data.TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)

    def epoch() -> None:
        for x, y in loader:
            x.to(device)
            y.to(device)

    return epoch
