"""Which GPUs have the memory that a plan needs, and how a plan is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.plan import fitting, other_processes, rendering, workspaces
from torchdevice.simulation.model_lookup import MACS, MODELS

pytestmark = pytest.mark.one_engine

GIB = 1 << 30


def plan_of(
    peak: float, fragments: float = 0, *, finished: bool = True, devices: int = 1
) -> dict[str, Any]:
    """Return the data of a plan with this peak in GiB."""
    context = GIB // 2
    sizes = {
        "weights": 0,
        "gradients": 0,
        "optimizer state": 0,
        "activations": int((peak - fragments) * GIB),
    }
    one = {
        **sizes,
        "workspaces": 0,
        "fragments": int(fragments * GIB),
        "peak": int(peak * GIB),
        "lines": ["train.py:3"],
    }
    found = [{"device": f"cuda:{index}", **one} for index in range(devices)]
    need, least = other_processes.most(found, [], context), fitting.at_least(found, context)
    return {
        "program": "train.py",
        "finished": finished,
        "ended": "" if finished else "ValueError at train.py:4",
        "error": None if finished else "ValueError: no",
        "advice": "",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "ran out": [],
        "devices": found,
        "other processes": [],
        "traffic": None,
        "context": context,
        "needs": need,
        "at least": least,
        "fits": [*fitting.fits(need, least, evidence=fitting.Evidence(finished))],
        "macs": [*fitting.macs(need, least, evidence=fitting.Evidence(finished))],
        "bound": "",
        "assumed": [{"lines": ["train.py:5"], "operator": "item()", "value": "0.0"}],
    }


def test_every_model_is_compared_by_its_memory() -> None:
    found = plan_of(20)["fits"]
    assert {each["model"] for each in found} == set(MODELS)
    memories = [each["memory"] for each in found]
    assert memories == sorted(memories)
    for each in found:
        assert each["fits"] == (fitting.YES if each["memory"] >= 20.5 * GIB else fitting.NO)
        assert each["headroom"] == pytest.approx(100 - 100 * 20.5 * GIB / each["memory"], abs=0.06)
    smallest = fitting.smallest(found)
    assert smallest is not None and smallest["model"] == "a10"


def test_fragments_may_be_given_back() -> None:
    fits = {each["model"]: each["fits"] for each in plan_of(16, fragments=2)["fits"]}
    assert fits["t4"] == fitting.WITHOUT_FRAGMENTS and fits["rtx4080"] == fitting.WITHOUT_FRAGMENTS
    assert fits["rtx3080"] == fitting.NO and fits["rtx4090"] == fitting.YES


def test_a_program_that_did_not_finish_fits_nothing() -> None:
    plan = plan_of(20, finished=False)
    assert {each["fits"] for each in plan["fits"]} == {fitting.NO, fitting.UNKNOWN}
    assert fitting.smallest(plan["fits"]) is None and fitting.smallest(plan["macs"]) is None
    said = "\n".join(rendering.answer(plan))
    assert said.startswith("The program did not finish: ValueError at train.py:4.")
    assert "at least 20.50 GiB" in said and "smallest" not in said
    gave_up = plan | {"error": None, "ended": "memory ran out at train.py:4"}
    assert next(rendering.answer(gave_up)) == (
        "Not all of the program may have run: memory ran out at train.py:4."
    )
    assert "fits" not in dict(rendering.tables(plan)) and "Macs" not in dict(rendering.tables(plan))


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda, "cublas_workspace_size"), reason="torch lacks the function"
)
def test_a_program_may_choose_the_workspaces() -> None:
    def product(chosen: int | None) -> torch.Tensor:
        if chosen is not None:
            torch.backends.cuda.cublas_workspace_size(chosen)
        x = torch.rand(8, 8, device="cuda")
        return x @ x

    for chosen, expected in ((None, 32 << 20), (1 << 20, 1 << 20)):
        found = torchdevice.plan(product, chosen, target="h100")
        assert found["devices"][0]["workspaces"] == expected


def test_some_gpus_have_larger_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    need = int(fitting.memory_of("h100"))
    two = fitting.Workspaces(2, (8, 0))
    fits = {
        each["model"]: each["fits"]
        for each in fitting.fits(need, need, two, evidence=fitting.Evidence())
    }
    assert fits["h100"] == fitting.NO and fits["a100-80gb"] == fitting.YES
    assert workspaces.size((8, 0)) == 8_519_680 and workspaces.size((9, 0)) == 32 << 20
    monkeypatch.setenv(workspaces.VARIABLE, ":4096:2:16:8")
    assert workspaces.size((9, 0)) == 8_519_680
    monkeypatch.setenv(workspaces.VARIABLE, ":0:0")
    assert workspaces.size((9, 0)) == 0


def test_macs_have_a_part_of_their_memory() -> None:
    assert MACS[16] == 16 * GIB * 2 // 3 and MACS[64] == 48 * GIB
    smallest = fitting.smallest(plan_of(20)["macs"])
    assert smallest is not None and smallest["unified memory"] == "32 GB"


def test_the_answer_comes_first() -> None:
    assert [*rendering.answer(plan_of(20, devices=2))] == [
        "It needs 20.50 GiB on the device that needs the most of 2, with 512.00 MiB for CUDA "
        "itself.",
        "The smallest GPU that fits: a10 (21.99 GiB, 6.8 % left).",
    ]
    assert "No GPU known here has so much memory." in [*rendering.answer(plan_of(500))]


def test_only_the_smallest_that_fit_are_listed() -> None:
    rows = dict(rendering.tables(plan_of(0.1)))["fits"]
    assert (
        len(rows) == rendering.SHOWN + 1
        and rows[-1][-1] == f"and {len(MODELS) - rendering.SHOWN} larger ones"
    )
    assert len(dict(rendering.tables(plan_of(150)))["fits"]) == 1


def test_ranks_and_what_one_sends_in_markdown() -> None:
    sent = {"collective": "all-reduce", "calls": 3, "bytes": 2 * GIB, "sent": 3 * GIB}
    plan = {
        **plan_of(20),
        "traffic": {"in": "a step", "collectives": [sent]},
        "ranks": [{"rank": 0, "needs": 2 * GIB, "ended": "ValueError at a.py:1"}],
    }
    text = "\n".join(rendering.markdown(plan))
    assert (
        "Sent by the rank in a step:\n\n| collective | calls | messages | sent |\n|---|---|---|---|\n"
        "| all-reduce | 3 | 2.00 GiB | 3.00 GiB |\n| in all |  |  | 3.00 GiB |" in text
    )
    assert (
        "| rank | needs | ended |\n|---|---|---|\n| rank 0 | 2.00 GiB | ValueError at a.py:1 |"
        in text
    )


def test_a_plan_in_markdown() -> None:
    lines = [*rendering.markdown(plan_of(150))]
    assert lines[:3] == [
        "### Memory of `train.py`",
        "",
        "It needs 150.50 GiB, with 512.00 MiB for CUDA itself.",
    ]
    assert "|  | cuda:0 |\n|---|---|\n| weights | 0 bytes |" in "\n".join(lines)
    assert (
        "| GPU | memory | headroom | name |\n|---|---|---|---|\n| b200 | 178.35 GiB | 15.6 % left |"
        in "\n".join(lines)
    )
    assert "peak of cuda:0 at: train.py:3" in lines and "| 0.0 | item() | train.py:5 |" in lines
    assert lines[-1] == "Holds for: torch 2.13.0, transformers 5.24.0"
    assert any(line.startswith("Too small: a100-1g.5gb, ") for line in lines)


def test_several_processes_have_a_range() -> None:
    sizes = {"cuda:0": 2 * GIB}
    child = {"name": "child.py", "ended": False, "devices": sizes, "allocated": sizes}
    found = plan_of(1) | {"other processes": [child]}
    assert next(iter(rendering.answer(found))) == (
        "It needs 1.50 GiB, with 512.00 MiB for CUDA itself."
    )
    found |= {"at least": 2 * GIB, "needs": 4 * GIB}
    assert next(iter(rendering.answer(found))) == (
        "It needs 2.00 GiB if its processes use GPUs one after the other, and up to 4.00 GiB if "
        "they do so at once, each with 512.00 MiB for CUDA itself."
    )
    alone = next(iter(rendering.answer(found | {"devices": []})))
    assert alone == "It needs 4.00 GiB, with 512.00 MiB for CUDA itself."
    elsewhere = found | {"other processes": [child | {"devices": {"cuda:1": 2 * GIB}}]}
    assert " on the device that needs the most of 2, " in next(iter(rendering.answer(elsewhere)))
    tables = dict(rendering.tables(found))
    assert tables["other processes"] == [("child.py", "2.00 GiB on cuda:0, did not finish")]
    assert "| process | memory |" in list(rendering.markdown(found))


def test_where_memory_ran_out_is_named() -> None:
    found = plan_of(1) | {"ran out": [{"lines": ["t.py:3"], "times": 2}]}
    assert list(rendering.answer(found))[1] == (
        "Memory ran out 2 times, at t.py:3, and the program went on. The plan holds for this "
        "memory only."
    )
    evidence = fitting.Evidence(adapted_to=fitting.memory_of("t4"))
    said = {each["model"]: each["fits"] for each in fitting.fits(GIB, GIB, evidence=evidence)}
    assert said.pop("t4") == fitting.YES and set(said.values()) == {fitting.UNKNOWN}


def test_what_is_not_known_to_fit() -> None:
    evidence = fitting.Evidence(finished=False)
    found = plan_of(1) | {"fits": [*fitting.fits(GIB, GIB, evidence=evidence)]}
    assert "No GPU is known to fit." in list(rendering.answer(found))
