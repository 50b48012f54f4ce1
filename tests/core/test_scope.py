"""Ways to enter a scope times kinds of use: {with, decorator, enable} x {nested, ...}."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import multiprocessing
import os
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OUT_OF_TREE, failing_half_way
from counted_frames import frames_of
from places import ROOT
from processes import run_python
from torch.overrides import TorchFunctionMode

import torchdevice
from torchdevice.errors import NotSupportedError, ScopeError
from torchdevice.kernel import thread_state
from torchdevice.scope import activation
from torchdevice.scope import collected_options as options

pytestmark = pytest.mark.usefixtures("chosen")

WAYS = ("with", "decorator", "enable")


@contextlib.contextmanager
def entered(
    way: str, scope: torchdevice.Scope | None = None, **options: Any
) -> Iterator[torchdevice.Scope]:
    """Activate a scope in one of three ways; ``decorator`` uses its context manager."""
    if way == "enable":
        try:
            yield torchdevice.enable(**options)
        finally:
            torchdevice.disable()
    else:
        with scope or torchdevice.portable(**options) as active:
            yield active


def run(way: str, body: Callable[[], Any], **options: Any) -> Any:
    """Run ``body`` in a scope activated by one of the three ways."""
    if way == "decorator":
        return torchdevice.portable(**options)(body)()
    with entered(way, **options):
        return body()


def is_active() -> bool:
    """Return whether CUDA spellings work here. The mode and the bindings must agree on that."""
    bindings = torch.cuda.is_available()
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        mode = False
    else:
        mode = True
    assert mode == bindings
    return mode


@pytest.mark.parametrize("way", WAYS)
class TestMatrix:
    def test_active_inside_and_not_outside(self, way: str) -> None:
        assert run(way, is_active)
        assert not is_active()

    def test_nested(self, way: str) -> None:
        def outer() -> list[bool]:
            inner = run(way, is_active)
            return [inner, is_active()]

        if way == "enable":  # the inner disable() ends both
            with pytest.raises(ScopeError, match="without enable"):
                run(way, outer)
        else:
            assert run(way, outer) == [True, True]
        assert not is_active()

    def test_nested_with_other_options(self, way: str) -> None:
        def counts() -> list[int]:
            before = torch.cuda.device_count()
            inner = run(way, torch.cuda.device_count, devices=4)
            return [before, inner, torch.cuda.device_count()]

        outer = "with" if way == "enable" else way
        assert run(outer, counts, devices=2) == [2, 4, 2]

    def test_reused(self, way: str) -> None:
        if way == "enable":
            for _ in range(3):
                assert run(way, is_active)
            return
        scope = torchdevice.portable()
        for _ in range(3):
            if way == "decorator":
                assert scope(is_active)()
            else:
                with scope:
                    assert is_active()
            assert not is_active()

    def test_reentered(self, way: str) -> None:
        if way == "enable":
            assert len({torchdevice.enable() for _ in range(50)}) == 1
            torchdevice.disable()
            assert not is_active()
            return
        scope = torchdevice.portable()

        def nested(depth: int) -> bool:
            if depth == 0:
                return is_active()
            if way == "decorator":
                return scope(nested)(depth - 1)
            with entered(way, scope):
                return nested(depth - 1)

        assert nested(50)
        assert not is_active()

    def test_exception(self, way: str) -> None:
        def body() -> None:
            assert is_active()
            raise KeyError("the program's own")

        with pytest.raises(KeyError, match="the program's own"):
            run(way, body)
        assert not is_active()

    def test_out_of_order(self, way: str) -> None:
        if way == "enable":
            torchdevice.enable()
            inner = torchdevice.portable(devices=3)
            inner.__enter__()
            with pytest.raises(ScopeError, match="reverse order"):
                torchdevice.disable()
        else:
            outer, inner = torchdevice.portable(), torchdevice.portable(devices=3)
            outer.__enter__()
            inner.__enter__()
            with pytest.raises(ScopeError, match="reverse order"):
                outer.__exit__(None, None, None)
        assert torch.cuda.device_count() == 3
        assert is_active()
        inner.__exit__(None, None, None)
        assert not is_active()

    def test_thread(self, way: str) -> None:
        seen: list[bool] = []

        def body() -> None:
            thread = threading.Thread(target=lambda: seen.append(is_active()))
            thread.start()
            thread.join()

        run(way, body)
        assert seen == [True]
        assert not is_active()

    def test_executor(self, way: str) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert (
                run(
                    way,
                    lambda: [
                        pool.submit(is_active).result(),
                        *pool.map(lambda _: is_active(), range(3)),
                    ],
                )
                == [True] * 4
            )
            assert not pool.submit(is_active).result(), "a worker kept the scope of an earlier task"

    def test_asyncio(self, way: str) -> None:
        async def steps() -> list[bool]:
            found = [is_active()]
            await asyncio.sleep(0)
            return [*found, is_active(), await asyncio.to_thread(is_active)]

        if way == "decorator":
            decorated = torchdevice.portable()(steps)
            assert inspect.iscoroutinefunction(decorated)
            assert asyncio.run(decorated()) == [True] * 3
        else:
            with entered(way):
                assert asyncio.run(steps()) == [True] * 3
        assert not is_active()

    def test_generator(self, way: str) -> None:
        def steps() -> Iterator[bool]:
            yield is_active()
            yield is_active()

        if way == "decorator":
            decorated = torchdevice.portable()(steps)
            assert inspect.isgeneratorfunction(decorated)
            iterator = decorated()
            assert not is_active()
            assert next(iterator)
            assert not is_active(), "the scope leaked out of a suspended generator"
            assert next(iterator)
        else:
            with entered(way):
                assert list(steps()) == [True, True]
        assert not is_active()

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
    def test_fork(self, way: str) -> None:
        def body() -> int:
            pid = os.fork()
            if pid == 0:
                # In the child the scope is active, also for the child's threads, and can be left.
                status = 1
                try:
                    results: list[bool] = []
                    thread = threading.Thread(target=lambda: results.append(is_active()))
                    thread.start()
                    thread.join()
                    status = 0 if is_active() and results == [True] else 1
                finally:
                    os._exit(status)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        assert run(way, body) == 0
        assert not is_active()


class TestDecorator:
    def test_without_parentheses(self) -> None:
        @torchdevice.portable
        def function(a: int, *, b: int = 2) -> tuple[int, int, bool]:
            """Documentation."""
            return a, b, torch.cuda.is_available()

        assert function(1) == (1, 2, True)
        assert function.__doc__ == "Documentation."
        assert list(inspect.signature(function).parameters) == ["a", "b"]

    def test_methods(self) -> None:
        class Trainer:
            @torchdevice.portable()
            def method(self) -> bool:
                return is_active()

            @torchdevice.portable()
            @classmethod
            def of_class(cls) -> bool:
                return is_active()

            @torchdevice.portable()
            @staticmethod
            def of_no_class() -> bool:
                return is_active()

        assert Trainer().method() and Trainer.of_class() and Trainer.of_no_class()

    def test_generator_passes_values_errors_and_its_result(self) -> None:
        log: list[Any] = []

        @torchdevice.portable()
        def generator() -> Any:
            try:
                log.append((yield 1))
                try:
                    yield 2
                except KeyError as error:
                    log.append(error)
                return "result"
            finally:
                log.append(is_active())

        iterator = generator()
        assert next(iterator) == 1
        assert iterator.send("sent") == 2
        with pytest.raises(StopIteration) as stop:
            iterator.throw(KeyError("thrown"))
        assert stop.value.value == "result"
        assert log[0] == "sent" and isinstance(log[1], KeyError) and log[2] is True

    def test_closing_a_generator_runs_its_cleanup_in_the_scope(self) -> None:
        log: list[bool] = []

        @torchdevice.portable()
        def generator() -> Any:
            try:
                yield
            finally:
                log.append(is_active())

        iterator = generator()
        next(iterator)
        iterator.close()
        assert log == [True]

    def test_async_generator(self) -> None:
        @torchdevice.portable()
        async def generator() -> Any:
            received = yield is_active()
            await asyncio.sleep(0)
            yield received, is_active()

        async def drive() -> list[Any]:
            iterator = generator()
            first = await iterator.asend(None)
            outside = is_active()
            second = await iterator.asend("sent")
            await iterator.aclose()
            return [first, outside, second]

        assert inspect.isasyncgenfunction(generator)
        assert asyncio.run(drive()) == [True, False, ("sent", True)]

    def test_two_coroutines_interleave(self) -> None:
        @torchdevice.portable(devices=2)
        async def two() -> list[int]:
            counts = []
            for _ in range(3):
                counts.append(torch.cuda.device_count())
                await asyncio.sleep(0)
            return counts

        @torchdevice.portable(devices=5)
        async def five() -> list[int]:
            counts = []
            for _ in range(3):
                counts.append(torch.cuda.device_count())
                await asyncio.sleep(0)
            return counts

        async def both() -> Any:
            return await asyncio.gather(two(), five())

        assert asyncio.run(both()) == [[2] * 3, [5] * 3]

    def test_not_callable(self) -> None:
        with pytest.raises(TypeError, match=r"3 cannot be decorated"):
            torchdevice.portable()(3)


class TestEnable:
    def test_the_last_call_counts(self) -> None:
        first = torchdevice.enable()
        assert torchdevice.enable() is first
        torchdevice.enable(devices=2)
        assert torch.cuda.device_count() == 2
        torchdevice.disable()
        assert not is_active()

    def test_the_last_call_counts_with_a_block_between(self) -> None:
        torchdevice.enable()
        with torchdevice.portable(devices=2) as block:
            torchdevice.enable(devices=3)
            assert torch.cuda.device_count() == 3
            torchdevice.disable()
            assert torchdevice.current() is block and torch.cuda.device_count() == 2
        assert not is_active()

    def test_a_call_that_is_refused_changes_nothing(self) -> None:
        scope = torchdevice.enable()
        with pytest.raises(torchdevice.errors.UnknownTargetError):
            torchdevice.enable("vax")
        assert torchdevice.current() is scope
        torchdevice.disable()

    @pytest.mark.parametrize("ways", [("mode", "wrap"), ("wrap", "mode")])
    def test_the_last_call_chooses_the_engine(self, ways: tuple[str, str]) -> None:
        for engine in ways:
            torchdevice.enable(engine=engine)
            assert (thread_state.state.mode is not None) is (engine == "wrap")
        torchdevice.disable()

    def test_what_activates_a_whole_run_stays(self) -> None:
        """A program in ``torchdevice run`` that enables and disables a scope is in the run's."""
        run = activation.enable_chosen(options.chosen({}), propagate=False)
        torchdevice.enable(devices=2)
        torchdevice.disable()
        assert torchdevice.current() is run
        torchdevice.disable()
        assert not is_active()

    def test_the_environment_is_as_before_the_first_call(self) -> None:
        before = dict(os.environ)
        for count in (2, 3):
            torchdevice.enable(capability=(8, count), propagate=True)
            assert os.environ["TORCHDEVICE_CAPABILITY"] == f"8.{count}"
        torchdevice.disable()
        assert dict(os.environ) == before

    def test_propagation_is_undone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHDEVICE_TARGET", "cpu")
        before = dict(os.environ)
        torchdevice.enable(devices=2, strict=True, propagate=True)
        assert os.environ["TORCHDEVICE"] == "1" and os.environ["TORCHDEVICE_DEVICES"] == "2"
        torchdevice.disable()
        assert dict(os.environ) == before

    def test_disable_without_enable(self) -> None:
        with pytest.raises(ScopeError, match="Call enable"):
            torchdevice.disable()

    def test_disable_in_another_thread(self) -> None:
        torchdevice.enable()
        caught: list[BaseException] = []

        def other() -> None:
            with thread_state.suspended():
                try:
                    torchdevice.disable()
                except ScopeError as error:
                    caught.append(error)

        pool = concurrent.futures.ThreadPoolExecutor(1)
        with thread_state.suspended():
            pool.submit(other).result()
        pool.shutdown()
        assert "in the same thread" in str(caught[0])
        assert is_active()
        torchdevice.disable()


