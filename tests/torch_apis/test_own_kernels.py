"""Kernels a program registers for its accelerator, in any way, run on the target."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.kernel import thread_state

Made = tuple[Callable[[Any], Any], Any]
"""An operator, and what keeps it."""


def _custom_op(name: str) -> Made:
    @torch.library.custom_op(f"{name}::op", mutates_args=(), device_types="cuda")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((1,), 10.0, device="cuda")

    return op, op


def _register_kernel(name: str) -> Made:
    @torch.library.custom_op(f"{name}::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    @op.register_kernel("cuda")
    def _(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((1,), 10.0, device="cuda")

    return op, op


def _of_library(name: str, *others: str) -> Made:
    library = torch.library.Library(name, "DEF")
    library.define("op(Tensor x) -> Tensor")
    for key in others:
        library.impl("op", lambda x: x - 1, key)
    library.impl("op", lambda x: x + torch.full((1,), 10.0, device="cuda"), "CUDA")
    return getattr(torch.ops, name).op, library


def _of_key(name: str) -> Made:
    definition = torch.library.Library(name, "DEF")
    definition.define("op(Tensor x) -> Tensor")
    library = torch.library.Library(name, "IMPL", "CUDA")
    library.impl("op", lambda x: x + torch.full((1,), 10.0, device="cuda"))
    return getattr(torch.ops, name).op, (definition, library)


def _by_function(name: str) -> Made:
    library = torch.library.Library(name, "DEF")
    library.define("op(Tensor x) -> Tensor")
    torch.library.register_kernel(
        f"{name}::op", "cuda", lambda x: x + torch.full((1,), 10.0, device="cuda"), lib=library
    )
    return getattr(torch.ops, name).op, library


def _triton_op(name: str) -> Made:
    @torch.library.triton_op(f"{name}::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x + torch.full((1,), 10.0, device="cuda")

    return op, op


WAYS: dict[str, Callable[[str], Made]] = {
    "custom_op(device_types=)": _custom_op,
    "register_kernel, with a default kernel": _register_kernel,
    "Library.impl": _of_library,
    "Library.impl, with a default kernel": lambda name: _of_library(
        name, "CompositeExplicitAutograd"
    ),
    "a library of the key": _of_key,
    "torch.library.register_kernel": _by_function,
    "triton_op without a Triton kernel": _triton_op,
}

_numbers = iter(range(1_000_000))


@pytest.fixture
def name() -> Iterator[str]:
    yield f"torchdevice_kernels{next(_numbers)}"
    gc.collect()  # libraries end with what keeps them


@pytest.fixture(params=["mode", "wrap"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
@pytest.mark.parametrize("way", WAYS)
def test_it_runs(way: str, target: str, engine: Any, name: str) -> None:
    scope = torchdevice.portable(target, engine=engine)
    with scope:
        op, _kept = WAYS[way](name)
        assert op(torch.ones(2, device="cuda")).tolist() == [11, 11]
    with scope:
        assert op(torch.ones(2, device="cuda")).tolist() == [11, 11]
    other = "cpu" if target != "cpu" else "simulated:cuda"
    with torchdevice.portable(other, engine=engine):
        assert op(torch.ones(2, device="cuda")).tolist() == [11, 11]


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("triton_op")])
def test_it_ends_with_the_scope(way: str, target: str, engine: Any, name: str) -> None:
    with torchdevice.portable(target, engine=engine):
        op, _kept = WAYS[way](name)
        op(torch.ones(2, device="cuda"))
        if "default" in way:
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(op(torch.ones(2)).tolist()))
            with thread_state.suspended():  # the thread joins no scope
                thread.start()
            thread.join()
            assert found == [[0, 0]]
    if "default" in way:
        assert op(torch.ones(2)).tolist() == [0, 0]
    else:
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            op(torch.ones(2))


def test_a_kernel_for_the_cpu_is_kept(engine: Any, name: str) -> None:
    """On a CPU target, in either order; a simulated device is an accelerator."""
    with torchdevice.portable("cpu", engine=engine):
        op, _kept = _of_library(name, "CPU")
        assert op(torch.ones(2, device="cuda")).tolist() == [0, 0]
        later, library = _of_library(f"{name}_later")
        library.impl("op", lambda x: x - 1, "CPU")
        assert later(torch.ones(2, device="cuda")).tolist() == [0, 0]
    with torchdevice.simulate("cuda", engine=engine):
        assert (
            op(torch.ones(2, device="cuda")).tolist()
            == later(torch.ones(2, device="cuda")).tolist()
            == [11, 11]
        )
        assert op(torch.ones(2)).tolist() == [0, 0]


class _Passing(TorchDispatchMode):
    """A mode of the program's own, which calls each operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("way", WAYS)
