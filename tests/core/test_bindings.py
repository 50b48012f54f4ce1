"""Supplied names, as torch and programs tell them apart."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import torchdevice
from torchdevice.kernel import bindings


def present(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute, None)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
@pytest.mark.parametrize("written_for", ["cuda", "any"])
@pytest.mark.one_engine
def test_each_name_has_a_function_of_its_own(target: str, written_for: str) -> None:
    """Dynamo keeps handlers by the function, and refuses two for one."""
    names = [each.name for each in bindings.SUPPLIED.values() if each.function is not None]
    torchs = {name: present(name) for name in names}
    with torchdevice.portable(target, written_for=written_for):
        seen: dict[Any, str] = {}
        for name in names:
            found = present(name)
            if found is None or found is torchs[name]:
                continue
            other = seen.setdefault(found, name)
            assert other == name or (torchs[other] is torchs[name] is not None), (other, name)
    assert len(seen) > 50
