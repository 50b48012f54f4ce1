"""Triton's language in a scope, compared with torch on the CPU, by feature."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext as _nothing
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import NotSupportedError

triton = pytest.importorskip("triton", reason="Triton is not installed")

import example_kernels as kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

FEATURES = json.loads(Path(__file__).with_name("features.json").read_text())

CASES: dict[str, Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]] = {}
"""For each feature, a generator of pairs: what a kernel gives, and what it should."""

Pairs = Iterator[tuple[Any, Any]]


def feature(name: str) -> Callable[[Callable[[], Pairs]], None]:
    def add(case: Callable[[], Pairs]) -> None:
        assert name not in CASES
        CASES[name] = case

    return add


def made(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values on the CPU, and the same on the device."""
    values = torch.randn(shape) if dtype.is_floating_point else torch.randint(-100, 100, shape)
    values = values.to(dtype)
    return values, values.to("cuda")


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


@feature("pointers, masks, `tl.load`, `tl.store`")
def _copies() -> Pairs:
    for dtype in (torch.float32, torch.float64, torch.int8, torch.int64, torch.bool):
        values, x = made(100, dtype=dtype)
        out = on_device(100, dtype=dtype)
        kernels.copied[(4,)](x, out, 100, 1, MASKED=True, BLOCK=32)
        yield out, values
    values, x = made(40)
    view = x[4:]
    out = on_device(9)
    kernels.copied[(1,)](view, out, 9, 4, MASKED=True, BLOCK=16)
    yield out, values[4::4]


@feature("scalar arguments: int32, int64, float32, bool, annotated bfloat16, 1 as a constant")
def _scalars() -> Pairs:
    for flag in (True, False):
        out = on_device(1)
        kernels.scalars[(1,)](out, 3, 2**40, 0.5, flag, 1)
        yield out, torch.tensor([3.5 if flag else 0.0])
    for value in (42.1, float("nan")):
        out = on_device(1)
        kernels.in_bfloat16[(1,)](out, value)
        yield out, torch.tensor([value], dtype=torch.bfloat16).float()


def _arithmetic(*dtypes: torch.dtype) -> Pairs:
    for dtype in dtypes:
        (left, x), (right, y) = made(64, dtype=dtype), made(64, dtype=dtype)
        out = on_device(64, dtype=dtype)
        kernels.arithmetic[(1,)](x, y, out, N=64)
        yield out, left * right - left


@feature("arithmetic in float32, float16 and integers")
def _plain() -> Pairs:
    yield from _arithmetic(torch.float32, torch.float16, torch.int32, torch.uint8)


@feature("arithmetic in bfloat16, rounded to nearest")
def _bfloat16() -> Pairs:
    yield from _arithmetic(torch.bfloat16)


@feature("casts to bfloat16, float16 and float8, to nearest")
def _casts() -> Pairs:
    pairs = [
        (tl.bfloat16, torch.bfloat16),
        (tl.float16, torch.float16),
        (tl.float8e5, torch.float8_e5m2),
    ]
    for theirs, ours in pairs:
        values, x = made(256)
        values, x = values * 30, x * 30
        out = on_device(256)
        kernels.through[(1,)](x, out, N=256, DTYPE=theirs)
        yield out, values.to(ours).float()


def _products(
    dtype: torch.dtype,
    precision: Any = None,
    out: torch.dtype = torch.float32,
    kind: Any = tl.float32,
) -> Pairs:
    (left, a), (right, b) = (
        (made(50, 70), made(70, 40))
        if dtype != torch.int8
        else (made(50, 70, dtype=dtype), made(70, 40, dtype=dtype))
    )
    a, b = a.to(dtype), b.to(dtype)
    c = on_device(50, 40, dtype=out)
    kernels.matmul[(4, 3)](a, b, c, 50, 40, 70, BLOCK=16, DEPTH=32, PRECISION=precision, OUT=kind)
    wide = torch.int64 if dtype == torch.int8 else torch.float64
    yield c, (left.to(dtype).to(wide) @ right.to(dtype).to(wide)).to(out)


