"""Triton without a wheel: a program can import it, and gets an error at a kernel's launch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import run_python

import torchdevice
from torchdevice.packages import registry

pytestmark = pytest.mark.one_engine

PROGRAM = """
import sys
import torch
import torchdevice
from torchdevice.packages import registry

sys.meta_path.insert(0, type("NoTriton", (), {"find_spec": staticmethod(lambda name, path, target=None: None)}))
hidden = [each for each in sys.meta_path if getattr(each, "__name__", "") == "PathFinder"][0]
own = hidden.find_spec
hidden.find_spec = lambda name, path=None, target=None: None if name == "triton" else own(name, path, target)
registry.PACKAGES["triton"] = registry.PACKAGES["triton"]._replace(needed=True)

with torchdevice.portable(target="cpu"):
    import triton
    import triton.language as tl

    @triton.autotune([triton.Config({"BLOCK": 16}, num_warps=2)], key=["n"])
    @triton.jit
    def kernel(x, n: tl.int32, dtype: tl.constexpr = tl.float32, BLOCK: tl.constexpr = 16):
        tl.store(x + tl.arange(0, BLOCK), 1)

    @triton.jit(do_not_specialize=["n"])
    def other(x, n):
        pass

    print(triton.cdiv(5, 2), triton.next_power_of_2(5), kernel.__name__, tl.math.exp, torch.utils._triton.has_triton())
    for launch in (lambda: kernel[(1,)](torch.ones(16), 16), lambda: other.run(1), lambda: tl.load(1)):
        try:
            launch()
        except torchdevice.errors.NotSupportedError as error:
            print(error)
print("triton" in sys.modules)
"""


def test_a_program_defines_kernels_and_is_told_at_the_launch(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = run_python(str(path))
    lines = done.stdout.splitlines()
    assert lines[0] == "3 8 kernel triton.language.math.exp False", done.stderr
    assert "'kernel'" in lines[1] and "Triton has no wheel for this system" in lines[1]
    assert "'other'" in lines[2] and "triton.language.load" in lines[3] and lines[4] == "False"


def _origin() -> str | None:
    """Return the file that `import triton` would read; None where there is no such package.

    Specs cannot be compared: a scope wraps the loader of a package that it patches.
    """
    spec = importlib.util.find_spec("triton")
    return None if spec is None else spec.origin


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux")
def test_where_it_can_be_installed_it_is_not_stood_in_for() -> None:
    assert not registry.PACKAGES["triton"].needed
    before = _origin()
    with torchdevice.portable(target="cpu"):
        assert _origin() == before
