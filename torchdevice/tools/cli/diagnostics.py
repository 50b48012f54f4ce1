"""The examinations of ``torchdevice doctor``, each faster than torch's import."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import timeit
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from torchdevice import cuda as pypi_conflict
from torchdevice.errors import PATCHERS, TorchDeviceError
from torchdevice.kernel.devices.accelerators import FAMILIES
from torchdevice.kernel.devices.registry import runtime
from torchdevice.kernel.python.byte_sizes import written
from torchdevice.kernel.python.environment import COLLECTED, REPORT, SAID, SWITCH
from torchdevice.kernel.python.logs import FILE, LEVEL, configure_logging
from torchdevice.kernel.python.run_folder import VARIABLE as RUN_FOLDER
from torchdevice.kernel.python.uncaught_errors import FRAMES
from torchdevice.native import building
from torchdevice.scope import activation, target_selection
from torchdevice.scope import collected_options as _options
from torchdevice.scope.target_selection import known_targets
from torchdevice.simulation.model_lookup import MODELS, SIMULATED


class Finding(NamedTuple):
    """The result of an examination.

    Attributes:
        subject: What was examined, in a word.
        status: ``"ok"``; ``"warning"`` for surprises; ``"problem"``.
        said: The result.
        remedy: How to fix it.
    """

    subject: str
    status: str
    said: str
    remedy: str = ""


def examine(target: str | None) -> list[Finding]:
    """Return the findings of all examinations, for a target or for the one that would be chosen."""
    status = "warning" if building.trouble() else "ok"
    native = Finding("native", status, f"kernels of simulated devices: {building.said('auto')}")
    looks = (_build, _memory, _speed, _compiler, _patchers, _packages, _activation, _variables)
    return [
        *_device(target),
        _targets(),
        native,
        *(finding for look in looks for finding in look()),
    ]


_WELL_KNOWN = ("t4", "rtx4090", "a100", "h100")


def _targets() -> Finding:
    """Return the devices and profiles, and a few of the many models. ``--json`` has all."""
    others = [name for name in known_targets() if name.removeprefix(f"{SIMULATED}:") not in MODELS]
    models = f"or one of {len(MODELS)} GPU models such as {', '.join(_WELL_KNOWN)}"
    return Finding(
        "targets",
        "ok",
        f"--target takes {', '.join(others)}, {models} (all of them: doctor --json)",
    )


def target_of(target: str | None) -> str:
    """Return the target that a scope would have, as ``--target`` takes it."""
    options = _options.chosen({"target": target})
    return str(options.target or target_selection.resolve(options)[0].target)


def _device(target: str | None) -> list[Finding]:
    try:
        found, options = target_selection.resolve(_options.chosen({"target": target}))
    except (TorchDeviceError, ValueError, TypeError) as error:
        return [Finding("device", "problem", str(error), "")]
    if target is not None:
        why = "asked for"
    elif options.target is not None:
        why = f"set by {_options.variable_of('target')}"
    else:
        better = [name for name in FAMILIES if not runtime(name).is_available()]
        if better:
            why = f"the best there is; not available: {', '.join(better)}"
        else:
            why = "the best there is"
    name = target_selection.name_of(found, options)
    said = f"{target_selection.shown(found)} would stand in: {name} ({why})"
    if found.degraded_notice:
        remedy = "to test as strictly as on a GPU: --target simulated:cuda"
    else:
        remedy = ""
    return [Finding("device", "ok", said, remedy)]


def _build() -> list[Finding]:
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version and (int(version[1]), int(version[2])) < (2, 10):
        return [
            Finding(
                "torch",
                "problem",
                f"torch {torch.__version__} is too old",
                "pip install 'torch>=2.10'",
            )
        ]
    if torch.version.cuda and not torch.cuda.is_available():
        return [
            Finding(
                "torch",
                "ok",
                f"a build for CUDA {torch.version.cuda}, without a GPU, which it does not need",
            )
        ]
    kinds = {
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "XPU": getattr(torch.version, "xpu", None),
    }
    built = [f"{name} {version}" for name, version in kinds.items() if version]
    return [
        Finding(
            "torch",
            "ok",
            f"a build for {' and '.join(built)}" if built else "a build without accelerators",
        )
    ]


def _memory() -> list[Finding]:
    memory = psutil.virtual_memory()
    said = f"{written(memory.available)} of {written(memory.total)} are free"
    if memory.available < 4 << 30:
        return [
            Finding(
                "memory", "warning", said, "a model of a GPU's size will not fit: use a smaller one"
            )
        ]
    return [Finding("memory", "ok", said)]


_SIDE = 256


def _speed() -> list[Finding]:
    """Compare the speed of mixed-precision products on the CPU in a scope and without one."""
    try:
        with activation.portable("cpu"):
            plain = _multiplication(None)
            return [
                _speed_of(dtype, _multiplication(dtype) / plain)
                for dtype in (torch.bfloat16, torch.float16)
            ]
    except ValueError:
        # A variable has a wrong value, so that no scope can be entered: `_variables` finds it.
        return []


def _speed_of(dtype: torch.dtype, factor: float) -> Finding:
    """Return the finding about autocast if products take ``factor`` times as long as float32's."""
    name = str(dtype).removeprefix("torch.")
    times = max(factor, 1 / factor)
    compared = f"{times:.{0 if times > 10 else 1}f} times {'slower' if factor > 1 else 'faster'}"
    slow = factor > 2
    said = f"on a CPU target, autocast to {name} makes a matrix product {compared}"
    return Finding(
        name,
        "warning" if slow else "ok",
        said,
        "turn mixed precision off on a CPU target" if slow else "",
    )


