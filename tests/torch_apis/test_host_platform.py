"""Python's ``platform`` on a simulated Mac, and everywhere else."""

from __future__ import annotations

import platform
import sysconfig
import threading
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchdevice
from torchdevice.torch_modules.accelerators.mps import MACOS

pytestmark = pytest.mark.one_engine


def answers() -> tuple[Any, ...]:
    uname = platform.uname()
    texts = (
        platform.release(),
        platform.version(),
        platform.processor(),
        platform.platform(),
        platform.platform(terse=True),
    )
    return platform.system(), platform.machine(), platform.mac_ver(), texts, uname.processor, uname


HOST = answers()


def is_mac() -> bool:
    system, machine, (release, _, of_release), texts, processor, uname = answers()
    major, minor = release.split(".")
    assert (int(major), int(minor)) == MACOS and (uname.system, uname.machine) == (system, machine)
    assert uname.node == HOST[-1].node and machine == of_release
    assert texts[:3] == (uname.release, uname.version, processor) and processor == "arm"
    assert (
        texts[3].startswith(f"macOS-{release}-arm64-arm-64bit") and texts[4] == f"macOS-{release}"
    )
    return system == "Darwin" and machine == "arm64"


def test_a_program_on_a_simulated_mac_is_on_a_mac() -> None:
    with torchdevice.simulate("mps", written_for="mps"):
        assert is_mac()
        for target in ("mps", "cpu"):
            with torchdevice.portable(target):
                assert is_mac()
    assert answers() == HOST


def test_other_devices_are_in_this_computer() -> None:
    for scope in (
        torchdevice.simulate(),
        torchdevice.portable("cpu"),
        torchdevice.simulate("mps", platform="host"),
    ):
        with scope:
            assert answers() == HOST


def test_only_the_threads_of_the_scope_are_on_the_mac() -> None:
    seen: dict[str, Any] = {}
    go = threading.Event()

    def outside() -> None:
        go.wait(60)
        seen["outside"] = answers()

    before = threading.Thread(target=outside)
    before.start()
    with torchdevice.simulate("mps"):
        inside = threading.Thread(target=lambda: seen.update(inside=is_mac()))
        inside.start()
        inside.join()
        go.set()
        before.join()
    assert seen == {"outside": HOST, "inside": True}


ASKING = (
    "import platform\ndef ask(): return platform.system(), platform.machine(), platform.mac_ver()"
)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch._inductor.cpp_builder", "/sources/pytorch/torch/_inductor/cpp_builder.py"),
        ("uuid", uuid.__file__),
        ("truststore._api", f"{sysconfig.get_path('purelib')}/truststore/_api.py"),
        ("__main__", f"{sysconfig.get_path('purelib')}/accelerate/commands/launch.py"),
    ],
    ids=["torch from sources", "Python's library", "a package", "a package's command"],
)
def test_who_chooses_code_for_the_processor_gets_the_truth(name: str, file: str) -> None:
    module = ModuleType(name)
    exec(compile(ASKING, file, "exec"), vars(module))
    with torchdevice.simulate("mps"):
        assert module.ask() == HOST[:3]


def test_a_programs_own_module_is_on_the_mac(tmp_path: Path) -> None:
    module = ModuleType("comfy.model_management")
    exec(compile(ASKING, str(tmp_path / "comfy" / "model_management.py"), "exec"), vars(module))
    with torchdevice.simulate("mps"):
        assert module.ask()[0] == "Darwin"


def test_texts_that_python_keeps_are_this_computers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = platform.platform()
    monkeypatch.setattr(platform, "_platform_cache", {})
    with torchdevice.simulate("mps"):
        assert platform.platform() != before
    assert platform._platform_cache == {}  # type: ignore[attr-defined]
    assert platform.platform() == before
