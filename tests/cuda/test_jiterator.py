"""``torch.cuda.jiterator``: functions of C++ for each element, by a compiler of this machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sweeping import choose
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice
from torchdevice.errors import NotSupportedError
from torchdevice.kernel.lowlevel import compiled_loop

TARGETS = ("cpu", "simulated:cuda")
OPERATORS = {entry.name: entry for entry in op_db if entry.name.startswith("jiterator")}
DTYPES = (torch.bool, torch.int32, torch.bfloat16, torch.float32, torch.complex64)


@pytest.fixture(params=TARGETS, autouse=True)
def scope(request: pytest.FixtureRequest) -> Any:
    with torchdevice.portable(request.param) as entered:
        yield entered


def made(code: str, **numbers: Any) -> Any:
    return torch.cuda.jiterator._create_jit_fn(code, **numbers)


def test_the_operators_of_torchs_database(
    sweep: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each is compiled, which takes half a second.
    for name, dtype in choose(list(itertools.product(OPERATORS, DTYPES)), sweep, 5):
        check_operator(name, dtype, monkeypatch)


def check_operator(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = OPERATORS[name]
    # Torch made the function when the database was imported, outside scopes.
    monkeypatch.setattr(entry.op, "is_cuda_available", True)
    for sample in entry.sample_inputs("cuda", dtype):
        # Before: a fraction becomes an integer, as C++ converts it.
        numbers = {
            key: value if dtype.is_floating_point or dtype.is_complex else dtype_of(value, dtype)
            for key, value in sample.kwargs.items()
        }
        found = entry.op(sample.input, *sample.args, **sample.kwargs)
        found = found if isinstance(found, tuple) else (found,)
        given = [wide(each) for each in (sample.input, *sample.args)]
        wanted = reference(name, given, numbers)
        for each, value in zip(found, wanted, strict=True):
            assert each.dtype is dtype and each.device == sample.input.device
            torch.testing.assert_close(each.cpu(), value.to(dtype), rtol=2e-2, atol=2e-2)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in a dtype in which C++ computes."""
    tensor = tensor.cpu()
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor.long() if tensor.dtype is torch.bool else tensor


def dtype_of(value: Any, dtype: torch.dtype) -> int:
    """Return a number as C++ converts it to a dtype of integers."""
    return int(bool(value)) if dtype is torch.bool else int(value)


def reference(name: str, given: list[torch.Tensor], numbers: dict[str, Any]) -> tuple[Any, ...]:
    """Return what an operator of the database computes, by torch."""
    alpha, beta = numbers.get("alpha", 1), numbers.get("beta", 1)
    if name == "jiterator_unary":
        return (given[0] * given[0] + given[0],)
    if name == "jiterator_4inputs_with_extra_args":
        return (alpha * given[0] + beta * given[1] + given[2] + given[3],)
    if name == "jiterator_2inputs_2outputs":
        return given[0] + alpha * given[1], given[0] - alpha * given[1]
    assert name in ("jiterator_binary", "jiterator_binary_return_by_ref")
    return (given[0] + alpha * given[1],)


def test_dtypes_are_promoted_and_strides_kept() -> None:
    add = made("template <typename T> T add(T x, T y) { return x + y; }")
    ints, halves = torch.arange(6, device="cuda"), torch.ones(6, dtype=torch.half, device="cuda")
    assert add(ints, halves).dtype is torch.half
    assert add(ints, torch.tensor(0.5, device="cuda")).dtype is torch.float32
    assert add(halves, torch.tensor(2.0, dtype=torch.double, device="cuda")).dtype is torch.half
    image = torch.rand(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    assert add(image, image).stride() == image.stride()
    assert torch.equal(add(image[:, ::2], image[:, ::2]), 2 * image[:, ::2])


def test_arguments_have_the_types_of_python() -> None:
    code = "template <typename T> T f(T x, {}) {{ return {}; }}"
    x = torch.ones(2, dtype=torch.double, device="cuda")
    assert made(code.format("bool b", "b ? 5 : 7"), b=False)(x, b=True).tolist() == [5, 5]
    large = 2**53 + 1
    assert made(code.format("int64_t n", "T(n % 1000)"), n=large)(x).tolist() == [large % 1000] * 2
    z = torch.ones(2, dtype=torch.complex64, device="cuda")
    assert made(code.format("T c", "x * c"), c=2 - 1j)(z).tolist() == [2 - 1j] * 2
    half = torch.tensor(0.5)
    assert made(code.format("T y", "x * y"), y=1.0)(x, y=half).tolist() == [0.5, 0.5]


def test_a_result_has_no_gradient_and_a_graph_repeats_the_function() -> None:
    square = made("template <typename T> T square(T x) { return x * x; }")
    x = torch.full((3,), 2.0, device="cuda", requires_grad=True)
    assert not square(x).requires_grad
    memory, graph = x.detach().clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = square(memory)
    memory.fill_(3.0)
    graph.replay()
    assert result.tolist() == [9.0] * 3


def test_what_is_wrong_raises(scope: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, device="cuda")
    with pytest.raises(RuntimeError, match="undeclared_name"):
        made("template <typename T> T bad(T x) { return undeclared_name; }")(x)
    with pytest.raises(RuntimeError, match="without a tensor"):
        made("template <typename T> T f(T x) { return x; }")()
    if torch.device("cuda").type == "cuda":
        with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu!"):
            made("template <typename T> T f(T x, T y) { return x + y; }")(x, x.cpu())
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    compiled_loop.compiled.cache_clear()
    with pytest.raises(NotSupportedError, match=r"name one by CXX=.*nonexistent"):
        made("template <typename T> T f(T x) { return x - x; }")(x)
