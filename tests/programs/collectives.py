"""An NCCL program that compares every collective with its definition. torchrun starts it.

The arguments are the backend, and ``without-float8`` for a device that lacks these dtypes.
"""

import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.distributed.tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local = rank % torch.cuda.device_count()
device = torch.device("cuda", local)
if sys.argv[1] == "mesh":  # which chooses the device
    init_device_mesh("cuda", (size,))
    assert torch.cuda.current_device() == local
else:
    torch.cuda.set_device(device)
assert (
    dist.get_default_backend_for_device("cuda") == "nccl"
    and dist.get_default_backend_for_device("cpu") == "gloo"
)
assert dist.get_default_backend_for_device(device) == ("gloo" if device.type == "cpu" else "nccl")

if sys.argv[1] == "nccl":
    dist.init_process_group("nccl", device_id=device)
elif sys.argv[1] != "mesh":
    dist.init_process_group(sys.argv[1])


def of(rank, *shape, dtype=torch.float32):
    """Return the tensor of a rank, on the CPU."""
    return (
        torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 10 * rank
    ).to(dtype)


def mine(*shape, dtype=torch.float32):
    return of(rank, *shape, dtype=dtype).cuda()


def all_of(*shape, dtype=torch.float32):
    return [of(other, *shape, dtype=dtype) for other in range(size)]


def total(*shape):
    return sum(all_of(*shape))


def same(found, expected):
    assert torch.equal(found.cpu(), expected), (found, expected)


def empty(*shape):
    return torch.empty(shape, device="cuda")


def name():
    assert dist.get_backend() == "nccl"
    assert dist.distributed_c10d._get_default_group().name() == "nccl"


def all_reduce():
    tensor = mine(3, 4)
    dist.all_reduce(tensor)
    same(tensor, total(3, 4))


def all_reduce_by_every_operation():
    each = torch.stack(all_of(3))
    expected = {
        dist.ReduceOp.AVG: each.mean(0),
        dist.ReduceOp.MAX: each.amax(0),
        dist.ReduceOp.MIN: each.amin(0),
        dist.ReduceOp.PRODUCT: each.prod(0),
        dist._make_nccl_premul_sum(0.5): (each * 0.5).sum(0),
    }
    for operation, result in expected.items():
        tensor = mine(3)
        dist.all_reduce(tensor, op=operation)
        same(tensor, result)


def all_reduce_of_every_dtype():
    for dtype in (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    ):
        tensor = mine(3, dtype=dtype)
        dist.all_reduce(tensor)
        same(tensor.float(), total(3))
    flags = torch.tensor([False, rank == 0], device="cuda")
    dist.all_reduce(flags)
    same(flags, torch.tensor([False, True]))
    number = torch.complex(mine(3), mine(3))
    dist.all_reduce(number)
    same(number.imag, total(3))


def all_reduce_later():
    tensor = mine(3)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    same(tensor, total(3))


def coalesced():
    first, second = mine(3), mine(4)
    with dist._coalescing_manager(device=device):
        dist.all_reduce(first)
        dist.all_reduce(second)
    same(second, total(4))
    gathered = empty(3 * size), empty(4 * size)
    with dist._coalescing_manager(device=device, async_ops=True) as works:
        dist.all_gather_into_tensor(gathered[0], mine(3))
        dist.all_gather_into_tensor(gathered[1], mine(4))
    works.wait()
    same(gathered[1], torch.cat(all_of(4)))


def all_gather_into_any_shape():
    for shape, outputs in {
        (3, 4): [(size * 12,), (size * 3, 4), (size, 3, 4)],
        (): [(size,), (size, 1)],
        (2, 0): [(size * 2, 0)],
    }.items():
        for output in outputs:
            gathered = empty(*output)
            dist.all_gather_into_tensor(gathered, mine(*shape))
            same(gathered.flatten(), torch.stack(all_of(*shape)).flatten())


def all_gather_refuses():
    for output, kind in ((empty(size * 3 + 1), ValueError), (empty(size * 3).half(), TypeError)):
        try:
            dist.all_gather_into_tensor(output, mine(3))
        except kind as error:
            assert "output tensor" in str(error), error
        else:
            raise AssertionError("nothing was raised")


