"""Which accelerator a device argument spells."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from torchdevice.kernel.devices import device_strings
from torchdevice.kernel.devices.device_strings import Spelling, parse

pytestmark = pytest.mark.one_engine


@pytest.mark.parametrize(
    ("value", "accelerator", "index"),
    [
        ("cuda", "cuda", None),
        ("mps", "mps", None),
        ("xpu", "xpu", None),
        ("cuda:0", "cuda", 0),
        ("mps:0", "mps", 0),
        ("xpu:1", "xpu", 1),
        ("cuda:12", "cuda", 12),
        (torch.device("cuda"), "cuda", None),
        (torch.device("cuda", 3), "cuda", 3),
        (torch.device("mps:0"), "mps", 0),
        (0, "cuda", 0),
        (1, "cuda", 1),
        (numpy.int64(2), "cuda", 2),
        (numpy.uint8(0), "cuda", 0),
    ],
    ids=repr,
)
def test_what_spells_an_accelerator(value: Any, accelerator: str, index: int | None) -> None:
    found = parse(value)
    assert found == Spelling(accelerator, index)
    assert type(found.index) is (int if index is not None else type(None))
    assert str(found) == accelerator + ("" if index is None else f":{index}")


@pytest.mark.parametrize(
    "value",
    [
        "cpu", "cpu:0", "meta", "cuda:", "cuda:x", "cuda:-1", "cuda:01", "cuda: 1", "cuda:1 ", " cuda", "cuda\n",
        "cuda:1\n", "CUDA", "cudax", "xcuda", "cuda:1:2", "cudamps", "", torch.device("cpu"), torch.device("meta"), -1,
        numpy.int64(-1), True, False, 0.0, 1.5, None, b"cuda", ["cuda"], ("cuda", 0), torch.float32, numpy.bool_(True),
    ],
    ids=repr,
)  # fmt: skip
def test_what_spells_none(value: Any) -> None:
    assert parse(value) is None


def test_a_spelling_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Spelling("cuda", 0).index = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "ordinal"),
    [
        (-3, -3),
        (0, 0),
        (numpy.int32(4), 4),
        (True, None),
        (False, None),
        (numpy.bool_(False), None),
        ("1", None),
        (1.0, None),
    ],
    ids=repr,
)
def test_ordinals(value: Any, ordinal: int | None) -> None:
    found = device_strings.ordinal_of(value)
    assert found == ordinal and type(found) in (int, type(None))


def test_what_forces_the_cpu() -> None:
    assert {("cpu:-1",), ("cpu", -1)} <= set(device_strings.FORCING_CPU)
    others: list[tuple[Any, ...]] = [
        (),
        ("cpu",),
        ("cpu", 0),
        ("cpu", 1),
        ("cpu:1",),
        ("cpu:0",),
        ("cuda", -1),
        ("cuda:-1",),
    ]
    others += [("cpu:-1", -1), ("cpu:-2",), ("cpu", -2), (-1,)]
    assert not [args for args in others if args in device_strings.FORCING_CPU]


class Typed:
    """What has the name of a legacy type of torch."""


@pytest.mark.parametrize("name", device_strings.LEGACY_DTYPES)
def test_the_dtype_of_a_legacy_type(name: str) -> None:
    dtype = getattr(torch, name).dtype  # that of the CPU's type
    assert device_strings.legacy_dtype(f"torch.cuda.{name}") is dtype
    assert device_strings.legacy_dtype(f"torch.xpu.{name}") is dtype
    assert device_strings.legacy_dtype(f"torch.cuda.sparse.{name}") is dtype
    assert device_strings.legacy_dtype(type(name, (), {"__module__": "torch.cuda"})) is dtype
    for other in (
        f"torch.{name}",
        f"torch.cpu.{name}",
        f"torch.cuda.{name}s",
        f"torch_cuda.{name}",
        f"torch.cuda.sparse_{name}",
    ):
        assert device_strings.legacy_dtype(other) is None
    assert (
        device_strings.legacy_dtype(f"xtorch.cuda.{name}") is None
        and device_strings.legacy_dtype(getattr(torch, name)) is None
    )


def test_what_is_no_type_has_no_legacy_dtype() -> None:
    assert [
        device_strings.legacy_dtype(value)
        for value in (3, None, object(), Typed, "torch.cuda.Stream", "torch.cuda.")
    ] == [None] * 6
