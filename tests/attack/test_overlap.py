"""Tensors that overlap: the simulated device copies, refuses and computes as the CPU does."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchdevice

SIZE = 24
"""The number of elements of the memory that all tensors of a program share."""

Make = Callable[[str], torch.Tensor]


def outcome(call: Callable[[], Any]) -> Any:
    """Return a call's results as nested lists, or its error's type and text without a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of an ``out`` that it resizes
        try:
            return values(call())
        except (RuntimeError, IndexError) as error:
            return type(error), str(error).splitlines()[0].replace("cuda:0", "cpu")


def is_error(result: Any) -> bool:
    return isinstance(result, tuple)


def values(result: Any) -> Any:
    return (
        result.tolist()
        if isinstance(result, torch.Tensor)
        else [values(each) for each in result or ()]
    )


def on_both(
    program: Callable[[torch.Tensor], Any], dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Run a program on CPU and simulated device. Return outcome and memory afterwards of each."""
    found = []
    for device in ("cpu", "cuda"):
        with torchdevice.simulate():
            memory = torch.arange(SIZE, dtype=dtype).to(device)
            found.append((outcome(lambda memory=memory: program(memory)), memory.tolist()))
    return found


def indices(memory: torch.Tensor, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, device=memory.device)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "y += y.t()": lambda x: x[:16].view(4, 4).add_(x[:16].view(4, 4).t()),
    "an expanded tensor in place": lambda x: x[:1].expand(4).add_(1),
    "add(out=)": lambda x: torch.add(x[:-1], 1, out=x[1:]),
    "cat(out=)": lambda x: torch.cat([x[:4], x[2:6]], out=x[1:9]),
    "index_select(out=)": lambda x: torch.index_select(x, 0, indices(x, 1, 2), out=x[:2]),
    "gather(out=)": lambda x: torch.gather(x, 0, indices(x, 1, 2), out=x[1:3]),
    "the second of two results": lambda x: torch.max(
        x[:16].view(4, 4), 0, out=(x[:4], torch.empty(1, dtype=torch.long, device=x.device))
    ),
    "another dtype": lambda x: torch.add(x.view(torch.int32)[2:], 1, out=x.view(torch.int32)[1:-1]),
    "index_copy_": lambda x: x.index_copy_(0, indices(x, 1, 2), x[:2]),
    "scatter_": lambda x: x.scatter_(0, indices(x, 1, 2), x[:2]),
    "x[1:] = x[:-1]": lambda x: x.__setitem__(slice(1, None), x[:-1]),
    "foreach": lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_cpu_refuses(name: str) -> None:
    on_cpu, simulated = on_both(REFUSED[name])
    assert is_error(on_cpu[0]), "the CPU refuses this no more"
    assert simulated == on_cpu


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: torch.add(x, x, out=x),
    "parts beside each other": lambda x: torch.add(x[:8], x[8:16], out=x[16:]),
    "a smaller result": lambda x: torch.add(x[:2], 1, out=x[4:12]),
    "a larger result within the memory": lambda x: torch.add(x[12:18], 1, out=x[:2]),
    "a result in no memory": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "a result in too little memory": lambda x: torch.add(x, 1, out=torch.ones(2, device=x.device)),
    "a result in an empty part": lambda x: torch.add(x[:3], 1, out=x[20:20]),
    "a masked part that overlaps itself": lambda x: (
        x[:1].expand(3).masked_fill_(indices(x, 1, 0, 1) > 0, 7.0)
    ),
    "every other element": lambda x: torch.mul(x[::2], 2, out=x[1::2]),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_cpu_computes(name: str) -> None:
    on_cpu, simulated = on_both(ALLOWED[name])
    assert not is_error(on_cpu[0]), on_cpu
    assert simulated == on_cpu


# ---- any program ---------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Draw the size, strides and offset of a tensor within the memory, which may overlap itself."""
    size = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    strides = tuple(draw(st.integers(0, 3)) for _ in size)
    extent = sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    return size, strides, draw(st.integers(0, SIZE - 1 - extent))


def like(a: torch.Tensor) -> torch.Tensor:
    return torch.zeros(a.shape, dtype=torch.long, device=a.device)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda a, b, c: a.copy_(b),
    "add_": lambda a, b, c: a.add_(b),
    "mul_": lambda a, b, c: a.mul_(2),
    "addcmul_": lambda a, b, c: a.addcmul_(b, c),
    "fill_": lambda a, b, c: a.fill_(b.flatten()[0]),
    "add out": lambda a, b, c: torch.add(a, b, out=c),
    "neg out": lambda a, b, c: torch.neg(a, out=c),
    "clamp out": lambda a, b, c: torch.clamp(a, 2, 9, out=c),
    "where out": lambda a, b, c: torch.where(a > 5, a, b, out=c),
    "cat out": lambda a, b, c: torch.cat([a, b], out=c),
    "stack out": lambda a, b, c: torch.stack([a, b], out=c),
    "sum out": lambda a, b, c: torch.sum(a, 0, out=c),
    "cumsum out": lambda a, b, c: torch.cumsum(a, 0, out=c),
    "sort out": lambda a, b, c: torch.sort(a, out=(c, like(a))),
    "index_select out": lambda a, b, c: torch.index_select(a, 0, indices(a, 0), out=c),
    "gather out": lambda a, b, c: torch.gather(a, 0, like(a), out=c),
    "mm out": lambda a, b, c: torch.mm(a, b, out=c),
    "index_add_": lambda a, b, c: a.index_add_(0, indices(a, 0), b),
    "index_put_": lambda a, b, c: a.index_put_((indices(a, 0),), b),
    "scatter_": lambda a, b, c: a.scatter_(0, like(b), b),
    "foreach": lambda a, b, c: torch._foreach_add_([a, b], [b, c]),
    "bits": lambda a, b, c: a.view(torch.int32).bitwise_xor_(b.view(torch.int32)),
}

STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), views(), views(), views()), min_size=1, max_size=6
)


def run(steps: Any, device: str, stop: int) -> Iterator[Any]:
    """Run a program and yield each step's outcome, up to a result that memory is too small for.

    The CPU would then grow the memory under all tensors that share it; memory of the simulated
    device cannot grow.
    """
    memory = torch.arange(float(SIZE)).to(device)
    for operator, *parts in steps[:stop]:
        a, b, c = (memory.as_strided(*part) for part in parts)
        result = outcome(lambda call=OPERATORS[operator], args=(a, b, c): call(*args))
        if memory.untyped_storage().nbytes() != SIZE * memory.itemsize:
            return
        shape = () if is_error(result) else tuple(c.shape)  # the CPU resizes before it refuses
        yield operator, result, memory.nan_to_num().tolist(), shape


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_any_program_does_what_it_does_on_the_cpu(steps: Any) -> None:
    expected = list(run(steps, "cpu", len(steps)))
    with torchdevice.simulate():
        assert list(run(steps, "cuda", len(expected))) == expected


# ---- one block, one storage ----------------------------------------------------------------------


@pytest.mark.usefixtures("no_collections")
def test_writes_through_views_of_every_dtype_reach_one_memory() -> None:
    with torchdevice.simulate():
        memory = torch.zeros(4, dtype=torch.complex64, device="cuda")
        torch.view_as_real(memory)[1:, 0] = 2.0
        memory.view(torch.float32)[1] = 3.0
        memory.conj()[3].add_(1j)
        assert memory.tolist() == [3j, 2, 2, 2 - 1j]


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("out", [False, True])
def test_memory_ends_with_its_last_view(out: bool) -> None:
    """The memory is also freed after an operator with ``out`` made it impossible to resize."""
    with torchdevice.simulate():
        gc.collect()
        before = torch.cuda.memory_allocated()
        memory = torch.zeros(1 << 16, device="cuda")
        part = memory[5:]
        if out:
            torch.add(part[:100], 1, out=part[100:200])
        part.view(torch.int32).add_(1)
        assert torch.cuda.memory_allocated() - before == memory.nbytes
        del memory
        assert torch.cuda.memory_allocated() > before
        del part
        assert torch.cuda.memory_allocated() == before


def test_tensors_of_inference_mode_are_written_in_and_outside() -> None:
    with torchdevice.simulate():
        x = torch.zeros(6, device="cuda")
        with torch.inference_mode():
            torch.add(x[:3], 1, out=x[3:])
            made = torch.ones(6, device="cuda")
            made[:3].add_(made[3:])
        x[1:].add_(1)
        torch.add(x[:3], 1, out=x[3:])
        assert x.tolist() == [0, 1, 1, 1, 2, 2] and made.tolist() == [2, 2, 2, 1, 1, 1]
        with pytest.raises(
            RuntimeError, match="Inplace update to inference tensor outside InferenceMode"
        ):
            made.add_(1)
