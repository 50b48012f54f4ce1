"""C++ extensions: those for an accelerator are refused at the call, others are built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.utils.cpp_extension
from processes import run_program
from torch.utils import cpp_extension
from torch.utils.cpp_extension import load as load_by_value

import torchdevice
from torchdevice.errors import ExtensionRefusedError, NotSupportedError

pytestmark = pytest.mark.one_engine


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The names of the extensions whose build has begun; a compiler need not be there."""
    names: list[str] = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(
        cpp_extension,
        "_write_ninja_file_and_build_library",
        lambda name, **options: names.append(name),
    )
    monkeypatch.setattr(cpp_extension, "_import_module_from_library", lambda name, *rest: name)
    return names


@pytest.fixture
def sources(tmp_path: Path) -> Callable[[str], str]:
    def write(name: str) -> str:
        path = tmp_path / name
        path.write_text("// nothing")
        return str(path)

    return write


REFUSED: dict[str, Callable[[Callable[[str], str]], Any]] = {
    "load": lambda sources: cpp_extension.load("kernels", [sources("a.cpp"), sources("b.cu")]),
    "load of one file": lambda sources: cpp_extension.load("kernels", sources("b.cu")),
    "load, asked for": lambda sources: cpp_extension.load(
        "kernels", [sources("a.cpp")], with_cuda=True
    ),
    "load, by value": lambda sources: load_by_value("kernels", [sources("b.cu")]),
    "load of SYCL": lambda sources: cpp_extension.load("kernels", [sources("b.sycl")]),
    "load_inline": lambda sources: cpp_extension.load_inline(
        "kernels", "", cuda_sources="__global__ void f() {}"
    ),
    "load_inline, asked for": lambda sources: cpp_extension.load_inline(
        "kernels", "", with_cuda=True
    ),
    "CUDAExtension": lambda sources: cpp_extension.CUDAExtension("kernels", ["b.cu"]),
    "SyclExtension": lambda sources: cpp_extension.SyclExtension(
        name="kernels", sources=["b.sycl"]
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_those_for_an_accelerator_are_refused(
    cuda: torchdevice.Scope, built: list[str], sources: Any, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ExtensionRefusedError, match=r"'kernels'.*plain PyTorch") as caught:
        REFUSED[name](sources)
    assert isinstance(caught.value, NotSupportedError) and caught.value.extension == "kernels"
    assert isinstance(caught.value, OSError), "what plain torch raises where no CUDA is"
    assert not built and not list(tmp_path.rglob("lock"))


def test_those_in_plain_cpp_are_built(
    cuda: torchdevice.Scope, built: list[str], sources: Any
) -> None:
    cpp_extension.load("plain", [sources("a.cpp")])
    cpp_extension.load_inline("inline", "int f() { return 1; }", functions="f")
    assert [name.partition("_v")[0] for name in built] == ["plain", "inline"]
    assert cpp_extension.CppExtension("described", ["a.cpp"]).name == "described"


def test_outside_a_scope_torch_decides(built: list[str], sources: Any) -> None:
    cpp_extension.load("kernels", [sources("b.cu")])
    assert built


PROGRAM = """
    import os
    import torch
    torch.cuda.is_available()
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import CUDAExtension
    built_with_cuda = os.environ["BUILT_WITH_CUDA"] == "1"
    assert built_with_cuda or cpp_extension.CUDA_HOME is None, cpp_extension.CUDA_HOME
    try:
        CUDAExtension("kernels", ["kernels.cu"])
    except OSError as error:
        print("refused", error)
"""


def test_imported_in_a_scope_the_module_sees_the_machine(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    done = run_program(
        tmp_path,
        PROGRAM,
        CUDA_HOME=str(tmp_path),
        BUILT_WITH_CUDA=str(int(torch.version.cuda is not None)),
        TORCHDEVICE_TARGET="cpu",
    )
    assert done.stdout.startswith("refused the extension 'kernels'"), done.stderr
