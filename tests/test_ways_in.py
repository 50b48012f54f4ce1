"""Every way into a scope on simulated devices shows a program the same device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import run_command, run_python
from test_pytest_plugin import run_pytest

import torchdevice
from torchdevice.scope.scope import Scope

MAC = "simulated:mps"
"""On which tensors say that they are on mps, as on a real Mac."""

TARGETS = (
    "simulated:cuda",
    "simulated:cuda:2",
    "simulated:t4",
    MAC,
    "simulated:strict",
    "simulated",
)

SHOW = "import torch; x = torch.ones(2).cuda(); print(x.device, x.is_cuda)"

CELL = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in ("%load_ext torchdevice", "%torchdevice TARGET", {SHOW!r}):
    shell.run_cell(cell).raise_error()
"""


def in_a_file(folder: Path) -> str:
    (folder / "program.py").write_text(SHOW)
    return str(folder / "program.py")


def in_a_test(folder: Path, *options: str, mark: str = "") -> str:
    text = f"import pytest\n{mark}\ndef test():\n    {SHOW}\n"
    return run_pytest(folder, text, "-s", *options)[1]


def enabled(target: str) -> str:
    return f"import torchdevice; torchdevice.enable({target!r}); {SHOW}"


WAYS: dict[str, Callable[[str, Path], str]] = {
    "run": lambda target, folder: run_command("run", "--target", target, in_a_file(folder)).stdout,
    "run, in a child": lambda target, folder: (
        run_command(
            "run",
            "--target",
            target,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, {in_a_file(folder)!r}])",
        ).stdout
    ),
    "run of a command": lambda target, folder: (
        run_command("run", "--target", target, "env", sys.executable, in_a_file(folder)).stdout
    ),
    "variable": lambda target, folder: (
        run_python("-c", SHOW, TORCHDEVICE="1", TORCHDEVICE_TARGET=target).stdout
    ),
    "enable": lambda target, folder: run_python("-c", enabled(target)).stdout,
    "magic": lambda target, folder: run_python("-c", CELL.replace("TARGET", target)).stdout,
    "pytest": lambda target, folder: in_a_test(folder, f"--torchdevice={target}"),
    "mark": lambda target, folder: in_a_test(
        folder, mark=f"@pytest.mark.torchdevice(target={target!r})"
    ),
}


@pytest.mark.sampled(4, of="ways in")
@pytest.mark.one_engine
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("named", TARGETS)
def test_tensors_say_the_same_in_each_process(way: str, named: str, tmp_path: Path) -> None:
    assert ("mps:0 False" if named == MAC else "cuda:0 True") in WAYS[way](named, tmp_path)


@pytest.mark.parametrize("named", TARGETS)
@pytest.mark.parametrize("way", [torchdevice.portable, torchdevice.simulate, torchdevice.enable])
def test_tensors_say_the_same_in_this_process(way: Callable[..., Scope], named: str) -> None:
    profile, _, count = named.removeprefix("simulated").removeprefix(":").partition(":")
    arguments = (profile or "cuda", int(count or 1)) if way is torchdevice.simulate else (named,)
    scope = way(*arguments)
    try:
        with scope:
            expected = "mps:0" if named == MAC else "cuda:0"
            assert (
                str(torch.ones(1).cuda().device)
                == str(torch.ones(1, device="cuda").device)
                == expected
            )
    finally:
        if way is torchdevice.enable:
            torchdevice.disable()


@pytest.mark.parametrize("way", [torchdevice.portable, torchdevice.simulate])
def test_the_target_itself_where_it_is_asked_for(
    way: Callable[..., Scope], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "cuda" if way is torchdevice.simulate else "simulated:cuda"
    with way(name, identity="target"):
        assert torch.ones(1).cuda().device.type == "simulated"
    monkeypatch.setenv("TORCHDEVICE_IDENTITY", "target")
    with way(name):
        assert torch.ones(1).cuda().device.type == "simulated"
    with way(name, identity="program"):
        assert torch.ones(1).cuda().device.type == "cuda"
