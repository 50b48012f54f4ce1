"""The cost of the simulated device, against the plain CPU in one process. Needs the [hf] extra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

import torchdevice
from benchmarks.measuring import Timing, compare
from benchmarks.progress import track

PLAIN, SIMULATED = "CPU", "simulated"


class Case(NamedTuple):
    """A call to time.

    Attributes:
        name: The name in the table.
        prepare: Called with a device type; makes tensors there and returns the call.
        seconds: The approximate duration of one measurement.
    """

    name: str
    prepare: Callable[[str], Callable[[], Any]]
    seconds: float = 0.02


def _step_of_gpt2(device: str) -> Callable[[], Any]:
    """Return a training step of a tiny GPT-2: 2 layers, 64 wide, batches of 4 x 32 tokens."""
    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=256, n_positions=64, **tokens)
    model = transformers.GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (4, 32)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def _operator(function: Callable[..., Any], *shape: int) -> Callable[[str], Callable[[], Any]]:
    """Return the ``prepare`` of a call of a binary operator on ones of this shape."""

    def prepare(device: str) -> Callable[[], Any]:
        x = torch.ones(*shape).to(device)
        return lambda: function(x, x)

    return prepare


CASES = (
    Case("add, 4 elements", _operator(torch.add, 4)),
    Case("add in place, 4 elements", _operator(torch.Tensor.add_, 4)),
    Case("view", lambda device: torch.ones(4, 4).to(device).t),
    Case("matmul, 64 x 64", _operator(torch.mm, 64, 64)),
    Case("matmul, 512 x 512", _operator(torch.mm, 512, 512), 0.06),
    Case("matmul, 1024 x 1024", _operator(torch.mm, 1024, 1024), 0.15),
    Case("training step of a tiny GPT-2", _step_of_gpt2, 0.06),
)


def measure(rounds: int, only: str = "") -> dict[str, dict[str, Timing]]:
    """Return, for each case whose name contains ``only``, the times on the CPU and on the simulated device."""
    scope = torchdevice.simulate()
    conditions = {PLAIN: contextlib.nullcontext, SIMULATED: lambda: scope}
    chosen = [case for case in CASES if only in case.name]
    return {case.name: _timings(case, conditions, rounds) for case in track(chosen, "cases")}


def _timings(case: Case, conditions: dict[str, Any], rounds: int) -> dict[str, Timing]:
    with conditions[SIMULATED]():
        simulated = case.prepare("cuda")
    calls = {PLAIN: case.prepare("cpu"), SIMULATED: simulated}
    return compare(conditions, calls, rounds=rounds, seconds=case.seconds)
