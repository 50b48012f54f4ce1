"""Plans of ranks of a program that several ranks run: their memory beside that of ranks that ran,
and what they send.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from places import PROGRAMS
from processes import run_command

from torchdevice.plan import traffic
from torchdevice.torch_modules.distributed import fake_works

pytestmark = pytest.mark.one_engine

PROGRAM = str(PROGRAMS / "planned_parallel.py")

WEIGHTS = 4 * (2 * 512 * 2048 + 2048 + 512)
"""The bytes of the program's parameters."""

OF_DDP = 100
"""More bytes than DDP broadcasts of its own, when it puts its buckets into another order."""


def peaks(printed: str) -> dict[int, int]:
    """Return the peak of each rank that ran."""
    found = re.findall(r"peak of rank (\d+): (\d+)", printed)
    return {int(rank): int(peak) for rank, peak in found}


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize(
    "kind", ["tensors", "data", "halved", "low rank", "states", "sharded", "pipeline"]
)
def test_a_planned_rank_has_the_memory_of_a_rank_that_ran(kind: str) -> None:
    ran = run_command("run", "--target", "simulated:cuda", "--ranks", "2", PROGRAM, kind)
    planned = run_command("plan", "--world-size", "2", PROGRAM, kind)
    assert ran.returncode == planned.returncode == 0, ran.stderr + planned.stderr
    assert peaks(planned.stdout)[0] == peaks(ran.stdout)[0]
    assert "optimizer state" in planned.stdout


def planned(*words: str) -> dict[str, Any]:
    """Return the data of a plan."""
    done = run_command("plan", "--json", *words)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0 and found["finished"], done.stderr
    return found


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("kind", ["uneven", "interleaved"])
def test_all_ranks_of_a_pipeline(kind: str) -> None:
    ran = run_command("run", "--target", "simulated:cuda", "--ranks", "2", PROGRAM, kind)
    found = planned("--world-size", "2", "--rank", "all", PROGRAM, kind)
    workspaces = found["devices"][0]["workspaces"]
    least = {
        each["rank"]: each["at least"] - found["context"] - workspaces for each in found["ranks"]
    }
    assert least == peaks(ran.stdout), ran.stderr
    worst = max(found["ranks"], key=lambda each: each["needs"])["rank"]
    assert found["rank"] == worst and found["program"].endswith(f"{kind}, rank {worst} of 2")
    assert kind != "uneven" or worst == 1


def test_a_stage_alone_does_not_know_its_inputs() -> None:
    done = run_command("plan", "--world-size", "2", "--rank", "1", PROGRAM, "pipeline")
    assert done.returncode == 1
    # From stage 0, and with the pipelines of torch 2.10 to 2.12 from rank 0.
    assert " 0, which is not planned. Plan all ranks by --rank all." in done.stderr


SENDS_SIZES = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, other = dist.get_rank(), 1 - dist.get_rank()
for size in (1, 2, 3):
    sizes = [size << 20 if rank == 0 else None, "floats"]
    if rank == 0:
        dist.send_object_list(sizes, dst=other)
    else:
        assert dist.recv_object_list(sizes, group_src=other) == other
    x = torch.empty(sizes[0], device="cuda")
print(f"peak of rank {rank}: {torch.cuda.max_memory_allocated()}", flush=True)
"""


def test_ranks_send_each_other_objects(tmp_path: Path) -> None:
    program = tmp_path / "sends.py"
    program.write_text(SENDS_SIZES)
    found = planned("--world-size", "2", "--rank", "all", str(program))
    needs = {each["rank"]: each["at least"] - found["context"] for each in found["ranks"]}
    assert needs[0] == needs[1] == (2 + 3) * 4 << 20
    alone = run_command("plan", "--world-size", "2", "--rank", "1", str(program))
    assert alone.returncode == 1 and "Rank 1 gets objects from rank 0, which is not" in alone.stderr


def test_a_stage_does_not_wait_for_one_that_ended(tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    text = (PROGRAMS / "planned_parallel.py").read_text()
    program.write_text(text.replace("    step = ", "    assert dist.get_rank()\n    step = "))
    done = run_command("plan", "--world-size", "2", "--rank", "all", str(program), "pipeline")
    assert done.returncode == 1 and "AssertionError" in done.stdout


@pytest.mark.sampled(3, of="traffic of ranks")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("data", {"all-reduce": WEIGHTS}),
        ("halved", {"all-reduce": WEIGHTS // 2}),
        ("states", {"all-reduce": WEIGHTS, "broadcast": WEIGHTS}),
        ("sharded", {"all-gather": 2 * WEIGHTS, "reduce-scatter": WEIGHTS}),
        ("tensors", {"all-reduce": 64 * 512 * 4}),
        ("pipeline", {"send": 64 * 512 * 4, "receive": 64 * 512 * 4}),
    ],
)
def test_what_a_rank_sends_in_a_step(kind: str, expected: dict[str, int], ranks: int) -> None:
    found = planned("--world-size", str(ranks), PROGRAM, kind)["traffic"]
    assert found["in"] == "a step"
    large = {each["collective"]: each for each in found["collectives"] if each["bytes"] > OF_DDP}
    assert large.keys() == expected.keys()
    for name, size in expected.items():
        assert size <= large[name]["bytes"] <= size + OF_DDP
    parts = {"all-reduce": 2 * (ranks - 1) / ranks, "send": 1, "broadcast": 1, "receive": 0}
    for name, each in large.items():
        part = parts.get(name, (ranks - 1) / ranks)
        assert each["sent"] == round(part * each["bytes"])


EVERY = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("nccl")
x = torch.ones(64, device="cuda")  # 256 bytes
parts, outputs = list(x.chunk(4)), [torch.empty_like(x) for _ in range(4)]
large, small = torch.empty(256, device="cuda"), torch.empty(16, device="cuda")
dist.all_reduce(x)
dist.all_reduce_coalesced([x, x])
dist.all_gather(outputs, x)
dist.all_gather_into_tensor(large, x)
dist.reduce_scatter(small, parts)
dist.reduce_scatter_tensor(small, x)
dist.all_to_all_single(torch.empty_like(x), x)
dist.all_to_all(list(torch.empty_like(x).chunk(4)), parts)
dist.broadcast(x, 0)
dist.reduce(x, 0)
dist.gather(x, outputs, 0)
dist.scatter(small, parts, 0)
dist.send(x, 1)
dist.recv(x, 1)
dist.barrier()
dist.all_reduce(torch.ones(64))  # on the CPU
functional.all_reduce(x, "sum", dist.group.WORLD).sum()
with torch.inference_mode():
    functional.all_gather_tensor(x, 0, dist.group.WORLD).sum()
pair = dist.new_group([0, 1])
dist.all_reduce(x, group=pair)
"""


