"""Outputs of ``torch.compile(mode="reduce-overhead")`` raise torch's error once a later call has
overwritten them, by the rules of ``torch/_inductor/cudagraph_trees.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor import cudagraph_trees

import torchdevice
from torchdevice.simulation import inductor, overwritten_outputs

pytestmark = pytest.mark.skipif(
    bool(inductor._missing_compiler()), reason="Inductor needs a C++ compiler"
)

OVERWRITTEN = "Error: accessing tensor output of CUDAGraphs that has been overwritten by a subse"


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Torch counts the steps that programs mark, and never resets that.
    monkeypatch.setattr(cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["never", "auto"])
def scope(request: pytest.FixtureRequest) -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(native=request.param) as entered:
        yield entered


def compiled(function: Any) -> Any:
    return torch.compile(function, mode="reduce-overhead")


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operator": lambda y: y + 1,
    "a number": lambda y: y[0].item(),
    "a copy to the host": lambda y: y.cpu(),
    "a text": repr,
    "a view's values": lambda y: y.view(2, 2).tolist(),
    "a write": lambda y: y.add_(1),
    "an operator of several tensors": lambda y: torch.cat([torch.ones(4, device="cuda"), y]),
    "an out argument": lambda y: torch.add(y.new_ones(4), 1, out=y),
}


@pytest.mark.parametrize("how", READS)
def test_a_read_of_an_output_after_a_later_call(scope: torchdevice.Scope, how: str) -> None:
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    for _ in range(3):  # torch warms up, records, and replays
        before = f(x)
        assert READS[how](before) is not None
        before = f(x)
        after = f(x)
        with pytest.raises(RuntimeError, match=OVERWRITTEN) as caught:
            READS[how](before)
        assert "return x * 2 + 1" in str(caught.value) and "torchdevice/calls" not in str(
            caught.value
        )
        assert after.tolist() == [3, 3, 3, 3]
        assert before.shape == (4,) and before.is_cuda  # no values are read


def test_a_view_that_was_made_before(scope: torchdevice.Scope) -> None:
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    part = f(x)[1:]
    f(x)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        part.sum()


def test_what_the_error_says_to_do(scope: torchdevice.Scope) -> None:
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    kept = [f(x).clone() for _ in range(4)]
    assert torch.stack(kept).sum().item() == 48
    several = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        several.append(f(x).sum())
    assert torch.stack(several).tolist() == [12, 12, 12]


def test_two_calls_of_one_step(scope: torchdevice.Scope) -> None:
    """A program that marks its steps may keep all outputs of one."""
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    first, second = f(x), f(x + 1)
    assert (first + second).tolist() == [8, 8, 8, 8]
    torch.compiler.cudagraph_mark_step_begin()
    f(x)
    for each in (first, second):
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            each.sum()


def test_an_output_given_to_the_next_call(scope: torchdevice.Scope) -> None:
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        f(f(x))
    assert f(f(x).clone()).tolist() == [7, 7, 7, 7]


def test_another_compiled_function_begins_a_step_too(scope: torchdevice.Scope) -> None:
    f, g = compiled(doubled), compiled(lambda x: x.sin())
    y = f(torch.ones(4, device="cuda"))
    g(torch.ones(4, device="cuda"))
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        y.sum()


def test_a_training_loop(scope: torchdevice.Scope) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)).cuda()
    step, x = compiled(model), torch.ones(3, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = step(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert len(torch.stack(losses).tolist()) == 4  # the loss itself is no output


def test_while_a_backward_is_pending_no_step_begins(scope: torchdevice.Scope) -> None:
    step, x = compiled(torch.nn.Linear(4, 4).cuda()), torch.ones(3, 4, device="cuda")
    for _ in range(3):
        first, second = step(x), step(x)
        (first + second).sum().backward()
    step(x)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        first.sum()


def test_gradients_that_accumulate(scope: torchdevice.Scope) -> None:
    step, x = compiled(torch.nn.Linear(4, 4).cuda()), torch.ones(3, 4, device="cuda")
    step(x).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"Error: accessing (gradient )?tensor output of CUDAGra"
    ):
        step(x).sum().backward()


def test_gradients_that_a_program_keeps(scope: torchdevice.Scope) -> None:
    model = torch.nn.Linear(4, 4).cuda()
    step, x = compiled(model), torch.ones(3, 4, device="cuda")
    step(x).sum().backward()
    kept = model.weight.grad
    model.zero_grad()
    step(x).sum().backward()
    assert kept is not None
    with pytest.raises(
        RuntimeError, match=r"Error: accessing (gradient )?tensor output of CUDAGra"
    ):
        kept.sum()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: torch.compile(doubled)(x),
        lambda x: torch.compile(doubled, dynamic=True, mode="reduce-overhead")(x),
        lambda x: compiled(lambda x: x * 2 + torch.ones(4, device="cpu").cuda())(x),
        lambda x: compiled(lambda x: x.add_(1).clone())(x),
        lambda x: torch.compile(doubled, backend="eager")(x),
    ],
    ids=["another mode", "symbolic sizes", "a tensor of the CPU", "a changed input", "eager"],
)
def test_graphs_that_are_not_recorded(
    scope: torchdevice.Scope, program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    before, after = (program(torch.ones(4, device="cuda")) for _ in range(2))
    assert before.sum().item() == after.sum().item()


def test_outputs_that_are_inputs(scope: torchdevice.Scope) -> None:
    f, x = compiled(lambda x: (x, x * 2)), torch.ones(4, device="cuda")
    kept = [f(x)[0] for _ in range(3)]
    assert torch.stack(kept).sum().item() == 12


def test_kernels_are_looked_at_only_while_something_overwritten_is_alive(
    scope: torchdevice.Scope,
) -> None:
    f, x = compiled(doubled), torch.ones(4, device="cuda")
    context = scope._resolved()

    def watching() -> bool:
        return any(
            isinstance(each, overwritten_outputs.Overwritten) for each in context.observers.kernels
        )

    before = f(x)
    f(x)
    assert watching()
    del before
    gc.collect()
    f(x)
    assert not watching()


@pytest.mark.parametrize("options", [{"races": "error"}, {"asynchronous": True}])
def test_beside_other_observers(options: Any) -> None:
    with torchdevice.simulate(**options):
        f, x = compiled(doubled), torch.ones(4, device="cuda")
        before = f(x)
        f(x)
        with pytest.raises(RuntimeError, match=OVERWRITTEN):
            before.sum()


def test_on_a_mac_and_on_the_cpu_nothing_is_recorded() -> None:
    for target, device in (("cpu", "cuda"), ("simulated:mps", "cuda")):
        torch._dynamo.reset()
        with torchdevice.portable(target):
            f, x = compiled(doubled), torch.ones(4, device=device)
            before = f(x)
            f(x)
            assert before.sum().item() == 12


def test_another_scope_knows_nothing_of_it() -> None:
    f = compiled(doubled)
    with torchdevice.simulate():
        before = f(torch.ones(4, device="cuda"))
    with torchdevice.simulate():
        f(torch.ones(4, device="cuda"))
        f(torch.ones(4, device="cuda"))
    assert before.shape == (4,)