def _multiplication(dtype: torch.dtype | None) -> float:
    """Return the seconds of the fastest of three products, warmed up, in autocast to a dtype."""
    threads = torch.get_num_threads()
    # Several wait for each other, on a busy machine hundreds of times as long as they compute.
    torch.set_num_threads(1)
    matrix = torch.ones(_SIDE, _SIDE)
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        times = timeit.repeat(lambda: matrix @ matrix, number=1, repeat=4)
    torch.set_num_threads(threads)
    return min(times[1:])


def _compiler() -> list[Finding]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++", "cl"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is not None:
        return [Finding("compiler", "ok", f"{found}, for torch.compile")]
    said = f"there is no {' or '.join(names)}, so torch.compile cannot make code"
    return [
        Finding(
            "compiler",
            "warning",
            said,
            "install g++ (or set CXX), or use torch.compile(backend='eager')",
        )
    ]


def _patchers() -> list[Finding]:
    """Look for packages that patch torch for the whole process, without importing them."""
    installed = sorted(
        {name.partition(".")[0] for name in PATCHERS if _place_of(name.partition(".")[0])}
    )
    if not installed:
        return [
            Finding("patchers", "ok", "no other package that replaces parts of torch is installed")
        ]
    remedy = (
        "leave its import out of programs that run in a scope; scopes refuse to be entered beside "
        "it"
    )
    return [
        Finding("patchers", "warning", f"{', '.join(installed)} replaces parts of torch", remedy)
    ]


def _place_of(package: str) -> ModuleSpec | None:
    """Return where a package is, without importing it; None where it is not installed."""
    try:
        return importlib.util.find_spec(package)
    except ValueError:  # a module that some code has made and put into sys.modules
        return None


def _packages() -> list[Finding]:
    """Compare sister packages' builds with torch's: CUDA's fail to import beside the CPU's."""
    found = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("torchdevice")
        said = f"another project of that name, torchdevice {version}, is installed in its place"
        found.append(Finding("packages", "problem", said, pypi_conflict.REMEDY))
    for name in ("torchvision", "torchaudio"):
        cuda = _cuda_of(name)
        if cuda and cuda != torch.version.cuda:
            ours = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
            index = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
            remedy = (
                f"pip install --force-reinstall {name} --index-url "
                f"https://download.pytorch.org/whl/{index}"
            )
            found.append(
                Finding(
                    "packages", "problem", f"{name} is for CUDA {cuda}, and torch {ours}", remedy
                )
            )
    return found or [
        Finding(
            "packages", "ok", "torchvision and torchaudio, where installed, are of torch's build"
        )
    ]


def _cuda_of(package: str) -> str | None:
    """Return the version of CUDA in a package's metadata, without importing it."""
    spec = _place_of(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "version.py")
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            said = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.M)
            if said:
                return said[1]
            local = re.search(r"\+cu(\d+)(\d)['\"]", text)
            return f"{local[1]}.{local[2]}" if local else None
    return None


def _activation() -> list[Finding]:
    """Look for the entry point that torch calls on import, so that other processes follow."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        remedy = "unset it: child processes do not follow `torchdevice run` without it"
        return [Finding("children", "warning", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set", remedy)]
    points = importlib.metadata.entry_points(group="torch.backends")
    if any(point.value == "torchdevice_autoload:activate" for point in points):
        return [
            Finding(
                "children", "ok", f"torch finds the package: {SWITCH}=1 and child processes work"
            )
        ]
    said = f"torch does not find the package: {SWITCH}=1 and child processes have no scope"
    return [
        Finding(
            "children",
            "problem",
            said,
            "install the package with pip, which registers it with torch",
        )
    ]


_OTHERS = ("CUDA_VISIBLE_DEVICES", "PYTORCH_ENABLE_MPS_FALLBACK", "NO_COLOR", "PYTHONPATH")


def _variables() -> list[Finding]:
    own = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SWITCH)}
    known = {_options.variable_of(name) for name in _options.declarations()}
    known |= {SWITCH, LEVEL, FILE, FRAMES, COLLECTED, REPORT, SAID, RUN_FOLDER}
    found = []
    for name in sorted(own.keys() - known):
        near = difflib.get_close_matches(name, sorted(known), n=1)
        remedy = f"did you mean {near[0]}?" if near else "torchdevice run --help lists the options"
        found.append(
            Finding("variables", "warning", f"{name} is not a variable of torchdevice", remedy)
        )
    for check in (_options.from_environment, configure_logging):
        try:
            check()
        except ValueError as error:
            found.append(Finding("variables", "problem", str(error)))
    shown = {**own, **{name: os.environ[name] for name in _OTHERS if os.environ.get(name)}}
    said = ", ".join(
        f"{name}={value}" for name, value in shown.items() if name in known or name in _OTHERS
    )
    return [*found, Finding("variables", "ok", f"in force: {said}" if said else "none is set")]
