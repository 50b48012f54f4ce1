"""Generators of simulated devices: seeds and offsets, and states that several share."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

import torchdevice
from torchdevice.simulation import device_generators


@pytest.fixture
def generator() -> Iterator[torch.Generator]:
    with torchdevice.simulate(count=2, random="device"):
        yield torch.Generator("cuda").manual_seed(3)


def draw(generator: torch.Generator | None) -> list[float]:
    return torch.rand(3, device="cuda", generator=generator).tolist()


def test_the_offset_counts_kernels(generator: torch.Generator) -> None:
    assert generator.get_offset() == 0
    draw(generator), torch.randperm(4, device="cuda", generator=generator)
    assert generator.get_offset() == 8
    generator.manual_seed(3)
    assert generator.get_offset() == 0


@pytest.mark.parametrize("seed", [0, 3, 2**63, 2**64 - 1])
def test_numbers_are_not_those_of_the_cpu_unless_asked_for(seed: int) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(seed)).tolist()
    for random, same in (("device", False), ("cpu", True)):
        with torchdevice.simulate(random=random):
            assert (draw(torch.Generator("cuda").manual_seed(seed)) == expected) == same


def test_a_state_is_a_seed_and_an_offset(generator: torch.Generator) -> None:
    draw(generator)
    state = generator.get_state()
    assert state.view(torch.int64).tolist() == [3, 4] and state.dtype is torch.uint8
    expected = draw(generator)
    with torchdevice.simulate(random="device"):  # another machine
        torch.cuda.set_rng_state(torch.tensor([3, 4]).view(torch.uint8))
        assert draw(None) == expected
        torch.cuda.set_rng_state(torch.tensor([3]).view(torch.uint8))
        assert torch.cuda._get_rng_state_offset() == 0 and torch.cuda.initial_seed() == 3


def test_kernels_draw_different_numbers(generator: torch.Generator) -> None:
    assert len({tuple(draw(generator)) for _ in range(1000)}) == 1000
    x = torch.randn(100_000, device="cuda", generator=generator)
    assert abs(x.mean().item()) < 0.02 and abs(x.std().item() - 1) < 0.02
    seeds = [draw(generator.manual_seed(seed))[0] for seed in range(1000)]
    assert abs(sum(seeds) / 1000 - 0.5) < 0.05


def test_a_generator_of_the_device_draws_for_no_cpu_tensor(generator: torch.Generator) -> None:
    for wrong in (
        lambda: torch.rand(3, generator=generator),
        lambda: torch.randperm(3, generator=generator),
        lambda: torch.empty(3).normal_(generator=generator),
        lambda: torch.bernoulli(torch.ones(3), generator=generator),
        lambda: torch.multinomial(torch.ones(3), 1, generator=generator),
    ):
        with pytest.raises(
            RuntimeError, match=r"^Expected a 'cpu' device type for generator but found 'cuda'$"
        ):
            wrong()
    torch.set_default_device("cuda")
    try:
        torch.rand(3, generator=generator)
    finally:
        torch.set_default_device(None)


def test_going_back_to_an_offset(generator: torch.Generator) -> None:
    first, offset = draw(generator), generator.get_offset()
    second = draw(generator)
    generator.set_offset(offset)
    assert draw(generator) == second
    generator.set_offset(0)
    assert draw(generator) == first


def test_an_offset_where_no_generator_has_been(generator: torch.Generator) -> None:
    generator.set_offset(100)
    assert (generator.get_offset(), generator.initial_seed()) == (100, 3)
    other = torch.Generator("cuda").manual_seed(3).set_offset(100)
    numbers = draw(generator)
    assert numbers == draw(other)
    assert numbers != draw(torch.Generator("cuda").manual_seed(3).set_offset(104))
    assert numbers != draw(torch.Generator("cuda").manual_seed(4).set_offset(100))
    with pytest.raises(RuntimeError, match=r"^offset must be a multiple of 4$"):
        generator.set_offset(3)


def test_a_state_keeps_its_offset(generator: torch.Generator) -> None:
    draw(generator)
    state = generator.get_state()
    other, copy = torch.Generator("cuda"), pickle.loads(pickle.dumps(generator))
    other.set_state(state)
    assert other.get_offset() == copy.get_offset() == generator.clone_state().get_offset() == 4
    assert draw(other) == draw(copy) == draw(generator)


def test_the_offset_of_the_device() -> None:
    with torchdevice.simulate(random="device"):
        torch.cuda.manual_seed(1)
        expected = draw(None)
        torch.cuda.manual_seed(1)
        before = torch.cuda.get_rng_state()
        torch.cuda._set_rng_state_offset(100)
        assert torch.cuda._get_rng_state_offset() == 100
        torch.nn.functional.dropout(torch.ones(4, device="cuda"))
        assert torch.cuda._get_rng_state_offset() == 104
        torch.cuda.set_rng_state(before)
        assert torch.cuda._get_rng_state_offset() == 0
        assert draw(None) == expected


def test_a_shared_state(generator: torch.Generator) -> None:
    shared, apart = generator.graphsafe_get_state(), generator.clone_state()
    first = draw(generator)
    assert shared.get_offset() == 4 and apart.get_offset() == 0 and draw(apart) == first
    assert draw(shared) == draw(apart) and generator.get_offset() == 8
    generator.graphsafe_set_state(apart.manual_seed(5))
    assert draw(generator) == draw(torch.Generator("cuda").manual_seed(5))
    assert apart.get_offset() == 4 and shared.get_offset() == 8 and generator.initial_seed() == 5


def test_nothing_is_kept_of_a_generator_that_is_gone(generator: torch.Generator) -> None:
    gc.collect()
    before = set(device_generators._known)
    other = torch.Generator("cuda")
    draw(other.graphsafe_get_state())
    del other
    gc.collect()
    assert set(device_generators._known) == before


FROM_POSITION = {
    "poisson": lambda x, generator: torch.poisson(x, generator),
    "poisson, named": lambda x, generator: torch.poisson(x, generator=generator),
    "binomial": lambda x, generator: torch.binomial(x.round(), x / 16, generator),
    "gamma": lambda x, generator: torch._standard_gamma(x, generator),
    "dirichlet": lambda x, generator: torch._sample_dirichlet(x, generator),
}
"""Operators whose generator has a place among the other arguments."""


@pytest.mark.parametrize("draws", FROM_POSITION.values(), ids=FROM_POSITION)
def test_a_generator_that_has_a_place_determines_the_numbers(
    draws: Callable[..., torch.Tensor],
) -> None:
    x = torch.linspace(1, 8, 12)
    expected = draws(x, torch.Generator().manual_seed(3))
    with torchdevice.simulate("cuda", count=2, random="cpu"):
        found = [draws(x.cuda(), torch.Generator("cuda").manual_seed(seed)) for seed in (3, 3, 4)]
        assert found[0].tolist() == found[1].tolist() == expected.tolist() != found[2].tolist()
        torch.cuda.manual_seed(3)
        assert draws(x.cuda(), None).tolist() == expected.tolist()
        with pytest.raises(RuntimeError, match="device type for generator"):
            draws(x.cuda(), torch.Generator())


def test_the_class_is_pickled_as_torchs_own() -> None:
    original = torch.Generator
    for engine in ("mode", "wrap"):
        with torchdevice.portable("cpu", engine=engine):
            pickled = pickle.dumps([torch.Generator, Own])
        assert pickle.loads(pickled) == [original, Own] and b"torchdevice" not in pickled


class Own(torch.Generator):
    """A program's class."""


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_the_class_pickles(target: str) -> None:
    """As torch's own class, which equals it, and which a process without this package has."""
    plain = torch.Generator
    with torchdevice.portable(target):
        inside = torch.Generator
        written = [
            pickle.dumps(inside, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
        ]
        assert all(pickle.loads(each) == inside for each in written)
    written.append(pickle.dumps(inside))
    assert all(pickle.loads(each) is plain and b"torchdevice" not in each for each in written)


class TestRandomNumbers:
    def test_a_seed_gives_the_cpus_numbers(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(5)
        on_cpu = [
            torch.randn(20),
            torch.rand(3),
            torch.randperm(9),
            torch.nn.functional.dropout(torch.ones(64), 0.3),
        ]
        torch.manual_seed(5)
        x = torch.ones(64, device="cuda:1")
        on_device = [
            torch.randn(20, device="cuda:1"),
            torch.rand(3, device="cuda:1"),
            torch.randperm(9, device="cuda:1"),
            torch.nn.functional.dropout(x, 0.3),
        ]
        assert all(
            torch.equal(one, other.cpu()) for one, other in zip(on_cpu, on_device, strict=True)
        )

    def test_devices_and_the_cpu_draw_apart(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(1)
        first = torch.randn(4, device="cuda:0")
        torch.randn(7), torch.randn(7, device="cuda:1")
        second = torch.randn(4, device="cuda:0")
        torch.manual_seed(1)
        assert torch.equal(torch.randn(8, device="cuda:0").cpu()[:4], first.cpu())
        torch.cuda.manual_seed_all(1)
        torch.randn(4, device="cuda:0")
        assert torch.equal(torch.randn(4, device="cuda:0"), second)

    @pytest.mark.parametrize("train", [True, False, None])
    @pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
    def test_dropout_drops_what_it_drops_on_the_cpu(
        self, devices: torchdevice.Scope, p: float, train: bool | None
    ) -> None:
        def dropped(device: str) -> list[torch.Tensor]:
            torch.manual_seed(3)
            x = torch.arange(8.0).to(device).requires_grad_()
            found, mask = torch.native_dropout(x, p, train)
            found.sum().backward()
            return [found.detach().cpu(), mask.cpu(), x.grad.cpu()]  # type: ignore[union-attr]

        assert all(map(torch.equal, dropped("cuda"), dropped("cpu")))

    def test_states(self, devices: torchdevice.Scope) -> None:
        state = torch.cuda.get_rng_state(1)
        drawn = torch.rand(3, device="cuda:1")
        torch.cuda.set_rng_state(state, 1)
        assert torch.equal(torch.rand(3, device="cuda:1"), drawn)
        with torch.random.fork_rng(devices=[0, 1]):
            torch.rand(3, device="cuda:1")
        generator = torch.Generator("cuda:1").manual_seed(3)
        restored = pickle.loads(pickle.dumps(generator))
        assert torch.equal(
            *(torch.rand(2, generator=each, device="cuda:1") for each in (generator, restored))
        )


def round_trips(generator: torch.Generator) -> list[torch.Generator]:
    """Return copies of a generator, one for each way to copy it."""
    file = io.BytesIO()
    torch.save({"g": generator}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["g"]
    return [
        pickle.loads(pickle.dumps(generator)),
        copy.deepcopy(generator),
        copy.copy(generator),
        loaded,
    ]


class TestPickledGenerators:
    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_round_trips_in_a_scope(self, target: str, device: str) -> None:
        with torchdevice.portable(target):

            class Own(torch.Generator):
                pass

            generator = torch.Generator(device).manual_seed(3)
            copies = round_trips(generator)
            expected = torch.rand(4, device=device, generator=generator).tolist()
            assert [torch.rand(4, device=device, generator=each).tolist() for each in copies] == [
                expected
            ] * 4
            assert all(
                isinstance(each, torch.Generator) and each.device == generator.device
                for each in copies
            )
            own = round_trips(Own().manual_seed(3))
            assert [each.initial_seed() for each in own] == [3] * 4

    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    def test_pickles_cross_the_border_of_a_scope(self, target: str) -> None:
        before = pickle.dumps(torch.Generator().manual_seed(5))
        with torchdevice.portable(target):
            within = pickle.dumps(torch.Generator().manual_seed(5))
            assert torch.equal(pickle.loads(before).get_state(), pickle.loads(within).get_state())
        program = "import pickle, sys; seed = pickle.load(sys.stdin.buffer).initial_seed()"
        command = [sys.executable, "-c", f"{program}; print(seed, 'torchdevice' in sys.modules)"]
        alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch without this package
        result = subprocess.run(command, input=within, env=alone, capture_output=True, check=False)
        assert result.stdout.split() == [b"5", b"False"], result.stderr


def test_numbers_do_not_depend_on_who_draws_in_between(generator: torch.Generator) -> None:
    """Kernels in C++ make the states for several kernels ahead of a generator that goes on."""
    other = torch.Generator("cuda").manual_seed(2**64 - 1)
    alone = [draw(generator) for _ in range(20)] + [draw(other) for _ in range(20)]
    generator.manual_seed(3), other.manual_seed(2**64 - 1)
    mixed = [(draw(generator), draw(other)) for _ in range(20)]
    assert alone == [first for first, _ in mixed] + [second for _, second in mixed]
    for number in (11, 12, 3, 4, 19):  # back and forth
        assert draw(generator.manual_seed(3).set_offset(4 * number)) == alone[number]


def test_the_numbers_are_those_of_the_documented_mixture(generator: torch.Generator) -> None:
    for number in range(20):
        numbers = torch.Generator().manual_seed(device_generators.mixed(3, 4 * number))
        assert draw(generator) == torch.rand(3, generator=numbers).tolist()


def test_states_are_real_tensors_under_a_dispatch_mode() -> None:
    """torch reads and sets a generator's state in C++, which no mode sees."""
    with torchdevice.simulate():
        state = torch.cuda.get_rng_state()
        with FakeTensorMode():
            assert torch.cuda.default_generators[0].get_state().__class__ is torch.Tensor
            torch.cuda.set_rng_state(state)
        assert torch.equal(torch.cuda.get_rng_state(), state)
