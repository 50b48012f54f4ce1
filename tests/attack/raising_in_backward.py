"""Raises every kind of error wherever the autograd engine calls Python, and prints the result.

``python raising_in_backward.py DEVICE``: a line for each place and kind. The same lines are
expected on every device.
"""

from __future__ import annotations

import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchdevice

Raise = Callable[..., Any]

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"


class NeedsMore(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, first: int, *, second: int):
        super().__init__(f"{first} and {second}")


class TakesNothing(BaseException):
    def __new__(cls, *args: Any) -> TakesNothing:
        if args:
            raise TypeError("no arguments")
        return super().__new__(cls)


def caused() -> Exception:
    error = RuntimeError("with a cause")
    error.__cause__ = KeyError("the cause")
    error.__context__ = IndexError("the context")
    return error


KINDS: dict[str, Callable[[], BaseException]] = {
    "ordinary": lambda: ValueError("ordinary"),
    "needs more": lambda: NeedsMore(1, second=2),
    "takes nothing": TakesNothing,
    "caused": caused,
    "interrupt": KeyboardInterrupt,
    "exit": lambda: SystemExit(3),
    "system": lambda: SystemError("the program's own"),
    "stop": lambda: StopIteration(1),
    "unicode": lambda: UnicodeDecodeError("ascii", b"x", 0, 1, "bad"),
    "unprintable": lambda: type("Unprintable", (Exception,), {"__str__": lambda self: 1 / 0})(),
    "unprintable, of torch's kind": lambda: type(
        "Unprintable", (RuntimeError,), {"__str__": lambda self: 1 / 0}
    )(),
}


def leaf() -> torch.Tensor:
    return torch.ones(3, device=DEVICE, requires_grad=True)


class Doubling(torch.autograd.Function):
    """Doubles; ``in_backward`` is called in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, in_backward: Any) -> torch.Tensor:
        ctx.in_backward = in_backward
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.in_backward(grad), None


class SetsUp(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, in_backward: Any) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.in_backward = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.in_backward(grad, *ctx.saved_tensors), None


class Dispatching(TorchDispatchMode):
    def __init__(self, fail: Raise):
        super().__init__()
        self.fail = fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fail()


def on_result(register: Callable[[torch.Tensor, Raise], Any]) -> Callable[[Raise], None]:
    """Register something on an intermediate result, and differentiate."""

    def run(fail: Raise) -> None:
        y = leaf() * 2
        register(y, fail)
        y.sum().backward()

    return run


def on_leaf(register: Callable[[torch.Tensor, Raise], Any]) -> Callable[[Raise], None]:
    def run(fail: Raise) -> None:
        x = leaf()
        register(x, fail)
        (x * 2).sum().backward()

    return run


def on_module(register: Callable[[torch.nn.Module, Raise], Any]) -> Callable[[Raise], None]:
    def run(fail: Raise) -> None:
        module = torch.nn.Linear(3, 3).to(DEVICE)
        register(module, fail)
        module(leaf()).sum().backward()

    return run


def accumulator(x: torch.Tensor) -> Any:
    """The node that accumulates a leaf's gradient, where DistributedDataParallel has its hooks."""
    node = x.view_as(x).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def on_accumulator(fail: Raise) -> None:
    x = leaf()
    node = accumulator(x)
    node.register_hook(fail)
    (x * 2).sum().backward()


def on_several(mode: Any) -> Callable[[Raise], None]:
    def run(fail: Raise) -> None:
        x, y = leaf(), leaf()
        register_multi_grad_hook([x, y], fail, mode=mode)
        (x * y).sum().backward()

    return run


def unpacking(fail: Raise) -> None:
    with saved_tensors_hooks(lambda t: t, fail):
        y = leaf().exp()
    y.sum().backward()


def recomputing(reentrant: bool) -> Callable[[Raise], None]:
    def run(fail: Raise) -> None:
        calls = []

        def block(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return fail() if len(calls) > 1 else x.sin()

        checkpoint(block, leaf(), use_reentrant=reentrant).sum().backward()

    return run


def for_every_module(fail: Raise) -> None:
    handle = torch.nn.modules.module.register_module_full_backward_hook(fail)
    try:
        on_module(lambda module, fail: None)(fail)
    finally:
        handle.remove()


def by_grad(fail: Raise) -> None:
    x = leaf()
    y = x * 2
    y.register_hook(fail)
    torch.autograd.grad(y.sum(), x)


def in_double_backward(fail: Raise) -> None:
    x = leaf()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.register_hook(fail)
    first.sum().backward()


def in_a_transform(fail: Raise) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(fail)
        return y.sum()

    torch.autograd.functional.jacobian(f, leaf())


def within_backward(fail: Raise) -> None:
    def nested(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            on_result(torch.Tensor.register_hook)(fail)
        return grad

    Doubling.apply(leaf(), nested).sum().backward()


def after_one_that_was_caught(fail: Raise) -> None:
    def hook(grad: torch.Tensor) -> None:
        try:
            with torch.enable_grad():
                on_result(torch.Tensor.register_hook)(lambda grad: 1 / 0)
        except ZeroDivisionError:
            pass
        fail()

    on_result(torch.Tensor.register_hook)(hook)


def in_a_thread(fail: Raise) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            on_result(torch.Tensor.register_hook)(fail)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise caught[0]


def while_handling_another(fail: Raise) -> None:
    try:
        {}["missing"]  # type: ignore[index]
    except KeyError:
        on_result(torch.Tensor.register_hook)(fail)


def in_anomaly_mode(fail: Raise) -> None:
    with torch.autograd.detect_anomaly():
        on_result(torch.Tensor.register_hook)(fail)


def at_the_end(fail: Raise) -> None:
    engine = torch.autograd.Variable._execution_engine
    on_result(torch.Tensor.register_hook)(lambda grad: engine.queue_callback(fail))


def in_an_optimizer(fail: Raise) -> None:
    x = leaf()
    x.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.1).step(fail))
    (x * 2).sum().backward()


