"""Where torch counts frames to find its caller: a scope's own frames must not count."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python

import torchdevice
from torchdevice.kernel import patching
from torchdevice.scope import installed

SCRIPTED = """
    import sys
    import warnings

    import torch
    import torchdevice

    warnings.simplefilter("ignore")

    def define():
        def helper(x: int) -> int:
            return x + 1

        @torch.jit.script
        class Point:
            def __init__(self, x: int):
                self.x = helper(x)

            def on_cuda(self) -> torch.Tensor:
                return torch.ones(2, device="cuda") * self.x

        return Point

    class Undecorated:
        def __init__(self, x: int):
            self.x = torch.full((2,), x, device="cuda")

        def twice(self, device: torch.device) -> torch.Tensor:
            return self.x.to(device) * 2

    @torch.jit.script
    def before(x: int) -> int:
        return x

    outside = define()
    with torchdevice.portable(sys.argv[1]):
        inside = define()

        @torch.jit.script
        def uses(x: int):
            return inside(x).on_cuda() + Undecorated(x).twice(torch.device("cuda")) + torch.range(0, 1, device="cuda")

        made = uses(3)
        assert made.tolist() == [10, 11] and made.device.type == sys.argv[2], made
        of_object = torch.jit.script(Undecorated(3))
        assert of_object.twice(torch.device("cuda")).device.type == sys.argv[2]
        with torchdevice.kernel.thread_state.suspended():  # patched, and without a scope in this thread
            assert define()(1).x == 2
        from torch.distributed.optim import ZeroRedundancyOptimizer  # scripts classes, and functions that are replaced
    print("done")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_scripted_classes_find_the_names_they_use(target: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(inspect.cleandoc(SCRIPTED))
    done = run_python(str(program), target, target.partition(":")[0])
    assert done.stdout.endswith("done\n"), done.stderr


def numpy_array() -> np.ndarray:
    array = np.ones(2, dtype=np.float32)
    array.flags.writeable = False
    return array


WARN = {
    "from C++, in an operator": lambda: torch.ones(2, 3, 4, device="cuda").T,
    "from C++, in a getter": lambda: (torch.ones(2, device="cuda", requires_grad=True) * 2).grad,
    "from C++, in a constructor": lambda: torch.tensor(torch.ones(2, device="cuda")),
    "from C++, in a move": lambda: torch.as_tensor(numpy_array(), device="cuda"),
    "from C++, as it writes": lambda: torch.add(
        torch.ones(2, device="cuda"), torch.ones(2, device="cuda"), out=torch.ones(3, device="cuda")
    ),
    "from Python": lambda: torch.nn.functional.softmax(torch.ones(2, 3, device="cuda")),
    "from Python, in a loss": lambda: torch.nn.functional.mse_loss(
        torch.ones(2, 1, device="cuda"), torch.ones(2, device="cuda")
    ),
    "from a function that is replaced": lambda: torch.range(0, 2, device="cuda"),
}


def line_of(function: Callable[[], object]) -> tuple[str, int]:
    return function.__code__.co_filename, function.__code__.co_firstlineno


@pytest.fixture
def every_time() -> Iterator[None]:
    """Let torch's C++ give every warning as if it were the first."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_time")
class TestWarnings:
    @pytest.mark.parametrize("name", WARN)
    def test_they_are_given_at_the_programs_line(self, cuda: torchdevice.Scope, name: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            WARN[name]()
        file, first = line_of(WARN[name])
        places = [
            (each.filename, each.lineno) for each in caught if "Lazy" not in str(each.message)
        ]
        assert places and all(
            place[0] == file and first <= place[1] <= first + 2 for place in places
        ), places

    @pytest.mark.parametrize(
        ("action", "times"), [("default", 2), ("once", 1), ("always", 4), ("module", 1)]
    )
    def test_they_are_given_as_often_as_the_filter_says(
        self, cuda: torchdevice.Scope, action: Any, times: int
    ) -> None:
        x = torch.ones(2, 3, 4, device="cuda")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for _ in range(2):
                x.T  # noqa: B018
                x.T  # noqa: B018
        assert len(caught) == times

    def test_filters_see_the_programs_module(self, cuda: torchdevice.Scope) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", module=__name__)
            torch.ones(2, 3, 4, device="cuda").T  # noqa: B018
        assert not caught

    def test_a_thread_without_a_scope_is_left_alone(self, cuda: torchdevice.Scope) -> None:
        def warn() -> None:
            with torchdevice.kernel.thread_state.suspended():
                warnings.warn_explicit("text", UserWarning, torch.overrides.__file__, 1)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            thread = threading.Thread(target=warn)
            thread.start()
            thread.join()
        assert [each.filename for each in caught] == [torch.overrides.__file__]


def test_a_custom_operator_is_said_to_be_defined_where_it_is(cuda: torchdevice.Scope) -> None:
    def define(name: str) -> str:
        @torch.library.custom_op(f"torchdevice_tests::{name}", mutates_args=())
        def operator(x: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(x, device="cuda")

        assert operator._init_fn is not None
        entry = torch._library.simple_registry.singleton.find(f"torchdevice_tests::{name}")
        return entry.fake_impl.kernel.source

    with torchdevice.kernel.thread_state.suspended():
        outside = define("outside")
    assert define("inside").partition(":")[0] == outside.partition(":")[0]


COUNTS = re.compile(
    r"_frames_up|_getframe|currentframe|inspect\.stack\(|createResolutionCallbackFromFrame"
)


def replaced_functions() -> Iterator[tuple[str, Any]]:
    for patch in installed.INSTALLATION._patches or ():
        for each in patch.places if isinstance(patch, patching.Together) else ():
            if inspect.isfunction(each.original) and inspect.isfunction(
                inspect.unwrap(each.original)
            ):
                yield f"{each.owner.__name__}.{each.name}", each.original


def called_by(function: Any) -> Iterator[Any]:
    """Yield functions of the module, or methods of the class, that a function calls by name."""
    cls = getattr(sys.modules[function.__module__], function.__qualname__.partition(".")[0], None)
    for name in re.findall(r"(\w+)\(", inspect.getsource(function)):
        found = function.__globals__.get(name, getattr(cls, name, None))
        # What wraps C++ has no source.
        if inspect.isfunction(found) and inspect.isfunction(inspect.unwrap(found)):
            yield found


def test_what_is_replaced_counts_no_frames(cuda: torchdevice.Scope) -> None:
    """``script`` and what it calls do, and its replacement adds the one frame that it is."""
    counting = {
        name
        for name, function in replaced_functions()
        if any(COUNTS.search(inspect.getsource(each)) for each in (function, *called_by(function)))
    }
    assert counting == {f"torch.jit.{module}script" for module in ("", "_script.", "_trace.")}
