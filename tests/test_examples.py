"""Examples are unmodified CUDA programs: they run in a scope, and only there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from places import ROOT
from processes import run_command, run_python

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(2), pytest.mark.one_engine]

EXAMPLES = ROOT / "examples"

ARGUMENTS = {
    "finetune_gpt2": ["--steps", "8"],
    "train_nanogpt": ["--steps", "20"],
    "classify_images": ["--epochs", "1"],
}

OPTIONS = {"model_parallel": ["--devices", "2"]}

EXPECTED = {
    "model_parallel": ["ToDevice(", "epoch 4: loss 0.0", "cuda:1 holds"],
    "finetune_gpt2": ["trained in", "wrote: 'The harbour"],
    "train_nanogpt": ["step 20: loss", "saved"],
    "classify_images": ["epoch 1: loss", "accuracy"],
    "demo_tensors": ["copied back unchanged: True", "reproducible: True"],
    "demo_matmul": ["GFLOP/s"],
    "demo_network": ["step 300: loss 0.0", "sin(1) is about 0.8"],
    "demo_device_info": ["available: True devices: 1", "PyTorch CUDA memory summary"],
    "demo_unsupported": [
        "a kernel in CUDA C++: NotSupportedError",
        "a raw graph: NotSupportedError",
        "an ordinary sum: works",
    ],
}


def names() -> list[str]:
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", [name for name in names() if name != "two_devices_mixed_up"])
def test_runs_in_a_scope(name: str, tmp_path: Path) -> None:
    if name == "finetune_gpt2":
        pytest.importorskip("transformers", reason="install with the [hf] extra")
    result = run_command(
        "run",
        *OPTIONS.get(name, []),
        str(EXAMPLES / f"{name}.py"),
        *ARGUMENTS.get(name, []),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for text in EXPECTED[name]:
        assert text in result.stdout


def test_a_mistake_is_seen_on_simulated_devices_and_not_on_a_cpu() -> None:
    script = str(EXAMPLES / "two_devices_mixed_up.py")
    on_cpu = run_command("run", "--target", "cpu", script)
    simulated = run_command("run", "--target", "simulated:cuda:2", script)
    assert (on_cpu.returncode, on_cpu.stdout) == (0, "tensor([2., 2.])\n")
    assert (
        "found at least two devices, cuda:0 and cuda:1!" in simulated.stderr
        and simulated.returncode == 1
    )


@pytest.mark.sampled(1, of="examples that train")
@pytest.mark.usefixtures("chosen")
def test_a_run_can_be_resumed(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_nanogpt.py")
    first = run_command("run", script, "--steps", "5", cwd=tmp_path)
    second = run_command("run", script, "--steps", "5", "--resume", cwd=tmp_path)
    assert "step 5: loss" in first.stdout, first.stderr
    assert "resumed at step 5" in second.stdout and "step 10: loss" in second.stdout, second.stderr


@pytest.mark.sampled(1, of="examples that train")
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_losses_are_close_in_every_precision(dtype: str, tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_nanogpt.py")
    result = run_command("run", script, "--steps", "20", "--dtype", dtype, cwd=tmp_path)
    match = re.search(r"step 20: loss ([\d.]+)", result.stdout)
    assert match, result.stderr
    assert 2.2 < float(match[1]) < 2.7


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in names() if name != "demo_unsupported"])
def test_fails_without_a_scope(name: str, tmp_path: Path) -> None:
    if name == "finetune_gpt2":
        pytest.importorskip("transformers", reason="install with the [hf] extra")
    environment = {"TORCHDEVICE": "0"}
    result = run_python(
        str(EXAMPLES / f"{name}.py"), *ARGUMENTS.get(name, []), cwd=tmp_path, **environment
    )
    if name == "demo_device_info":  # it prints is_available() before anything fails
        assert "available: False" in result.stdout
    errors = (
        "Torch not compiled with CUDA",
        "needs a GPU",
        "no attribute '_cuda_setDevice'",
        "requires CUDA support",
    )
    errors += (
        "NVIDIA driver",
        "CUDA error",
        "no attribute '_nccl_version'",
        "CUDA driver",
        "Cannot access accelerator",
    )
    assert result.returncode == 1 and any(error in result.stderr for error in errors), (
        result.stderr[-1500:]
    )


# Which uses ToDevice.
@pytest.mark.parametrize("name", [name for name in names() if name != "model_parallel"])
def test_no_example_mentions_this_package(name: str) -> None:
    assert "torchdevice" not in (EXAMPLES / f"{name}.py").read_text()
    assert os.access(EXAMPLES / f"{name}.py", os.R_OK)
