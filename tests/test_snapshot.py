"""What the fixture that guards every test can see."""

from __future__ import annotations

import pytest
import snapshot
import torch

from torchdevice.kernel.patching import subclass_in_place_of

pytestmark = pytest.mark.one_engine


def _changes(change: object) -> list[str]:
    before = snapshot.take()
    with pytest.MonkeyPatch.context() as patching:
        change(patching)  # type: ignore[operator]
        return snapshot.differences(before, snapshot.take())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda patching: patching.setattr(torch, "add", torch.sub), "torch.add is another object"),
        (lambda patching: patching.delattr(torch, "add"), "torch.add is another object"),
        (
            lambda patching: patching.setattr(torch, "added", len, raising=False),
            "torch.added is new",
        ),
        (
            lambda patching: patching.setattr(torch.version, "debug", 1),
            "torch.version.debug: False -> 1",
        ),
        (
            lambda patching: patching.setattr(
                torch, "Event", subclass_in_place_of(torch.Event, torch.Event.__new__)
            ),
            "torch.Event is another object",
        ),
        (
            lambda patching: patching.setattr(torch.Tensor, "backward", len),
            "torch.Tensor.backward is another object",
        ),
    ],
    ids=["replaced", "deleted", "new", "plain value", "replaced by what equals it", "method"],
)
def test_a_change_is_seen(change: object, expected: str) -> None:
    assert expected in _changes(change)


def test_nothing_is_seen_where_nothing_changed() -> None:
    assert _changes(lambda patching: None) == []


def test_the_precision_that_a_test_sets_is_restored() -> None:
    before = snapshot.precisions()
    torch.backends.fp32_precision = "tf32"  # as the Trainer does
    assert snapshot.precisions() != before
    snapshot.restore_precisions(before)
    assert snapshot.precisions() == before and torch.get_float32_matmul_precision() == "highest"