class PoolWithWorkerContexts(concurrent.futures.ThreadPoolExecutor):
    """Initializes workers by contexts, as Python 3.14 does."""

    def __init__(self, count: int, initializer: Callable[[], Any]):
        super().__init__(count)
        self._create_worker_context = lambda: types.SimpleNamespace(initialize=initializer)

    @property
    def _initializer(self) -> Callable[[], Any]:
        """What a worker of an older Python calls."""
        return self._create_worker_context().initialize

    @_initializer.setter
    def _initializer(self, given: None) -> None:
        pass


KINDS_OF_POOL = [concurrent.futures.ThreadPoolExecutor]
if sys.version_info < (3, 14):  # whose own pools have contexts
    KINDS_OF_POOL.append(PoolWithWorkerContexts)


class TestThreads:
    def test_unrelated_threads_see_plain_torch(self, no_cuda_build: bool, kind: str) -> None:
        ready, go = threading.Event(), threading.Event()
        seen: dict[str, Any] = {}

        def unrelated() -> None:
            ready.set()
            go.wait()
            seen["active"] = is_active()
            seen["count"] = torch.cuda.device_count()
            seen["initialized"] = bool(torch.cuda.is_initialized())
            seen["version"] = torch.version.cuda
            seen["binding"] = hasattr(torch._C, "_cuda_getDeviceCount")
            seen["accelerator"] = torch.accelerator.is_available()
            try:
                torch.cuda.current_device()
            except (AssertionError, RuntimeError) as error:
                seen["error"] = str(error)

        thread = threading.Thread(target=unrelated)
        thread.start()
        ready.wait()
        with torchdevice.portable():
            go.set()
            thread.join()
            assert is_active()
        expected_error = (
            "Torch not compiled with CUDA enabled" if no_cuda_build else "Found no NVIDIA driver"
        )
        assert expected_error in seen.pop("error")
        assert seen == {
            "active": False,
            "count": 0,
            "initialized": False,
            "version": torch.version.cuda,
            "binding": not no_cuda_build,
            "accelerator": kind == OUT_OF_TREE,
        }

    def test_a_thread_keeps_its_scope_after_the_starter_has_left(self) -> None:
        started, left = threading.Event(), threading.Event()
        seen: list[bool] = []

        def work() -> None:
            started.set()
            left.wait()
            seen.append(is_active())

        with torchdevice.portable():
            thread = threading.Thread(target=work)
            thread.start()
            started.wait()
        assert not is_active()
        left.set()
        thread.join()
        assert seen == [True]

    def test_a_subclass_with_its_own_run(self) -> None:
        class Worker(threading.Thread):
            active = False

            def run(self) -> None:
                self.active = is_active()

        with torchdevice.portable():
            worker = Worker()
            worker.start()
            worker.join()
        assert worker.active
        assert "run" not in vars(worker)

    def test_a_thread_with_a_run_of_its_own(self) -> None:
        """Threads that can be stopped set ``run`` on themselves before they start."""
        seen: list[bool] = []
        thread = threading.Thread()
        thread.run = own = lambda: seen.append(is_active())  # type: ignore[method-assign]
        with torchdevice.portable():
            thread.start()
            thread.join()
            assert vars(thread)["run"] is own
            with pytest.raises(RuntimeError, match="threads can only be started once"):
                thread.start()
        assert seen == [True] and vars(thread)["run"] is own

    @pytest.mark.parametrize("kind_of_pool", KINDS_OF_POOL)
    def test_a_worker_is_initialized_in_the_scope_that_starts_it(
        self, kind_of_pool: type[concurrent.futures.ThreadPoolExecutor]
    ) -> None:
        begun, end, seen = threading.Semaphore(0), threading.Event(), []

        def work() -> bool:
            begun.release()
            end.wait(60)
            return is_active()

        with kind_of_pool(2, initializer=lambda: seen.append(is_active())) as pool:
            with torchdevice.portable():
                tasks = [pool.submit(work)]
                begun.acquire(timeout=60)
            tasks.append(pool.submit(work))
            begun.acquire(timeout=60)
            end.set()
            assert [task.result() for task in tasks] == seen == [True, False]

    def test_the_thread_of_a_queue_is_in_no_scope(self) -> None:
        seen: list[bool] = []

        class Pickled:
            def __reduce__(self) -> Any:
                seen.append(is_active())
                return int, ()

        with torchdevice.portable():
            queue = multiprocessing.Queue()
            queue.put(Pickled())
            assert queue.get(timeout=60) == 0
            queue.close()
            queue.join_thread()
        assert seen == [False]

    def test_the_thread_that_passes_descriptors_is_in_no_scope(self) -> None:
        """The first tensor that a process sends to another starts it, and it does not end."""
        resource_sharer.stop()
        with torchdevice.portable():
            ForkingPickler.dumps(torch.ones(1))
        assert type(torch.version) is types.ModuleType, "torch is as it was"

    def test_many_threads(self) -> None:
        def work(index: int) -> bool:
            with torchdevice.portable(devices=index + 1):
                return torch.cuda.device_count() == index + 1 and is_active()

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            assert all(pool.map(work, range(64)))

    def test_current_device_is_per_thread(self) -> None:
        seen: list[int] = []
        with torchdevice.portable(devices=4):
            torch.cuda.set_device(3)
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
            thread.start()
            thread.join()
            assert (torch.cuda.current_device(), seen) == (3, [0])


