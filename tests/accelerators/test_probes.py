"""Libraries find the accelerator of the program in any order and way of probing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_program

TARGETS = ("cpu", "simulated:cuda")

# The last three repeat the calls of libraries that the tests do not install.
PROBES = """
import json, sys
import torch

def accelerate():
    from accelerate import PartialState
    return PartialState().device.type

def accelerates_checks():
    from accelerate.utils import imports
    return [imports.is_cuda_available(), imports.is_mps_available(), imports.is_xpu_available(check_device=True)]

def transformers():
    from transformers.utils import import_utils as utils
    xpu = utils.is_torch_xpu_available(check_device=True)
    return [utils.is_torch_cuda_available(), utils.is_torch_mps_available(), xpu]

def transformers_arguments():
    from transformers import TrainingArguments
    return TrainingArguments(output_dir="out", report_to=[]).device.type

def fabric():
    from lightning.fabric import Fabric
    return Fabric(accelerator="auto", devices=1).device.type

def lightning():
    from lightning.pytorch import Trainer
    return type(Trainer(accelerator="auto", devices=1, logger=False, enable_checkpointing=False).accelerator).__name__

def pytorch_lightning():
    from pytorch_lightning import Trainer
    return type(Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False).accelerator).__name__

def accelerator():
    return str(torch.accelerator.current_accelerator())

def deepspeed():
    if hasattr(torch, "xpu") and torch.cuda.device_count() == 0:
        if torch.xpu.device_count() > 0 and torch.xpu.is_available():
            return "xpu"
    try:
        torch.mps.current_allocated_memory()
        return "mps"
    except (RuntimeError, ImportError):
        pass
    if torch.cuda.device_count() > 0 and torch.cuda.is_available():
        return "cuda"
    return "cpu"

def ultralytics():
    if torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device()}"
    return "mps" if torch.backends.mps.is_available() else "cpu"

def by_trying():
    found = []
    for family in ("mps", "xpu", "cuda"):
        try:
            torch.zeros(1, device=family)
            getattr(torch, family).synchronize()
            found.append(family)
        except (RuntimeError, AssertionError, AttributeError):
            pass
    return found

probes = [
    accelerate, accelerates_checks, transformers, transformers_arguments, fabric, lightning, pytorch_lightning,
    accelerator, deepspeed, ultralytics, by_trying,
]
print(json.dumps({probe.__name__: probe() for probe in probes if probe.__name__ not in sys.argv[1:]}))
"""

FOUND = {
    "accelerates_checks": [True, False, False],
    "transformers": [True, False, False],
    "lightning": "CUDAAccelerator",
    "pytorch_lightning": "CUDAAccelerator",
    "accelerator": "cuda",
    "deepspeed": "cuda",
    "ultralytics": "cuda:0",
    "by_trying": ["cuda"],
}


@pytest.mark.one_engine
@pytest.mark.parametrize("target", TARGETS)
def test_a_program_written_for_cuda(target: str, tmp_path: Path) -> None:
    ran = run_program(tmp_path, PROBES, options=["--target", target], TORCHDEVICE_IDENTITY="")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    devices = {found.pop(name) for name in ("accelerate", "transformers_arguments", "fabric")}
    assert found == FOUND
    assert devices == {"cpu" if target == "cpu" else "cuda"}, (
        "a CPU target is where its tensors say they are"
    )


OWN_MODULE_ONLY = (
    "pytorch_lightning",
    "lightning",
    "fabric",
    "accelerate",
    "transformers_arguments",
    "transformers",
)


@pytest.mark.one_engine
@pytest.mark.parametrize("family", ["mps", "xpu"])
def test_a_program_written_for_another(family: str, tmp_path: Path) -> None:
    options = ["--target", "cpu", "--written-for", family]
    ran = run_program(tmp_path, PROBES, *OWN_MODULE_ONLY, options=options)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["by_trying"] == [family] and found["accelerator"] == found["deepspeed"] == family
    assert found["accelerates_checks"] == [False, family == "mps", family == "xpu"]
