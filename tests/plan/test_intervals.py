"""``torchdevice plan --interval``: programs whose memory depends on values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command

import torchdevice
from torchdevice.plan import rendering

pytestmark = pytest.mark.one_engine

SELECTS = """
import torch

x = torch.rand(1 << 20, 8, device="cuda", requires_grad=True)
kept = x[x[:, 0] > 0.5]
kept.exp().sum().backward()
"""


def found(folder: Path, *words: str) -> dict[str, Any]:
    """Return the data of a plan."""
    (folder / "selects.py").write_text(SELECTS)
    done = run_command("plan", "--json", *words, "selects.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.mark.parametrize(("values", "rows"), [("assume", 5), ("assume-fewest", 0)])
def test_how_much_values_select(values: Any, rows: int) -> None:
    with torchdevice.simulate("cuda", compute="meta", values=values):
        x = torch.rand(5, 2, device="cuda")
        assert x[x[:, 0] > 0.5].shape == (rows, 2) and torch.nonzero(x[:, 0]).shape == (rows, 1)
        assert not (x > 0).any().item()


def test_a_plan_is_named_a_bound_where_values_select(tmp_path: Path) -> None:
    upper, lower = found(tmp_path), found(tmp_path, "--assume", "fewest")
    assert (upper["bound"], lower["bound"]) == ("upper", "lower") and upper["needs"] > lower[
        "needs"
    ]
    said = "The memory depends on values, and this plan is the upper bound. --interval shows both."
    assert said in list(rendering.answer(upper))


def test_an_interval_has_both_bounds(tmp_path: Path) -> None:
    both = found(tmp_path, "--interval")
    assert both["needs"] > both["least"]["needs"] and both["least"]["bound"] == "lower"
    assert any(
        line.startswith("The memory depends on values: it needs ")
        for line in rendering.answer(both)
    )


def test_a_lower_bound_that_did_not_finish() -> None:
    plan = {
        "bound": "upper",
        "needs": 1 << 30,
        "least": {"finished": False, "ended": "IndexError at t.py:3"},
    }
    said = "The memory depends on values, and the lower bound is not known: IndexError at t.py:3."
    assert list(rendering._interval(plan)) == [said]


def test_a_program_whose_memory_does_not_depend_on_values_has_no_bound() -> None:
    assert torchdevice.plan(lambda: torch.ones(1 << 20, device="cuda").sum().item())["bound"] == ""


@pytest.mark.parametrize("other", [["--sweep", "n=1,2"], ["--fits", "t4"], ["--try"]])
def test_an_interval_stands_alone(other: list[str]) -> None:
    done = run_command("plan", "--interval", *other, "t.py")
    assert done.returncode == 2 and "--interval makes two plans" in done.stderr


SCALED = """
import sys, torch

model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=sys.argv[1] == "fused")
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.ones(8, 1024, device="cuda")).float().sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_scaler_skips_steps_in_the_lower_bound(kind: str, tmp_path: Path) -> None:
    (tmp_path / "scaled.py").write_text(SCALED)
    done = run_command("plan", "--json", "--interval", "scaled.py", kind, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    upper = json.loads(done.stdout)
    lower = upper["least"]
    states = 2 * 4 * 1024 * 1025
    assert upper["devices"][0]["optimizer state"] >= states
    if kind == "plain":
        assert (upper["bound"], lower["bound"]) == ("upper", "lower")
        assert lower["devices"][0]["optimizer state"] == 0
        assert upper["needs"] - lower["needs"] >= states
        said = {each["value"] for each in lower["assumed"]}
        assert "an infinity, so the step is skipped" in said
    else:  # it takes the infinities on the GPU, and has its states in any case
        assert upper["bound"] == "" and upper["needs"] == lower["needs"]


def test_both_bounds_of_a_program_without_values_or_gpu(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("import torch; torch.zeros(9, device='cuda')")
    done = run_command("plan", "--interval", "same.py", cwd=tmp_path)
    assert done.returncode == 0 and "both bounds are the same" in done.stdout, done.stderr
    (tmp_path / "none.py").write_text("import torch; torch.zeros(9)")
    done = run_command("plan", "--interval", "none.py", cwd=tmp_path)
    assert done.returncode == 0 and "asked for no memory of a GPU" in done.stdout, done.stderr


@pytest.mark.parametrize(("values", "places"), [("assume", [0, 1, 2]), ("assume-fewest", [])])
def test_the_places_of_what_is_selected_are_known(values: Any, places: list[int]) -> None:
    with torchdevice.simulate("cuda", compute="meta", values=values):
        counts = torch.rand(4, 3, device="cuda").argmax(1).bincount(minlength=3)
        found = (counts > 0).nonzero()
        assert [int(each) for each in found] == places
        assert [f"expert_{each[0]}" for each in found] == [f"expert_{each}" for each in places]
        assert f"{counts.sum():03d}" == "000" and "..." in repr(counts.sum())


@pytest.mark.parametrize("values", ["assume", "assume-fewest"])
def test_a_split_by_sizes_that_were_read(values: Any) -> None:
    with torchdevice.simulate("cuda", compute="meta", values=values) as scope:
        x = torch.rand(6, 2, device="cuda", requires_grad=True)
        sizes = torch.rand(3, device="cuda").long().tolist()
        parts = x.split(sizes)
        assert sizes == [0, 0, 0] and [len(each) for each in parts] == [6, 0, 0]
        torch.cat([each.exp() for each in parts]).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        said = {row.done for row in scope.report().rows}
        assert "assumed: the first part has everything" in said
        assert [len(each) for each in x.split([2, 0, 4])] == [2, 0, 4]
    with pytest.raises(RuntimeError, match="sum exactly"):
        torch.rand(6, 2).split([0, 0])
