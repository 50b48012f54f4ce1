"""An NCCL program that compares every collective with its definition, for edge-case sizes.

torchrun starts it. The argument is the backend.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group(sys.argv[1])
warnings.simplefilter("ignore")  # of names that torch deprecates

SHAPES = {
    "empty": (0,),
    "no rows": (0, 3),
    "no columns": (2, 0),
    "one": (1,),
    "a number": (),
    "many": (2, 3),
}

# How many elements each rank has where these differ: none, one, several.
UNEVEN = [0, 1, 3][:size]


def of(rank, shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 10 * rank).cuda()


def each(shape):
    return [of(other, shape) for other in range(size)]


def same(found, expected):
    assert found.shape == expected.shape and torch.equal(found, expected), (found, expected)


def same_all(found, expected):
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def rows(shape):
    """Return the shape of all ranks' parts in sequence. A number has no row, and becomes one."""
    first, *others = shape or (1,)
    return (first * size, *others)


def joined(tensors, shape):
    return torch.cat([each.reshape(shape or (1,)) for each in tensors])


def all_reduce(shape, do):
    tensor = of(rank, shape)
    do(dist.all_reduce, tensor)
    same(tensor, sum(each(shape)))


def reduce(shape, do):
    tensor = of(rank, shape)
    do(dist.reduce, tensor, size - 1)
    same(tensor, sum(each(shape)) if rank == size - 1 else of(rank, shape))


def broadcast(shape, do):
    tensor = of(rank, shape)
    do(dist.broadcast, tensor, size - 1)
    same(tensor, of(size - 1, shape))


def all_gather(shape, do):
    found = [torch.empty(shape, device="cuda") for _ in range(size)]
    do(dist.all_gather, found, of(rank, shape))
    same_all(found, each(shape))


def all_gather_of_several_sizes(shape, do):
    found = [torch.empty(number, *shape, device="cuda") for number in UNEVEN]
    do(dist.all_gather, found, of(rank, (UNEVEN[rank], *shape)))
    same_all(found, [of(other, (number, *shape)) for other, number in enumerate(UNEVEN)])


def all_gather_into_tensor(shape, do):
    found = torch.empty(rows(shape), device="cuda")
    do(dist.all_gather_into_tensor, found, of(rank, shape))
    same(found, joined(each(shape), shape))


def gather(shape, do):
    found = [torch.empty(shape, device="cuda") for _ in range(size)] if rank == 0 else None
    do(dist.gather, of(rank, shape), found, 0)
    if rank == 0:
        same_all(found, each(shape))


def scatter(shape, do):
    found = torch.empty(shape, device="cuda")
    do(dist.scatter, found, each(shape) if rank == 0 else None, 0)
    same(found, of(rank, shape))


def reduce_scatter(shape, do):
    found = torch.empty(shape, device="cuda")
    do(dist.reduce_scatter, found, [of(rank + other, shape) for other in range(size)])
    same(found, sum(of(other + rank, shape) for other in range(size)))


def reduce_scatter_of_several_sizes(shape, do):
    shapes = [(number, *shape) for number in UNEVEN]
    found = torch.empty(shapes[rank], device="cuda")
    do(dist.reduce_scatter, found, [of(rank, each) for each in shapes])
    same(found, sum(of(other, shapes[rank]) for other in range(size)))


def reduce_scatter_tensor(shape, do):
    found = torch.empty(shape, device="cuda")
    do(
        dist.reduce_scatter_tensor,
        found,
        joined([of(rank + other, shape) for other in range(size)], shape),
    )
    same(found, sum(of(other + rank, shape) for other in range(size)))


def all_to_all(shape, do):
    found = [torch.empty(shape, device="cuda") for _ in range(size)]
    do(dist.all_to_all, found, [of(rank + other, shape) for other in range(size)])
    same_all(found, [of(other + rank, shape) for other in range(size)])


def all_to_all_of_several_sizes(shape, do):
    """Each rank sends to rank r as much as r has of rows."""
    mine = (UNEVEN[rank], *shape)
    found = [torch.empty(mine, device="cuda") for _ in range(size)]
    do(dist.all_to_all, found, [of(rank, (number, *shape)) for number in UNEVEN])
    same_all(found, [of(other, mine) for other in range(size)])


