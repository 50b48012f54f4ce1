"""Kernels of the tests, decorated outside of any scope as those of libraries are."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.libdevice import tanh


@triton.jit
def add(x, y, out, n, alpha, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    left = tl.load(x + at, mask=inside)
    right = tl.load(y + at, mask=inside)
    tl.store(out + at, (left + alpha.to(tl.float32) * right).to(left.dtype), mask=inside)


@triton.jit
def softmax(out, x, stride, n, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + column, mask=column < n, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride + column, powers / tl.sum(powers, axis=0), mask=column < n)


@triton.jit
def matmul(
    a,
    b,
    c,
    M,
    N,
    K,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    OUT: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=OUT)
    for k in range(0, tl.cdiv(K, DEPTH)):
        depth = k * DEPTH + tl.arange(0, DEPTH)
        left = tl.load(
            a + rows[:, None] * K + depth[None, :],
            mask=(rows[:, None] < M) & (depth[None, :] < K),
            other=0.0,
        )
        right = tl.load(
            b + depth[:, None] * N + columns[None, :],
            mask=(depth[:, None] < K) & (columns < N),
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION, out_dtype=OUT)
    tl.store(
        c + rows[:, None] * N + columns[None, :],
        total,
        mask=(rows[:, None] < M) & (columns[None, :] < N),
    )


@triton.jit
def doubled_block(x, out, rows, columns, x_strides, out_strides, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.program_id(0) * M + tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    inside = (i < rows) & (j < columns)
    values = tl.load(x + (i * x_strides[0] + j * x_strides[1]), mask=inside, other=7)
    tl.store(out + i * out_strides[0] + j * out_strides[1], values * 2, mask=inside)


@triton.jit
def doubled_rows(x, out, columns, N: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, N)
    values = tl.load(x + row * columns + j, mask=j < columns, other=row)
    tl.store(out + row * N + j, values * 2)
    tl.store(x + row * columns + j, values * 3, mask=j < columns)


@triton.jit
def beyond_int32(x, out, start, N: tl.constexpr):
    at = start + tl.arange(0, N)[:, None] + tl.arange(0, N)[None, :]
    tl.store(out + at * 0, tl.load(x + at, mask=at < 0))


@triton.jit
def unary(x, out, N: tl.constexpr, WHICH: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(x + at)
    if WHICH == "exp":
        result = tl.exp(values)
    elif WHICH == "erf":
        result = tl.erf(values)
    elif WHICH == "tanh":
        result = libdevice.tanh(values)
    elif WHICH == "tanh by value":
        result = tanh(values)
    elif WHICH == "pow":
        result = libdevice.pow(values, values)
    elif WHICH == "div_rn":
        result = libdevice.div_rn(values, values + 1)
    elif WHICH == "rsqrt":
        result = libdevice.rsqrt(values)
    elif WHICH == "cumsum":
        result = tl.cumsum(values, 0)
    elif WHICH == "cumsum reversed":
        result = tl.cumsum(values, 0, reverse=True)
    elif WHICH == "cumprod":
        result = tl.cumprod(values, 0)
    elif WHICH == "sort":
        result = tl.sort(values)
    elif WHICH == "flip":
        result = tl.flip(values, 0)
    else:
        result = values
    tl.store(out + at, result)


@triton.jit
def asked_of_libdevice(x, out):
    tl.store(out, libdevice.erfcinv(tl.load(x)))


@triton.jit
def sums(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    values = tl.load(x + rows[:, None] * COLUMNS + columns[None, :])
    tl.store(out + rows, tl.reduce(values, 1, larger))
    tl.store(out + ROWS + columns, values.sum(0))
    tl.store(out + ROWS + COLUMNS, tl.sum(values).to(values.dtype))


@triton.jit
def larger(left, right):
    return tl.where(left > right, left, right)


@triton.jit
def concatenate(first, length, second, added):
    return first * 10 + second, length + added


@triton.jit
def in_order(x, out, N: tl.constexpr):
    """The digits of a number, which a reduction that changes their order mixes up."""
    digits = tl.load(x + tl.arange(0, N)).to(tl.int64)
    powers = tl.full((N,), 10, tl.int64)
    number, _ = tl.reduce((digits, powers), 0, joined)
    tl.store(out, number)


@triton.jit
def joined(left, left_power, right, right_power):
    return left * right_power + right, left_power * right_power


@triton.jit
def places(x, out, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    _, where = tl.max(values, 0, return_indices=True)
    tl.store(out, tl.argmax(values, 0))
    tl.store(out + 1, tl.argmin(values, 0))
    tl.store(out + 2, where)


@triton.jit
def step(a, b, later_a, later_b):
    return a * later_a, b * later_a + later_b


@triton.jit
def recurrence(x, y, out, N: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, N)
    _, result = tl.associative_scan((tl.load(x + at), tl.load(y + at)), 0, step, reverse=REVERSE)
    tl.store(out + at, result)


@triton.jit
def accumulate(total, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(total + at % 4, values, mask=at < n)


@triton.jit
def extremes(out, x, BLOCK: tl.constexpr):
    values = tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_max(out, tl.max(values, 0))
    tl.atomic_min(out + 1, tl.min(values, 0))


@triton.jit
def locked(lock, count):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(count, tl.load(count) + 1)
    tl.atomic_xchg(lock, 0)


@triton.jit
def block_pointers(x, out, M, N, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    sink = tl.make_block_ptr(out, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    for _ in range(0, tl.cdiv(N, BLOCK)):
        tl.store(sink, tl.load(source, boundary_check=(0, 1)) * 2, boundary_check=(0, 1))
        source = tl.advance(source, (0, BLOCK))
        sink = tl.advance(sink, (0, BLOCK))


@triton.jit
def descriptors(x, out, M, N, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    sink = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[BLOCK, BLOCK])
    for i in range(0, tl.cdiv(N, BLOCK)):
        sink.store([0, i * BLOCK], source.load([0, i * BLOCK]) * 2)


@triton.jit
def given_descriptors(source, sink, N, BLOCK: tl.constexpr):
    for i in range(0, tl.cdiv(N, BLOCK)):
        sink.store([0, i * BLOCK], source.load([0, i * BLOCK]) * 2)


@triton.jit
def random_numbers(out, seed, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.randint(seed, tl.arange(0, N)).to(tl.int32))


@triton.jit
def assembly(out):
    tl.store(
        out,
        tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1),
    )


@triton.jit
def scalars(out, small, large, real, flag, one):
    tl.static_assert(small.dtype == tl.int32)
    tl.static_assert(large.dtype == tl.int64)
    tl.static_assert(real.dtype == tl.float32)
    tl.static_assert(one == 1)
    if flag and small > 0:
        tl.store(out, small.to(tl.float32) + real.to(tl.float32))


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) * tl.load(y + at) - tl.load(x + at))


@triton.jit
def through(x, out, N: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(DTYPE).to(tl.float32))


@triton.jit
def gathered(x, where, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(where + at), 0))


@triton.jit
def reshaped(x, out, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    even, odd = tl.split(tl.reshape(values, (N // 2, 2)))
    values = tl.reshape(tl.join(even, odd), (N,))
    tl.store(out + tl.arange(0, N), tl.reshape(tl.trans(tl.reshape(values, (4, N // 4))), (N,)))


@triton.jit
def counted(x, out, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + tl.arange(0, N)), BINS))


@triton.jit
def by_pointers(pointers, out, count, others, N: tl.constexpr):
    for i in range(count):
        source = tl.load(pointers + i).to(tl.pointer_type(tl.float32))
        tl.store(out + i * N + tl.arange(0, N), tl.load(source + tl.arange(0, N)))


@triton.autotune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.load(x + at) + 1)
    else:
        tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def without_tensors(N: tl.constexpr):
    print("at", tl.arange(0, N) + tl.program_id(0))


@triton.jit
def with_edges(x, out, rows, columns, N: tl.constexpr, KIND: tl.constexpr, TURNED: tl.constexpr):
    i = (tl.program_id(0) * N + tl.arange(0, N))[:, None]
    j = (tl.program_id(1) * N + tl.arange(0, N))[None, :]
    at = j * rows + i if TURNED else i * columns + j
    inside = (i < rows) & (j < columns)
    if KIND == "triangle":
        inside = inside & (i >= j)
    if KIND == "hole":
        inside = inside & (j != 3)
    if KIND == "nothing":
        inside = inside & (j < 0)
    if KIND == "too far":
        inside = i <= rows
    tl.store(out + at, tl.load(x + at, mask=inside, other=-1) + 1, mask=inside)


@triton.jit
def printing_pointers(x, N: tl.constexpr):
    print("at", x + tl.arange(0, N))


@triton.jit
def given_tuples(out, values, pair):
    tl.static_assert(pair[1] is None)
    tl.store(out, tl.load(values[0]) + values[1] + pair[0])
    tl.store(out + 1, len(((1, 2) and (3,)) or (4, 5)))


@triton.jit
def in_bfloat16(out, value: tl.bfloat16):
    tl.store(out, value)


@triton.jit
def of_one_element(x):
    if tl.load(x + tl.arange(0, 1)) > 1:
        tl.store(x, 0)


@triton.jit
def toward_zero(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(tl.float16, fp_downcast_rounding="rtz"))


@triton.jit
def count_bits(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)) > 0, dtype=tl.int1).to(tl.int32))


@triton.jit
def bounded(x, out, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), tl.maximum(values, 0.0))
    tl.store(out + N + tl.arange(0, N), tl.clamp(values, -1.0, 1.0))


@triton.jit
def scaled(a, a_scale, b, out, N: tl.constexpr, K: tl.constexpr):
    rows, depth = tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
    factors = tl.load(a_scale + rows[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :])
    right = tl.load(b + depth[:, None] * N + rows[None, :])
    tl.store(
        out + rows[:, None] * N + rows[None, :],
        tl.dot_scaled(left, factors, "e2m1", right, None, "bf16"),
    )


@triton.jit
def reduced_by_descriptor(x, out, N: tl.constexpr):
    sink = tl.make_tensor_descriptor(out, shape=[N, N], strides=[N, 1], block_shape=[N, N])
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    sink.atomic_add([0, 0], tl.load(x + at))
    sink.atomic_and([0, 0], tl.load(x + at))


@triton.jit
def by_own_pointer(pointers, out, N: tl.constexpr):
    source = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(out + tl.program_id(0) * N + tl.arange(0, N), tl.load(source + tl.arange(0, N)))


# ---- kernels with mistakes -----------------------------------------------------------------------


@triton.jit
def copied(x, out, n, stride, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(out + at, tl.load(x + at * stride, mask=at < n), mask=at < n)
    else:
        tl.store(out + at, tl.load(x + at * stride))


@triton.jit
def shifted(x, out, n, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at + shift, mask=at < n), mask=at < n)


@triton.jit
def summed(x, out, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)), 0)
    if ATOMIC:
        tl.atomic_add(out, part)
    else:
        tl.store(out, tl.load(out) + part)


@triton.jit
def neighbours(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + at - 1, mask=(at > 0) & (at < n), other=0)
    tl.store(out + at, left + tl.load(x + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def asserted(x, LIMIT: tl.constexpr):
    tl.device_assert(tl.load(x) < LIMIT, "too large")


@triton.jit
def statically(x, LIMIT: tl.constexpr):
    tl.static_assert(LIMIT > 1, "too large")
    tl.store(x, LIMIT)


@triton.jit
def ranged(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), 1.0)


@triton.jit
def conditional(x, out, N: tl.constexpr, WHOLE: tl.constexpr):
    values = tl.load(x + tl.arange(0, N))
    if WHOLE:
        if values > 0:
            tl.store(out, 1.0)
    else:
        if tl.max(values, 0) > 0:
            tl.store(out, 1.0)


@triton.jit
def shapes(x, out, N: tl.constexpr, M: tl.constexpr):
    tl.store(out + tl.arange(0, N), tl.load(x + tl.arange(0, N)) + tl.arange(0, M))


@triton.jit
def dotted(x, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(x + at)))


@triton.jit
def strided(out, n, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) * step + tl.arange(0, BLOCK)
    tl.store(out + at, 1.0, mask=at < n)


@triton.jit
def large_product(a, b, c, N: tl.constexpr, STEPS: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    for i in range(STEPS):
        total = tl.dot(tl.load(a + at + i), tl.load(b + at + i), total)
    tl.store(c + at, total)


@triton.jit
def histogram(x, out, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    """Counts by blocks of addresses, some of them equal."""
    bins = out + tl.load(x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    if ATOMIC:
        tl.atomic_add(bins, 1)
    else:
        tl.store(bins, tl.load(bins) + 1)


@triton.autotune(configs=[triton.Config({"N": size}, num_stages=4) for size in (64, 32)], key=[])
@triton.jit
def tuned_product(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit(noinline=True)
def doubled(value):
    return value * 2


SCALE, CONSTANT = 3, tl.constexpr(3)


@triton.jit
def refused(x, N: tl.constexpr, WHAT: tl.constexpr):
    """Python, but not what Triton's compiler takes, where ``WHAT`` names a mistake."""
    at, count = tl.arange(0, N), tl.load(x).to(tl.int32)
    total = tl.load(x + at)
    if WHAT == "a global variable":
        total += SCALE
    elif WHAT == "a block for noinline":
        total = doubled(total)
    elif WHAT == "a loop that changes a shape":
        for _ in range(count):
            total = tl.sum(total, 0)
    elif WHAT == "a list":
        total = sum([total, total])
    else:
        total += CONSTANT + doubled(count)
        for _ in range(count):
            total = total + tl.sum(total, 0)
    tl.static_print("compiled for", N)
    tl.store(x + at, total)
