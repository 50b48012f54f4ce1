"""A GPU's random numbers, made by C++ and by NumPy, which are equal to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import torchdevice
from torchdevice.native import building
from torchdevice.random_numbers import philox
from torchdevice.random_numbers.philox import Gpu, Kind, Source

pytestmark = [pytest.mark.one_engine, pytest.mark.usefixtures("native_kernels")]

KINDS = [philox.WORDS, philox.PAIRS, philox.UNIFORM, philox.UNIT, philox.UNIFORM64, philox.NORMAL]

SOURCES = [Source(0, 0), Source(2**64 - 1, 2**34 - 4), Source(0x123456789ABCDEF0, 2**63)]


@pytest.mark.parametrize("count", [1, 7, 255, 257, 1023, 1025, 4096, 4100, 5000, 100_003])
@pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])
def test_cpp_and_python_make_equal_numbers(
    kind: Kind, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(philox, "compiled", [])
    for source in SOURCES:
        for gpu in (Gpu(2, 600), Gpu(108, 2048)):
            threads = gpu.threads_for(count)
            ours, theirs = numpy.zeros(count, kind.dtype), numpy.zeros(count, kind.dtype)
            philox.fill(kind, ours, source, threads)
            assert building.load().fill_random(
                kind.name, theirs.ctypes.data, count, *source, threads
            )
            assert (ours.view(numpy.uint8) == theirs.view(numpy.uint8)).all()


_NAN, _INF = float("nan"), float("inf")

FILLS: dict[str, list[tuple[Any, ...]]] = {
    "uniform_": [
        *[(), (-1.0, 1.0), (0.0, 3.0), (1e-3, 7.5), (2.0, 2.0), (-1e30, 1e30), (0.0, 1e-50)],
        *[(1.0, 0.0), (_NAN, 1.0), (0.0, _INF), (-3e38, 3e38), (0.0, 1e5)],
    ],
    "normal_": [(), (1.0, 2.0), (-3.0, 0.0), (0.0, 0.1), (0.0, -1.0), (_NAN, 1.0), (0.0, _NAN)],
    "bernoulli_": [(), (0.0,), (0.3,), (1.0,), (1.5,), (-0.1,), (_NAN,)],
    "random_": [
        *[(), (7,), (0,), (-3,), (1 << 20,), (-5, 5), (3, 3), (5, None), (0, 256), (-1, 1)],
        *[(0, 2**28 - 1), (0, 2**28), (0, 2**31), (0, 2**31 + 1), (-(2**31), 2**31)],
        *[(3 << 32,), (5 << 40,), (-(1 << 32), (1 << 63) - (1 << 33)), (0, 3 << 61)],
        *[(-(2**40), 2**40), (-(2**63), 2**63 - 1), (-(2**63), None), (2**62, 2**63 - 1)],
    ],
    "exponential_": [(), (2.5,), (0.0,)],
    "cauchy_": [(), (1.0, 2.0)],
    "geometric_": [(0.3,), (0.0,)],
    "log_normal_": [(), (0.0, 0.1)],
}
"""Method that fills a tensor -> arguments, some of which torch refuses."""

DTYPES = [
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64],
    *[torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool],
]

LAYOUTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "scalar": lambda dtype: torch.zeros((), dtype=dtype, device="cuda"),
    "empty": lambda dtype: torch.zeros(0, 3, dtype=dtype, device="cuda"),
    "one": lambda dtype: torch.zeros(1, dtype=dtype, device="cuda"),
    "blocks": lambda dtype: torch.zeros(3, 1701, dtype=dtype, device="cuda"),
    "transposed": lambda dtype: torch.zeros(5, 301, dtype=dtype, device="cuda").t(),
    "channels last": lambda dtype: torch.zeros(2, 3, 4, 5, dtype=dtype, device="cuda").to(
        memory_format=torch.channels_last
    ),
    "part": lambda dtype: torch.zeros(300, dtype=dtype, device="cuda")[3:296],
    "gaps": lambda dtype: torch.zeros(4, 600, dtype=dtype, device="cuda")[:, ::2],
    "shared": lambda dtype: torch.zeros(1, dtype=dtype, device="cuda").expand(6),
}


# torch warns of bounds that a dtype of floating point lacks.
@pytest.mark.filterwarnings("ignore:.* is out of bounds:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_cpp_and_python_fill_equally(name: str, dtype: torch.dtype) -> None:
    found: list[list[object]] = [[], []]
    for answers, native in zip(found, ("always", "never"), strict=True):
        with torchdevice.simulate(random="cuda", native=native):  # type: ignore[arg-type]
            own = torch.Generator("cuda")
            for args in FILLS[name]:
                for layout, make in LAYOUTS.items():
                    for generator in (None, own, torch.Generator("cpu")):
                        torch.cuda.manual_seed(5)
                        own.manual_seed(6)
                        answers.append((args, layout, _filled(name, make(dtype), args, generator)))
                        offsets = torch.cuda.get_rng_state()[8:].tolist(), own.get_offset()
                        answers.append(offsets)
    for one, other in zip(*found, strict=True):
        assert one == other


def _filled(
    name: str, x: torch.Tensor, args: tuple[Any, ...], generator: torch.Generator | None
) -> bytes | str:
    """Return the bytes of a tensor after it is filled, or the error."""
    base = x if x._base is None else x._base
    try:
        assert getattr(x, name)(*args, generator=generator) is x
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    host = base.cpu().reshape(-1)
    if not host.dtype.is_floating_point:
        return bytes(torch.view_as_real(host).numpy() if host.is_complex() else host.numpy())
    # A NaN has several bit patterns.
    return bytes(host.masked_fill(host.isnan(), 1234.5).view(torch.uint8).numpy())


def test_remainders_are_exact() -> None:
    spans = [3, 5, 6, 7, 10, 641, 2**16 + 1, 2**27 - 1, 2**28 - 1, *range(900, 1000)]
    spans += [2**28, 2**28 + 1, 2**32, 3 << 32, 5 << 40, (1 << 63) - (1 << 32), 2**63 - 1]
    found = []
    for native in ("always", "never"):
        with torchdevice.simulate(random="cuda", native=native):  # type: ignore[arg-type]
            torch.manual_seed(9)
            drawn = [torch.randint(span, (10_000,), device="cuda").cpu() for span in spans]
            found.append(torch.stack(drawn))
    assert torch.equal(*found)
    assert (found[0] < torch.tensor(spans)[:, None]).all()


def in_both(draw: Callable[[], Any]) -> list[list[Any]]:
    """Return what is drawn by C++ and by Python, and the generator's offset after it."""
    found = []
    for native in ("always", "never"):
        with torchdevice.simulate(random="cuda", native=native):  # type: ignore[arg-type]
            torch.manual_seed(7)
            try:
                drawn = draw()
            except RuntimeError as error:
                drawn = str(error)
            found.append([drawn, torch.cuda.get_rng_state()[8:].tolist()])
    return found


CHANCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda p: p,
    "transposed": lambda p: p.view(10, 511).t(),
    "gaps": lambda p: p[::3],
    "scalar": lambda p: p[5],
    "empty": lambda p: p[:0],
    "channels last": lambda p: p[:5040].view(2, 7, 4, 90).to(memory_format=torch.channels_last),
    "NaN": lambda p: p.index_fill(0, torch.tensor([77], device="cuda"), math.nan),
    "above": lambda p: p + 0.01,
    "below": lambda p: p - 0.01,
    "ends": lambda p: p.round(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_chances_of_elements_are_drawn_equally(dtype: torch.dtype) -> None:
    for name, change in CHANCES.items():

        def drawn(change: Callable[[torch.Tensor], torch.Tensor] = change) -> list[Any]:
            p = change((torch.arange(5110, device="cuda") % 21 / 20).to(dtype))
            other = torch.empty(p.shape, device="cuda", dtype=torch.float32).bernoulli_(p)
            within = p.clone()
            overlapping = within.view(-1)[1:].bernoulli_(within.view(-1)[:-1])
            return [
                each.tolist() for each in (torch.bernoulli(p), other, overlapping, p.bernoulli_(p))
            ]

        by_cpp, by_python = in_both(drawn)
        assert by_cpp == by_python, name


def test_chances_that_overlap_what_they_fill_are_read_first() -> None:
    def drawn() -> list[Any]:
        x = torch.arange(3000, device="cuda").double() / 3000
        return [x[1:].bernoulli_(x[:-1]).tolist(), x.tolist()]

    by_cpp, by_python = in_both(drawn)
    assert by_cpp == by_python


_PERMUTED = [torch.int64, torch.int32, torch.int16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("count", "dtype"),
    [
        *itertools.product([0, 1, 3, 300, 25_000, 33_000], _PERMUTED),
        (2048, torch.float16),
        (256, torch.bfloat16),
    ],
    ids=str,
)
def test_permutations_are_equal(count: int, dtype: torch.dtype) -> None:
    def drawn() -> list[Any]:
        out = torch.empty(count, 2, dtype=dtype, device="cuda")[:, 0]
        return [
            torch.randperm(count, device="cuda", dtype=dtype).tolist(),
            torch.randperm(count, out=torch.empty(count, dtype=dtype, device="cuda")).tolist(),
            torch.randperm(count, out=torch.empty(0, dtype=dtype, device="cuda")).tolist(),
            torch.randperm(count, out=out).tolist(),
        ]

    by_cpp, by_python = in_both(drawn)
    assert by_cpp == by_python


def test_a_permutation_too_long_for_one_number_of_key_and_place_is_equal() -> None:
    count = 2**21 + 1
    (by_cpp, _), (by_python, _) = in_both(lambda: torch.randperm(count, device="cuda").cpu())
    assert torch.equal(by_cpp, by_python)


def test_equal_keys_are_shuffled_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled, words_of = [], philox.words_of
    monkeypatch.setattr(philox, "words_of", lambda *of: shuffled.append(of) or words_of(*of))
    by_cpp, by_python = in_both(
        lambda: [torch.randperm(5, device="cuda").tolist() for _ in range(200)]
    )
    assert by_cpp == by_python and 5 < len(shuffled) < 60


def test_cpp_serves_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_python(*call: object) -> bool:
        raise AssertionError("a kernel in Python drew")

    def drawn() -> None:
        torch.rand(3000, device="cuda")
        torch.randn(3000, device="cuda")
        torch.randint(5, (3000,), device="cuda")
        torch.rand(9, device="cuda", dtype=torch.float64)
        x = torch.zeros(9, device="cuda", dtype=torch.half)
        x.uniform_()
        x.normal_()
        torch.zeros(9, device="cuda", dtype=torch.int64).random_()
        torch.zeros(9, device="cuda").bernoulli_(0.5)
        torch.bernoulli(torch.zeros(9, device="cuda"))
        torch.zeros(9, device="cuda", dtype=torch.bfloat16).random_(9)
        torch.randperm(9, device="cuda")

    with torchdevice.simulate(random="cuda", native="always"):
        drawn()  # C++ learns of an operator by its first call
        monkeypatch.setattr(philox, "compiled", [in_python])
        drawn()
        with pytest.raises(AssertionError, match="in Python drew"):
            torch.zeros(9, device="cuda").exponential_()


def test_the_upper_end_becomes_the_lower() -> None:
    x = torch.tensor([0.5, 1.0, 0.25])
    building.load().scale_random(x.data_ptr(), 3, 2.0, -1.0, 1.0, -1.0)
    assert x.tolist() == [0.0, -1.0, -0.5]


def test_a_kind_that_only_python_makes_is_left_to_it() -> None:
    assert not building.load().fill_random(philox.NORMAL64.name, 0, 0, 0, 0, 256)


def test_a_scope_without_cpp_uses_python(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def drawn(native: str) -> torch.Tensor:
        with torchdevice.simulate(random="cuda", native=native) as scope:  # type: ignore[arg-type]
            if native == "always":
                compiled = philox.compiled[0]
                monkeypatch.setattr(
                    philox, "compiled", [lambda *call: calls.append(call) or compiled(*call)]
                )
            torch.manual_seed(1)
            assert scope.runtime.supplied.is_gpu
            return torch.zeros(3000, device="cuda").exponential_().cpu()

    assert torch.equal(drawn("always"), drawn("never")) and len(calls) == 2
    assert calls[0][0] == "uniform"
