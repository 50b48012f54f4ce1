"""TorchScript programs with devices: scripted, traced, loaded, in a process per target.

Torch keeps scripted functions for the life of the process, so each process runs one target.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import torchdevice
from torchdevice.errors import PortabilityWarning

PROGRAM = """
    import io
    import sys
    import torch
    import torchdevice
    import warnings

    warnings.simplefilter("ignore")

    def constant(x): return torch.zeros(2, device="cuda") + x.to("cuda")
    def moved(x): return x.to("cuda") * 2
    def to_a_device(x): return x.to(torch.device("cuda:0")) * 2
    def converted(x): return x.to("cuda", torch.float64)
    def cuda(x): return x.cuda() + 1
    def computed(x, i: int): return x.to("cuda:" + str(i))
    def two_parts(x): return torch.ones_like(x, device=torch.device("cuda", 0))
    def text_argument(x, device: str): return x.to(device)
    def device_argument(x, device: torch.device): return x.to(device)
    def factory(x): return torch.arange(3, device="cuda:0", dtype=torch.long)
    def other(x): return x.to("cpu")

    def branches(x, n: int):
        y = x
        for i in range(n):
            if i > 0:
                y = y + torch.full((2,), 1.0, device="cuda")
            else:
                y = y.cuda()
        return y

    def inner(x): return x.cuda() + torch.ones(2, device="cuda")
    def calls(x): return inner(x) + 1

    class Attributes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.device = torch.device("cuda")
            self.text = "cuda:0"

        def forward(self, x):
            return self.linear(x.to(self.device)) + torch.zeros(2, device=self.device) + x.to(self.text)

    class Pinned(torch.nn.Module):
        def forward(self, x): return x.pin_memory().to("cuda", non_blocking=True)

    CASES = {
        "constant": (constant, ()), "moved": (moved, ()), "to_a_device": (to_a_device, ()),
        "converted": (converted, ()), "cuda": (cuda, ()), "computed": (computed, (0,)),
        "two_parts": (two_parts, ()), "text_argument": (text_argument, ("cuda",)),
        "device_argument": (device_argument, ("cuda",)), "factory": (factory, ()), "branches": (branches, (3,)),
        "calls": (calls, ()), "Attributes": (Attributes, ()), "Pinned": (Pinned, ()), "other": (other, ()),
    }

    def made(subject):
        return subject().eval() if isinstance(subject, type) else subject

    target, kind = sys.argv[1:]
    for name, (subject, arguments) in CASES.items():
        torch.manual_seed(0)
        saved = io.BytesIO()
        torch.jit.save(torch.jit.script(made(subject)), saved)  # on a machine that knows nothing of us
        saved.seek(0)
        torch._C._jit_clear_class_registry()
        with torchdevice.portable(target):
            def run(program):
                program = program.cuda() if isinstance(subject, type) else program
                values = [torch.device(v) if subject is device_argument else v for v in arguments]
                return program(torch.ones(2), *values)

            torch.manual_seed(0)
            expected = run(made(subject))
            loaded = run(torch.jit.load(saved))
            torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
            torch.manual_seed(0)
            scripted = run(torch.jit.script(made(subject)))
            results = [loaded, scripted]
            if not arguments:
                torch.manual_seed(0)
                traceable = made(subject).cuda() if isinstance(subject, type) else subject
                results.append(run(torch.jit.trace(traceable, (torch.ones(2),))))
            for result in results:
                where = "cpu" if name == "other" else kind
                assert result.device.type == where == expected.device.type, (name, result.device)
                assert result.dtype is expected.dtype and torch.equal(result.cpu(), expected.cpu()), name
            again = io.BytesIO()
            torch.jit.save(torch.jit.script(made(subject)), again)  # what is saved needs nothing of ours
        assert b"torchdevice" not in again.getvalue()
        print("ran", name, len(results))
