"""An NCCL program, compiled and distributed as its command line asks. It saves its results.

With ``PLAIN`` in the environment it is the same program for the CPU and gloo.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

warnings.simplefilter("ignore")
plain = "PLAIN" in os.environ
kind = "cpu" if plain else "cuda"
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cpu") if plain else torch.device("cuda", rank % torch.cuda.device_count())
if not plain:
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if plain else "nccl")
torch.manual_seed(0)
given = torch.randn(4 * size, 8).chunk(size)[rank].to(device)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)


def mesh():
    return init_device_mesh(kind, (size,))


def trained(model):
    losses = []
    for _ in range(2):
        loss = model(given).square().mean()
        loss.backward()
        losses.append(loss.detach())
    gradients = [each.grad for each in model.parameters()]
    return losses, [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]


def ddp_compiled(backend):
    return trained(torch.compile(DistributedDataParallel(model()), backend=backend))


def compiled_in_ddp(backend):
    return trained(DistributedDataParallel(torch.compile(model(), backend=backend)))


def fsdp(backend):
    sharded, devices = model(), mesh()
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=devices)
    return trained(torch.compile(sharded, backend=backend))


def tensor_parallel(backend):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return trained(torch.compile(parallelize_module(model(), mesh(), plan), backend=backend))


def dtensor(backend):
    devices = mesh()

    def whole(x):
        divided = DTensor.from_local(x, devices, [Shard(0)])
        return (divided * 2).redistribute(devices, [Replicate()]).to_local()

    x = given.clone().requires_grad_()
    result = torch.compile(whole, backend=backend, fullgraph=True)(x)
    result.sum().backward()
    return result.detach(), x.grad


def functional_collectives(backend):
    def several(x):
        gathered = functional.all_gather_tensor(x, 0, dist.group.WORLD)
        return (
            functional.all_reduce(x * 2, "sum", dist.group.WORLD).sin(),
            gathered + 1,
            functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) * 2,
            functional.all_to_all_single(x, None, None, dist.group.WORLD) + 1,
        )

    return torch.compile(several, backend=backend, fullgraph=True)(given)


def calls_of_dist(backend):
    def several(x):
        reduced = x * 2
        work = dist.all_reduce(reduced, async_op=True)
        gathered, part = x.new_empty(x.shape[0] * size, *x.shape[1:]), torch.empty_like(x)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(part, gathered)
        work.wait()
        return reduced.sin(), gathered + 1, part + 1

    return torch.compile(several, backend=backend)(given)


def compiled_autograd(backend):
    with torch._dynamo.config.patch(compiled_autograd=True, optimize_ddp="python_reducer"):
        replicated = DistributedDataParallel(model())

        def step(x):
            loss = replicated(x).square().mean()
            loss.backward()
            return loss

        loss = torch.compile(step, backend=backend)(given)
    return loss.detach(), [each.grad for each in replicated.parameters()]


found = {}
for chosen in sys.argv[2:]:
    way, backend = chosen.split(":")
    torch._dynamo.reset()
    found[chosen] = [each.detach().cpu() for each in pytree.tree_leaves(globals()[way](backend))]
torch.save(found, f"{sys.argv[1]}.{rank}")
dist.destroy_process_group()
