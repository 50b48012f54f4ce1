"""A GPU's random numbers, made by C++ and by NumPy, which are equal to the bit."""

from __future__ import annotations

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


SCALED = {
    "uniform_": [(-1.0, 1.0), (0.0, 3.0), (1e-3, 7.5), (-1e30, 1e30)],
    "normal_": [(1.0, 2.0), (0.0, 0.1), (-3.0, 0.0)],
}


@pytest.mark.parametrize(
    ("name", "bounds"), [(name, each) for name, several in SCALED.items() for each in several]
)
@pytest.mark.parametrize("shape", [(1,), (257,), (4, 5000), (0,)])
def test_cpp_and_python_scale_equally(
    name: str, bounds: tuple[float, float], shape: tuple[int, ...]
) -> None:
    found = []
    for native in ("always", "never"):
        with torchdevice.simulate(random="cuda", native=native):  # type: ignore[arg-type]
            torch.manual_seed(5)
            x = torch.empty(shape, device="cuda")
            getattr(x, name)(*bounds)
            transposed = getattr(torch.empty(3, 7, device="cuda").t(), name)(*bounds)
            half = getattr(torch.empty(9, device="cuda", dtype=torch.bfloat16), name)(*bounds)
            gaps = torch.zeros(4, 6, device="cuda")
            getattr(gaps[:, ::2], name)(*bounds)
            found.append([each.cpu() for each in (x, transposed, half, gaps)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


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
            return torch.randn(3000, device="cuda").cpu()

    assert torch.equal(drawn("always"), drawn("never")) and len(calls) == 2
    assert calls[0][0] == "normal"