"""


@pytest.mark.sampled(1)
def test_every_way_to_name_a_device(target: str, kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    result = run_python(str(program), target, kind, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran ") == 15


def test_a_device_of_two_parts_may_have_a_type_that_an_argument_says(
    cuda: torchdevice.Scope,
) -> None:
    def moved(x: torch.Tensor, kind: str) -> torch.Tensor:
        return x.to(torch.device(kind, 0))

    function = torch.jit.script(moved)
    assert function(torch.ones(2), "cuda").device == torch.ones(2, device="cuda").device
    assert function(torch.ones(2).cuda(), "cpu").device.type == "cpu"


@pytest.mark.lacked_by("simulated:mps", "device of its own that TorchScript takes from a list")
def test_a_device_that_cannot_be_known_is_torchs_error_with_the_line(
    cuda: torchdevice.Scope,
) -> None:
    """A tuple of devices is left as it is; the error names the operator and the line."""

    def hidden(x: torch.Tensor, devices: list[torch.device]) -> torch.Tensor:
        return x.to(devices[0])

    function = torch.jit.script(hidden)
    # Rewritten when it was made.
    assert function(torch.ones(2), [torch.device("cuda")]).numel() == 2
    with (
        pytest.raises(RuntimeError, match=r"x\.to\(devices\[0\]\)"),
        torch._C.DisableTorchFunction(),
    ):
        function(torch.ones(2), [torch.device("cuda", 0)])


@pytest.mark.parametrize("target", ["simulated:mps"])
@pytest.mark.parametrize("policy", ["float32", "error", "cpu"])
def test_float64_beside_a_device(target: str, policy: Any) -> None:
    """Of a graph, ``float64="cpu"`` keeps nothing on the CPU: torch's error is left."""

    def made(x: torch.Tensor) -> list[torch.Tensor]:
        there = x.to("cuda", torch.float64), torch.zeros(2, dtype=torch.float64, device="cuda")
        by_keyword = (
            x.to(dtype=torch.complex128, device="cuda:0"),
            torch.arange(2, device="cuda", dtype=torch.double),
        )
        host = torch.ones_like(x, dtype=torch.float64, device="cpu")
        return [there[0], there[1], by_keyword[0], by_keyword[1], host]

    with torchdevice.portable(target, float64=policy) as scope, warnings.catch_warnings():
        warnings.simplefilter("ignore", PortabilityWarning)
        program = torch.jit.script(made)
        if policy != "float32":
            with pytest.raises(RuntimeError, match="Cannot convert a MPS Tensor to float64"):
                program(torch.ones(2))
            return
        results = program(torch.ones(2))
        assert [each.dtype for each in results] == [
            torch.float32,
            torch.float32,
            torch.complex64,
            torch.float32,
            torch.float64,
        ]
        assert [each.tolist() for each in results] == [[1, 1], [0, 0], [1, 1], [0, 1], [1, 1]]
        assert (
            all(each.device.type != "cpu" for each in results[:4])
            and results[4].device.type == "cpu"
        )
        assert {"torch.float64", "torch.complex128"} <= {
            entry.requested for entry in scope.journal.degraded
        }


CALLS: list[Callable[[Any], Any]] = [
    lambda m: m,
    lambda m: torch.jit.freeze(m.eval()),
    torch.jit.optimize_for_inference,
]


@pytest.mark.parametrize("prepare", CALLS, ids=["as it is", "frozen", "optimized"])
def test_a_traced_model_goes_on(
    cuda: torchdevice.Scope, prepare: Callable[[Any], Any], tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).cuda().eval()
    x = torch.rand(2, 4, device="cuda")
    traced = torch.jit.trace(model, (x,))
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    saved.seek(0)
    loaded = torch.jit.load(saved, map_location="cuda:0")
    assert torch.equal(loaded(x), model(x)) and next(loaded.parameters()).device == x.device
    # An optimized model computes by oneDNN, which rounds otherwise.
    with torch.no_grad():
        assert torch.allclose(prepare(traced)(x), model(x), atol=1e-6)


NAMING: dict[str, Callable[[torch.Tensor], Any]] = {
    "factory": lambda x: x + torch.arange(2, device="cuda"),
    "device of a tensor": lambda x: x + torch.ones(2, device=x.device),
    "move": lambda x: x.to("cpu").to("cuda") + 1,
    "method": lambda x: x.cpu().cuda() + 1,
}


class Adding(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return NAMING["factory"](x)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("name", NAMING)
def test_two_traces_of_a_function_are_alike(name: str, engine: Any, target: str) -> None:
    """Torch compares them with the lines of Python, here with those of this package."""
    with torchdevice.portable(target, engine=engine):
        x = torch.ones(2, device="cpu").cuda()
        assert torch.equal(torch.jit.trace(NAMING[name], x)(x), NAMING[name](x))


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_two_traces_of_a_method_are_alike(engine: Any) -> None:
    with torchdevice.simulate(engine=engine):
        x = torch.ones(2, device="cpu").cuda()
        traced = torch.jit.trace_module(Adding(), {"forward": x})
        assert traced(x).tolist() == [1, 2]