def in_a_dispatch_mode(fail: Raise) -> None:
    y = (leaf() * 2).exp().sum()
    with Dispatching(fail):
        y.backward()


PLACES: dict[str, Callable[[Raise], None]] = {
    "a tensor's hook": on_result(torch.Tensor.register_hook),
    "a leaf's hook": on_leaf(torch.Tensor.register_hook),
    "a hook of a retained gradient": on_result(
        lambda y, fail: (y.retain_grad(), y.register_hook(fail))
    ),
    "a hook after accumulation": on_leaf(torch.Tensor.register_post_accumulate_grad_hook),
    "a node's hook": on_result(lambda y, fail: y.grad_fn.register_hook(fail)),  # type: ignore[union-attr]
    "a node's hook before it": on_result(lambda y, fail: y.grad_fn.register_prehook(fail)),  # type: ignore[union-attr]
    "the accumulator's hook": on_accumulator,
    "hooks of several, all": on_several("all"),
    "hooks of several, any": on_several("any"),
    "a module's hook": on_module(torch.nn.Module.register_full_backward_hook),
    "a module's hook before it": on_module(torch.nn.Module.register_full_backward_pre_hook),
    "every module's hook": for_every_module,
    "Function.backward": lambda fail: Doubling.apply(leaf(), fail).sum().backward(),
    "Function.backward with setup_context": lambda fail: (
        SetsUp.apply(leaf(), fail).sum().backward()
    ),
    "unpacking a saved tensor": unpacking,
    "checkpoint, recomputing": recomputing(False),
    "checkpoint, reentrant": recomputing(True),
    "autograd.grad": by_grad,
    "double backward": in_double_backward,
    "jacobian": in_a_transform,
    "a backward in a backward": within_backward,
    "after one that was caught": after_one_that_was_caught,
    "another thread": in_a_thread,
    "while another is handled": while_handling_another,
    "anomaly mode": in_anomaly_mode,
    "the end of backward": at_the_end,
    "an optimizer": in_an_optimizer,
    "a dispatch mode": in_a_dispatch_mode,
}

TORCHS_OWN: dict[str, Callable[[], Any]] = {
    "a hook changes the shape": lambda: on_result(torch.Tensor.register_hook)(
        lambda grad: grad[:1]
    ),
    "a hook returns text": lambda: on_result(torch.Tensor.register_hook)(lambda grad: "text"),
    "a backward of a wrong shape": lambda: PLACES["Function.backward"](lambda grad: grad[:1]),
    "an operator fails": lambda: PLACES["Function.backward"](
        lambda grad: grad + torch.ones(7, device=DEVICE)
    ),
    "an operator fails in a hook": lambda: on_result(torch.Tensor.register_hook)(
        lambda grad: grad.view(99)
    ),
    "twice": lambda: [y.backward() for y in [leaf().exp().sum()] for _ in range(2)],
    "not a number": lambda: not_a_number(),
}


def not_a_number() -> None:
    with torch.autograd.detect_anomaly():
        (leaf() * float("nan")).sqrt().sum().backward()


@contextmanager
def scope() -> Iterator[None]:
    with torchdevice.simulate("cuda", 2) if DEVICE != "cpu" else nullcontext():
        yield


def verdict(place: Callable[[Raise], None], error: BaseException) -> str:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    try:
        place(fail)
    except BaseException as raised:
        innermost = traceback.extract_tb(raised.__traceback__)[-1].name
        notes = error.__cause__, type(error.__context__).__name__
        return f"same={raised is error} from={innermost} notes={notes}"
    return "nothing raised"


def works() -> bool:
    x = leaf()
    (x * 3).sum().backward()
    return x.grad is not None and x.grad.tolist() == [3.0] * 3


def main() -> None:
    warnings.simplefilter("ignore")
    with scope():
        for place, run in PLACES.items():
            for kind, make in KINDS.items():
                print(place, "|", kind, "|", verdict(run, make()), works(), flush=True)
        for place, own in TORCHS_OWN.items():
            try:
                own()
            except (RuntimeError, TypeError) as error:
                print(
                    place,
                    "|",
                    type(error).__name__,
                    "|",
                    str(error).splitlines()[0],
                    works(),
                    flush=True,
                )


if __name__ == "__main__":
    main()
