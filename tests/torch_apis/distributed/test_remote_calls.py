"""``torch.distributed.rpc`` between two workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import free_port, run_fresh_python, run_program

pytestmark = pytest.mark.one_engine

WORKERS = """
    import os
    import sys

    import torch
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as mp


    def doubled(x):
        return (x.to("cuda") * torch.full((3,), 2.0, device="cuda")).cpu()


    def where(x):
        return str(x.device)


    def more(x, by=1):
        return x + by


    @rpc.functions.async_execution
    def later(x):
        return rpc.rpc_async("w0", doubled, args=(x,))


    def work(rank, port, maps):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
        if maps and rank == 0:
            options.set_device_map("w1", {"cuda:0": "cuda:1"})
            options.set_devices(["cuda:0", "cuda:1"])
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        if rank == 0:
            ask()
        rpc.shutdown()


    def ask():
        x, here = torch.ones(3), torch.ones(3, device="cuda")
        asked = {
            "sync": lambda: rpc.rpc_sync("w1", doubled, args=(x,)),
            "async": lambda: rpc.rpc_async("w1", doubled, args=(x,)).wait(),
            "remote": lambda: rpc.remote("w1", doubled, args=(x,)).to_here(),
            "itself": lambda: rpc.rpc_sync("w0", doubled, args=(x,)),
            "chained": lambda: rpc.rpc_sync("w1", later, args=(x,)),
            "builtin": lambda: rpc.rpc_sync("w1", torch.full, args=((3,), 2.0)),
            "where": lambda: rpc.rpc_sync("w1", where, args=(here,)),
            "there and back": lambda: rpc.rpc_sync("w1", more, args=(here,), kwargs={"by": here}),
            "rref": lambda: rpc.remote("w1", more, args=(here,)).to_here(),
            "function of torch": lambda: rpc.rpc_sync("w1", torch.add, args=(here, here)),
            "other device": lambda: rpc.rpc_sync("w1", where, args=(here.to("cuda:1"),)),
        }
        for name, function in asked.items():
            try:
                print(f"{name}: {function()}", flush=True)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)


    if __name__ == "__main__":
        mp.spawn(work, args=(sys.argv[1], sys.argv[2:] == ["maps"]), nprocs=2)
"""

TWO = "tensor([2., 2., 2.]{})"

ONLY_CPU = (
    "RuntimeError: TensorPipe RPC backend only supports CPU tensors by default, please move your "
    "tensors to CPU before sending them over RPC, or call `set_device_map` on "
    "`TensorPipeRpcBackendOptions` to explicitly configure device mapping. Request device mapping "
    "is not available for destination w1"
)


@pytest.mark.parametrize("maps", ["maps", ""])
@pytest.mark.parametrize("on", ["cpu", "simulated:cuda"])
def test_what_one_worker_asks_of_another(on: str, maps: str, tmp_path: Path) -> None:
    options = ["--target", on, "--devices", "2"]
    done = run_program(tmp_path, WORKERS, str(free_port()), maps, options=options)
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    for name in ("sync", "async", "remote", "itself", "chained", "builtin"):
        assert found.pop(name) == TWO.format("")
    if on == "cpu":
        expected = {"where": "cpu", "other device": "cpu"}
        device = ""
    elif maps:
        expected = {"where": "cuda:1"}
        expected["other device"] = (
            f"{ONLY_CPU} for device cuda:1 but received a tensor on that device."
        )
        device = ", device='cuda:0'"
    else:
        refused = f"{ONLY_CPU}, but found tensor on device: cuda:"
        assert found == dict.fromkeys(found, f"{refused}0") | {"other device": f"{refused}1"}
        return
    for name in ("there and back", "rref", "function of torch"):
        expected[name] = TWO.format(device)
    assert found == expected


def test_a_worker_that_has_outlived_its_scope(tmp_path: Path) -> None:
    program = f"""
        import torch
        import torch.distributed.rpc as rpc
        import torchdevice

        table = dict(rpc.internal._internal_rpc_pickler._dispatch_table)
        functions = rpc.internal._run_function, rpc.internal.serialize, rpc.TensorPipeAgent
        with torchdevice.simulate(devices=2):
            options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:{free_port()}")
            rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
            assert rpc.rpc_sync("w0", torch.cuda.device_count) == 2
            assert (rpc.internal._run_function, rpc.internal.serialize) == functions[:2]
        assert rpc.rpc_sync("w0", torch.cuda.device_count) == 0
        assert rpc.rpc_sync("w0", torch.add, args=(torch.ones(1), 1)) == 2
        rpc.shutdown()
        assert rpc.internal._internal_rpc_pickler._dispatch_table[torch.Tensor] == table[torch.Tensor]
        assert rpc.TensorPipeAgent is functions[2]
        print("as before")
    """
    path = tmp_path / "program.py"
    path.write_text("\n".join(line[8:] for line in program.splitlines()))
    done = run_fresh_python(str(path))
    assert done.stdout == "as before\n", done.stderr
