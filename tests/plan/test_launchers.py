"""Plans of programs behind a launcher, whose own words have the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from places import PROGRAMS
from processes import run_command

from torchdevice.plan import launchers

pytestmark = pytest.mark.one_engine

PARALLEL = str(PROGRAMS / "planned_parallel.py")

ASKING = """
import os, sys, torch
from torch.distributed import is_torchelastic_launched
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ACCELERATE_MIXED_PRECISION"
print(*[f"{name}={os.environ.get(name)}" for name in names.split()])
print("words", sys.argv[1:], "GPUs", torch.cuda.device_count(), is_torchelastic_launched())
torch.zeros(1000, device=f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
"""


@pytest.fixture
def asking(tmp_path: Path) -> str:
    path = tmp_path / "asking.py"
    path.write_text(ASKING)
    return str(path)


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "train.py"],
        ["/usr/local/bin/torchrun", "--nproc-per-node=2", "train.py"],
        ["-m", "torch.distributed.run", "train.py"],
        ["python", "-m", "torch.distributed.launch", "train.py"],
        ["python3.12", "/usr/local/bin/torchrun", "train.py"],
    ],
)
def test_a_launcher_is_found(words: list[str]) -> None:
    found = launchers.launcher_of(words)
    assert found is not None and found[0].startswith("torch.distributed.")
    assert found[-1] == "train.py" and "-m" not in found


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "torchrun"],
        ["-m", "train", "torch.distributed.run"],
        ["-m"],
        ["-c", "torchrun"],
        ["python"],
        ["accelerate", "config"],
        ["accelerate"],
        ["-"],
    ],
)
def test_other_programs_are_no_launchers(words: list[str]) -> None:
    assert launchers.launcher_of(words) is None


def test_a_script_of_a_launchers_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchrun").touch()
    monkeypatch.chdir(tmp_path)
    assert launchers.launcher_of(["torchrun", "train.py"]) is None


RUN, OLD = "torch.distributed.run", "torch.distributed.launch"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("launcher", "devices", "expected"),
    [
        ([RUN, "--nproc-per-node=3", "a.py", "--x", "1"], 0, (["a.py", "--x", "1"], 1, 3)),
        ([RUN, "--nnodes", "2", "--nproc_per_node", "4", "-m", "a"], 0, (["-m", "a"], 2, 4)),
        ([RUN, "--nproc-per-node=gpu", "a.py"], 5, (["a.py"], 1, 5)),
        ([OLD, "--nproc-per-node=2", "a.py"], 0, (["a.py", "--local-rank=${local_rank}"], 1, 2)),
        ([RUN, "a.py", "--nproc-per-node=2"], 0, (["a.py", "--nproc-per-node=2"], 1, 1)),
    ],
)
def test_what_torchrun_would_start(launcher: list[str], devices: int, expected: Any) -> None:
    found = launchers.read(launcher, devices)
    assert (found.words, found.machines, found.on_machine) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "machines", "on_machine", "variables"),
    [
        (["--num_processes=4"], 1, 4, {"ACCELERATE_MIXED_PRECISION": "no"}),
        (["--mixed_precision=bf16"], 0, 1, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (
            ["--use_fsdp", "--num_processes=2", "--fsdp_sharding_strategy=SHARD_GRAD_OP"],
            1,
            2,
            {"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
        ),
    ],
)
def test_what_accelerate_would_start(
    words: list[str],
    machines: int,
    on_machine: int,
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where a user's configuration is
    found = launchers.read(["accelerate.commands.launch", *words, "a.py", "--x"], 0)
    assert found.words == ["a.py", "--x"]
    assert (found.machines, found.on_machine) == (machines, on_machine)
    assert variables.items() <= found.variables.items()


def test_which_gpus_of_a_machine_ranks_have_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = ["--num_processes", "2", "--multi_gpu", "--gpu_ids", "2,3", "a.py"]
    found = launchers.read(["accelerate.commands.launch", *words], 0)
    assert found.on_machine == 2 and "CUDA_VISIBLE_DEVICES" not in found.variables
    refused = ["accelerate.commands.launch", "--no_python", "/bin/echo"]
    with pytest.raises(ValueError, match="starts no process of Python"):
        launchers.read(refused, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnodes=1:4", "a.py"], "--nnodes 1:4 is a range"),
        (["--nproc-per-node=gpu", "a.py"], "--nproc-per-node gpu counts GPUs. Name them"),
        (["--nproc-per-node=cpu", "a.py"], "counts this machine's processors. Write the number"),
        (["--no-python", "/bin/echo"], "starts no process of Python"),
    ],
)
def test_an_unknown_number_of_ranks_is_refused(words: list[str], said: str) -> None:
    done = run_command("plan", "torchrun", *words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_what_the_launcher_refuses_is_its_own_error() -> None:
    done = run_command("plan", "torchrun", "--no-such-flag", "a.py")
    assert done.returncode == 2 and "usage: torch.distributed.run" in done.stderr
    assert "plan of" not in done.stdout


def test_two_numbers_of_ranks_are_refused() -> None:
    done = run_command("plan", "--world-size", "2", "torchrun", "a.py")
    assert done.returncode == 2 and "Leave --world-size out" in done.stderr


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("own", "launcher", "said"),
    [
        (
            ["--rank", "5"],
            ["torchrun", "--nnodes=2", "--nproc-per-node=4"],
            [
                "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1",
                "words ['--x'] GPUs 4 True",
                "asking.py --x, rank 5 of 8",
                "cuda:1",
            ],
        ),
        (
            ["--world-size", "4", "--rank", "3", "--ranks-per-machine", "2"],
            [],
            ["RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1", "GPUs 2 True"],
        ),
        (
            ["--target", "simulated:t4:2", "--rank", "1"],
            ["python", "-m", "torch.distributed.launch", "--nproc-per-node=auto"],
            ["RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", "words ['--local-rank=1', '--x']"],
        ),
    ],
)
def test_a_rank_is_told_what_the_launcher_tells_it(
    own: list[str], launcher: list[str], said: list[str], asking: str
) -> None:
    done = run_command("plan", *own, *launcher, asking, "--x")
    assert done.returncode == 0, done.stderr
    for each in said:
        assert each in done.stdout


@pytest.mark.sampled(8, of="long programs")
def test_a_plan_is_that_of_the_rank() -> None:
    plans = [
        json.loads(run_command("plan", "--json", *words, PARALLEL, "sharded").stdout)
        for words in (["--world-size", "2"], ["torchrun", "--nproc-per-node", "2"])
    ]
    assert plans[0]["devices"] == plans[1]["devices"] and plans[0]["traffic"]["collectives"]
    assert plans[0]["program"] == plans[1]["program"]


@pytest.mark.sampled(8, of="long programs")
def test_all_ranks_and_several_numbers_of_ranks(asking: str) -> None:
    done = run_command("plan", "--rank", "all", "torchrun", "--nproc-per-node", "2", asking)
    assert done.returncode == 0 and "rank 1 " in done.stdout, done.stderr
    done = run_command(
        "plan", "--json", "--sweep", "nproc-per-node=1,3", "torchrun", "--nproc-per-node=2", asking
    )
    found = json.loads(done.stdout)
    assert [each["program"].rpartition(", ")[2] for each in found["plans"]] == [
        "rank 0 of 1",
        "rank 0 of 3",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["deepspeed", "--num_gpus", "4", "train.py"],
        ["python", "/usr/local/bin/deepspeed", "train.py"],
        ["-m", "deepspeed.launcher.runner", "train.py"],
    ],
)
def test_the_launcher_of_deepspeed_is_refused(words: list[str]) -> None:
    with pytest.raises(
        ValueError, match="starts ranks with DeepSpeed's engine, which a plan does not run"
    ):
        launchers.launcher_of(words)


def test_deepspeed_behind_accelerate_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = ["--use_deepspeed", "--num_processes", "2", "a.py"]
    with pytest.raises(ValueError, match="accelerate launch --use_deepspeed starts ranks with"):
        launchers.read(["accelerate.commands.launch", *words], 2)


def test_a_command_that_is_no_program_of_python_is_refused() -> None:
    done = run_command("plan", "bash", "-c", "true")
    assert done.returncode == 2 and "a plan follows a program of Python" in done.stderr
    assert "Name the SCRIPT that it starts" in done.stderr
