"""Ranks that call different collectives, or wait for each other for ever: an error on every rank, no hang."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from conftest import free_port, run_program

from torchdevice.torch_apis.agreement import Note, stuck

RANKS = """
    import datetime, os, sys, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from torchdevice.torch_apis import agreement

    def other_collective(rank, x, pair):
        if rank == 0:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    def other_size(rank, x, pair):
        dist.all_reduce(x if rank == 0 else torch.ones(3, 2, device=x.device))

    def other_dtype(rank, x, pair):
        x = x if rank else x.half()
        dist.all_gather_into_tensor(torch.ones(8, device=x.device, dtype=x.dtype), x)

    def other_operation(rank, x, pair):
        dist.all_reduce(x, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)

    def other_root(rank, x, pair):
        dist.broadcast(x, rank)

    def other_list(rank, x, pair):
        dist.all_gather([torch.ones(4, device=x.device), torch.ones(3 + rank, device=x.device)], x)

    def other_object(rank, x, pair):
        dist.barrier() if rank else dist.all_gather_object([None, None], "a")

    def other_group(rank, x, pair):
        dist.all_reduce(x, group=pair if rank else None)
        dist.all_reduce(x, group=None if rank else pair)

    def slow(rank, x, pair):
        time.sleep(1.0 if rank else 0)  # five times a rank's patience
        dist.all_reduce(x, group=pair)
        time.sleep(0 if rank else 1.0)
        dist.all_reduce(x)

    def rank(number, port):
        store = dist.TCPStore("127.0.0.1", port, 2, number == 0, datetime.timedelta(seconds=60))
        dist.init_process_group("nccl", store=store, rank=number, world_size=2, timeout=datetime.timedelta(seconds=60))
        torch.cuda.set_device(number % torch.cuda.device_count())
        pair = dist.new_group([0, 1])
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        for name in sys.argv[2:]:
            said = "ran"
            try:
                globals()[name](number, x, pair)
            except dist.DistBackendError as error:
                said = str(error).replace(chr(10), "|")
            print(f"{name} {number}: {said}{chr(10)}", end="", flush=True)
        os._exit(0)

    if __name__ == "__main__":
        agreement.PATIENCE = datetime.timedelta(seconds=0.2)
        forks = mp.get_context("fork")
        ranks = [forks.Process(target=rank, args=(number, int(sys.argv[1]))) for number in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(100)
            each.kill()
"""

CALLS = {
    "other_collective": ("broadcast of float32[4], from rank 0", "all_reduce of float32[4], SUM"),
    "other_size": ("all_reduce of float32[4], SUM", "all_reduce of float32[3, 2], SUM"),
    "other_dtype": ("all_gather of float16[4]", "all_gather of float32[4]"),
    "other_operation": ("all_reduce of float32[4], SUM", "all_reduce of float32[4], MAX"),
    "other_root": ("broadcast of float32[4], from rank 0", "broadcast of float32[4], from rank 1"),
    "other_list": ("all_gather of float32[4]", "all_gather of float32[4]"),
    "other_object": ("all_gather of int64[1]", "barrier"),
    "other_group": ("all_reduce of float32[4], SUM", "all_reduce of float32[4], SUM"),
}
"""What both ranks call, as the errors say it."""


def run(target: str, folder: Path, cases: list[str]) -> dict[str, str]:
    """Run cases in two ranks, and return what each rank printed of each."""
    two = f"{target}:2" if target.startswith("simulated") else target
    done = run_program(folder, RANKS, free_port(), *cases, options=["--target", two])
    return dict(re.findall(r"^(\w+ [01]): (.*)$", done.stdout, re.MULTILINE)) or {"error": done.stderr[-4000:]}


@pytest.mark.sampled(1)
@pytest.mark.one_engine
def test_every_rank_is_told_what_all_called(target: str, tmp_path: Path) -> None:
    found = run(target, tmp_path, ["slow", *CALLS])
    assert [found.pop(f"slow {rank}", found) for rank in (0, 1)] == ["ran", "ran"], "a slow rank is waited for"
    for case, calls in CALLS.items():
        for rank in (0, 1):
            said = found[f"{case} {rank}"]
            lines = [re.escape(call) + r", at \S+program\.py:\d+ in " + case for call in calls]
            assert re.search(rf"rank 0 [\w ]+ {lines[0]}\|  rank 1 [\w ]+ {lines[1]}\|", said), said
            assert ("can never go on" if case == "other_group" else "do not fit together") in said, said


def note(key: str, ranks: list[int], **begun: int) -> Note:
    return Note(1, "", key, ranks, begun)


def test_ranks_that_wait_for_each_other_are_stuck() -> None:
    assert stuck({0: note("a", [0, 1], a=2), 1: note("b", [0, 1], a=1, b=1)}) == [0, 1]


def test_a_rank_that_waits_for_one_that_computes_is_not_stuck() -> None:
    assert stuck({0: note("a", [0, 1, 2], a=1), 1: note("a", [0, 1, 2], a=1)}) == []


def test_a_rank_whose_collective_all_have_begun_is_not_stuck() -> None:
    """Its note is of a moment ago: it goes on, and so can the rank that waits for it."""
    assert stuck({0: note("a", [0, 1], a=1, b=1), 1: note("b", [0, 1], b=1)}) == []


def test_ranks_in_a_ring_are_stuck_and_so_is_who_waits_for_them() -> None:
    pairs = {0: ("x", [0, 1]), 1: ("y", [1, 2]), 2: ("z", [2, 0]), 3: ("w", [0, 3])}
    ring = {rank: note(key, ranks, **{key: 1}) for rank, (key, ranks) in pairs.items()}
    assert stuck(ring) == [0, 1, 2, 3]
    del ring[2]  # it computes, so it may come, and then each of the others
    assert stuck(ring) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_ranks_does_not_matter(order: tuple[int, ...]) -> None:
    waits = {order[0]: note("a", [*order], a=1), order[1]: note("b", [order[1], order[2]], b=1)}
    assert stuck(waits) == [], "the third rank computes"
    waits[order[2]] = note("a", [*order], a=1)
    assert stuck(waits) == sorted(order), "none of the three can come"
