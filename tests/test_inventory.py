"""Every name under ``torch.cuda`` and neighbours is declared, and as faithful as declared.

The names are read from the installed torch, so that a name that is new in torch fails a test.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from facade_cases import CASES, MODULES

import torchdevice
from torchdevice.check.public_names import PUBLIC_NAMES, TARGETS, UNTOUCHED
from torchdevice.errors import FidelityError, NotSupportedError, PortabilityWarning
from torchdevice.kernel import bindings
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.scope import installed

pytestmark = pytest.mark.one_engine

FAMILIES = r"_cuda\w*|_Cuda\w+|_CUDA\w+|_cudart\w*|_nvtx\w*|_nccl\w+|_cudnn\w*|_gds\w+|_mps\w+|_MPS\w+|_accelerator\w+"
FAMILIES += r"|_xpu\w*|_Xpu\w+|_XPU\w+"

SUPPLIED_OTHERWISE = {
    "_CUDAGraph": "the class above it makes a stand-in (torch_modules/cuda/graphs.py)",
    "_MemPool": "the class above it makes a stand-in (torch_modules/cuda/memory.py)",
    "_CudaEventBase": "the class above it makes a stand-in (torch_modules/cuda/streams.py)",
    "_CudaStreamBase": "the class above it makes a stand-in (torch_modules/cuda/streams.py)",
    "_MPSStreamBase": "the class above it refuses (torch_modules/cuda/unsupported.json)",
    "_XPUGraph": "the class above it refuses (torch_modules/cuda/unsupported.json)",
    "_XPUMemPool": "the class above it makes a stand-in (xpu.py)",
    "_XpuEventBase": "the class above it makes a stand-in (xpu.py)",
    "_XpuStreamBase": "the class above it makes a stand-in (xpu.py)",
    "_xpu_XPUAllocator": "a type, named in annotations",
    "_CUDAGreenContext": "the class above it refuses (torch_modules/cuda/unsupported.json)",
    "_accelerator_getAllocatorSettings": "named in a list of Dynamo's; torch calls it nowhere",
    "_mps_is_on_macos_13_or_newer": "named in a list of Dynamo's; torch has it no more",
    **dict.fromkeys(
        (
            f"_accelerator_hooks_{name}"
            for name in ("set_current_device", "get_current_device", "maybe_exchange_device")
        ),
        "torch.mtia asks them, on torch 2.10",
    ),
    "_acceleratorGraph": (
        "the class above it refuses (torch_modules/accelerators/accelerator_api.py)"
    ),
    "_cuda_CUDAAllocator": "a type, named in annotations",
    "_cuda_CUDAAllocator_AllocatorState": "a type, named in annotations",
    "_cudart": "torch.cuda keeps it in a global (torch_modules/cuda/cudart.py)",
    "_nvtx": "torch.cuda.nvtx keeps it in a global (torch_modules/cuda/nvtx.py)",
    "_cudnn": "a module that torch.backends.cudnn imports; asked for its version only",
    "_CudaKernel": "a class of Python, of torch.cuda._compile_kernel, which compiles CUDA code",
    "_CudaModule": "a class of Python, of torch.cuda._compile_kernel, which compiles CUDA code",
}


def mentioned() -> set[str]:
    """Return ``torch._C``'s accelerator names that installed torch's Python mentions."""
    direct = re.compile(rf"\b_?C\.({FAMILIES})\b")
    quoted = re.compile(rf"""(?:_C, |_dummy_type\()["']({FAMILIES})["']""")
    imported = re.compile(r"from torch\._C import (?:\(([^)]*)\)|([^\n(]*))")
    found: set[str] = set()
    for path in Path(torch.__file__).parent.rglob("*.py"):
        text = path.read_text(errors="ignore")
        found.update(direct.findall(text), quoted.findall(text))
        for inside, line in imported.findall(text):
            found.update(re.findall(rf"\b(?:{FAMILIES})\b", inside or line))
    return found


def test_every_name_of_the_c_module_is_declared() -> None:
    assert installed.AREAS
    declared = {name.removeprefix("torch._C.") for name in bindings.SUPPLIED}
    names = mentioned()
    assert len(names) > 120
    assert names - declared - SUPPLIED_OTHERWISE.keys() == set()


def test_every_binding_says_what_it_does() -> None:
    for each in bindings.SUPPLIED.values():
        assert isinstance(each.fidelity, Fidelity) and each.note, each.name
        assert set(each.on) <= set(TARGETS), each.name


def resolve(name: str) -> Any:
    """Return what a dotted name of torch holds.

    Raises:
        LookupError: The installed torch has no such name.
    """
    module, rest = "torch", name.split(".")[1:]
    value: Any = torch
    for part in rest:
        if isinstance(value, ModuleType) and not hasattr(value, part):
            try:
                value = importlib.import_module(f"{module}.{part}")
            except ImportError:
                raise LookupError(name) from None
        else:
            value = getattr(value, part)
        module = f"{module}.{part}"
    return value


def present(names: Any) -> list[str]:
    found = []
    for name in names:
        try:
            resolve(name)
        except (LookupError, AttributeError):
            continue
        found.append(name)
    return found


def public(module: ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    own = [
        n
        for n, v in vars(module).items()
        if n[0] != "_" and getattr(v, "__module__", None) == module.__name__
    ]
    return list(listed) if listed else own


def test_every_public_name_is_declared() -> None:
    declared = PUBLIC_NAMES.keys() | UNTOUCHED
    objects = {id(resolve(name)) for name in present(declared)}
    missing = [
        f"{module}.{name}"
        for module in present(MODULES)
        for name in public(importlib.import_module(module))
        if f"{module}.{name}" not in declared
        and not isinstance(value := getattr(importlib.import_module(module), name), ModuleType)
        and id(value) not in objects
    ]
    assert missing == []


def test_every_declared_name_has_a_case() -> None:
    exist = set(present(PUBLIC_NAMES))
    assert exist - CASES.keys() == set()
    assert CASES.keys() - PUBLIC_NAMES.keys() == set()
    assert len(exist) > 230


CASED = present(PUBLIC_NAMES)


def skip_torchs_own(name: str, kind: str) -> None:
    """Skip a name of the target's module, which torch or the simulated machine answers."""
    if name.startswith((f"torch.{kind}.", f"torch.backends.{kind}.")):
        pytest.skip(f"{name} belongs to the target")


def program(name: str) -> dict[str, Any]:
    """Return the options for a program that uses a name: MPS cases compare with CUDA names."""
    if name.startswith(("torch.mps.", "torch.backends.mps.")):
        return {"written_for": "any"}
    return {"written_for": "xpu" if name.startswith("torch.xpu.") else "cuda"}


def declared(name: str, kind: str) -> Fidelity:
    """Return the fidelity that is declared for a name on a type of target."""
    on = {target: fidelity for target, (fidelity, _) in PUBLIC_NAMES[name].on.items()}
    if kind not in TARGETS and {on.get("cpu"), on.get("mps")} == {Fidelity.UNSUPPORTED}:
        return Fidelity.UNSUPPORTED  # what only a simulated device has
    return on.get(kind, PUBLIC_NAMES[name].fidelity)


def use(name: str, kind: str) -> None:
    """Run a name's case in the scope. It passes, or raises if it is declared unsupported."""
    if declared(name, kind) is not Fidelity.UNSUPPORTED:
        assert CASES[name]()
        return
    with pytest.raises((NotSupportedError, RuntimeError)) as caught:
        CASES[name]()
    assert isinstance(caught.value, NotSupportedError) or "init" in name


@pytest.mark.parametrize("name", CASED)
def test_a_name_does_what_it_says(
    name: str, target: str, kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    skip_torchs_own(name, kind)
    monkeypatch.chdir(tmp_path)
    with torchdevice.portable(target, **program(name)), warnings.catch_warnings():
        warnings.simplefilter("ignore", PortabilityWarning)
        use(name, kind)


@pytest.mark.parametrize("name", CASED)
def test_a_name_is_as_faithful_as_declared(
    name: str, target: str, kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A strict scope refuses approximate names alone, and allows declared constants."""
    skip_torchs_own(name, kind)
    monkeypatch.chdir(tmp_path)
    fidelity = declared(name, kind)
    with torchdevice.portable(target, strict=True, **program(name)):
        if fidelity is Fidelity.APPROXIMATE:
            with pytest.raises(FidelityError):
                CASES[name]()
        elif fidelity is not Fidelity.UNSUPPORTED:
            assert CASES[name]()


NOTHING_TO_OBSERVE = {
    "torch.mps.set_stream": "there is one stream, which is the current one already",
    "torch.xpu.graph": "the graph that it takes is refused",
    "torch.cuda.has_half": "torch's own constant, True in every build",
    "torch.cuda.has_magma": "torch's own constant, True in a CUDA build",
    "torch.backends.mps.is_macos13_or_newer": (
        "macOS 14.0 is answered, which is newer than any macOS 13"
    ),
    **{
        f"torch.cuda.graph_annotations.{verb}_kernel_{what}": "torch annotates nothing without "
        "CUDA's bindings"
        for verb, what in (
            ("get", "annotations"),
            ("clear", "annotations"),
            ("get", "py_stacks"),
            ("dump", "py_stacks"),
        )
    },
}
"""Names whose cases a stub can pass, with the reason."""


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Replace a public name by a value, or a function by a function that returns the value."""
    path, _, attribute = name.rpartition(".")
    owner = resolve(path)
    before, own = getattr(owner, attribute), attribute in vars(owner)
    setattr(owner, attribute, (lambda *args, **kwargs: value) if callable(before) else value)
    try:
        yield
    finally:
        if own:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


@pytest.fixture
def settings_are_restored(target: str) -> Iterator[None]:
    """Restore what a failed case leaves: flags of attention and open NVTX ranges."""
    flags = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _ATTENTION}
    yield
    for name, value in flags.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)
    with torchdevice.portable(target):
        while torch.cuda.nvtx.range_pop() >= 0:
            continue


@pytest.mark.usefixtures("settings_are_restored")
@pytest.mark.parametrize("name", CASED)
def test_a_stub_does_not_pass(
    name: str, target: str, kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """No case passes for a function that only returns None, True or 0."""
    skip_torchs_own(name, kind)
    monkeypatch.chdir(tmp_path)
    passed = []
    for value in (None, True, 0):
        with torchdevice.portable(target, **program(name)), replaced(name, value):
            try:
                use(name, kind)
            except (Exception, pytest.fail.Exception):
                continue
            passed.append(value)
    assert not passed or name in NOTHING_TO_OBSERVE, f"a stub that returns any of {passed} passes"


def test_untouched_names_are_torchs_own(cuda: torchdevice.Scope) -> None:
    for name in present(UNTOUCHED):
        assert "torchdevice" not in getattr(resolve(name), "__module__", "")
        assert getattr(resolve(name), "__wrapped__", None) is None
