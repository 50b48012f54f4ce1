"""What the command line shows of mistakes that have one remedy, and the demonstration."""

from __future__ import annotations

import py_compile
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import torch._dynamo.convert_frame
from processes import run_command, run_program

from torchdevice.tools.cli import demo, main, programs

pytestmark = pytest.mark.one_engine

ASKS_FOR_CUDA = """
    import torch

    def rule(x):
        {condition}

    rule(torch.ones(2, device="cuda"))
"""


@pytest.mark.parametrize(
    "condition",
    [
        'assert x.device.type == "cuda"',
        "if not x.is_cuda: raise ValueError('Selected CUDA device(s) do not satisfy the GPU rule')",
        "if not x.is_cuda: raise SystemExit('needs a GPU')",
        "if not x.is_cuda: __import__('sys').exit('needs a GPU')",
    ],
)
def test_a_comparison_that_ends_the_program_is_named(condition: str, tmp_path: Path) -> None:
    done = run_program(
        tmp_path, ASKS_FOR_CUDA.format(condition=condition), options=["--target", "cpu"]
    )
    *_, comparison, remedy = done.stderr.splitlines()
    assert done.returncode == 1
    assert comparison == f"program.py:5 compares a device's type, which is 'cpu' here: {condition}"
    assert remedy.startswith("`torchdevice run --target simulated:cuda`")
    assert (
        run_program(
            tmp_path, ASKS_FOR_CUDA.format(condition=condition), options=["--target", "t4"]
        ).returncode
        == 0
    )


DEVICES_IN_A_LIST = """
    import torch

    def dtype_of_all():
        profiles = [(torch.device(f"cuda:{i}"), 8.0) for i in range(torch.cuda.device_count())]
        unsupported = [i for i, found in enumerate(profiles) if found[0].type != "cuda"]
        if unsupported:
            raise RuntimeError("Selected CUDA device(s) do not satisfy the GPU rule")

    dtype_of_all()
"""


def test_a_comparison_of_devices_in_a_list_is_named(tmp_path: Path) -> None:
    done = run_program(tmp_path, DEVICES_IN_A_LIST, options=["--target", "cpu"])
    assert "program.py:6 compares a device's type, which is 'cpu' here" in done.stderr
    assert run_program(tmp_path, DEVICES_IN_A_LIST, options=["--target", "t4"]).returncode == 0


def test_the_type_that_is_named_is_what_the_program_sees(tmp_path: Path) -> None:
    program = ASKS_FOR_CUDA.format(condition='assert x.device.type == "cuda", x.device.type')
    done = run_program(tmp_path, program, options=["--target", "simulated:mps"])
    *_, error, comparison, remedy = done.stderr.splitlines()
    assert error == "AssertionError: mps" and "which is 'mps' here" in comparison
    assert remedy.startswith("`torchdevice run --identity program`")


DRAWS_AS_DIFFUSERS = """
    import torch

    def draw(device, generator):
        if device.type == "mps":
            return torch.randn(2, generator=generator).to(device)
        return torch.randn(2, generator=generator, device=device)

    draw(torch.ones(2, device="cuda").device, torch.Generator("cuda"))
"""


def test_a_generator_of_a_mac_for_numbers_drawn_on_the_cpu(tmp_path: Path) -> None:
    mac = ["--target", "simulated:mps"]
    done = run_program(tmp_path, DRAWS_AS_DIFFUSERS, options=mac)
    *_, error, note, remedy = done.stderr.splitlines()
    assert error == "RuntimeError: Expected a 'cpu' device type for generator but found 'mps'"
    assert note.endswith("where a device's type is 'mps', and the generator is of 'mps'.")
    assert remedy.startswith("`torchdevice run --identity program`")
    mac += ["--identity", "program"]
    assert run_program(tmp_path, DRAWS_AS_DIFFUSERS, options=mac).returncode == 0


def test_errors_of_torch_get_no_such_note(tmp_path: Path) -> None:
    condition = 'print(x.device.type == "cuda"); x + torch.ones(3)'
    done = run_program(
        tmp_path, ASKS_FOR_CUDA.format(condition=condition), options=["--target", "cpu"]
    )
    assert "must match the size" in done.stderr and "compares" not in done.stderr


def test_a_program_without_the_command_that_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["train.py", "--epochs", "3"])
    assert "(did you mean `torchdevice run train.py`?)" in capsys.readouterr().err


def test_a_command_is_looked_for_beside_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    command = tmp_path / "accelerate"
    command.write_text("#!/usr/bin/env python\nprint(1)\n")
    command.chmod(0o755)
    found = programs.named(["accelerate", "launch"])
    assert found.path == str(command) and found.argv == [str(command), "launch"]


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize(
    "call",
    [
        'torch.empty(1 << 50, device="cuda")',
        'torch.empty(1, device="cuda").repeat(1 << 50)',  # which the CPU's scope does not see
    ],
)
def test_an_error_of_memory_is_cudas_alone(call: str, target: str, tmp_path: Path) -> None:
    program = f"import torch\n{call}\n"
    done = run_program(tmp_path, program, options=["--quiet", "--target", target])
    assert "DefaultCPUAllocator" not in done.stderr and done.stderr.count("Traceback") == 1
    assert "Error: CUDA out of memory. Tried to allocate 4194304.00 GiB." in done.stderr
    assert ("This machine's memory ran out." in done.stderr) == (target != "cpu")


def test_an_error_that_no_kernel_raised_names_the_programs_types(tmp_path: Path) -> None:
    program = """
        import torch

        x = torch.ones(1, 1, 2, 2, device="cuda")
        torch.conv_transpose2d(x.to(torch.complex64), x)
    """
    options = ["--quiet", "--engine", "wrap", "--target", "simulated:cuda"]
    done = run_program(tmp_path, textwrap.dedent(program), options=options)
    assert "Input type (CUDAComplexFloatType) and weight type (torch.cuda.Float" in done.stderr


def test_the_demonstration_lets_one_command_compile_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert not demo._is_compiled()
    py_compile.compile(torch._dynamo.convert_frame.__file__)
    assert demo._is_compiled()


@pytest.mark.sampled(8, of="long programs")
def test_the_demonstration(tmp_path: Path) -> None:
    done = run_command("demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 60: loss 0.0" in done.stdout and "The smallest GPU that fits: " in done.stdout
    assert "found at least two devices, cuda:0 and cuda:1!" in done.stdout
    assert [*tmp_path.iterdir()] == [], "it needs no files, and leaves none"


@pytest.mark.parametrize(
    "ending", ["sys.exit('no data')", "x.is_cuda or sys.exit(3)", "x.is_cuda or sys.exit()"]
)
def test_another_way_to_end_has_no_hint(ending: str, tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        f"import sys, torch\nx = torch.ones(2, device='cuda')\n{ending}\n",
        options=["--target", "cpu"],
    )
    assert "compares a device's type" not in done.stderr
