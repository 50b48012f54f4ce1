"""NVIDIA GPUs' random numbers: published ones, and those of threads of torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_threads
import numpy
import pytest
import torch
from draws import DRAWN

import torchdevice
from torchdevice.random_numbers import operators, philox
from torchdevice.random_numbers.operators import Drawing
from torchdevice.random_numbers.philox import Gpu, Source
from torchdevice.random_numbers.scratch import Scratch

pytestmark = pytest.mark.one_engine


def scope(multiprocessors: int = 108, threads: int = 2048) -> torchdevice.Scope:
    figures = {"multi_processor_count": multiprocessors, "max_threads_per_multi_processor": threads}
    return torchdevice.simulate(random="cuda", properties=figures)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def near(tensor: torch.Tensor, expected: list[float]) -> bool:
    """Return whether a tensor is printed as these numbers of four digits."""
    return bool((tensor.cpu().flatten() - torch.tensor(expected)).abs().max() < 0.6e-4)


class TestPublishedNumbers:
    def test_uniform_numbers(self) -> None:
        with scope():
            torch.manual_seed(0)
            found = torch.rand(8, device="cuda")
        assert near(found, [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203])

    @pytest.mark.parametrize(
        ("seed", "expected"),
        [
            (0, [-0.9247, -0.4253, -2.6438, 0.1452]),
            (10, [-0.1029, 1.6810, -0.2708]),  # pytorch#79496
            (42, [0.1940, 2.1614, -0.1721]),
        ],
    )
    def test_normal_numbers(self, seed: int, expected: list[float]) -> None:
        with scope():
            assert near(torch.randn(len(expected), device="cuda", generator=seeded(seed)), expected)

    @pytest.mark.parametrize(
        ("multiprocessors", "last"),
        [(132, [-0.6970, -0.7780, 0.3267]), (108, [0.1549, -0.6797, -0.1656])],
        ids=["H100", "A100"],
    )
    def test_normal_numbers_beyond_one_wave(self, multiprocessors: int, last: list[float]) -> None:
        """pytorch#143086: 9.5 million numbers, of which the last depend on the model."""
        with scope(multiprocessors):
            found = torch.randn(1, 49 * 12 * 112 * 144, device="cuda", generator=seeded(1))
            assert near(found[0, :3], [-0.2963, 2.6764, -0.1408]) and near(found[0, -3:], last)

    def test_rows_beyond_one_wave_of_a_small_gpu(self) -> None:
        """pytorch#158398: the first machine; figures are of 28 multiprocessors, 1,536 threads."""
        with scope(28, 1536):
            found = torch.randn([1, 64, 2048], device="cuda", generator=seeded(42))[0].cpu()
        rows = [0, 1, 2, -3, -2, -1]
        assert near(
            found[rows][:, :3],
            [
                *(0.1940, 2.1614, -0.1721, -0.4574, 0.8063, 0.1580, 1.1346, -0.6329, -0.9147),
                *(-0.4861, 0.3358, 1.0578, 0.7881, 0.8339, -1.1424, -1.2356, -0.4083, -0.4695),
            ],
        )
        assert near(
            found[rows][:, -3:],
            [
                *(1.4540, -2.7733, -0.8932, 0.1124, 0.2769, -1.2535, -1.0001, -1.1552, -0.6955),
                *(-0.7282, 0.5087, 0.1318, -0.6297, -1.1112, -0.4091, -0.4841, 1.2850, -0.0282),
            ],
        )

    @pytest.mark.parametrize(
        ("multiprocessors", "total"), [(56, 999_826), (13, 999_100)], ids=["P100", "K80"]
    )
    def test_what_dropout_kept(self, multiprocessors: int, total: int) -> None:
        """pytorch#25690: a million dropped ones, summed, by the one-element kernel."""
        with scope(multiprocessors):
            # A part of rows is not read four at a time.
            x = torch.ones(1000, 1001, device="cuda")[:, :1000]
            torch.manual_seed(0)
            assert torch.nn.functional.dropout(x).sum() == total


