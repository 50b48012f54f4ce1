"""Ranks with different collectives or endless waits: an error on each, no hang."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from processes import free_port, run_program

from torchdevice.torch_modules.distributed.collective_checks import Awaited, Note, stuck

RANKS = """
    import datetime, os, sys, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from torchdevice.torch_modules.distributed import collective_checks

    def other_collective(rank, x, pair):
        if rank == 0:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)

    def other_size(rank, x, pair):
        dist.all_reduce(x if rank == 0 else torch.ones(3, 2, device=x.device))

    def waited(work):
        work.wait()

    def other_size_later(rank, x, pair):
        waited(dist.all_reduce(x if rank == 0 else torch.ones(3, 2, device=x.device), async_op=True))

    def crossed(rank, x, pair):
        groups = [None, pair] if rank else [pair, None]
        for work in [dist.all_reduce(x.clone(), group=each, async_op=True) for each in groups]:
            work.wait()

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

    def both_receive(rank, x, pair):
        slow_to_send(rank, x, pair)
        dist.recv(x, 1 - rank)

    def both_send(rank, x, pair):
        dist.send(x, 1 - rank)

    def never_sent(rank, x, pair):
        if rank == 0:
            dist.recv(x, 1)
        else:
            dist.all_reduce(x)

    def sent_with_another_tag(rank, x, pair):
        if rank == 0:
            dist.recv(x, 1, tag=3)
        else:
            dist.send(x, 0, tag=4)

    def received_twice(rank, x, pair):
        if rank == 0:
            dist.isend(x, 1).wait()
            dist.barrier(group=pair)
        else:
            dist.recv(x, 0)
            dist.irecv(x, 0).wait()

    def received_from_any(rank, x, pair):
        # NCCL receives from a named rank only.
        group = dist.new_group([0, 1], backend="gloo") if not x.is_cpu else None
        dist.recv(x, group=group) if rank == 0 else dist.barrier()

    def refused_from_any(rank, x, pair):
        dist.recv(x)

    def slow(rank, x, pair):
        time.sleep(0.5 if rank else 0)  # more than twice a rank's patience
        dist.all_reduce(x, group=pair)
        time.sleep(0 if rank else 0.5)
        dist.all_reduce(x)

    def slow_to_send(rank, x, pair):
        if rank == 0:
            dist.recv(x, 1)
            dist.recv(x, 1)
            dist.send(x, 1)
            dist.recv(x, 1)
        else:
            time.sleep(0.5)
            dist.send(x, 0)
            time.sleep(0.5)
            dist.send(x, 0)
            time.sleep(0.5)
            dist.recv(x, 0)
            dist.isend(x, 0).wait()

    def polled(rank, x, pair):
        work = dist.isend(x, 1) if rank == 0 else dist.irecv(x.zero_(), 0)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()
        work.wait()
        assert x.tolist() == [1] * 4, x

    def rank(number, port):
        store = dist.TCPStore("127.0.0.1", port, 2, number == 0, datetime.timedelta(seconds=60))
        dist.init_process_group("nccl", store=store, rank=number, world_size=2, timeout=datetime.timedelta(seconds=60))
        torch.cuda.set_device(number % torch.cuda.device_count())
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(4, device="cuda"))
        for name in sys.argv[2:]:
            said, x = "ran", torch.ones(4, device="cuda")
            try:
                globals()[name](number, x, pair)
            except (dist.DistBackendError, NotImplementedError) as error:
                said = str(error).replace(chr(10), "|")
            print(f"{name} {number}: {said}{chr(10)}", end="", flush=True)
        os._exit(0)

    if __name__ == "__main__":
        collective_checks.PATIENCE = datetime.timedelta(seconds=0.2)
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
    "other_size_later": ("all_reduce of float32[4], SUM", "all_reduce of float32[3, 2], SUM"),
    "other_dtype": ("all_gather of float16[4]", "all_gather of float32[4]"),
    "other_operation": ("all_reduce of float32[4], SUM", "all_reduce of float32[4], MAX"),
    "other_root": ("broadcast of float32[4], from rank 0", "broadcast of float32[4], from rank 1"),
    "other_list": (
        "all_gather of float32[4], into [4, 3]",
        "all_gather of float32[4], into [4, 4]",
    ),
    "other_object": ("all_gather of int64[1], into [1, 1]", "barrier"),
    "other_group": ("all_reduce of float32[4], SUM", "all_reduce of float32[4], SUM"),
}
"""What both ranks call, as the errors say it."""


