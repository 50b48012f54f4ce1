"""``verify=`` compares a program's operators with kernels for both target and CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.errors import DivergenceWarning
from torchdevice.report.discrepancies import findings_of

Registered = Callable[[torch.library.Library, str, Callable[..., Any]], None]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of findings be written to a folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("verified", "FRAGMENT")
    library.define("half(Tensor x) -> Tensor")
    library.define("half_(Tensor(a!) x) -> ()")
    yield library
    library._destroy()


def by_key(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    library.impl(name, kernel, "PrivateUse1")


def by_cuda(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    library.impl(name, kernel, "CUDA")


def by_device(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    torch.library.register_kernel(f"verified::{name}", "cuda", kernel, lib=library)


WAYS = [by_key, by_cuda, by_device]


@pytest.mark.parametrize("reference", ["CPU", "CompositeExplicitAutograd"])
@pytest.mark.parametrize("register", WAYS)
@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_a_kernel_of_the_programs_own(
    library: torch.library.Library, register: Registered, reference: str, wrong: float
) -> None:
    library.impl("half", lambda x: x / 2, reference)
    with torchdevice.simulate(verify=True) as scope:
        register(library, "half", lambda x: x / 2 + wrong)
        x = torch.ones(3, device="cuda")
        if wrong:
            with pytest.warns(
                DivergenceWarning, match="verified::half: the result: 3 of 3 elements differ"
            ):
                torch.ops.verified.half(x)
        else:
            torch.ops.verified.half(x)
    findings = findings_of(scope.journal)
    assert [each.operator for each in findings] == ["verified::half"] * bool(wrong)
    assert findings.compared["verified::half"] == 1


def test_what_an_operator_of_the_program_writes(library: torch.library.Library) -> None:
    library.impl("half_", lambda x: (x.div_(2), None)[1], "CPU")
    with torchdevice.simulate(verify=True) as scope:
        by_key(library, "half_", lambda x: None)
        with pytest.warns(
            DivergenceWarning, match="the argument 'x': is as it was before the call"
        ):
            torch.ops.verified.half_(torch.ones(3, device="cuda"))
    assert [each.kind for each in findings_of(scope.journal)] == ["not written"]


def test_an_operator_with_one_kernel_is_not_compared_and_the_summary_says_so(
    library: torch.library.Library,
) -> None:
    called = []
    library.impl("half", lambda x: called.append(x.device.type) or x / 2, "CPU")
    with torchdevice.simulate(verify=True) as scope:
        torch.ops.verified.half(torch.ones(3, device="cuda"))
        torch.ops.verified.half(torch.ones(3))  # not on the target
    assert called == ["cpu"] * 2, "nothing was run twice"
    assert findings_of(scope.journal).left_out["foreign"] == {"verified::half": 1}
    assert "; not compared: 1 call of 1 operator of other libraries" in str(scope.report())
