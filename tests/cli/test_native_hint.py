"""The hint at native kernels after a long run: it is measured, and given where it holds only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command

import torchdevice
from torchdevice.native import building
from torchdevice.tools.cli import native_hint

pytestmark = pytest.mark.one_engine


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a runner of programs with so many small additions that returns the hints shown."""
    monkeypatch.setattr(building, "is_built", lambda: False)
    monkeypatch.setattr(native_hint, "claim", lambda text: True)

    def run(
        additions: int, seconds: float, target: str = "simulated:cuda", **options: Any
    ) -> list[str]:
        monkeypatch.setattr(native_hint.time, "process_time", lambda: seconds)
        monkeypatch.setattr(native_hint, "saved_by_each", lambda device: 1e-3)
        found: list[str] = []
        monkeypatch.setattr(native_hint.logger, "warning", found.append)
        if target != "cpu":  # which has no such option
            options = {"native": "auto", **options}
        with torchdevice.portable(target, **options) as scope:
            x = torch.ones(1, device="cuda")
            for _ in range(additions):
                x + x
            native_hint.give(scope)
        return [hint for hint in found if "native build" in hint]

    return run


def test_a_run_of_small_kernels_gets_the_hint(hints: Any) -> None:
    (hint,) = hints(30_000, 40.0)
    assert hint == (
        "Kernels in Python took 75% of this run's 40 s of processor time. "
        "'torchdevice native build' compiles them once, in half a minute."
    )


@pytest.mark.parametrize(
    ("additions", "seconds", "target", "options"),
    [
        (30_000, 29.0, "simulated:cuda", {}),  # a short run
        (20, 40.0, "simulated:cuda", {}),  # few kernels, so the time went elsewhere
        (30_000, 40.0, "cpu", {}),  # no simulated device
        (30_000, 40.0, "simulated:cuda", {"native": "never"}),  # Python was asked for
        # Native kernels would not serve it.
        (30_000, 40.0, "simulated:cuda", {"uninitialized": "error"}),
    ],
)
def test_other_runs_get_none(
    additions: int,
    seconds: float,
    target: str,
    options: dict[str, Any],
    hints: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hints(additions, seconds, target, **options) == []


def test_what_a_native_kernel_saves_is_measured() -> None:
    with torchdevice.simulate(native="never") as scope:
        saved = native_hint.saved_by_each(scope._resolved().runtime.device(0))
    assert 1e-6 < saved < 1e-2


def test_the_command_gives_it_after_the_program(tmp_path: Path) -> None:
    """The report of a run does not have the additions of the measurement."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torchdevice.native import building\n"
        "from torchdevice.tools.cli import native_hint\n"
        "building.is_built = lambda: False\n"
        "native_hint.LONG, native_hint.SHARE = 0, 0\n"
        "torch.ones(1, device='cuda') + 1\n"
        "print('done')\n"
    )
    command = ("run", "--native", "auto", "--report", "--target", "simulated:cuda", "train.py")
    done = run_command(*command, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and done.stdout == "done\n"
    assert done.stderr.count("'torchdevice native build' compiles them once") == 1
    assert "native_hint" not in done.stderr.partition("Kernels in Python")[2]