def all_to_all_single(shape, do):
    found = torch.empty(rows(shape), device="cuda")
    do(
        dist.all_to_all_single,
        found,
        joined([of(rank + other, shape) for other in range(size)], shape),
    )
    same(found, joined([of(other + rank, shape) for other in range(size)], shape))


def all_to_all_single_of_several_sizes(shape, do):
    given = torch.cat([of(rank, (number, *shape)) for number in UNEVEN])
    found = torch.empty((UNEVEN[rank] * size, *shape), device="cuda")
    do(dist.all_to_all_single, found, given, [UNEVEN[rank]] * size, UNEVEN)
    same(found, torch.cat([of(other, (UNEVEN[rank], *shape)) for other in range(size)]))


def send(shape, do):
    found = torch.empty(shape, device="cuda")
    if rank == 0:
        dist.send(of(0, shape), 1)
    elif rank == 1:
        dist.recv(found, 0)
        same(found, of(0, shape))


def in_a_batch(shape, do):
    found = torch.empty(shape, device="cuda")
    given = dist.P2POp(dist.isend, of(rank, shape), (rank + 1) % size)
    taken = dist.P2POp(dist.irecv, found, (rank - 1) % size)
    for work in dist.batch_isend_irecv([given, taken]):
        work.wait()
    same(found, of((rank - 1) % size, shape))


def functional_forms(shape, do):
    group = dist.group.WORLD
    same(functional.all_reduce(of(rank, shape), "sum", group) + 0, sum(each(shape)))
    if not shape:
        return
    same(functional.all_gather_tensor(of(rank, shape), 0, group) + 0, joined(each(shape), shape))
    parts = joined([of(rank + other, shape) for other in range(size)], shape)
    same(
        functional.reduce_scatter_tensor(parts, "sum", 0, group) + 0,
        sum(of(o + rank, shape) for o in range(size)),
    )
    given, taken = UNEVEN, [UNEVEN[rank]] * size
    sent = torch.cat([of(rank, (number, *shape)) for number in given])
    found = functional.all_to_all_single(sent, taken, given, group) + 0
    same(found, torch.cat([of(other, (UNEVEN[rank], *shape)) for other in range(size)]))


def in_pieces(shape, do):
    """NCCL refuses what does not lie in one piece, on every rank."""
    if len(shape) < 2 or not torch.Size(shape).numel():
        return
    tensor = of(rank, shape).t()
    for call in (
        lambda: do(dist.all_reduce, tensor),
        lambda: do(dist.broadcast, tensor, 0),
        lambda: do(
            dist.all_gather_into_tensor, torch.empty(rows(tensor.shape), device="cuda"), tensor
        ),
    ):
        try:
            call()
        except ValueError as error:
            assert "Tensors must be contiguous" in str(error), error
        else:
            raise AssertionError("NCCL refuses it")


def now(collective, *args):
    collective(*args)


def later(collective, *args):
    collective(*args, async_op=True).wait()


CHECKS = [
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    all_gather_of_several_sizes,
    all_gather_into_tensor,
    gather,
]
CHECKS += [
    scatter,
    reduce_scatter,
    reduce_scatter_of_several_sizes,
    reduce_scatter_tensor,
    all_to_all,
    send,
]
CHECKS += [
    all_to_all_of_several_sizes,
    all_to_all_single,
    all_to_all_single_of_several_sizes,
    in_a_batch,
]
CHECKS += [functional_forms, in_pieces]

failed = []
for check in CHECKS:
    for kind, shape in SHAPES.items():
        for do in (now, later):
            try:
                check(shape, do)
            except Exception as error:
                failed.append(
                    f"rank {rank}: {check.__name__} of {kind}, {do.__name__}: "
                    f"{type(error).__name__}: {error}"
                )
            dist.barrier()
print(*failed, sep="\n")
print(f"rank {rank} is done")
dist.destroy_process_group()
sys.exit(bool(failed))
