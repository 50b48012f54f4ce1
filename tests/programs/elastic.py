"""An NCCL program with snapshots and one rank killed once. torchrun starts it."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, steps, dies_at = Path(sys.argv[1]), 6, 3
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)

torch.manual_seed(0)
data = torch.randn(steps, 8, 4)
model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device), device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
snapshot, killed = folder / "snapshot.pt", folder / "killed"
begin, losses = 0, []
if snapshot.exists():
    state = torch.load(snapshot, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin, losses = state["step"], state["losses"]
    print(f"rank {rank} of {size} goes on from step {begin}", flush=True)


def train():
    for step in range(begin, steps):
        if step == dies_at and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(data[step].chunk(size)[rank].to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1, "losses": losses}, folder / "new")
            os.replace(folder / "new", snapshot)
        dist.barrier()


try:
    train()
except RuntimeError as error:  # what gloo says when the other rank is gone
    print(f"rank {rank} of {size} stops: {error}", flush=True)
    os._exit(1)  # at once, so that both agents of torch count this failure
(folder / f"losses-{rank}").write_text(json.dumps(losses))
dist.destroy_process_group()