@feature("`tl.dot` of int8")
def _int8() -> Pairs:
    yield from _products(torch.int8, out=torch.int32, kind=tl.int32)


@feature("`tl.dot` of float16, bfloat16, float8")
def _small_products() -> Pairs:
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        yield from _products(dtype)


@feature("`tl.dot` of float32, `ieee` and `tf32`")
def _wide_products() -> Pairs:
    yield from _products(torch.float32, "ieee")
    ((result, expected),) = _products(torch.float32, "tf32")
    assert (result.cpu() - expected).abs().max() > 1e-4, "TF32 has 10 bits"
    torch.testing.assert_close(result.cpu(), expected, atol=5e-2, rtol=1e-2)


def _by(
    name: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Pairs:
    values, x = made(64, dtype=dtype)
    values, x = values.abs(), x.abs()
    out = on_device(64, dtype=dtype)
    kernels.unary[(1,)](x, out, N=64, WHICH=name)
    yield out, function(values)


@feature("`tl.exp`, `tl.erf` and other functions")
def _functions() -> Pairs:
    yield from _by("exp", torch.exp)
    yield from _by("erf", torch.erf)


@feature("`tl.extra.libdevice`, also imported by value")
def _libdevice() -> Pairs:
    yield from _by("tanh", torch.tanh)
    yield from _by("tanh by value", torch.tanh)
    yield from _by("pow", lambda x: x**x)
    yield from _by("rsqrt", torch.rsqrt)
    yield from _by("div_rn", lambda x: x / (x + 1))


@feature("functions of `libdevice` that torch and NumPy lack")
def _unknown() -> Pairs:
    yield kernels.asked_of_libdevice[(1,)](on_device(1), on_device(1)), None


@feature("`tl.sum`, `tl.max`, `tl.reduce` with a function of the program")
def _reductions() -> Pairs:
    values, x = made(16, 32)
    out = on_device(16 + 32 + 1)
    kernels.sums[(1,)](x, out, ROWS=16, COLUMNS=32)
    yield out, torch.cat([values.max(1).values, values.sum(0), values.sum()[None]])
    values, x = made(7, 100)
    out = on_device(7, 100)
    kernels.softmax[(7,)](out, x, 100, 100, BLOCK=128)
    yield out, values.softmax(-1)


@feature("the order of `tl.reduce`")
def _order() -> Pairs:
    out = on_device(1, dtype=torch.int64)
    digits = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    kernels.in_order[(1,)](digits.cuda(), out, N=8)
    yield out, torch.tensor([31415926])


@feature("`tl.argmax`, `tl.argmin`, `return_indices`")
def _arguments() -> Pairs:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        values, x = made(64, dtype=dtype)
        out = on_device(3, dtype=torch.int32)
        kernels.places[(1,)](x, out, N=64)
        largest = (values == values.max()).nonzero()[0, 0].item()
        smallest = (values == values.min()).nonzero()[0, 0].item()
        yield out, torch.tensor([largest, smallest, largest], dtype=torch.int32)


@feature("`tl.cumsum`, `tl.cumprod`")
def _cumulative() -> Pairs:
    yield from _by("cumsum", lambda x: x.cumsum(0))
    yield from _by("cumsum reversed", lambda x: x.flip(0).cumsum(0).flip(0))
    yield from _by("cumprod", lambda x: x.cumprod(0))


@feature("`tl.associative_scan` with a function of the program, also reversed")
def _scans() -> Pairs:
    for reverse in (False, True):
        factors, summands = torch.rand(64), torch.rand(64)
        out = on_device(64)
        kernels.recurrence[(1,)](factors.cuda(), summands.cuda(), out, N=64, REVERSE=reverse)
        state, expected = torch.tensor(0.0), []
        for i in range(64)[:: -1 if reverse else 1]:
            state = state * factors[i] + summands[i]
            expected.append(state)
        yield out, torch.stack(expected[::-1] if reverse else expected)


@feature("`tl.sort`, `tl.flip`, `tl.gather`, `tl.histogram`")
def _orders() -> Pairs:
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        yield from _by("sort", lambda x: x.sort().values, dtype)
    yield from _by("flip", lambda x: x.flip(0))
    values, x = made(32)
    where, out = torch.randperm(32).int(), on_device(32)
    kernels.gathered[(1,)](x, where.cuda(), out, N=32)
    yield out, values[where.long()]
    values = torch.randint(0, 8, (64,), dtype=torch.int32)
    out = on_device(8, dtype=torch.int32)
    kernels.counted[(1,)](values.cuda(), out, N=64, BINS=8)
    yield out, torch.bincount(values, minlength=8).int()


@feature("`tl.split`, `tl.join`, `tl.reshape`, `tl.trans`")
def _shapes() -> Pairs:
    values, x = made(64)
    out = on_device(64)
    kernels.reshaped[(1,)](x, out, N=64)
    yield out, values.reshape(4, 16).T.reshape(64)


@feature("atomics of integers, float32, float16, bfloat16")
def _atomics() -> Pairs:
    for dtype in (torch.int32, torch.float32, torch.float16, torch.bfloat16):
        # Small numbers, so that no order rounds otherwise.
        values = torch.randint(-2, 3, (100,)).to(dtype)
        total = on_device(4, dtype=dtype)
        kernels.accumulate[(4,)](total, values.cuda(), 100, BLOCK=32)
        yield total, values.reshape(25, 4).sum(0).to(dtype)
    for dtype in (torch.int32, torch.float32):
        values, x = made(64, dtype=dtype)
        out = on_device(2, dtype=dtype)
        kernels.extremes[(4,)](out, x, BLOCK=16)
        yield out, torch.stack([values.max(), values.min()])


@feature("`tl.dot_scaled` of float4, bfloat16 and others")
def _scaled_products() -> Pairs:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(0, 16, (16, 64))
    exponents = torch.randint(120, 134, (16, 2), dtype=torch.uint8)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    right = torch.randn(64, 16).bfloat16()
    out = on_device(16, 16)
    kernels.scaled[(1,)](packed.cuda(), exponents.cuda(), right.cuda(), out, N=16, K=64)
    factors = torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
    yield out, (numbers[codes] * factors) @ right.float()


@feature("casts toward zero")
def _toward_zero() -> Pairs:
    values, x = made(1024)
    out = on_device(1024, dtype=torch.float16)
    kernels.toward_zero[(1,)](x, out, N=1024)
    bits = values.half().view(torch.int16)
    yield (
        out,
        torch.where(values.half().float().abs() > values.abs(), bits - 1, bits).view(torch.float16),
    )


@feature("tuples of tensors, numbers and None as arguments")
def _tuples() -> Pairs:
    out = on_device(2)
    kernels.given_tuples[(1,)](out, (torch.ones(1).cuda(), 2), (3, None))
    yield out, torch.tensor([6.0, 1.0])


@feature("sums of int1, which wrap")
def _sums_of_bits() -> Pairs:
    for count in (10, 11):
        values = torch.cat([torch.ones(count), torch.zeros(64 - count)])
        out = on_device(1, dtype=torch.int32)
        kernels.count_bits[(1,)](values.cuda(), out, N=64)
        yield out, torch.tensor([count % 2], dtype=torch.int32)


@feature("NaN in `tl.maximum`, `tl.minimum`, `tl.clamp`")
def _not_numbers() -> Pairs:
    values = torch.tensor([float("nan"), -3.0, 0.5, 3.0])
    out = on_device(8)
    kernels.bounded[(1,)](values.cuda(), out, N=4)
    yield out, torch.tensor([0, 0, 0.5, 3, -1, -1, 0.5, 1])


@feature("reductions by tensor descriptors")
def _descriptor_reductions() -> Pairs:
    values = torch.randint(0, 100, (16, 16), dtype=torch.int32)
    out = torch.ones(16, 16, dtype=torch.uint32).cuda()
    kernels.reduced_by_descriptor[(1,)](values.to(torch.uint32).cuda(), out, N=16)
    yield out, ((values + 1) & values).to(torch.uint32)


@feature("locks by `tl.atomic_cas` and `tl.atomic_xchg`")
def _locks() -> Pairs:
    lock, count = on_device(1, dtype=torch.int32), on_device(1, dtype=torch.int32)
    kernels.locked[(10,)](lock, count)
    yield count, torch.tensor([10], dtype=torch.int32)


@feature("block pointers (Triton 3.8 and earlier)")
def _block_pointers() -> Pairs:
    if int(triton.__version__.split(".")[1]) > 8:
        pytest.skip("this Triton has no block pointers")
    values, x = made(10, 50)
    out = on_device(10, 50)
    with (
        pytest.warns(UserWarning, match="deprecated") if triton.__version__ >= "3.7" else _nothing()
    ):
        kernels.block_pointers[(1,)](x, out, 10, 50, BLOCK=16)
    yield out, values * 2


@feature("tensor descriptors, of kernels and of the host")
def _descriptors() -> Pairs:
    values, x = made(10, 48)
    out, other = on_device(10, 48), on_device(10, 48)
    kernels.descriptors[(1,)](x, out, 10, 48, BLOCK=16)
    yield out, values * 2
    source, sink = (TensorDescriptor.from_tensor(each, [16, 16]) for each in (x, other))
    kernels.given_descriptors[(1,)](source, sink, 48, BLOCK=16)
    yield other, values * 2


def philox(seed: int, offset: int) -> int:
    """Return Philox 4x32-10's first number, by its paper: Salmon et al., 2011."""
    counter, key = [offset, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 0xFFFFFFFF
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & low,
            (first >> 32) ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter[0] - 2**32 if counter[0] >= 2**31 else counter[0]


@feature("`tl.rand` and `tl.randint`: Philox")
def _random() -> Pairs:
    out = on_device(256, dtype=torch.int32)
    kernels.random_numbers[(1,)](out, 42, N=256)
    yield out, torch.tensor([philox(42, i) for i in range(256)], dtype=torch.int32)


@feature("pointers that a kernel reads from memory")
def _pointers() -> Pairs:
    pairs = [made(32) for _ in range(3)]
    pointers = torch.tensor([x.data_ptr() for _, x in pairs]).cuda()
    out = on_device(3, 32)
    # So many arguments that the number of one could be the upper bits of an address of the process.
    kernels.by_pointers[(1,)](pointers, out, 3, tuple(made(1)[1] for _ in range(16)), N=32)
    yield out, torch.stack([values for values, _ in pairs])


@feature("`inline_asm_elementwise`")
def _assembly() -> Pairs:
    yield kernels.assembly[(1,)](on_device(1, dtype=torch.int32)), None


def test_the_table_and_the_cases_agree() -> None:
    assert list(FEATURES) == list(CASES)
    assert set(FEATURES.values()) == {"exact", "approximate", "unsupported"}


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature(name: str, target: str) -> None:
    torch.manual_seed(0)
    with torchdevice.portable(target):
        if FEATURES[name] == "unsupported":
            with pytest.raises(NotSupportedError, match="on a GPU"):
                list(CASES[name]())
            return
        pairs = list(CASES[name]())
        assert pairs
        for result, expected in pairs:
            tolerance = (
                {"atol": 0, "rtol": 0}
                if FEATURES[name] == "exact"
                else {"atol": 1e-4, "rtol": 1e-5}
            )
            torch.testing.assert_close(result.cpu(), expected, equal_nan=True, **tolerance)
