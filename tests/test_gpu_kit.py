"""The questions to a GPU, rehearsed on a simulated H200: `benchmarks/gpu_kit.py`."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, benchmark
from processes import run_python

pytestmark = pytest.mark.one_engine

KIT = benchmark("gpu_kit")


def rehearsed(folder: Path, *words: str) -> dict[tuple[str, str], Any]:
    """Run the kit on a simulated H200, and return its answers."""
    ran = run_python(
        "-m",
        "benchmarks.gpu_kit",
        str(folder),
        "--target",
        "h200",
        "--workers",
        "1",
        *words,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[tuple[str, str], Any] = KIT.answers_in(folder)
    return found


def asked(folder: Path, part: str, number: int, count: int) -> list[Any]:
    """Ask one of many shards of a part."""
    file = folder / "answers.jsonl"
    words = ("--target", "h200", "--ask", part, str(number), str(count))
    ran = run_python("-m", "benchmarks.gpu_kit", *words, cwd=ROOT, GPU_KIT_ANSWERS=str(file))
    assert ran.returncode == 0, ran.stderr[-2000:]
    answers: list[Any] = KIT._read(file)
    return answers


def test_contract_tests_run_on_the_target_and_on_no_other(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--parts", "contracts", "--only", "cuda.test_streams")
    assert len(found) > 10
    assert {each["outcome"] for each in found.values()} == {"passed"}
    assert all("[TARGET" in question for _, question in found)


def test_peaks_are_those_that_plan_predicts(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--parts", "memory", "--only", "00")
    answer = found["memory", "dense layers, AdamW"]
    assert answer["gpu"] == "NVIDIA H200"
    assert 0 < answer["predicted"]["peak"] - answer["allocated"] < 80 << 20, "CUDA's workspaces"


def test_the_corpus_is_asked_with_its_twins(tmp_path: Path) -> None:
    cases = [each for each in asked(tmp_path, "corpus", 0, 150) if "case" in each]
    assert cases and all(each["bug"] and each["twin"] is None for each in cases if each["expected"])


def test_draws_are_the_same_in_each_process(tmp_path: Path) -> None:
    one = asked(tmp_path, "draws", 0, 300)
    (tmp_path / "answers.jsonl").unlink()
    other = asked(tmp_path, "draws", 0, 300)
    assert [each["operator"] for each in one] == [each["operator"] for each in other]
    for each, beside in zip(one, other, strict=True):
        count = min(len(each["draws"]), len(beside["draws"]))
        assert count > 2 and each["draws"][:count] == beside["draws"][:count]


def shard(name: str, code: str, seconds: float = 60) -> Any:
    return KIT.Shard(
        "contracts",
        name,
        ["-c", f"import sys; from benchmarks.gpu_kit import answer; {code}"],
        seconds,
    )


def ends(folder: Path) -> dict[str, str]:
    found = map(json.loads, (file.read_text() for file in folder.glob("*/*.json")))
    return {each["name"]: each["ended"] for each in found}


def test_a_shard_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    code = (
        f"open({str(tmp_path / 'ran')!r}, 'a').write('x'); answer(test='one', outcome='failed'); "
        "sys.exit(3)"
    )
    for _ in range(2):
        KIT.run([shard("one", code)], tmp_path / "answers", 60, 1)
    assert ends(tmp_path / "answers") == {"one": "failed"}
    assert (tmp_path / "ran").read_text() == "x"
    assert KIT.summary(tmp_path / "answers") == "contracts: 1 failed"


def test_a_shard_that_hangs_keeps_its_answers_and_is_not_run_again(tmp_path: Path) -> None:
    hanging = shard(
        "one", "import time; answer(test='one', outcome='passed'); time.sleep(600)", seconds=15
    )
    KIT.run([hanging, shard("two", "answer(test='two', outcome='passed')")], tmp_path, 300, 1)
    assert ends(tmp_path) == {"one": "stopped", "two": "finished"}
    assert KIT.summary(tmp_path) == "contracts: 2 passed\ncontracts one: stopped"


def test_what_no_time_was_left_for_runs_the_next_time(tmp_path: Path) -> None:
    shards = [shard("one", "import time; time.sleep(600)"), shard("two", "")]
    KIT.run(shards, tmp_path, 0.5, 1)
    assert ends(tmp_path) == {"one": KIT.CUT}
    KIT.run([shard("one", ""), shard("two", "")], tmp_path, 300, 1)
    assert ends(tmp_path) == {"one": "finished", "two": "finished"}


def test_a_wheel_is_imported_from_the_folder(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "VALUE = 'carried along'")
    importing = shard("one", "import carried; answer(test='one', outcome=carried.VALUE)")
    for _ in range(2):
        packages = KIT.unpack(wheels, tmp_path / "answers")
    KIT.run([importing], tmp_path / "answers", 60, 1, [packages])
    assert KIT.summary(tmp_path / "answers") == "contracts: 1 carried along"


def test_two_folders_are_compared(tmp_path: Path) -> None:
    draws = [
        ["torch.float32", [["torch.float32", [2], [1], "cuda", 1.0]]],
        ["torch.int8", "RuntimeError: no"],
    ]
    for name, mean, failed in (
        ("one", 1.0, "passed"),
        ("same", 1.001, "passed"),
        ("other", 1.5, "failed"),
    ):
        draws[0][1][0][4] = mean  # type: ignore[index]
        code = (
            f"answer(operator='add', draws={draws!r}); answer(test='t[{name}]', outcome={failed!r})"
        )
        KIT.run([shard("one", code)._replace(part="draws")], tmp_path / name, 60, 1)
    assert KIT.differences(tmp_path / "one", tmp_path / "same") == []
    (odd,) = KIT.differences(tmp_path / "one", tmp_path / "other")
    assert odd.startswith("draws add: 1 differ, such as\n") and "1.5" in odd


def test_a_test_that_failed_on_one_device_only_is_a_difference(tmp_path: Path) -> None:
    for target, outcome in (("cuda", "failed"), ("simulated:h200", "passed")):
        code = f"answer(test='file::test[{target}]', outcome={outcome!r}, text='')"
        KIT.run([shard("one", code)], tmp_path / outcome, 60, 1)
    (odd,) = KIT.differences(tmp_path / "failed", tmp_path / "passed")
    assert odd == "contracts file::test[TARGET]:\n  {'outcome': 'failed'}\n  {'outcome': 'passed'}"
