"""Fields of torch's C++ objects, found by what torch answers for them."""

from __future__ import annotations

import ctypes

import pytest

from torchdevice.errors import TorchVersionError
from torchdevice.kernel.lowlevel import object_fields
from torchdevice.kernel.lowlevel.object_fields import word_at

pytestmark = pytest.mark.one_engine

OBJECTS = [(ctypes.c_uint64 * 4)(*words) for words in ((7, 5, 9, 5), (7, 6, 2, 8))]


def offset_of(*values: int, words: int = 4) -> int:
    return object_fields.offset_of(
        "a field", [ctypes.addressof(each) for each in OBJECTS], values, words
    )


def test_a_field_is_where_each_object_has_its_value() -> None:
    assert [offset_of(7, 7), offset_of(5, 6), offset_of(9, 2), offset_of(5, 8)] == [0, 8, 16, 24]


def test_a_field_can_be_set() -> None:
    made = (ctypes.c_uint64 * 2)(1, 2)
    word_at(ctypes.addressof(made) + 8).value = 3
    assert list(made) == [1, 3]


def test_a_field_that_is_nowhere_or_in_several_places_is_refused() -> None:
    for values, words in (((1, 1), 4), ((5, 8), 3)):
        with pytest.raises(TorchVersionError, match="a field"):
            offset_of(*values, words=words)
    with pytest.raises(TorchVersionError, match="a field"):
        object_fields.offset_of("a field", [ctypes.addressof(OBJECTS[0])], [5], 4)