class TestInterruptedThreadState:
    """An interrupt or handler at lines where tests that count lines cannot place a real one."""

    @pytest.mark.parametrize("late", [False, True])
    def test_leaving_goes_on_after_an_interrupt(
        self, late: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leave, interrupts = thread_state.leave, [KeyboardInterrupt]

        def interrupted(entry: thread_state.Entry) -> None:
            if late or not interrupts:
                leave(entry)
            if interrupts:
                raise interrupts.pop()

        with torchdevice.portable():
            monkeypatch.setattr(thread_state, "leave", interrupted)
            seen = []
            with pytest.raises(KeyboardInterrupt), thread_state.suspended():
                seen.append(torch.cuda.is_available())
            assert is_active() and seen == [False]
            monkeypatch.undo()

    def test_an_interrupted_entry_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settle, interrupts = thread_state.settle, [KeyboardInterrupt]

        def interrupted() -> None:
            if interrupts:
                raise interrupts.pop()
            settle()

        with torchdevice.portable():
            monkeypatch.setattr(thread_state, "settle", interrupted)
            with pytest.raises(KeyboardInterrupt), thread_state.suspended():
                raise AssertionError("it was entered")
            assert is_active()
            monkeypatch.undo()

    def test_what_was_entered_and_never_left_ends_with_its_statement(self) -> None:
        with torchdevice.portable():
            entered = thread_state.suspended()
            leaves = entered.__exit__  # what a with statement holds
            entered.__enter__()
            seen = [torch.cuda.is_available()]
            del leaves
            assert is_active() and seen == [False]

    def test_the_stack_is_looked_at_where_no_signal_handler_comes_between(self) -> None:
        class Mode(TorchFunctionMode):
            pass

        asked: list[Any] = []
        with Mode() as mode:
            before = sys.getprofile()
            sys.setprofile(
                lambda frame, event, argument: asked.append(argument) if event == "c_call" else None
            )
            try:
                found = thread_state.stacked_modes()
            finally:
                sys.setprofile(before)
        assert found[-1] is mode
        # The profile sees Python's own calls, and signals are handled between such calls.
        assert thread_state._stack_length not in asked and thread_state._stack_at not in asked

    def test_the_stack_is_looked_at_again_where_it_became_shorter(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to Python 3.11, a collection leaves with statements between length and modes."""

        class Mode(TorchFunctionMode):
            pass

        look, above = thread_state._stack_at, [Mode()]

        def looked(at: int) -> Any:
            if above:
                above.pop().__exit__(None, None, None)
            return look(at)

        with Mode() as mode:
            above[0].__enter__()
            monkeypatch.setattr(thread_state, "_stack_at", looked)
            assert thread_state.stacked_modes()[-1] is mode

    def test_a_scope_is_left_where_somebody_else_took_its_mode_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pop, refusals = thread_state._pop, [RuntimeError("stack is empty")]

        def refused() -> None:
            if refusals:
                raise refusals.pop()
            pop()

        monkeypatch.setattr(thread_state, "_pop", refused)
        with torchdevice.portable(engine="mode"):
            assert is_active()
        assert not is_active() and not refusals

    def test_a_scope_is_left_in_a_call_that_its_mode_handles(self) -> None:
        class Leaving(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if entered:
                    entered.pop().__exit__(None, None, None)
                return super().__torch_function__(func, types, args, kwargs or {})

        x, entered = torch.ones(2).as_subclass(Leaving), [torchdevice.portable(engine="mode")]
        entered[0].__enter__()
        assert torch.add(x, 1).tolist() == [2, 2] and not entered and not is_active()
        with torchdevice.portable():
            assert is_active()
        assert not is_active()

    def test_what_is_kept_from_a_scope_refuses_after_it(self) -> None:
        with pytest.raises(
            NotSupportedError, match=r"torch\.cuda\.thing is not supported.*Do without"
        ):
            thread_state.refuse("torch.cuda.thing", "Do without.")


@pytest.mark.one_engine
@pytest.mark.parametrize(("engine", "most"), [("mode", 8), ("wrap", 10)])
def test_calls_with_a_device_take_few_frames_of_python(engine: Any, most: int) -> None:
    with torchdevice.portable("cpu", engine=engine):
        x = torch.ones(4, device="cuda")
        for call in (lambda: x.to("cuda"), lambda: torch.zeros(4, device="cuda")):
            call()
            assert len(frames_of(call)) <= most


ENTRY = """
import torch, torchdevice
from counted_frames import frames_of

def enter_and_leave():
    with scope:
        pass

def make_and_enter():
    with torchdevice.portable(target, engine=engine):
        pass

for engine, target in (("mode", "cpu"), ("wrap", "cpu"), ("mode", "simulated:cuda"), ("wrap", "simulated:cuda")):
    scope = torchdevice.portable(target, engine=engine)
    for call in (enter_and_leave, make_and_enter):
        call()  # builds the patches
        call()
        print(len(frames_of(call)))
"""


@pytest.mark.one_engine
def test_entering_and_leaving_takes_few_frames_of_python() -> None:
    # In a process of its own: a module that other tests have imported is patched too.
    # Without the options that these tests set.
    unset = {"TORCHDEVICE_TARGET": "", "TORCHDEVICE_IDENTITY": ""}
    ran = run_python("-c", ENTRY, PYTHONPATH=str(ROOT / "tests" / "support"), **unset)
    found = [*map(int, ran.stdout.split())]
    assert max(found[0:4:2]) <= 170
    assert max(found[4::2]) <= 200
    # Of a scope that is made for it.
    assert max(found[1:4:2]) <= 240
    assert max(found[5::2]) <= 330


class TestUndo:
    def test_exit_without_entry(self) -> None:
        with pytest.raises(ScopeError, match="not entered"):
            torchdevice.portable().__exit__(None, None, None)

    def test_exit_twice(self) -> None:
        scope = torchdevice.portable()
        with scope:
            pass
        with pytest.raises(ScopeError, match="not entered"):
            scope.__exit__(None, None, None)

    def test_failure_half_way_through_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchdevice.kernel import patching
        from torchdevice.scope import installed

        with torchdevice.portable():
            pass  # builds the list of patches
        for _ in failing_half_way(installed.INSTALLATION, monkeypatch):
            with pytest.raises(RuntimeError, match="half-way"):
                torchdevice.portable().__enter__()
            assert not is_active()
        assert isinstance(installed.INSTALLATION, patching.Installation)

    def test_a_mode_of_the_program_on_top_at_exit(self) -> None:
        class Own(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return func(*args, **(kwargs or {}))

        own = Own()
        scope = torchdevice.portable()
        scope.__enter__()
        own.__enter__()
        scope.__exit__(None, None, None)
        assert not is_active()
        assert torch.overrides._get_current_function_mode_stack() == [own]
        own.__exit__(None, None, None)

    def test_a_name_that_the_program_replaced_stays_replaced(self) -> None:
        original = torch.cuda.is_bf16_supported
        try:
            with torchdevice.portable():
                replacement = torch.cuda.is_bf16_supported = lambda: False
            assert torch.cuda.is_bf16_supported is replacement
        finally:
            torch.cuda.is_bf16_supported = original

    def test_no_answer_of_a_scope_is_remembered(self, tmp_path: Path) -> None:
        """In a process of its own, before torch asks: Triton, bfloat16, number of devices."""
        program = """
            import torch, torchdevice
            from torch.utils import _triton
            with torchdevice.portable(capability=(7, 5), devices=2):
                _triton.has_triton(), torch.cuda.is_bf16_supported(), torch.cuda.device_count()
            assert _triton.has_triton() == _triton.has_triton.__wrapped__()
            assert torch.cuda._check_bf16_tensor_supported.cache_info().currsize == 0
            assert torch.cuda.device_count() == 0 and not torch.cuda.is_bf16_supported()
            print("as before")
        """
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        result = run_python(str(tmp_path / "program.py"), TORCHDEVICE="0")
        assert result.stdout == "as before\n", result.stderr

    def test_the_module_of_an_accelerator_is_not_remembered(self, target: str) -> None:
        with torchdevice.portable(target, written_for="mps"):
            assert torch.get_device_module() is torch.get_device_module(None) is torch.mps
        with torchdevice.portable(target):
            assert torch.get_device_module() is torch.get_device_module(None) is torch.cuda
        assert torch.get_device_module(None) is torch.get_device_module.__wrapped__(None)

    def test_current(self, kind: str) -> None:
        assert torchdevice.current() is None
        with torchdevice.portable() as outer:
            assert torchdevice.current() is outer
            assert outer.target.type == kind and outer.target.index in (0, None)
            with torchdevice.portable() as inner:
                assert torchdevice.current() is inner
            assert torchdevice.current() is outer
        assert torchdevice.current() is None


class TestForceCpu:
    def test_is_idempotent_and_ends_with_the_scope(self) -> None:
        with torchdevice.portable():
            for _ in range(2):
                assert torch.device("cpu:-1") == torch.device("cpu")
                assert torch.device("cpu", -1) == torch.device("cpu")
            assert torch.ones(1).to("cpu:-1").device == torch.device("cpu")
            assert torch.nn.Linear(1, 1).to("cpu:-1").weight.device == torch.device("cpu")
        with pytest.raises(RuntimeError):
            torch.device("cpu:-1")

    def test_sends_later_requests_to_the_cpu(self, distinct: torchdevice.Scope) -> None:
        assert torch.zeros(1, device="cuda").device.type == "meta"
        torch.device("cpu:-1")
        seen: list[str] = []
        thread = threading.Thread(
            target=lambda: seen.append(torch.zeros(1, device="cuda").device.type)
        )
        thread.start()
        thread.join()
        assert seen == ["cpu"]
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"


def without_a_device(family: str) -> str:
    """Return what torch says of a machine without an accelerator."""
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        torch.ones(2, device=family)
    return f"{type(caught.value).__name__}: {str(caught.value).splitlines()[0]}"


@pytest.mark.parametrize("family", ["cuda", "xpu"])
def test_a_call_without_the_mode_leaves_no_note_in_torch(family: Any, target: str) -> None:
    """torch's C++ marks an accelerator as initialised for good after ``_lazy_init`` returned."""
    before = without_a_device(family)
    with torchdevice.portable(target, written_for=family), torch._C.DisableTorchFunction():
        # Kernels that make tensors on a simulated GPU serve the call. Elsewhere torch refuses it.
        with contextlib.suppress(AssertionError, RuntimeError):
            torch.ones(2, device=family)
    assert without_a_device(family) == before


@pytest.mark.one_engine
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("as_block", [False, True])
def test_scopes_in_the_midst_of_a_change_of_the_default_device(
    target: str, engine: Any, as_block: bool
) -> None:
    """Torch then has taken modes off its stack, and a destructor may enter and leave a scope."""
    lines = 0

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != torch.utils._device.__file__:
            return None
        if event == "line":
            lines += 1
            with torchdevice.portable(target):
                pass
        return trace

    with torchdevice.portable(target, engine=engine):
        before = torch.overrides._get_current_function_mode_stack()
        sys.settrace(trace)
        try:
            if as_block:
                with torch.device("cuda"):
                    pass
            else:
                torch.set_default_device("cuda")
                torch.set_default_device(None)
        finally:
            sys.settrace(None)
        assert torch.overrides._get_current_function_mode_stack() == before
    assert lines