RUN = ("slow", "slow_to_send", "polled", "crossed")
"""What ends, although a rank is waited for."""


WAITS = {
    "both_receive": ("recv of float32[4], from rank 1", "recv of float32[4], from rank 0"),
    "both_send": ("send of float32[4], to rank 1", "send of float32[4], to rank 0"),
    "never_sent": ("recv of float32[4], from rank 1", "all_reduce of float32[4], SUM"),
    "sent_with_another_tag": ("recv of float32[4], from rank 1", "send of float32[4], to rank 0"),
    "received_twice": ("barrier", "recv of float32[4], from rank 0"),
    "received_from_any": ("recv of float32[4], from any rank", "barrier"),
}
"""Where both ranks wait, as the errors say it."""


def run(target: str, folder: Path, cases: list[str]) -> dict[str, str]:
    """Run cases in two ranks, and return what each rank printed of each."""
    two = f"{target}:2" if target.startswith("simulated") else target
    done = run_program(folder, RANKS, free_port(), *cases, options=["--target", two])
    return dict(re.findall(r"^(\w+ [01]): (.*)$", done.stdout, re.MULTILINE)) or {
        "error": done.stderr[-4000:]
    }


@pytest.mark.sampled(1)
@pytest.mark.one_engine
def test_every_rank_is_told_what_all_called(target: str, tmp_path: Path) -> None:
    found = run(target, tmp_path, [*RUN, *CALLS])
    for case in RUN:
        assert [found.pop(f"{case} {rank}", found) for rank in (0, 1)] == ["ran", "ran"], (
            "a slow rank is waited for"
        )
    for case, calls in CALLS.items():
        for rank in (0, 1):
            said = found[f"{case} {rank}"]
            lines = [re.escape(call) + r", at \S+program\.py:\d+ in " + case for call in calls]
            assert re.search(rf"rank 0 [\w ]+ {lines[0]}\|  rank 1 [\w ]+ {lines[1]}\|", said), said
            assert (
                "can never go on" if case == "other_group" else "do not fit together"
            ) in said, said


@pytest.mark.sampled(1)
@pytest.mark.one_engine
@pytest.mark.parametrize("case", WAITS)
def test_ranks_that_send_and_receive_are_told_where_all_wait(
    case: str, target: str, tmp_path: Path
) -> None:
    found = run(target, tmp_path, [case])
    for rank in (0, 1):
        said = found[f"{case} {rank}"]
        lines = [
            re.escape(f"waits in {call}") + r", at \S+program\.py:\d+ in " + case
            for call in WAITS[case]
        ]
        assert re.search(rf"never go on:\|  rank 0 {lines[0]}\|  rank 1 {lines[1]}\|", said), said


@pytest.mark.one_engine
def test_nccl_receives_from_a_named_rank_only(tmp_path: Path) -> None:
    found = run("simulated:cuda", tmp_path, ["refused_from_any"])
    for rank in (0, 1):
        assert (
            "ProcessGroupNCCL does not support recvAnysource" in found[f"refused_from_any {rank}"]
        )


def note(key: str, ranks: list[int], **begun: int) -> Note:
    return Note(1, "", Awaited([key], begun[key], ranks), begun, 0.0)


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


def receives(source: int | None, times: int, **begun: int) -> Note:
    """Return the note of rank 0 of three, waiting for tensor ``times`` of one or any rank."""
    ranks = [0, 1, 2] if source is None else [source]
    return Note(1, "", Awaited(["send to 0"], times, ranks, source is None), begun, 0.0)


@pytest.mark.parametrize(("sent", "goes_on"), [(0, False), (1, False), (2, True)])
def test_a_rank_that_receives_is_stuck_until_all_was_sent(sent: int, goes_on: bool) -> None:
    other = Note(1, "", Awaited(["b"], 1, [0]), {"send to 0": sent}, 0.0)
    assert stuck({0: receives(1, times=2), 1: other}) == ([] if goes_on else [0, 1])


def test_a_rank_that_receives_from_any_goes_on_while_one_can_send() -> None:
    waits = {0: receives(None, times=1), 1: Note(1, "", Awaited(["b"], 1, [0]), {}, 0.0)}
    assert stuck(waits) == [], "the third rank computes"
    waits[2] = waits[1]
    assert stuck(waits) == [0, 1, 2]
    waits[2] = waits[1]._replace(begun={"send to 0": 1})
    assert stuck(waits) == []