def contiguous_tensors_only():
    for tensor in (mine(3, 4).t(), mine(3, 4)[:, :2]):
        try:
            dist.all_reduce(tensor)
        except ValueError as error:
            assert str(error) == "Tensors must be contiguous", error
        else:
            raise AssertionError("nothing was raised")
    images = mine(2, 3, 4, 5).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    same(images, total(2, 3, 4, 5))


def all_gather_to_a_list():
    for sizes in ([3] * size, list(range(1, size + 1))):
        gathered = [empty(length) for length in sizes]
        dist.all_gather(gathered, mine(sizes[rank]))
        for other, tensor in enumerate(gathered):
            same(tensor, of(other, sizes[other]))


def all_gather_of_bytes_and_bools():
    float8 = [] if "without-float8" in sys.argv else [torch.float8_e4m3fn]
    for dtype in (torch.bool, torch.complex64, *float8):
        gathered = torch.empty(size * 3, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(gathered, mine(3, dtype=dtype))
        same(gathered.to(torch.complex64), torch.cat(all_of(3, dtype=dtype)).to(torch.complex64))


def reduce_scatter_of_any_shape():
    for shape, output in {
        (size * 3, 4): (3, 4),
        (size, 3, 4): (3, 4),
        (size * 12,): (3, 4),
        (size,): (),
    }.items():
        for operation, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, size)):
            scattered = empty(*output)
            dist.reduce_scatter_tensor(scattered, mine(*shape), op=operation)
            same(scattered.flatten(), (total(*shape) / divisor).flatten().chunk(size)[rank])


def reduce_scatter_of_a_list():
    scattered = empty(3, 4)
    dist.reduce_scatter(scattered, list(mine(size * 3, 4).chunk(size)))
    same(scattered, total(size * 3, 4).chunk(size)[rank])


def all_to_all():
    expected = [part.chunk(size)[rank] for part in all_of(size * 2)]
    exchanged = empty(size * 2)
    dist.all_to_all_single(exchanged, mine(size * 2))
    same(exchanged, torch.cat(expected))
    parts = [empty(2) for _ in range(size)]
    dist.all_to_all(parts, list(mine(size * 2).chunk(size)))
    same(torch.cat(parts), torch.cat(expected))


def all_to_all_of_different_sizes():
    sent = list(range(1, size + 1))
    exchanged = empty((rank + 1) * size, 2)
    dist.all_to_all_single(exchanged, mine(sum(sent), 2), [rank + 1] * size, sent)
    same(exchanged, torch.cat([each.split(sent)[rank] for each in all_of(sum(sent), 2)]))


def from_and_to_one():
    tensor = mine(3)
    dist.broadcast(tensor, src=1)
    same(tensor, of(1, 3))
    tensor = mine(3)
    dist.reduce(tensor, dst=0)
    same(tensor, total(3) if rank == 0 else of(rank, 3))
    gathered = [empty(3) for _ in range(size)] if rank == 0 else None
    dist.gather(mine(3), gathered, dst=0)
    if gathered is not None:
        same(torch.stack(gathered), torch.stack(all_of(3)))
    scattered = empty(3)
    dist.scatter(scattered, [each.cuda() for each in all_of(3)] if rank == 0 else None, src=0)
    same(scattered, of(rank, 3))


