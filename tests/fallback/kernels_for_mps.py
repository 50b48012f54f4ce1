"""Kernels in front of torch's for the dispatch key of MPS, which no tensor here has.

``test_fallback_kernels.py`` runs this file in a process of its own.
"""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import MetaRuntime
from test_fallback_kernels import in_front, registered

import torchdevice


@pytest.fixture
def as_mps(meta_target: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetaRuntime, "corrected_key", "MPS")


def test_kernels_stay_in_front_and_torchs_tables_are_as_they_were(as_mps: None) -> None:
    before = registered("MPS")
    with torchdevice.portable("meta"):
        inside = in_front("MPS")
        assert {
            "aten::linalg_eig",
            "aten::logspace.out",
        } <= inside and "aten::linalg_cond" not in inside
        assert not any(name.startswith("c10d::") for name in inside)
        assert registered("MPS") == before
    with torchdevice.portable("meta"):
        assert in_front("MPS") == inside
    assert registered("MPS") == before and in_front("MPS") == inside


def test_only_a_thread_in_a_scope_comes_to_them(as_mps: None) -> None:
    def included() -> str:
        return str(torch._C._dispatch_tls_local_include_set())

    elsewhere: list[str] = []
    thread = threading.Thread(target=lambda: elsewhere.append(included()))
    before = included()
    with pytest.raises(KeyError), torchdevice.portable("meta"):
        assert included() != before
        with torchdevice.kernel.thread_state.suspended():
            thread.start()
            thread.join()
        raise KeyError
    assert included() == before == elsewhere[0]


def test_numbers_in_the_place_of_tensors_are_passed_on(as_mps: None) -> None:
    with torchdevice.portable("meta"):
        pass
    wanted = [each.dtype for each in numbers()]
    with torchdevice.portable("cpu"):
        found = numbers()
    assert [each.dtype for each in found] == wanted and all(map(torch.equal, found, numbers()))


def numbers() -> list[torch.Tensor]:
    found = []
    for dtype in (torch.int32, torch.float16, torch.float32, torch.float64):
        x = torch.arange(1, 4).to(dtype)
        found += [2**x, 2.5**x, 7 // x, 0.1 + x, x * 0.1, torch.where(x > 1, x, 0.1)]
    return found
