"""Tracebacks for users: frames that torch alone would show, and none of this package."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_program, run_python

import torchdevice
from torchdevice.kernel.context import Context
from torchdevice.tools.cli import run


def matmul(device: str) -> None:
    torch.ones(2, 3, device=device) @ torch.ones(2, 3, device=device)


def function_in_python(device: str) -> None:
    torch.nn.functional.softmax(torch.ones(2, device=device), dim=5)


def module(device: str) -> None:
    torch.nn.Linear(2, 2).to(device)(torch.ones(3, device=device))


def factory(device: str) -> None:
    torch.zeros(-1, device=device)


def spelling(device: str) -> None:
    torch.ones(2, device=device).to("cuda:x")


def device_of_text(device: str) -> None:
    torch.device("cuda:x")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient @ torch.ones(3, device=gradient.device)


def backward(device: str) -> None:
    Failing.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()


class Interrupted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def interrupted(device: str) -> None:
    Interrupted.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()


FAILURES = [
    matmul,
    function_in_python,
    module,
    factory,
    spelling,
    device_of_text,
    backward,
    interrupted,
]


def frames(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return file and function of frames in the traceback of a raising call, below this one."""
    try:
        call()
    except BaseException as error:
        found = traceback.extract_tb(error.__traceback__)
    return [(frame.filename, frame.name) for frame in found[1:]]


def in_scope(target: str, failing: Callable[[str], None]) -> None:
    with torchdevice.portable(target):
        failing("cuda")


@pytest.mark.parametrize("failing", FAILURES)
class TestFrames:
    def test_of_a_block(self, target: str, failing: Any) -> None:
        expected = frames(lambda: failing("cpu"))
        assert frames(lambda: in_scope(target, failing))[2:] == expected[1:]

    def test_of_a_decorated_function(self, target: str, failing: Any) -> None:
        expected = frames(lambda: failing("cpu"))
        decorated = torchdevice.portable(target)(failing)
        found = frames(lambda: decorated("cuda"))
        # Python itself puts back the frame of the wrapper, above the program's.
        if sys.version_info < (3, 11):
            found = [
                frame
                for frame in found
                if "torchdevice/torchdevice" not in frame[0] and frame[1] != "call"
            ]
        assert found == expected

    def test_of_nested_scopes_and_stacks(self, target: str, failing: Any) -> None:
        def nested() -> None:
            with torchdevice.portable(target), contextlib.ExitStack() as stack:
                stack.enter_context(torchdevice.portable(target))
                failing("cuda")

        found = frames(nested)
        expected = frames(lambda: failing("cpu"))
        assert found[-len(expected[1:]) :] == expected[1:]


def test_of_a_thread(target: str) -> None:
    seen: list[list[str]] = []

    def run() -> None:
        try:
            with torchdevice.portable(target):
                matmul("cuda")
        except RuntimeError as error:
            seen.append([frame.name for frame in traceback.extract_tb(error.__traceback__)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [["run", "matmul"]]


def test_of_what_this_package_raises_itself(target: str) -> None:
    def refused() -> None:
        with torchdevice.portable(target):
            torch.cuda.CUDAPluggableAllocator("a.so", "b", "c")

    assert frames(refused)[-1] == (__file__, "refused")


def test_a_defect_of_this_package_is_shown(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    def defect(self: Context, value: Any, above: int = 2) -> Any:
        raise AttributeError("of this package")

    defect.__code__ = defect.__code__.replace(co_filename=Context.redirect.__code__.co_filename)
    monkeypatch.setattr(Context, "redirect", defect)
    assert frames(lambda: in_scope(target, matmul))[-1][1] == "defect"


def test_what_this_package_handled_is_no_context(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def handling(self: Context, value: Any, above: int = 2) -> Any:
        try:
            raise KeyError(value)
        except KeyError:
            raise RuntimeError("of the program")  # noqa: B904

    handling.__code__ = handling.__code__.replace(co_filename=Context.redirect.__code__.co_filename)
    monkeypatch.setattr(Context, "redirect", handling)

    def failing(device: str) -> None:
        try:
            raise ValueError("of the program")
        except ValueError:
            matmul(device)

    with pytest.raises(RuntimeError) as found:
        in_scope(target, failing)
    assert isinstance(found.value.__context__, ValueError)


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_an_ordinal_that_is_not_there_is_one_error(engine: Any) -> None:
    with (
        pytest.raises(torch.AcceleratorError) as found,
        torchdevice.simulate(count=2, engine=engine),
    ):
        try:
            torch.ones(2, device="cuda:7")
        except torch.AcceleratorError as caught:
            assert caught.__context__ is None, "shown by a program that prints its errors itself"
            raise
    assert found.value.__notes__ == [
        "The program has 2 device(s). For more, use a target that ends in ':8'."
    ]


def test_of_causes(target: str) -> None:
    def failing(device: str) -> None:
        try:
            matmul(device)
        except RuntimeError as error:
            raise ValueError("of the program") from error

    try:
        in_scope(target, failing)
    except ValueError as error:
        cause = error.__cause__
    assert cause is not None and [f.name for f in traceback.extract_tb(cause.__traceback__)] == [
        "failing",
        "matmul",
    ]


PROGRAM = """
    import sys
    import torch

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 1

        @staticmethod
        def backward(ctx, gradient): raise KeyboardInterrupt

    def fails(device):
        if sys.argv[1] == "interrupt":
            return Interrupted.apply(torch.ones(2, device=device, requires_grad=True)).sum().backward()
        return torch.nn.functional.softmax(torch.ones(2, device=device), dim=5)

    fails("cuda" if torch.cuda.is_available() else "cpu")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["error", "interrupt"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_of_a_program(tmp_path: Path, target: str, engine: str, how: str) -> None:
    found = run_program(tmp_path, PROGRAM, how, options=("--target", target, "--engine", engine))
    expected = run_python(str(tmp_path / "program.py"), how)
    assert (
        found.stderr[found.stderr.index("Traceback") :]
        == expected.stderr[expected.stderr.index("Traceback") :]
    )
    assert found.returncode == expected.returncode


@pytest.mark.one_engine
class TestTheEndOfARun:
    def test_only_the_programs_own_error_loses_frames(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another error, such as that of a handler at exit, is printed with all of its frames."""
        shown: list[tuple[BaseException, Any]] = []
        monkeypatch.setattr(sys, "last_traceback", None, raising=False)
        monkeypatch.setattr(
            sys, "excepthook", lambda kind, value, frames: shown.append((value, frames))
        )
        hook, error = sys.excepthook, self.raised()
        for value, kept in ((self.raised(), True), (error, False)):
            before = value.__traceback__
            run._show_from(error, None, lambda: None)
            sys.excepthook(type(value), value, before)
            assert shown.pop() == (value, before if kept else None) and sys.excepthook is hook

    def raised(self) -> BaseException:
        try:
            raise ValueError("two\nlines")
        except ValueError as error:
            return error
