"""Graphs of a simulated device that are compiled while the program runs, as torch 2.15 compiles backward graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.simulation import inductor


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_a_backward_graph_is_compiled_in_the_scope(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There tensors say "cuda", and a compiler that believed it would ask for Triton."""
    compile_one, graphs = inductor._compile_one, []

    def note(gm: Any, inputs: Any, **options: Any) -> Any:
        graphs.append((gm, inputs, options))
        return compile_one(gm, inputs, **options)

    monkeypatch.setattr(inductor, "_compile_one", note)
    torch._dynamo.reset()
    with torchdevice.simulate("cuda", engine=engine):
        x = torch.tensor([-1.0, 3.0], device="cuda", requires_grad=True)
        torch.compile(lambda x: (x * 2).relu() + 1)(x).sum().backward()
        gm, inputs, options = graphs[-1]
        assert options["is_backward"] and x.grad is not None and x.grad.tolist() == [0, 2]
        given = [torch.zeros(value.shape, dtype=value.dtype, device="cuda") for value in inputs]
        fake_mode = torch._guards.detect_fake_mode(inputs)
        with torch._guards.tracing(torch._guards.TracingContext(fake_mode)):
            (gradient,) = compile_one(gm, inputs, **options)(given)
        assert gradient.is_cuda and gradient.shape == x.shape
    torch._dynamo.reset()
