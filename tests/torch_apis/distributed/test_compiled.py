"""Compiled programs on two ranks, against gloo on the CPU, in every way and backend."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import sweeping
import torch
from places import PROGRAMS
from processes import run_command, run_python

PROGRAM = PROGRAMS / "compiled_parallel.py"

WAYS = (
    "ddp_compiled",
    "compiled_in_ddp",
    "fsdp",
    "tensor_parallel",
    "dtensor",
    "functional_collectives",
    "calls_of_dist",
    "compiled_autograd",
)

RUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(PROGRAM))


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("device", ["cpu", "simulated:cuda:2"])
def test_results_are_those_of_plain_gloo(
    device: str, engine: str, sweep: tuple[bool, int], tmp_path: Path
) -> None:
    matrix = [
        f"{way}:{backend}"
        for way, backend in itertools.product(WAYS, ("inductor", "aot_eager", "eager"))
    ]
    chosen = sweeping.choose(matrix, sweep, 4)
    plain = run_python(*RUN, str(tmp_path / "plain"), *chosen, PLAIN="1")
    assert plain.returncode == 0, plain.stderr[-3000:]
    options = ("--target", device, "--engine", engine)
    done = run_command("run", *options, *RUN, str(tmp_path / "found"), *chosen)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        expected: dict[str, Any] = torch.load(tmp_path / f"plain.{rank}")
        found: dict[str, Any] = torch.load(tmp_path / f"found.{rank}")
        for name in chosen:
            pairs = zip(found[name], expected[name], strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), (name, rank)


SHAPES_DIFFER = """
import torch, torch.distributed as dist
torch._dynamo.config.enable_compiler_collectives = True
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())

@torch.compile(backend="eager", dynamic=False)
def compiled(x):
    doubled = x * 2
    torch._dynamo.graph_break()
    return doubled + len(x)

print(compiled(torch.ones(4 + dist.get_rank(), device="cuda")).tolist())
"""


@pytest.mark.sampled(1, of="programs of two ranks")
@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_ranks_tell_each_other_what_they_compile(engine: str, tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SHAPES_DIFFER)
    run = run_command(
        "run",
        "--target",
        "simulated:cuda:2",
        "--engine",
        engine,
        "--ranks",
        "2",
        str(tmp_path / "ranks.py"),
    )
    assert run.returncode == 0, run.stderr
    assert "[6.0, 6.0, 6.0, 6.0]" in run.stdout and "[7.0, 7.0, 7.0, 7.0, 7.0]" in run.stdout
