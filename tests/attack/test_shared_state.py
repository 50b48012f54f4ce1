"""State that must not leak: between threads, into running code, into torch after a scope."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import unittest.mock
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import torchdevice
from torchdevice.errors import ScopeError
from torchdevice.kernel import bindings, thread_state
from torchdevice.scope import installed


def supplied_names() -> list[str]:
    assert installed.AREAS
    return sorted(bindings.SUPPLIED)


def owner_of(name: str) -> tuple[Any, str]:
    module, _, attribute = name.rpartition(".")
    owner: Any = torch
    for part in module.split(".")[1:]:
        owner = getattr(owner, part)
    return owner, attribute


class TestMonkeypatching:
    """A supplied name can be set, deleted, restored like an attribute, until the scope ends."""

    @pytest.mark.parametrize("way", ["monkeypatch", "mock", "by hand", "delete"])
    def test_every_supplied_name(self, chosen: str, way: str) -> None:
        tried = 0
        for name in supplied_names():
            owner, attribute = owner_of(name)
            outside = vars(owner).get(attribute, "absent")
            with torchdevice.portable(written_for="any"):
                if not hasattr(owner, attribute):
                    continue
                before = getattr(owner, attribute)
                self.exchange(owner, attribute, way)
                after = getattr(owner, attribute)
                assert after is before or after == before, f"{name} is another object after {way}"
                setattr(owner, attribute, "left behind")
            assert vars(owner).get(attribute, "absent") is outside, (
                f"{name} stays changed after the scope"
            )
            with torchdevice.portable(written_for="any"):
                assert getattr(owner, attribute) != "left behind"
            tried += 1
        assert tried > 200

    def exchange(self, owner: Any, attribute: str, way: str) -> None:
        if way == "monkeypatch":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, attribute, "exchanged")
                assert getattr(owner, attribute) == "exchanged"
        elif way == "mock":
            with unittest.mock.patch.object(owner, attribute, "exchanged"):
                assert getattr(owner, attribute) == "exchanged"
        elif way == "by hand":
            before = getattr(owner, attribute)
            setattr(owner, attribute, "exchanged")
            assert getattr(owner, attribute) == "exchanged"
            setattr(owner, attribute, before)
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.delattr(owner, attribute)
                assert not hasattr(owner, attribute)

    def test_the_version_of_cuda(
        self, cuda: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer = torch.version.cuda
        with unittest.mock.patch("torch.version.cuda", "99.9"):
            assert torch.version.cuda == "99.9"
        assert torch.version.cuda == answer
        monkeypatch.setattr(torch.version, "cuda", None)
        assert torch.version.cuda is None
        monkeypatch.undo()
        assert torch.version.cuda == answer


class TestThreads:
    def test_a_thread_does_not_resolve_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []
        with torchdevice.simulate(count=3):
            torch.cuda.init()  # before that, CUDA reads the variable at each call
            assert torch.cuda.device_count() == 3
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.device_count()))
            thread.start()
            thread.join()
            assert torch.cuda.device_count() == 3
        assert seen == [3]

    def test_another_thread_that_enters_the_same_scope(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHDEVICE_TARGET", "simulated:cuda:2")
        scope, seen = torchdevice.portable(), []

        def enter() -> None:
            with scope:
                seen.append(torch.cuda.device_count())

        thread = threading.Thread(target=enter)
        with scope:
            with thread_state.suspended():
                monkeypatch.setenv("TORCHDEVICE_TARGET", "cpu")
                thread.start()
                thread.join()
            assert scope.runtime.target == "simulated:cuda:2" and torch.cuda.device_count() == 2
        assert seen == [2]

    def test_forcing_the_cpu_is_the_threads_own(self) -> None:
        seen: list[str] = []
        begin, end = threading.Event(), threading.Event()

        def other() -> None:
            begin.wait()
            seen.append(torch.zeros(1, device="cuda").device.type)
            end.set()

        with torchdevice.simulate():
            thread = threading.Thread(target=other)
            thread.start()
            torch.device("cpu", -1)
            begin.set()
            end.wait()
            thread.join()
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert seen == ["cuda"]

    @pytest.mark.parametrize("made", ["in the scope", "before the scope"])
    def test_pools_with_an_initializer(self, chosen: str, made: str) -> None:
        def pool() -> concurrent.futures.ThreadPoolExecutor:
            return concurrent.futures.ThreadPoolExecutor(
                2, initializer=torch.cuda.set_device, initargs=(0,)
            )

        before = pool()
        with torchdevice.portable():
            executor = pool() if made == "in the scope" else before
            found = list(
                executor.map(lambda n: torch.full((1,), n, device="cuda").item(), range(8))
            )
            executor.shutdown()
        before.shutdown()
        assert found == list(range(8))

    def test_enable_and_disable_are_the_threads_own(self, chosen: str) -> None:
        torchdevice.enable()
        caught: list[bool] = []

        def other() -> None:
            torchdevice.enable("cpu")
            torchdevice.disable()
            caught.append(torch.cuda.is_available())

        with thread_state.suspended():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        assert caught == [False] and torch.cuda.is_available()
        torchdevice.disable()
        assert not torch.cuda.is_available()

    def test_an_enable_that_fails_is_undone(
        self, chosen: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(values: Any) -> Any:
            raise OSError("no environment")

        monkeypatch.setattr("torchdevice.scope.collected_options.set_environment", fail)
        with pytest.raises(OSError, match="no environment"):
            torchdevice.enable(propagate=True)
        assert not torch.cuda.is_available() and torchdevice.current() is None
        with pytest.raises(ScopeError):
            torchdevice.disable()

    def test_random_histories_with_threads(self, chosen: str, sweep: tuple[bool, int]) -> None:
        """Threads enter, nest, start others, run tasks, fail at random; messages show the seed."""
        import random

        complete, seed = sweep
        print(f"seed {seed}")
        before = torch.cuda.is_available(), type(torch.Generator())

        def work(rng: random.Random, depth: int) -> None:
            for _ in range(rng.randint(1, 3)):
                kind = rng.choice(["scope", "decorated", "thread", "pool", "generator", "error"])
                if depth == 0 or kind == "error":
                    assert torch.zeros(1, device="cuda").item() == 0
                elif kind == "scope":
                    with torchdevice.portable(rng.choice(["cpu", "simulated:cuda", None])):
                        work(rng, depth - 1)
                elif kind == "decorated":
                    torchdevice.portable(work)(rng, depth - 1)
                elif kind == "generator":
                    list(torchdevice.portable(lambda: (work(rng, depth - 1) for _ in range(2)))())
                else:
                    own = random.Random(rng.random())
                    run_in_thread(kind, own, depth - 1)

        def run_in_thread(kind: str, rng: random.Random, depth: int) -> None:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                if kind == "pool":
                    pool.submit(work, rng, depth).result()
                    return
            failures: list[BaseException] = []

            def guarded() -> None:
                try:
                    work(rng, depth)
                except BaseException as error:
                    failures.append(error)

            thread = threading.Thread(target=guarded)
            thread.start()
            thread.join()
            assert not failures, failures

        for number in range(40 if complete else 8):
            with torchdevice.portable():
                work(random.Random(f"{seed} {number}"), 3)
            assert (torch.cuda.is_available(), type(torch.Generator())) == before, (
                f"seed {seed}, history {number}"
            )


class TestAfterwards:
    def test_disable_inside_a_hook(self, chosen: str) -> None:
        stack = torch.overrides._get_current_function_mode_stack()
        torchdevice.enable()
        x = torch.ones(2, requires_grad=True, device="cuda")
        y = (x * 2).sum()
        y.register_hook(lambda gradient: torchdevice.disable())
        y.backward()
        assert not torch.cuda.is_available() and torch.ones(1).sum().item() == 1
        with torchdevice.portable():
            assert torch.ones(2, device="cuda").sum().item() == 2
        assert torch.overrides._get_current_function_mode_stack() == stack

    def test_autocast_that_is_left_after_the_scope(self, chosen: str) -> None:
        with torchdevice.portable():
            autocast = torch.autocast("cuda", torch.bfloat16)
            autocast.__enter__()
            a = torch.ones(2, 2, device="cuda")
            assert (a @ a).dtype is torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")
        autocast.__exit__(None, None, None)
        assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled("cpu")

    def test_autocast_around_the_steps_of_a_generator(self, chosen: str) -> None:
        @torchdevice.portable
        def steps() -> Iterator[torch.dtype]:
            a = torch.ones(2, 2, device="cuda")
            with torch.autocast("cuda", torch.bfloat16):
                yield (a @ a).dtype
                yield (a @ a).dtype
            yield (a @ a).dtype

        found = []
        for dtype in steps():
            found.append(dtype)
            assert not torch.is_autocast_enabled("cpu")
        assert found == [torch.bfloat16, torch.bfloat16, torch.float32]

    def test_a_default_device_ends_with_the_scope(self, chosen: str) -> None:
        with torchdevice.portable():
            torch.set_default_device("cuda")
            assert torch.zeros(1).get_device() == torch.zeros(1, device="cuda").get_device()
        assert torch.zeros(1).device.type == "cpu" and torch.get_default_device().type == "cpu"

    def test_arguments_of_a_call_are_not_kept_alive(self, cuda: torchdevice.Scope) -> None:
        other = torch.ones(2)
        torch.ones(2).to(other)
        torch.ops.aten.to(torch.ones(2), other)
        kept = weakref.ref(other)
        del other
        gc.collect()
        assert kept() is None

    def test_true_is_not_an_ordinal(self, chosen: str) -> None:
        with torchdevice.portable():
            with pytest.raises((TypeError, RuntimeError)):
                torch.ones(1).to(device=True)
            assert torch.ones(1).to(0).device == torch.ones(1, device="cuda").device
            with pytest.raises((TypeError, RuntimeError)):
                torch.ones(1).to(device=True)

    @pytest.mark.parametrize("ordinal", [np.int64(1), np.int32(1), np.uint8(1)])
    def test_numpy_integers_are_ordinals(self, ordinal: Any) -> None:
        with torchdevice.simulate(count=2):
            assert torch.ones(1).cuda(ordinal).get_device() == 1
            with pytest.raises(
                ValueError, match=r"Expected a torch\.device with a specified index"
            ):
                torch.cuda.set_device(ordinal)  # torch's own error


class TestDecorating:
    def test_a_class_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"is a class\. Decorate its methods"):

            @torchdevice.portable("cpu")
            class Program: ...

    def test_an_object_with_an_asynchronous_call(self, chosen: str) -> None:
        class Program:
            async def __call__(self, n: int) -> tuple[bool, int]:
                await asyncio.sleep(0)
                return torch.cuda.is_available(), n

        async def main() -> tuple[bool, int]:
            found = torchdevice.portable(Program())(3)
            assert not torch.cuda.is_available()
            return await found

        assert asyncio.run(main()) == (True, 3)

    def test_a_function_that_returns_a_generator(self, chosen: str) -> None:
        steps = torchdevice.portable(lambda: (torch.cuda.is_available() for _ in range(2)))()
        assert not torch.cuda.is_available() and list(steps) == [True, True]

    def test_a_generator_that_ignores_its_end(self, chosen: str) -> None:
        def stubborn() -> Iterator[int]:
            for number in (1, 2, 3):
                try:
                    yield number
                except GeneratorExit:
                    continue

        plain, decorated = stubborn(), torchdevice.portable(stubborn)()
        for generator in (plain, decorated):
            assert next(generator) == 1
            assert generator.throw(GeneratorExit()) == 2  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="generator ignored GeneratorExit"):
                generator.close()  # type: ignore[attr-defined]
        assert not torch.cuda.is_available()

    def test_a_generator_that_is_closed_in_another_thread(self, chosen: str) -> None:
        seen: list[bool] = []

        @torchdevice.portable
        def steps() -> Iterator[int]:
            try:
                yield 1
            finally:
                seen.append(torch.cuda.is_available())

        generator = steps()
        next(generator)
        thread = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        assert seen == [True] and not torch.cuda.is_available()