SMALL = Gpu(2, 600)
"""A GPU that runs 1,024 threads at once: four blocks, since 88 threads of each multiprocessor are
no block.
"""

COUNTS = [1, 255, 257, 1024, 1025, 4096, 4100, 5000]


class Counting:
    """Draws from a seed and an offset, and counts."""

    def __init__(self, seed: int = 0x123456789ABCDEF0, offset: int = 2**34 - 4):
        self.seed = seed
        self.began = self.offset = offset
        self.draw = Drawing(SMALL, self._take)

    def _take(self, increment: int) -> Source:
        source = Source(self.seed, self.offset)
        self.offset += increment
        return source

    def expected(
        self, count: int, unroll: int, number: Callable[..., Any], dtype: Any
    ) -> numpy.ndarray:
        grid = gpu_threads.grid_of(*SMALL, count)
        return gpu_threads.expected(self.seed, self.began, grid, count, unroll, number, dtype)


@pytest.mark.parametrize("count", COUNTS)
def test_each_element_is_its_threads(count: int) -> None:
    numbers: dict[Any, Callable[..., Any]] = {
        philox.WORDS: lambda words, i: words[i],
        philox.PAIRS: lambda words, i: words[2 * i] << 32 | words[2 * i + 1],
        philox.UNIFORM: lambda words, i: gpu_threads.uniform(words[i]),
        philox.UNIFORM64: lambda words, i: (
            (words[2 * i] ^ words[2 * i + 1] << 21) * 2.0**-53 + 2.0**-54
        ),
    }
    for kind, number in numbers.items():
        counting = Counting()
        found = counting.draw.numbers(kind, torch.empty(count))
        assert (found == counting.expected(count, kind.unroll, number, kind.dtype)).all(), kind.name
        calls = (count - 1) // (SMALL.threads_for(count) * kind.unroll) + 1
        assert counting.offset - counting.began == 4 * calls


