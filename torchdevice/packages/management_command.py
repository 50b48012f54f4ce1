"""Offers an ``nvidia-smi`` to the processes of programs under ``run``, on simulated GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.options import Options, of_device
from torchdevice.packages import managed_devices, nvml
from torchdevice.packages.nvidia_smi import VARIABLE

FOLDER = str(Path(__file__).with_name("bin"))
"""The folder with the command."""

_PYTHON = "TORCHDEVICE_SMI_PYTHON"


def devices(options: Options, runtime: Runtime) -> list[dict[str, Any]]:
    """Return the devices of a scope, as the command reads them."""
    count = managed_devices.count(options, runtime)
    same = {
        "driver": nvml.DRIVER,
        "cuda": nvml.cuda_version(),
        "count": count,
        "used": options.context or 0,
    }
    return [{**_described(options, runtime, index), **same} for index in range(count)]


def _described(options: Options, runtime: Runtime, index: int) -> dict[str, Any]:
    capability = "{}.{}".format(*of_device(options.capability, index))
    return {
        **dataclasses.asdict(managed_devices.device(options, runtime, index)),
        "capability": capability,
    }


def offer(options: Options, runtime: Runtime) -> None:
    """Put the command first on the path of this process's children, for good."""
    if options.packages == "absent" or os.name == "nt" or not runtime.supplied.is_gpu:
        return
    os.environ[VARIABLE] = json.dumps(devices(options, runtime))
    os.environ[_PYTHON] = sys.executable
    others = [
        each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if each != FOLDER
    ]
    os.environ["PATH"] = os.pathsep.join([FOLDER, *others])
