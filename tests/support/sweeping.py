"""Samples of sweeps, and the comparison of results bit for bit."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

T = TypeVar("T")


def choose(items: Sequence[T], sweep: tuple[bool, int], size: int) -> list[T]:
    """Return all items in a full sweep, else ``size`` drawn by the seed, in their order."""
    complete, seed = sweep
    if complete or size >= len(items):
        return list(items)
    chosen = set(random.Random(seed).sample(range(len(items)), size))
    return [item for index, item in enumerate(items) if index in chosen]


def shuffled(items: Sequence[T], sweep: tuple[bool, int]) -> list[T]:
    """Return items in order in a full sweep, else shuffled by the seed, to sample the first."""
    complete, seed = sweep
    return list(items) if complete else random.Random(seed).sample(items, len(items))


def parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the values with which a test is parametrised."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def sample(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Return the tests of a sample: all but those marked ``sampled``.

    Of a function marked ``sampled(n)`` n cases are kept. Of all functions marked ``sampled(n, of="a
    group")``, wherever they stand, n are kept, with one case each. The seed and the name of the
    function or group draw them, so others have no influence on what is drawn.
    """
    kept, cases, groups = set(), defaultdict(list), defaultdict(lambda: defaultdict(list))
    for item in items:
        mark = item.get_closest_marker("sampled")
        function = item.nodeid.partition("[")[0]
        if mark is None:
            kept.add(item)
        elif "of" in mark.kwargs:
            groups[mark.kwargs["of"], mark.args[0]][function].append(item)
        else:
            cases[function, mark.args[0]].append(item)
    for (function, size), of_one in cases.items():
        kept.update(_drawn(of_one, size, seed, function))
    for (group, size), functions in groups.items():
        for function in _drawn(sorted(functions), size, seed, group):
            kept.update(_drawn(functions[function], 1, seed, function))
    return kept


def _drawn(items: list[T], size: int, seed: int, name: str) -> list[T]:
    return random.Random(f"{seed} {name}").sample(items, min(size, len(items)))


def few_of(
    name: str, value: Any, items: Sequence[pytest.Item], seed: int, size: int
) -> list[pytest.Item]:
    """Return the tests, of those with one value of a parameter only ``size``, drawn by the seed."""
    with_it = [item for item in items if parameters(item).get(name) == value]
    kept = set(random.Random(f"{seed} {value}").sample(with_it, min(size, len(with_it))))
    left_out = set(with_it) - kept
    return [item for item in items if item not in left_out]


def on_one_target(items: Sequence[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests; of one that runs on several targets, the case of one of them.

    The test's name and the seed choose, so each target gets its share, and consecutive seeds go
    through all targets.
    """
    kept, cases = set(), defaultdict(list)
    for item in items:
        given = parameters(item)
        if "target" in given:
            cases[item.nodeid.replace(str(given["target"]), "", 1)].append(item)
        else:
            kept.add(item)
    kept.update(
        of_one[(zlib.crc32(key.encode()) + seed) % len(of_one)] for key, of_one in cases.items()
    )
    return [item for item in items if item in kept]


def samples_of(op: Any, dtype: torch.dtype, *, requires_grad: bool = False) -> Iterator[Any]:
    """Return the samples of an operator of torch's own database, on the CPU.

    torch looks for a test of unittest's in the stack first, which with some thousand modules takes
    longer than most operators. There is none.
    """
    from torch.testing._internal import common_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common_utils, "extract_test_fn", lambda: None)
        found: Iterator[Any] = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        return found


def attention_on(target: str) -> contextlib.AbstractContextManager[None]:
    """Let the CPU compute attention by a target's operators: MPS has no such fused kernel."""
    return sdpa_kernel(SDPBackend.MATH) if "mps" in target else contextlib.nullcontext()


def results_on_cpu(target: str, run: Callable[[], Any]) -> list[Any]:
    """Return a run's valid results: the plain CPU's, by each way to compute attention.

    A GPU composes attention that learns where heads are too narrow for its kernels, and so does a
    simulated one.
    """
    with attention_on(target):
        found = [run()]
    family, _, model = target.partition(":")
    if family == "simulated" and model.partition(":")[0] not in ("mps", "strict"):
        with sdpa_kernel(SDPBackend.MATH):
            found.append(run())
    return found


def difference_from_each(expected: Sequence[Any], actual: Any, kind: str) -> str:
    """Return "" if a result is identical to an expected one, else its difference from the first."""
    differences = [identical(each, actual, kind) for each in expected]
    return "" if "" in differences else differences[0]


def identical(expected: Any, actual: Any, kind: str = "cpu") -> str:
    """Return "" if values, dtypes, shapes and strides agree to the bit, else the difference.

    Tensors of ``actual`` may be on devices of type ``kind``.
    """
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    if expected_spec != actual_spec:
        return f"structure {actual_spec} instead of {expected_spec}"
    for one, other in zip(expected_leaves, actual_leaves, strict=True):
        difference = _leaf_difference(one, other, kind)
        if difference:
            return difference
    return ""


def _leaf_difference(one: Any, other: Any, kind: str) -> str:
    if not isinstance(one, torch.Tensor):
        return (
            ""
            if one == other or (one != one and other != other)
            else f"{other!r} instead of {one!r}"
        )
    if not isinstance(other, torch.Tensor):
        return f"{other!r} instead of a tensor"
    same_device = other.device.type in (kind, one.device.type)
    if (one.dtype, one.shape, one.layout) != (
        other.dtype,
        other.shape,
        other.layout,
    ) or not same_device:
        return (
            f"{other.dtype} {other.shape} {other.layout} on {other.device} instead of {one.dtype} "
            f"{one.shape}"
        )
    if one.is_nested or one.layout is not torch.strided or one.is_quantized:
        return "" if str(one.detach()) == str(other.detach().cpu()) else "values differ"
    if one.stride() != other.stride():
        return f"strides {other.stride()} instead of {one.stride()}"
    return "" if _bytes(one) == _bytes(other) else "values differ"


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().resolve_conj().resolve_neg().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()