def test_a_mode_of_the_program_calls_the_kernel(
    way: str, target: str, engine: Any, name: str
) -> None:
    with torchdevice.portable(target, engine=engine):
        op, _kept = WAYS[way](name)
        with _Passing(), _Passing():
            assert op(torch.ones(2, device="cuda")).tolist() == [11, 11]


def test_a_library_that_ended_leaves_nothing(name: str) -> None:
    with torchdevice.portable("cpu"):
        _, library = _of_library(name)
        library._destroy()
        redefined = torch.library.Library(name, "DEF")
        redefined.define("op(Tensor x) -> Tensor")
        redefined.impl("op", lambda x: x * 7, "CompositeExplicitAutograd")
        assert getattr(torch.ops, name).op(torch.ones(2)).tolist() == [7, 7]


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_autograd_opcheck_and_compiled_code(target: str, engine: Any, name: str) -> None:
    with torchdevice.portable(target, engine=engine):
        op, library = _register_kernel(name)
        op.register_fake(torch.empty_like)  # type: ignore[attr-defined]
        op.register_autograd(lambda context, gradient: gradient * 5)  # type: ignore[attr-defined]
        x = torch.ones(2, device="cuda", requires_grad=True)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: op(x) * 2)
        assert compiled(x).tolist() == [22, 22]
        op(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [5, 5]
        assert set(torch.library.opcheck(library, (torch.ones(2, device="cuda"),)).values()) == {
            "SUCCESS"
        }


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_kernel_of_autograd(target: str, engine: Any, name: str) -> None:
    with torchdevice.portable(target, engine=engine):
        op, library = _of_library(name)
        library.impl("op", lambda x: x * 3, "AutogradCUDA")
        assert op(torch.ones(2, device="cuda")).tolist() == [3, 3]


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_a_kernel_of_torch_serves_only_its_own_device(target: str, engine: Any, name: str) -> None:
    """torch's CUDA build registers Python kernels that call CUDA's, in a scope at need."""

    def router(keys: Any, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("CUDA's kernel was called")

    router.__module__ = "torch._native.registry"
    with torchdevice.portable(target, engine=engine):
        library = torch.library.Library(name, "DEF")
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x - 1, "CompositeExplicitAutograd")
        library.impl("op", router, "CUDA", with_keyset=True)
        assert getattr(torch.ops, name).op(torch.ones(2, device="cuda")).tolist() == [0, 0]


def test_entering_with_kernels_makes_no_finalizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python finalizer would swallow a signal handler's error while a scope is left."""
    library = torch.library.Library("finalized", "DEF")
    library.define("one(Tensor x) -> Tensor")
    with torchdevice.portable("cpu"):
        library.impl("one", lambda x: x + 1, "CUDA")
    made: list[object] = []
    monkeypatch.setattr(
        weakref.finalize, "__init__", lambda self, watched, *args, **kwargs: made.append(watched)
    )
    with torchdevice.portable("cpu"):
        assert torch.ops.finalized.one(torch.ones(1)).item() == 2
    assert not made