def test_every_collective_is_counted(tmp_path: Path) -> None:
    (tmp_path / "every.py").write_text(EVERY)
    found = planned("--world-size", "4", str(tmp_path / "every.py"))["traffic"]
    assert found["in"] == "the program"
    counted = {
        each["collective"]: (each["calls"], each["bytes"], each["sent"])
        for each in found["collectives"]
    }
    assert counted == {
        "all-reduce": (4, 5 * 256, 4 * 2 * 192 + 256),
        "all-gather": (3, 3 * 1024, 3 * 768),
        "reduce-scatter": (2, 2 * 256, 2 * 192),
        "all-to-all": (2, 2 * 256, 2 * 192),
        "broadcast": (1, 256, 256),
        "reduce": (1, 256, 256),
        "gather": (1, 256, 0),  # by the rank that receives
        "scatter": (1, 256, 192),
        "send": (1, 256, 256),
        "receive": (1, 256, 0),
    }


WITHOUT_FUTURE = {"send", "recv_", "recv_any_source_"}


def test_every_collective_has_a_result(tmp_path: Path) -> None:
    known = {name for name in traffic.COLLECTIVES if name not in WITHOUT_FUTURE}
    assert known == {*fake_works.OPERATORS, *fake_works.LACKED}
    there = {each.name.removeprefix("c10d::") for each in torch._C._jit_get_all_schemas()}
    (tmp_path / "results.py").write_text(RESULTS)
    (tmp_path / "operators.json").write_text(json.dumps(sorted(known & there)))
    planned("--world-size", "4", str(tmp_path / "results.py"))


RESULTS = """
import json, pathlib, torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

known = set(json.loads(pathlib.Path(__file__).with_name("operators.json").read_text()))
seen = set()

class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        seen.add(str(op).removeprefix("c10d.").removesuffix(".default"))
        return op(*args, **(kwargs or {}))

def works(device):
    x, y, large = (torch.ones(number, device=device) for number in (4, 4, 16))
    parts, others = list(torch.ones(16, device=device).chunk(4)), list(large.clone().chunk(4))
    yield group.allreduce([x]), [x]
    yield group.allreduce_coalesced([x, y]), [x, y]
    yield group.broadcast(x, 0), [x]
    yield group.reduce(x, 0), [x]
    yield group.allgather([parts], [x]), parts
    yield group._allgather_base(large, x), [large]
    yield group.allgather_coalesced([[part] for part in parts], [x]), parts
    yield group.allgather_into_tensor_coalesced([large], [x]), [large]
    yield group.reduce_scatter([x], [parts]), [x]
    yield group._reduce_scatter_base(x, large), [x]
    yield group.reduce_scatter_tensor_coalesced([x, y], [large, large]), [x, y]
    yield group.alltoall(parts, others), parts
    yield group.alltoall_base(large, large.clone(), [], []), [large]
    yield group.gather([parts], [x], dist.GatherOptions()), parts
    yield group.scatter([x], [parts], dist.ScatterOptions()), [x]
    if hasattr(group, "gather_single"):  # since torch 2.14
        yield group.gather_single(large, x, dist.GatherOptions()), [large]

dist.init_process_group("nccl")
group = dist.group.WORLD
for device in ("cuda", "cpu"):
    seen.clear()
    with Seen():
        for work, outputs in works(device):
            work.wait()
            found = work.get_future().wait()
            assert work.is_completed() and len(found) == len(outputs)
            assert all(one is other for one, other in zip(found, outputs))
    assert known <= seen
"""


WITHOUT_MESSAGE = {"barrier", "monitored_barrier_", "check_for_nan"}


def test_every_operator_of_torch_with_a_message_is_known() -> None:
    names = {
        each.name.removeprefix("c10d::")
        for each in torch._C._jit_get_all_schemas()
        if each.name.startswith("c10d::")
    }
    assert len(names) > 15 and names - WITHOUT_MESSAGE <= traffic.COLLECTIVES.keys()


def test_a_program_of_one_process_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import torch\nkept = torch.ones(8, device='cuda')\n")
    assert planned(str(tmp_path / "one.py"))["traffic"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rank", "1"], "Add --world-size N"),
        (["--world-size", "2", "--rank", "2"], "--rank 2 does not exist. The last one is 1"),
        (["--world-size", "2", "--rank", "x"], "'x' is not a rank"),
        (["--world-size", "2", "--rank", "all", "--interval"], "--rank all makes a plan for each"),
    ],
)
def test_what_is_no_rank(words: list[str], said: str) -> None:
    done = run_command("plan", *words, "t.py")
    assert done.returncode == 2 and said in done.stderr
