"""Training on several simulated devices, in one process and in several."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from processes import free_port, run_program

import torchdevice


def test_model_parallel_training_is_identical_to_the_cpu(devices: torchdevice.Scope) -> None:
    def train(first: str, second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        x, y = torch.randn(5, 6), torch.randint(3, (5,))
        one.to(first), two.to(second)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = one(x.to(first)).relu().to(second)
            torch.nn.functional.cross_entropy(two(hidden), y.to(second)).backward()
            optimizer.step()
        assert one.weight.grad is not None and two.weight.grad is not None
        assert str(one.weight.grad.device) == first and str(two.weight.grad.device) == second
        return [p.detach().cpu() for p in (*one.parameters(), *two.parameters())]

    expected = train("cpu", "cpu")
    assert all(torch.equal(a, b) for a, b in zip(expected, train("cuda:0", "cuda:1"), strict=True))


def test_threads_train_on_devices_of_their_own(devices: torchdevice.Scope) -> None:
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        torch.cuda.set_device(index)
        weight = torch.full((3,), float(index + 1), device="cuda", requires_grad=True)
        for _ in range(20):
            (weight * weight).sum().backward()
        assert weight.grad is not None
        results[index] = weight.grad

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: (g.get_device(), g.tolist()) for i, g in results.items()} == {
        0: (0, [40.0] * 3),
        1: (1, [80.0] * 3),
    }


class TestDataParallel:
    def test_it_runs_a_replica_on_each_device(self, devices: torchdevice.Scope) -> None:
        class Seen(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.norm = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(
                    (
                        len(x),
                        x.get_device(),
                        self.layer.weight.get_device(),
                        torch.cuda.current_device(),
                    )
                )
                return self.norm(self.layer(x))

        seen: list[tuple[int, ...]] = []
        plain = Seen()
        parallel, x = torch.nn.DataParallel(copy.deepcopy(plain)).cuda(), torch.randn(10, 8)
        result = parallel(x.cuda())
        assert sorted(seen) == [(5, 0, 0, 0), (5, 1, 1, 1)] and result.get_device() == 0
        result.square().sum().backward()
        expected = torch.cat([copy.deepcopy(plain)(part) for part in x.chunk(2)])
        assert torch.equal(result.cpu(), expected)
        torch.cat([plain(part) for part in x.chunk(2)]).square().sum().backward()
        for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-5)

    def test_an_error_names_the_replica(self, devices: torchdevice.Scope) -> None:
        class Failing(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.get_device() == 1:
                    raise ValueError("no")
                return x

        with pytest.raises(ValueError, match="in replica 1 on device 1"):
            torch.nn.DataParallel(Failing())(torch.ones(4, 2, device="cuda"))


def test_a_reducer_gets_page_locked_memory(tmp_path: Path) -> None:
    program = """
        import sys, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            model = DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0], **options)
            for _ in range(2):
                model(torch.ones(1, 2, device="cuda")).sum().backward()
            print(model.module.weight.grad.tolist())
        dist.destroy_process_group()
        with torch._C.DisableTorchFunction():
            print(torch.ones(1).is_pinned())
    """
    done = run_program(tmp_path, program, str(tmp_path), options=["--target", "simulated:cuda"])
    assert done.stdout.split("\n")[:3] == ["[[2.0, 2.0], [2.0, 2.0]]"] * 2 + ["False"], done.stderr[
        -2000:
    ]


def test_collectives_between_processes(tmp_path: Path) -> None:
    program = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp

    def worker(rank):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=2)
        x = torch.full((2,), float(rank), device="cuda")
        gathered = [torch.empty(2, device="cuda") for _ in range(2)]
        dist.all_gather(gathered, x)
        flat = torch.empty(4, device="cuda")
        dist.all_gather_into_tensor(flat, x)
        part = torch.empty(1, device="cuda")
        dist.reduce_scatter_tensor(part, x + 1)
        swapped = torch.empty(2, device="cuda")
        dist.all_to_all_single(swapped, x)
        dist.broadcast(x, 1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if rank == 0:
            dist.send(torch.tensor([7.0], device="cuda"), 1)
        else:
            received = torch.empty(1, device="cuda")
            dist.recv(received, 0)
            print([t.tolist() for t in gathered], flat.tolist(), part.tolist(), swapped.tolist(), x.tolist(),
                  received.item(), x.device, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(worker, nprocs=2)
    """
    result = run_program(
        tmp_path, program, options=["--target", "simulated:cuda:2"], MASTER_PORT=free_port()
    )
    expected = (
        "[[0.0, 0.0], [1.0, 1.0]] [0.0, 0.0, 1.0, 1.0] [3.0] [0.0, 1.0] [2.0, 2.0] 7.0 cuda:1"
    )
    assert expected in result.stdout.splitlines(), (result.stdout, result.stderr[-2000:])
