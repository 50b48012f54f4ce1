"""The runtime of PrivateUse1 backends, on a test backend with public ones' conventions.

torch has room for one such backend in a process, and the simulated device takes it. So what is
tested here runs in processes of their own, where ``import torch`` loads ``out_of_tree/npu_like``
through its entry point.
"""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from conftest import OUT_OF_TREE, OUT_OF_TREE_PATH
from places import TESTS
from processes import run_fresh_python

from torchdevice.kernel.devices.module import ModuleRuntime

QUICK = (
    "amp autograd batch_norm data engines memory profiling scope streams torch_cuda transfer "
    "written_for_xpu"
)
"""Files of contract tests, of which one runs by default, drawn with the seed."""

LONG = (
    "breakages compile cpp_extension distributed dtype_gaps frames inventory policies roads "
    "tracebacks transformers"
)
"""Further files of contract tests, for complete sweeps."""


def with_backend(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with the backend on the path, before the packages that are installed."""
    path = os.pathsep.join((str(OUT_OF_TREE_PATH), os.environ.get("PYTHONPATH", "")))
    return run_fresh_python(*arguments, PYTHONPATH=path, **environment)


def run_contract(name: str, request: pytest.FixtureRequest) -> None:
    """Run the contract tests of a file on the backend."""
    seed, engine = request.config.getoption("--sweep-seed"), request.config.getoption("--engine")
    flags = (
        "--targets",
        OUT_OF_TREE,
        "--sweep-seed",
        str(seed),
        "--engine",
        engine,
        "-q",
        "-p",
        "no:cacheprovider",
    )
    done = with_backend("-m", "pytest", *flags, str(next(TESTS.rglob(f"test_{name}.py"))))
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-5000:] + done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sampled(1)) for name in QUICK.split()]
)
def test_the_contract(name: str, request: pytest.FixtureRequest) -> None:
    run_contract(name, request)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sampled(0)) for name in LONG.split()]
)
def test_the_rest_of_the_contract(name: str, request: pytest.FixtureRequest) -> None:
    run_contract(name, request)


PROGRAM = """
import os, warnings
warnings.simplefilter("ignore")
import torch, torchdevice

assert torchdevice.TorchDevice().device.type == "npu_like", "the backend is chosen before the CPU"

try:
    torchdevice.simulate().__enter__()
except torchdevice.errors.BackendTakenError as error:
    assert error.name == "npu_like"
else:
    raise AssertionError("there are two backends")

with torchdevice.portable(devices=2) as scope:
    model = torch.nn.Linear(2, 1)
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), 0.1)
    model.cuda()
    before = model.weight.detach().cpu().clone()
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    assert model.weight is weight and weight.device.type == "npu_like"
    assert not torch.equal(before, weight.detach().cpu()), "an optimizer that was made before the move trains nothing"

    assert torch.ones(2).pin_memory().is_pinned(), "a hint, where the backend has no page-locked memory"

    assert torch.compile(lambda x: (x * 2).sin())(torch.zeros(3, device="cuda")).tolist() == [0.0] * 3
    assert any("Inductor makes no code for 'npu_like'" in entry.done for entry in scope.journal.degraded)

    torch.accelerator.synchronize()
    assert torch.accelerator.current_accelerator().type == "cuda"

    try:
        torch.empty(1 << 40, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        assert str(error).startswith("CUDA out of memory. Tried to allocate 4096.00 GiB (NPU 0;"), error
    else:
        raise AssertionError("memory has no end")
print("as said")
"""


def test_what_torch_asks_of_backends_in_cpp_only() -> None:
    done = with_backend("-c", PROGRAM, TORCHDEVICE_TARGET="npu_like")
    assert done.stdout.endswith("as said\n"), done.stdout + done.stderr


@pytest.mark.one_engine
def test_a_backend_that_torch_loads_after_this_package_is_the_target() -> None:
    after = f"import sys; sys.path.append({str(OUT_OF_TREE_PATH)!r})"
    program = f"{after}; import torch; print(torch.ones(1).cuda().device)"
    done = run_fresh_python("-c", program, TORCHDEVICE="1")
    assert done.stdout == "npu_like:0\n", done.stdout + done.stderr


@pytest.mark.usefixtures("no_collections")
@pytest.mark.one_engine
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0)"),
            "Tried to allocate 2.00 GiB (NPU 0)",
        ),
        (
            torch.OutOfMemoryError("XPU out of memory. Tried to allocate 2 GiB."),
            "Tried to allocate 2 GiB.",
        ),
        (RuntimeError("the file ran out of memory of the past"), None),
        (ValueError("NPU out of memory."), None),
    ],
)
def test_which_errors_say_that_memory_ran_out(error: Exception, text: str | None) -> None:
    assert ModuleRuntime("npu").out_of_memory(error) == text
