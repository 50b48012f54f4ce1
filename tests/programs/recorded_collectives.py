"""Two ranks' collectives for NCCL's flight recorder, compared with NCCL's own records."""

import json
import os
import pickle
import sys
import time

import torch
import torch.distributed as dist

recorded = torch._C._distributed_c10d


def dump(**choices: bool) -> dict:
    return pickle.loads(recorded._dump_nccl_trace(**choices))


def compared() -> None:
    rank = dist.get_rank()
    group = dist.group.WORLD
    a = torch.full((3, 4), float(rank), device="cuda")
    whole = torch.empty(6, 4, device="cuda")
    with torch.profiler.profile() as profile:
        dist.all_reduce(a)
        dist.all_gather_into_tensor(whole, a)
        if rank == 0:
            dist.send(a, 1)
        else:
            dist.recv(a, 0)
        dist.barrier()
    ends = "nccl:send 0->1" if rank == 0 else "nccl:recv 1<-0"
    names = ["nccl:all_reduce", "nccl:_all_gather_base", ends, "nccl:all_reduce_barrier"]
    assert {*names} <= {event.name for event in profile.events()}, sorted(
        {event.name for event in profile.events()}
    )
    entries = dump()["entries"]
    assert [each["profiling_name"] for each in entries] == names
    assert [each["record_id"] for each in entries] == [0, 1, 2, 3]
    assert [each["collective_seq_id"] for each in entries] == [1, 2, 2, 3]
    assert [(each["p2p_seq_id"], each["is_p2p"]) for each in entries] == [
        (0, False),
        (0, False),
        (1, True),
        (1, False),
    ]
    gathered = entries[1]
    assert gathered["input_sizes"] == [[3, 4]] and gathered["output_sizes"] == [[6, 4]]
    assert gathered["input_dtypes"] == gathered["output_dtypes"] == ["Float"]
    assert gathered["process_group"] == ("0", "default_pg") and gathered["timeout_ms"] == 600_000
    assert gathered["state"] == "completed" and "duration_ms" not in gathered
    assert "recorded_collectives.py" in str(gathered["frames"])
    assert gathered["frames"][0]["filename"].endswith("distributed_c10d.py")
    assert not dump(onlyActive=True)["entries"] and "entries" not in dump(includeCollectives=False)
    assert "frames" not in dump(includeStackTraces=False)["entries"][0]

    group._enable_collectives_timing()
    if rank == 1:
        work = dist.all_reduce(a, async_op=True)  # rank 0 comes once this rank has looked
        (active,) = dump(onlyActive=True)["entries"]
        assert active["state"] == "started" and active["time_discovered_completed_ns"] is None
        status = dump()["pg_status"]["0"]
        assert (status["last_enqueued_collective"], status["last_completed_collective"]) == (4, 3)
        dist.send(torch.ones(1, device="cuda"), 0)
        work.wait()
    else:
        dist.recv(torch.ones(1, device="cuda"), 1)
        dist.all_reduce(a)
    in_json = json.loads(recorded._dump_nccl_trace_json())
    last = in_json["entries"][-1] if rank == 0 else in_json["entries"][-2]
    assert last["state"] == "completed" and last["duration_ms"] > 0 and "frames" not in last
    assert in_json["pg_config"] == {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}

    other, small = 1 - rank, torch.full((2,), float(rank), device="cuda")
    received = torch.empty(3, 4, device="cuda"), torch.empty(2, device="cuda")
    sent = [dist.P2POp(dist.isend, each, other) for each in (torch.full_like(a, rank), small)]
    works = dist.batch_isend_irecv(
        [*sent, *(dist.P2POp(dist.irecv, each, other) for each in received)]
    )
    assert len(works) == 1, "a batch has one work"
    works[0].wait()
    assert all(torch.equal(each, torch.full_like(each, other)) for each in received)
    *parts, batch = dump()["entries"][-5:]
    ends = [f"nccl:send {rank}->{other}"] * 2 + [f"nccl:recv {rank}<-{other}"] * 2
    assert [each["profiling_name"] for each in parts] == ends and batch[
        "profiling_name"
    ] == "nccl:coalesced"
    assert {each["p2p_seq_id"] for each in (*parts, batch)} == {3} and batch["input_sizes"] == []
    assert all(each["state"] == "scheduled" and "duration_ms" not in each for each in parts)
    assert batch["state"] == "completed" and batch["duration_ms"] > 0
    with dist._coalescing_manager(device=a.device, async_ops=True) as coalesced:
        dist.all_reduce(a)
        dist.all_reduce(whole)
    coalesced.wait()
    assert dump()["pg_status"]["0"]["last_completed_collective"] == 5

    for _ in range(12):
        dist.all_reduce(a)
    entries = dump()["entries"]
    assert len(entries) == 10 and entries[-1]["record_id"] - entries[0]["record_id"] == 9
    print("as NCCL")


def piped() -> None:
    """A write to the parent's named pipe brings the record to the file, even during a wait."""
    a = torch.ones(3, device="cuda")
    dist.all_reduce(a)
    if dist.get_rank() == 0:
        file = f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}1"
        pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}1.pipe"
        with open(pipe, "w") as writer:
            writer.write("1\n")
        while not (os.path.exists(file) and os.path.getsize(file)):
            time.sleep(0.05)
        with open(file, "rb") as written:
            assert "all_reduce" in str(pickle.load(written))
    dist.broadcast(a, 0)
    print("as NCCL")


def differing() -> None:
    a = torch.ones(3, device="cuda")
    dist.all_reduce(a)
    if dist.get_rank() == 0:
        dist.all_reduce(a)
    else:
        dist.broadcast(a, 0)


def differing_while_the_program_goes_on() -> None:
    a = torch.ones(3, device="cuda")
    dist.all_reduce(a)
    work = (
        dist.all_reduce(a, async_op=True)
        if dist.get_rank() == 0
        else dist.broadcast(a, 0, async_op=True)
    )
    work.wait()


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
globals()[sys.argv[1]]()
dist.destroy_process_group()
