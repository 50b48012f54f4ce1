"""Processes that fail or end while others need them, or start in a scope.

Each test is bounded in time by the processes that it waits for. Programs get a temporary folder of
their own, in which nothing may be left, as in shared memory.
"""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
from processes import free_port, run_program, run_python


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """A folder for temporary files, with a short name, because sockets are in it."""
    folder = tmp_path / "t"
    folder.mkdir()
    return folder


def assert_prints(
    done: subprocess.CompletedProcess[str], temporary: Path, expected: list[str]
) -> None:
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr[-4000:]
    # torch keeps a cache, and a worker that is killed leaves a folder of multiprocessing's.
    left = [
        each.name
        for each in temporary.iterdir()
        if not each.name.startswith(("torchinductor_", "pymp-"))
    ]
    assert done.returncode == 0 and left == []


RANKS = """
    import datetime, os, signal, sys, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.nn.parallel import DistributedDataParallel

    def all_reduce(x, loss):
        dist.all_reduce(x)

    def recv(x, loss):
        dist.recv(x, 1)

    def barrier(x, loss):
        dist.barrier()

    def objects(x, loss):
        dist.all_gather_object([None, None], "a")

    def backward(x, loss):
        loss.backward()

    def rank(number, port, how, wait):
        store = dist.TCPStore("127.0.0.1", port, 2, number == 0, datetime.timedelta(seconds=60))
        limit = datetime.timedelta(seconds=2 if how == "stay away" else 60)
        dist.init_process_group("nccl", store=store, rank=number, world_size=2, timeout=limit)
        torch.cuda.set_device(number % torch.cuda.device_count())
        x = torch.ones(1, 4, device="cuda")
        dist.all_reduce(x)
        loss = x.sum()
        if wait is backward:
            layer = torch.nn.Linear(4, 1).cuda()
            model = DistributedDataParallel(layer, device_ids=[torch.cuda.current_device()])
            loss = model(x).sum()
        if number:
            store.wait(["ready"])
            if how == "exit":
                os._exit(3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        store.set("ready", "")
        try:
            wait(x, loss)
        except dist.DistBackendError as error:
            print(how, wait.__name__, str(error).partition(" cannot end")[0], sep=", ", flush=True)
        os._exit(0)

    if __name__ == "__main__":
        forks = mp.get_context("fork")
        for number, case in enumerate(sys.argv[2:]):
            how, name = case.split(":")
            arguments = int(sys.argv[1].split(",")[number]), how, globals()[name]
            ranks = [forks.Process(target=rank, args=(number, *arguments)) for number in range(2)]
            for each in ranks:
                each.start()
            ranks[0].join(50)
            ranks[1].kill()
            ranks[1].join()
"""


@pytest.mark.sampled(8, of="long programs")
@pytest.mark.one_engine
def test_a_rank_that_ends_or_stays_away(target: str, tmp_path: Path, temporary: Path) -> None:
    """The waiting rank gets NCCL's error in time, with the collective and the rank."""
    failing = {
        "exit:all_reduce": "all_reduce",
        "exit:recv": "recv",
        "kill:barrier": "barrier",
        "kill:backward": "all_reduce",
        "stay away:objects": "all_gather",
    }
    two = f"{target}:2" if target.startswith("simulated") else target
    ports = ",".join(free_port() for _ in failing)
    done = run_program(
        tmp_path, RANKS, ports, *failing, options=["--target", two], TMPDIR=str(temporary)
    )
    where = "of the group 'default_pg' of 2 ranks"
    expected = [f"{case.replace(':', ', ')}, {name} {where}" for case, name in failing.items()]
    assert_prints(done, temporary, expected)


LOADER = """
    import os, signal, sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __init__(self, how):
            self.how = how

        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5 and self.how == "raise":
                raise ValueError("the fifth")
            if index == 5 and self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((1 << 16,), float(index))

    class Batch:
        def __init__(self, items):
            self.items = items

        def pin_memory(self):
            if self.items[0][0] == 4:
                raise ValueError("not this one")
            return self

    def attempt(how, **options):
        try:
            list(DataLoader(Data(how), batch_size=2, num_workers=2, timeout=60, **options))
        except (ValueError, RuntimeError) as error:
            line = str(error).splitlines()[0]
            print(type(error).__name__, line.partition(" (")[0])

    if __name__ == "__main__":
        before = set(os.listdir("/dev/shm")) if os.path.exists("/dev/shm") else set()
        for method in ("fork", "spawn"):
            attempt("raise", multiprocessing_context=method)
        attempt("kill", pin_memory=True)
        attempt("", collate_fn=Batch, pin_memory=True)
        print(torch.ones(2, device="cuda").sum().item())
        left = set(os.listdir("/dev/shm")) - before if before else set()
        print([name for name in left if name.startswith(f"torch_{os.getpid()}")])
"""


@pytest.mark.sampled(2, of="faults of processes")
@pytest.mark.one_engine
def test_a_loader_whose_worker_raises_or_is_killed(
    target: str, tmp_path: Path, temporary: Path
) -> None:
    done = run_program(tmp_path, LOADER, options=["--target", target], TMPDIR=str(temporary))
    raised = "ValueError Caught ValueError in DataLoader worker process 0."
    expected = [
        *[raised, raised],
        "RuntimeError DataLoader worker",
        "ValueError Caught ValueError in pin memory thread for device 0.",
        *["2.0", "[]"],
    ]
    assert_prints(done, temporary, expected)


CHILDREN = """
    import multiprocessing, subprocess, sys, threading
    import torch, torchdevice

    def answer():
        return f"{torch.cuda.is_available()} {torchdevice.current() is not None}"

    def put(answers):
        answers.put(answer())

    def ask(method):
        if method == "subprocess":
            code = "import program; print(program.answer())"
            return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout[:-1]
        context = multiprocessing.get_context(method)
        answers = context.Queue()
        child = context.Process(target=put, args=(answers,))
        child.start()
        found = answers.get(timeout=60)
        child.join()
        return found

    def ask_from_a_thread(method):
        found = []
        thread = threading.Thread(target=lambda: found.append(ask(method)))
        thread.start()
        thread.join()
        return found[0]

    if __name__ == "__main__":
        way, method = sys.argv[1:]
        if way == "enable":
            torchdevice.enable("simulated:cuda", propagate=True)
        else:
            scope = torchdevice.simulate()
            scope.__enter__()
        torch.ones(1)
        print("within", ask_from_a_thread(method), answer())
        torchdevice.disable() if way == "enable" else scope.__exit__(None, None, None)
        print("after", ask(method), answer())
"""


@pytest.mark.sampled(2, of="faults of processes")
@pytest.mark.one_engine
@pytest.mark.parametrize("way", ["with", "enable"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "subprocess"])
def test_a_child_of_a_process_in_a_scope(
    way: str, method: str, tmp_path: Path, temporary: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(CHILDREN))
    done = run_python(
        str(program), way, method, cwd=tmp_path, TMPDIR=str(temporary), TORCHDEVICE=""
    )
    follows = way == "enable" or method == "fork"
    later = follows and method == "forkserver"  # its children have what the server began with
    expected = [f"within {follows} {follows} True True", f"after {later} {later} False False"]
    assert_prints(done, temporary, expected)
