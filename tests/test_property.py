"""Random entries, exits, exceptions, threads: the thread's state agrees with a model."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchdevice
from torchdevice.errors import ScopeError

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.just(0)),
        st.tuples(st.just("leave out of order"), st.integers(0, 5)),
        st.tuples(st.just("raise"), st.integers(1, 4)),
        st.tuples(st.just("decorated"), st.integers(1, 4)),
        st.tuples(st.just("thread"), st.integers(1, 4)),
        st.tuples(st.just("device context"), st.just(0)),
        st.tuples(st.just("backward"), st.just(0)),
    ),
    max_size=14,
)


def seen() -> int:
    """Return how many devices this thread sees; the mode is active if that is not 0."""
    count = torch.cuda.device_count()
    try:
        torch.zeros(1, device="cuda")
    except (AssertionError, RuntimeError):
        assert count == 0
    else:
        assert count > 0
    return count


class Machine:
    """Carries actions out, and keeps a model of the stack of scopes."""

    def __init__(self) -> None:
        self.stack: list[tuple[torchdevice.Scope, int]] = []

    @property
    def expected(self) -> int:
        return self.stack[-1][1] if self.stack else 0

    def act(self, action: str, number: int) -> None:
        getattr(self, action.replace(" ", "_"))(number)
        assert seen() == self.expected

    def enter(self, devices: int) -> None:
        scope = torchdevice.portable(devices=devices)
        scope.__enter__()
        self.stack.append((scope, devices))

    def leave(self, _: int) -> None:
        if self.stack:
            self.stack.pop()[0].__exit__(None, None, None)

    def leave_out_of_order(self, position: int) -> None:
        if position >= len(self.stack) - 1:
            return
        scope, _ = self.stack.pop(position)
        try:
            scope.__exit__(None, None, None)
        except ScopeError:
            return
        raise AssertionError("no complaint about the order")

    def raise_(self, devices: int) -> None:
        try:
            with torchdevice.portable(devices=devices):
                assert seen() == devices
                raise KeyError(devices)
        except KeyError:
            pass

    def decorated(self, devices: int) -> None:
        assert torchdevice.portable(devices=devices)(seen)() == devices

    def thread(self, devices: int) -> None:
        found: list[int] = []

        def work() -> None:
            found.append(seen())
            with torchdevice.portable(devices=devices):
                found.append(seen())
            found.append(seen())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [self.expected, devices, self.expected]

    def device_context(self, _: int) -> None:
        with torch.device("cpu"):
            assert seen() == self.expected

    def backward(self, _: int) -> None:
        found: list[int] = []
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda grad: found.append(seen()))
        x.sum().backward()
        assert found == [self.expected]


setattr(Machine, "raise", Machine.raise_)


@pytest.mark.usefixtures("chosen")
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=ACTIONS)
def test_any_sequence(actions: list[tuple[str, Any]]) -> None:
    machine = Machine()
    try:
        for action, number in actions:
            machine.act(action, number)
    finally:
        while machine.stack:
            machine.leave(0)
    assert seen() == 0
