"""``compute="meta"``: a call like an earlier one gives what it would without its plan."""

from __future__ import annotations

import functools
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sweeping import choose, samples_of
from torch.testing._internal import common_methods_invocations as database
from torch.utils import _pytree as pytree

import torchdevice
from torchdevice.simulation.allocator.storages import has_no_values
from torchdevice.simulation.observe import meta_kernels


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Return what gives the answer of a program with plans, which must be the one without them."""

    def both(program: Callable[[], Any]) -> Any:
        found = []
        for key in (meta_kernels._key, lambda *args: None):
            gc.collect()  # a tensor left from another machine may have an address of this one's
            with monkeypatch.context() as patch, torchdevice.simulate(compute="meta", count=2):
                patch.setattr(meta_kernels, "_key", key)
                found.append(program())
        assert found[0] == found[1]
        return found[0]

    gc.disable()  # what it frees, at a moment of its own, would be in the figures of one of both
    yield both
    gc.enable()


def shown(value: Any) -> Any:
    """Return all of a result but its values: of those only whether they are known."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (int, float, str, type(None))) else type(value)
    if value.layout is not torch.strided or value.is_nested:
        return value.shape, value.dtype, value.layout
    known = value.is_cpu or not has_no_values(value.untyped_storage())
    layout = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
    return *layout, value.dtype, str(value.device), value.is_conj(), value.is_neg(), known


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call gives, or its error, and the memory that it leaves and took at most."""
    # Which releases what has ended, before the peak begins anew.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        result = call()
        found = [shown(each) for each in pytree.tree_leaves(result)]
    except Exception as error:
        result, found = None, [type(error), str(error).splitlines()[:1]]
    return found, torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


FAMILIES = [
    *database.op_db,
    *database.foreach_unary_op_db,
    *database.foreach_binary_op_db,
    *database.foreach_pointwise_op_db,
    *database.foreach_other_op_db,
]


@pytest.mark.one_engine
def test_operators_of_torchs_database(sweep: tuple[bool, int], answers: Any) -> None:
    chosen = choose(
        [op for op in FAMILIES if torch.float32 in op.supported_dtypes("cpu")], sweep, 40
    )

    def program() -> Any:
        found = []
        for op in chosen:
            torch.manual_seed(0)
            for sample in list(samples_of(op, torch.float32))[:12]:
                for _ in range(3):
                    on_device = lambda x: x.detach().to("cuda")  # noqa: E731
                    args, kwargs = pytree.tree_map_only(
                        torch.Tensor, on_device, (sample.args, sample.kwargs)
                    )
                    given = pytree.tree_map_only(torch.Tensor, on_device, sample.input)
                    result = outcome(functools.partial(op, given, *args, **kwargs))
                    found.append((op.name, result, outcome(functools.partial(shown, given))))
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(answers(program)) >= 3 * len(chosen) - 10


CALLS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda x, y: x + y,
    lambda x, y: x.add_(y),
    lambda x, y: x * 2,
    lambda x, y: x * 2.5,
    lambda x, y: x * True,
    lambda x, y: x.mul_(x),
    lambda x, y: x.t(),
    lambda x, y: x[1:],
    lambda x, y: x[:, ::2],
    lambda x, y: x[:-1].add_(x[1:]),
    lambda x, y: x.long(),
    lambda x, y: x.long().copy_(y),
    lambda x, y: x.sum(0, dtype=torch.float64),
    lambda x, y: torch.cat([x, y]),
    lambda x, y: x.expand(3, *x.shape),
    lambda x, y: x @ y,
    lambda x, y: x / 2,
    lambda x, y: torch.arange(0, 4, device="cuda"),
    lambda x, y: torch.arange(0, 4.5, device="cuda"),
    lambda x, y: torch.arange(4, device="cuda") + x.shape[0],
    lambda x, y: torch.rand(4, 4, device="cuda:1"),
    lambda x, y: torch._foreach_add_([x, y], [0.5, 1.5]),
    lambda x, y: torch._foreach_mul([x, y], 2.0),
    lambda x, y: torch.add(x, y, out=x),
    lambda x, y: torch.native_dropout(x, 0.5, False)[0],
    lambda x, y: torch.complex(x, x).conj(),
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: x.new_empty(2, 3).resize_(4, 4),
    lambda x, y: x.to("cuda:1"),
    lambda x, y: x.clone(memory_format=torch.contiguous_format),
    lambda x, y: torch.full((2, 2), 3, device="cuda"),
    lambda x, y: x.as_strided((2,), (1,)),
    lambda x, y: torch.as_strided_scatter(x, x.reshape(-1)[:2], (2,), (1,)),
]


# Torch gives some once in a process, and not to the second program.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int, sweep: tuple[bool, int], answers: Any) -> None:
    def program() -> Any:
        draw = random.Random(f"{seed} {sweep[1]}")
        torch.set_default_dtype(torch.float32)
        held = [torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda", dtype=torch.int64)]
        found = []
        for _ in range(400):
            default = draw.choice([torch.float32, torch.float32, torch.float64])
            call, x, y = draw.choice(CALLS), draw.choice(held), draw.choice(held)
            torch.set_default_dtype(default)
            made: list[Any] = []
            with torch.inference_mode(draw.random() < 0.1):
                found.append(outcome(lambda: made.append(call(x, y)) or made))  # noqa: B023
            held.extend(each for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor))
            while len(held) > 12:
                held.pop(draw.randrange(2, len(held)))
        return found

    try:
        assert len(answers(program)) == 400
    finally:
        torch.set_default_dtype(torch.float32)


def test_calls_of_one_plan_need_no_kernel_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    with torchdevice.simulate(compute="meta"):
        x, parts = torch.ones(4, device="cuda"), torch.ones(100, device="cuda")
        y, _ = x + x, parts[0].mul_(parts[1])
        monkeypatch.setattr(meta_kernels, "_run", None)
        z = x + x
        assert z.shape == y.shape and z.data_ptr() != y.data_ptr()
        for i in range(99):
            parts[i].mul_(parts[i + 1])
        with pytest.raises(TypeError):
            x + 1


@pytest.mark.parametrize("size", [5, 40, 1000, 100_000])
def test_forgotten_values_keep_their_address(size: int) -> None:
    """Whose memory was freed would be the storage of a later tensor that gets the same memory."""
    makers = [
        lambda: torch.arange(size, device="cuda"),
        lambda: torch.empty(0, dtype=torch.int64, device="cuda").resize_(size).zero_(),
        lambda: torch.cumsum(
            torch.ones(size, device="cuda").long(), 0, out=torch.arange(0, device="cuda")
        ),
        lambda: torch.full((size,), 2, device="cuda"),
    ]
    with torchdevice.simulate(compute="meta"):
        unknown = torch.rand(size, device="cuda")
        forgotten = []
        for make in makers * 20:
            forgotten.append(make())
            forgotten[-1].copy_(unknown)
            later = torch.full((size,), 4, device="cuda") + 1
            assert later.untyped_storage().nbytes() == 8 * size
            assert later.tolist()[:2] == [5, 5]
            assert later.data_ptr() not in {each.data_ptr() for each in forgotten}
