"""Kernels on a resized storage: CUDA's error and a lost device, never a crash."""

from __future__ import annotations

import pytest
import torch
from places import PROGRAMS
from processes import run_python

import torchdevice

pytestmark = pytest.mark.one_engine

UNHARMED = {
    "a view",
    "a shape",
    "the like",
    "zeros like it",
    "numbers like it",
    "new ones",
    "saved",
    "detached",
}
UNHARMED |= {"its size again", "another geometry"}

REFUSED = {"printed", "transposed", "a row"}

LOST = "AcceleratorError: CUDA error: an illegal memory access was encountered, lost with the line"


def expected(use: str, came: str) -> bool:
    if use in UNHARMED:
        return came == "fine"
    if use in REFUSED:
        return came.startswith("RuntimeError: setStorage: sizes") and came.endswith("alive")
    return came == LOST


@pytest.mark.parametrize("native", ["never", "auto"])
def test_every_use_of_a_freed_storage(native: str) -> None:
    """In a process of its own, which used to end by a segmentation fault."""
    done = run_python(str(PROGRAMS / "freed_storages.py"), native, TORCHDEVICE_NATIVE=native)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = {
        (size, use): came
        for size, use, came in (line.split("|") for line in done.stdout.splitlines())
    }
    assert len(found) > 80
    assert {key: came for key, came in found.items() if not expected(key[1], came)} == {}


def test_on_a_mac() -> None:
    with torchdevice.simulate("mps", written_for="mps"):
        x = torch.ones(100, device="mps")
        x.untyped_storage().resize_(0)
        with pytest.raises(
            RuntimeError, match=r"^Placeholder storage has not been allocated on MPS device!$"
        ):
            x + 1
        assert torch.ones(2, device="mps").tolist() == [1, 1]