@pytest.mark.parametrize("first", [0, 16384, 2**32 * 3 + 16384])
@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_only_the_words_that_are_used_are_made(first: int, wanted: int) -> None:
    for seed in (0, 2**64 - 1, 0x123456789ABCDEF0):
        for counter in (0, 5, 2**40 + 3):
            source = Source(seed, (counter - 2) * 4 & 2**64 - 1)
            found = philox.words(source, 2, first, 300, wanted, Scratch())
            assert len(found) == (2 if wanted <= 2 else 4)
            for thread in (0, 1, 150, 299):
                made = tuple(int(each[thread]) & gpu_threads.MASK for each in found)
                number = (source.offset // 4 + 2) & 2**64 - 1
                assert made == gpu_threads.philox(seed, number, first + thread)[: len(made)]


def test_threads_that_draw_at_the_same_time_have_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(philox, "compiled", [])

    def drawn(seed: int) -> list[float]:
        out = numpy.empty(40_000, numpy.float32)
        philox.fill(philox.NORMAL, out, Source(seed, 0), 25_600)
        return out.tolist()

    one_by_one = [drawn(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, range(12))) == one_by_one


def test_memory_for_arrays_ends() -> None:
    room = Scratch()
    first, second = (room.array(3, numpy.dtype(numpy.int32)) for _ in range(2))
    first[:], second[:] = 1, 2
    assert first.tolist() == [1, 1, 1] and first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    room.used = 0
    assert room.array(3, numpy.dtype(numpy.int32)) is first
    for count in range(1, 600):
        room.used = 0
        assert len(room.array(count, numpy.dtype(numpy.int8))) == count
    with pytest.raises(AssertionError):
        for _ in range(100):
            room.array(16384, numpy.dtype(numpy.float64))


def box_muller(words: tuple[int, ...], i: int) -> float:
    first, second = words[i // 2 * 2 : i // 2 * 2 + 2]
    u, v = (first + 0.5) / 2**32, (second + 0.5) / 2**32
    return math.sqrt(-2 * math.log(u)) * (math.cos if i % 2 else math.sin)(2 * math.pi * v)


def box_muller64(words: tuple[int, ...], i: int) -> float:
    u, v = ((words[at] ^ words[at + 1] << 21) * 2.0**-53 + 2.0**-54 for at in (0, 2))
    return math.sqrt(-2 * math.log(u)) * (math.cos if i % 2 else math.sin)(2 * math.pi * v)


@pytest.mark.parametrize("count", COUNTS)
def test_normal_numbers_are_the_pairs_of_box_and_muller(count: int) -> None:
    for kind, number, error in (
        (philox.NORMAL, box_muller, 3e-6),
        (philox.NORMAL64, box_muller64, 1e-14),
    ):
        counting = Counting()
        found = counting.draw.numbers(kind, torch.empty(count))
        assert (
            abs(found - counting.expected(count, kind.unroll, number, numpy.float64)).max() < error
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_uniform_numbers_of_an_interval(dtype: torch.dtype) -> None:
    counting = Counting()
    found = operators.uniform_(counting.draw, torch.empty(3000, dtype=dtype), -1.5, 2.25)
    unroll = 2 if dtype is torch.float64 else 4
    kind = philox.UNIFORM64 if dtype is torch.float64 else philox.UNIFORM
    plain = torch.from_numpy(Counting().draw.numbers(kind, torch.empty(3000))).double()
    expected = (plain * 3.75 - 1.5).to(torch.float64 if unroll == 2 else torch.float32).to(dtype)
    expected[expected == 2.25] = -1.5
    assert torch.equal(found, expected) and found.min() >= -1.5 and found.max() < 2.25


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (torch.int64, 0, 10),
        (torch.int64, -5, 2**28 - 5),
        (torch.int32, -(2**31), 2**31 - 1),
        (torch.int64, -(2**63), 2**63 - 1),
        (torch.int64, 7, None),
        (torch.uint8, 3, 200),
        (torch.float16, 0, 1000),
        (torch.bool, 0, 2),
    ],
)
def test_integers_are_remainders(dtype: torch.dtype, low: int, high: int | None) -> None:
    span = (2**63 if high is None else high) - low
    wide = span >= 2**28
    counting = Counting()
    found = operators.random_from(counting.draw, torch.empty(1500, dtype=dtype), low, high)
    words = Counting().draw.numbers(philox.PAIRS if wide else philox.WORDS, found)
    expected = [(int(word) % span + low + 2**63) % 2**64 - 2**63 for word in words]
    assert found.tolist() == torch.tensor(expected).to(dtype).tolist()


def test_the_whole_range_of_64_bits_takes_the_words_as_they_are() -> None:
    found = operators.random_from(
        Counting().draw, torch.empty(1500, dtype=torch.int64), -(2**63), None
    )
    words = Counting().draw.numbers(philox.PAIRS, found)
    assert found.tolist() == words.view(numpy.int64).tolist()


def test_a_permutation_is_the_order_of_keys_with_equal_ones_shuffled() -> None:
    n, equal = 2000, 0
    for seed in (0, 13, 14):  # of the last two a pair of keys is equal
        counting = Counting(seed=seed, offset=0)
        found = operators.randperm(counting.draw, n)
        assert found.sort().values.tolist() == list(range(n))
        grid = gpu_threads.grid_of(*SMALL, n)
        keys = gpu_threads.expected(
            seed,
            0,
            grid,
            n,
            2,
            lambda words, i: (words[2 * i] << 32 | words[2 * i + 1]) % (2**32 - 1),
            numpy.uint64,
        )
        bits = math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9))))
        own = [(int(key) + 2**31) % 2**32 % 2**bits for key in keys]
        order = sorted(range(n), key=own.__getitem__)
        offset = 4 * ((n - 1) // (grid * 256 * 2) + 1)
        start = 0
        while start < n:
            end = start + 1
            while end < n and own[order[end]] == own[order[start]]:
                end += 1
            for step, last in enumerate(range(end - start - 1, 0, -1)):
                word = gpu_threads.philox(seed, offset // 4 + step // 4, start)[step % 4]
                one, two = start + last, start + word % (last + 1)
                order[one], order[two] = order[two], order[one]
                equal += 1
            start = end
        assert found.tolist() == order and counting.offset == offset + -(-n // 4) * 4
    assert equal, "no keys were equal, so nothing was tested of them"


@pytest.mark.parametrize(
    ("dtype", "count", "start", "width"),
    [
        (torch.float32, 6000, 0, 4),
        (torch.float32, 6002, 0, 2),
        (torch.float32, 6001, 0, 1),
        (torch.float32, 6000, 2, 2),
        (torch.float32, 6000, 1, 1),
        (torch.float16, 16_000, 0, 8),
        (torch.bfloat16, 6004, 0, 4),
        (torch.float64, 6000, 0, 2),
    ],
)
def test_dropout_draws_for_the_elements_that_a_thread_reads(
    dtype: torch.dtype, count: int, start: int, width: int
) -> None:
    counting = Counting()
    x = torch.arange(1, count + start + 1).to(dtype)[start:]
    found, mask = operators.native_dropout(counting.draw, x, 0.3)
    grid = gpu_threads.grid_of(*SMALL, count)
    threads, numbers = grid * 256, numpy.zeros(count)
    if width == 1:
        numbers = counting.expected(count, 4, lambda words, i: gpu_threads.uniform(words[i]), float)
    else:
        for thread in range(threads):
            for turn, first in enumerate(range(thread * width, count, threads * width)):
                calls = max(1, width // 4)
                words = [
                    word
                    for call in range(calls)
                    for word in gpu_threads.philox(
                        counting.seed, counting.began // 4 + turn * calls + call, thread
                    )
                ]
                numbers[first : first + width] = [
                    gpu_threads.uniform(word) for word in words[:width]
                ]
    kept = torch.from_numpy(numbers) < torch.tensor(
        0.7, dtype=torch.float64 if dtype is torch.float64 else torch.float32
    )
    assert torch.equal(mask, kept) and 0.65 < mask.double().mean() < 0.75
    scale = (
        1
        / torch.tensor(0.7, dtype=torch.float64)
        .to(torch.float32 if dtype.itemsize < 8 else torch.float64)
        .item()
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert torch.equal(found, (x.to(wide) * kept * torch.tensor(scale, dtype=wide)).to(dtype))
    assert counting.offset - counting.began == 4 * ((count - 1) // (threads * 4) + 1)


def test_chances_of_each_element_draw_four_at_a_time() -> None:
    counting = Counting()
    chances = torch.linspace(0, 1, 5001)
    found = operators.bernoulli(counting.draw, chances)
    for element in (0, 1, 4, 7, 2500, 4999, 5000):
        word = gpu_threads.philox(counting.seed, counting.began // 4, element // 4)[element % 4]
        assert found[element] == (gpu_threads.uniform(word) <= chances[element])
    assert counting.offset - counting.began == 12


def test_samples_with_replacement_are_drawn_by_blocks_of_128() -> None:
    counting = Counting()
    chances = torch.tensor([[1.0, 0, 2, 1], [0, 0, 1, 3], [1, 1, 1, 0]])
    found = operators.multinomial(counting.draw, chances, 200, True)
    bounds = (chances / chances.sum(-1, keepdim=True)).double().cumsum(-1)
    for row in range(3):
        for sample in (0, 1, 127, 128, 199):
            word = gpu_threads.philox(counting.seed, counting.began // 4, row * 256 + sample)[0]
            assert found[row, sample] == int((bounds[row] < gpu_threads.uniform(word)).sum())
    assert counting.offset - counting.began == 4


@pytest.mark.parametrize("samples", [1, 3])
def test_other_samples_divide_by_exponential_numbers(samples: int) -> None:
    chances = torch.rand(5, 7)
    found = operators.multinomial(Counting().draw, chances, samples)
    keys = chances / operators.exponential_(Counting().draw, torch.empty(5, 7))
    assert torch.equal(found, keys.topk(samples).indices)


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.zeros(6, 4).t(),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.zeros(6, 8)[:, ::2],
    "transposed with gaps": lambda: torch.zeros(6, 8)[::2].t(),
    "one number": lambda: torch.zeros(()),
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_elements_are_counted_in_the_order_of_memory(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    operators.uniform_(Counting().draw, tensor)
    flat = operators.uniform_(Counting().draw, torch.empty(tensor.numel()))
    places = torch.arange(tensor.untyped_storage().size() // 4).as_strided(
        tensor.shape, tensor.stride()
    )
    assert torch.equal(tensor.flatten()[places.flatten().argsort()], flat)


def test_a_tensor_of_more_than_two_gibibytes_is_filled_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_LARGEST_INT", 4 * 1000)
    counting = Counting()
    found = counting.draw.numbers(philox.UNIFORM, torch.empty(3001))
    one = Counting()
    one.draw.take(SMALL.offsets_for(3001, 4))
    parts = [one.draw.numbers(philox.UNIFORM, torch.empty(count)) for count in (750, 750, 750, 751)]
    assert (found == numpy.concatenate(parts)).all() and one.offset == counting.offset


@pytest.mark.parametrize("draws", DRAWN.values(), ids=DRAWN)
def test_a_state_of_16_bytes_resumes_with_the_next_numbers(
    draws: Callable[..., torch.Tensor],
) -> None:
    with scope():
        generator = seeded(7)
        draws(generator)
        state = generator.get_state()
        assert (
            state.numel() == 16
            and int(state[:8].view(torch.int64)) == 7
            and int(state[8:].view(torch.int64)) > 0
        )
        expected = draws(generator)
        assert torch.equal(draws(torch.Generator("cuda").set_state(state)), expected)
        torch.cuda.set_rng_state(state)
        assert torch.equal(draws(None), expected) and not torch.equal(draws(None), expected)


def test_a_plain_simulated_gpu_is_an_a100_and_each_model_its_own() -> None:
    def drawn(target: str, **options: Any) -> torch.Tensor:
        with torchdevice.portable(target, random="cuda", **options):
            return torch.rand(500_000, device="cuda", generator=seeded(3)).cpu()

    plain, a100, t4 = (
        drawn(target) for target in ("simulated:cuda", "simulated:a100", "simulated:t4")
    )
    assert (
        torch.equal(plain, a100)
        and not torch.equal(plain, t4)
        and torch.equal(plain[:40_960], t4[:40_960])
    )


def test_it_is_the_default_of_simulated_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDEVICE_RANDOM")
    with torchdevice.simulate():
        torch.manual_seed(0)
        assert near(torch.rand(3, device="cuda"), [0.3990, 0.5167, 0.0249])
        torch.cuda.manual_seed_all(42)
        assert near(torch.randn(3, device="cuda"), [0.1940, 2.1614, -0.1721])


WRONG: dict[str, Callable[[], object]] = {
    "interval": lambda: torch.empty(3, device="cuda").uniform_(2, 1),
    "std": lambda: torch.empty(3, device="cuda").normal_(0, -1),
    "std of means": lambda: torch.normal(torch.zeros(2, device="cuda"), -1.0),
    "shared memory": lambda: torch.empty(1, device="cuda").expand(3).normal_(),
    "range": lambda: torch.empty(3, device="cuda").random_(3, 3),
    "p": lambda: torch.empty(3, device="cuda").geometric_(2),
    "lambda": lambda: torch.empty(3, device="cuda").exponential_(-1),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_as_before_and_draw_nothing(call: Callable[[], object]) -> None:
    errors = []
    for random in ("cuda", "device"):
        with torchdevice.simulate(random=random), pytest.raises(RuntimeError) as caught:  # type: ignore[arg-type]
            torch.manual_seed(1)
            try:
                call()
            finally:
                assert random == "device" or torch.cuda._get_rng_state_offset() == 0
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