def point_to_point():
    left, right = (rank - 1) % size, (rank + 1) % size
    received = empty(3)
    works = [dist.isend(mine(3), right), dist.irecv(received, left)]
    for work in works:
        work.wait()
    same(received, of(left, 3))
    received = empty(3)
    pairs = [dist.P2POp(dist.isend, mine(3), right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    same(received, of(left, 3))
    if rank == 0:
        dist.send(mine(3), 1)
    elif rank == 1:
        dist.recv(received, 0)
        same(received, of(0, 3))


def objects():
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert [each["rank"] for each in gathered] == list(range(size))
    shared = [rank]
    dist.broadcast_object_list(shared, src=0, device=device)
    assert shared == [0]
    scattered = [None]
    dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, src=0)
    assert scattered == [rank]


def groups():
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = mine(3)
        dist.all_reduce(tensor, group=pair)
        same(tensor, of(0, 3) + of(1, 3))
        assert dist.get_backend(pair) == "nccl"
    on_cpu = dist.new_group(backend="gloo")
    tensor = of(rank, 3)
    dist.all_reduce(tensor, group=on_cpu)
    same(tensor, total(3))
    assert dist.get_backend(on_cpu) == "gloo"
    dist.monitored_barrier(on_cpu)
    dist.barrier()
    dist.barrier(device_ids=[local])


def meshes():
    mesh = init_device_mesh("cuda", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.device_type == "cuda"
    tensor = mine(3)
    dist.all_reduce(tensor, group=mesh["tp"].get_group())
    same(tensor, of(rank - rank % 2, 3) + of(rank - rank % 2 + 1, 3))


def distributed_tensors():
    mesh = init_device_mesh("cuda", (size,))
    whole = of(0, 4 * size, 4)
    sharded = dtensor.distribute_tensor(whole.cuda(), mesh, [dtensor.Shard(0)])
    same(sharded.full_tensor(), whole)
    same((sharded @ sharded.T).full_tensor(), whole @ whole.T)
    same(sharded.redistribute(mesh, [dtensor.Replicate()]).to_local(), whole)


def distributed_tensors_on_some_ranks():
    mesh = dtensor.DeviceMesh("cuda", [0])
    sharded = dtensor.distribute_tensor(mine(4, 4), mesh, [dtensor.Shard(0)])
    assert torch.equal(sharded, sharded)
    if torch.__version__ >= "2.11":  # torch 2.10 fails in its own choice of a way to redistribute
        assert (sharded @ sharded).to_local().numel() == (16 if rank == 0 else 0)
    leaf = torch.nn.Parameter(sharded.detach())
    (leaf * 2).sum().backward()
    assert leaf.grad.to_local().numel() == (16 if rank == 0 else 0)


def random_distributed_tensors():
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(0)
    for draw in (
        lambda: dtensor.zeros(
            4 * size, 4, device_mesh=mesh, placements=[dtensor.Shard(0)]
        ).normal_(),
        lambda: dtensor.randn(4 * size, 4, device_mesh=mesh, placements=[dtensor.Shard(0)]),
        lambda: torch.nn.init.uniform_(
            dtensor.zeros(4 * size, 4, device_mesh=mesh, placements=[dtensor.Shard(0)])
        ),
    ):
        drawn = draw().full_tensor()
        assert drawn.unique().numel() == drawn.numel(), "two shards got the same numbers"
    copy = dtensor.rand(4, 4, device_mesh=mesh, placements=[dtensor.Replicate()]).to_local()
    copies = [torch.empty_like(copy) for _ in range(size)]
    dist.all_gather(copies, copy)
    assert all(torch.equal(each, copy) for each in copies), "replicas got different numbers"
    following = torch.rand(1, device="cuda")
    others = empty(size)
    dist.all_gather_into_tensor(others, following)
    assert torch.equal(others, following.expand(size)), "the generators are not in the same state"


def functional_collectives():
    group = dist.group.WORLD
    same(functional.all_reduce(mine(3), "sum", group) + 0, total(3))
    same(functional.all_gather_tensor(mine(3, 4), 0, group) + 0, torch.cat(all_of(3, 4)))
    same(
        functional.reduce_scatter_tensor(mine(size), "sum", 0, group) + 0,
        total(size)[rank : rank + 1],
    )
    leaf = mine(3).requires_grad_()
    differentiable.all_reduce(leaf).sum().backward()
    same(leaf.grad, torch.full((3,), float(size)))


CASES = [
    value for value in list(globals().values()) if getattr(value, "__module__", "") == "__main__"
]
CASES = [case for case in CASES if case not in (of, mine, all_of, total, same, empty)]

failed = False
for case in CASES:
    try:
        case()
    except Exception as error:
        failed = True
        traceback.print_exc()
        print(f"rank {rank}: {case.__name__}: {type(error).__name__}: {error}", flush=True)
print(f"rank {rank}: {len(CASES)} cases", flush=True)
dist.destroy_process_group()
sys.exit(failed)
