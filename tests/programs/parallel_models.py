"""An NCCL program that trains in all of torch's parallel ways, compared with one process."""

import copy
import functools
import os
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as ring
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
torch.manual_seed(1)
inputs, targets = torch.randn(8 * size, 8), torch.randn(8 * size, 8)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def adam(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def alone():
    one = model()
    optimizer, losses = adam(one), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(one(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def trained(model, optimizer=None):
    """Return the losses of three steps, each the mean over all ranks."""
    optimizer, losses = optimizer or adam(model), []
    x, y = (each.chunk(size)[rank].cuda() for each in (inputs, targets))
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return torch.tensor(losses)


expected = alone()


def same(losses, tolerance=1e-5):
    assert torch.allclose(losses, expected, atol=tolerance), (losses, expected)


def ddp(model, **options):
    return DistributedDataParallel(model.cuda(), device_ids=[device.index], **options)


def data_parallel():
    for options in (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ):
        same(trained(ddp(model(), **options)))


def data_parallel_with_unused_parameters():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = model(), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    partly = ddp(Partly(), find_unused_parameters=True)
    same(trained(partly))
    assert partly.module.unused.weight.grad is None


def zero():
    parallel = ddp(model())
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    same(trained(parallel, optimizer))
    optimizer.consolidate_state_dict(0)


def synchronized_batch_norm():
    torch.manual_seed(2)
    plain = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.BatchNorm2d(2, momentum=None)
    )
    parallel = ddp(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)))
    for _ in range(2):
        images = torch.randn(4 * size, 1, 5, 5, requires_grad=True)
        part = images.detach().chunk(size)[rank].cuda().requires_grad_()
        found = parallel(part)
        found.square().mean().backward()
        whole = plain(images)
        whole.square().mean().backward()
        assert torch.allclose(found.cpu(), whole.chunk(size)[rank], atol=1e-5)
        assert torch.allclose(part.grad.cpu() / size, images.grad.chunk(size)[rank], atol=1e-5)
    for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-5)
    same_buffers(parallel.module, plain)
    assert torch.allclose(
        parallel.eval()(part).cpu(), plain.eval()(images).chunk(size)[rank], atol=1e-5
    )


def synchronized_batch_norm_of_unequal_parts():
    """Ranks have 0, 1, 2, ... rows of three dimensions, no weights, half precision."""
    torch.manual_seed(3)
    plain, sizes = nn.BatchNorm1d(3, affine=False), list(range(size))
    parallel = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).cuda()
    rows = torch.randn(sum(sizes), 3, 4).half().float().requires_grad_()
    part = rows.detach().split(sizes)[rank].cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        found = parallel(part)
    weights = torch.randn_like(rows)
    (found * weights.split(sizes)[rank].cuda()).sum().backward()
    whole = plain(rows)
    (whole * weights).sum().backward()
    assert torch.allclose(found.cpu(), whole.split(sizes)[rank], atol=1e-5)
    if sizes[rank]:  # else torch gives no gradient
        assert torch.allclose(part.grad.cpu(), rows.grad.split(sizes)[rank], atol=1e-5)
    same_buffers(parallel, plain)


def synchronized_batch_norm_in_a_group_of_one():
    group = [dist.new_group([each]) for each in range(size)][rank]
    images = torch.randn(4, 2, 5, 5)
    assert torch.equal(
        nn.SyncBatchNorm(2, process_group=group).cuda()(images.cuda()).cpu(),
        nn.BatchNorm2d(2)(images),
    )


def same_buffers(parallel, plain):
    for (name, one), other in zip(parallel.named_buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one.cpu(), other, atol=1e-5), name


def sharded():
    wrap = functools.partial(FullyShardedDataParallel, device_id=torch.cuda.current_device())
    same(trained(wrap(model().cuda())))
    same(
        trained(
            wrap(model(), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        )
    )
    same(trained(wrap(model(), cpu_offload=CPUOffload(offload_params=True))))
    half = wrap(
        model(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    same(trained(half), tolerance=0.05)
    half.clip_grad_norm_(1.0)


def sharded_state():
    whole = FullyShardedDataParallel(model().cuda(), device_id=device.index)
    for offload in (True, False):
        config = FullStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(whole, StateDictType.FULL_STATE_DICT, config):
            state = whole.state_dict()
        if rank == 0:
            assert torch.equal(state["0.weight"].cpu(), model()[0].weight)
    same(trained(whole))


def fully_sharded():
    sharded = model().cuda()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    same(trained(sharded))


def fully_sharded_from_meta():
    with torch.device("meta"):
        sharded = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    policy = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mp_policy=policy)
    sharded.to_empty(device="cuda")
    state = {name: value.cuda() for name, value in model().state_dict().items()}
    torch.distributed.checkpoint.state_dict.set_model_state_dict(
        sharded, state, options=StateDictOptions(full_state_dict=True)
    )
    same(trained(sharded), tolerance=0.05)
    nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)


def checkpoints():
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    one = model().cuda()
    fully_shard(one)
    optimizer = adam(one)
    trained(one, optimizer)
    state, of_optimizer = get_state_dict(one, optimizer)
    checkpoint.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder[0])
    checkpoint.async_save({"model": state}, checkpoint_id=f"{folder[0]}/later").result()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    before = get_model_state_dict(one, options=options)
    trained(one, optimizer)
    for parameter in one.parameters():
        parameter.data.zero_()
    state, of_optimizer = get_state_dict(one, optimizer)
    checkpoint.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder[0])
    set_state_dict(one, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    after = get_model_state_dict(one, options=options)
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )


def tensor_parallel():
    mesh = init_device_mesh("cuda", (size,))
    parallel = parallelize_module(
        model().cuda(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    found = parallel(inputs.cuda())
    assert torch.allclose(found.cpu(), model()(inputs), atol=1e-5)
    found.sum().backward()


def attention(query, key, value, is_causal):
    """Return the result of attention and the gradients."""
    given = [each.detach().clone().requires_grad_() for each in (query, key, value)]
    found = F.scaled_dot_product_attention(*given, is_causal=is_causal)
    found.square().sum().backward()
    return [found.detach(), *(each.grad for each in given)]


def context_parallel_attention():
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(4)
    whole = [torch.randn(2, 3, 8 * size, 4) for _ in range(3)]
    try:
        for rotation, balanced, is_causal, backend in [
            ("allgather", True, True, SDPBackend.FLASH_ATTENTION),
            ("alltoall", True, True, SDPBackend.EFFICIENT_ATTENTION),
            ("alltoall", False, False, SDPBackend.FLASH_ATTENTION),
        ]:
            set_rotate_method(rotation)
            ring._cp_options.enable_load_balance = balanced
            parts = [each.cuda() for each in whole]
            with (
                sdpa_kernel(backend),
                context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]),
            ):
                found = attention(*parts, is_causal)
                gathered = ring.context_parallel_unshard(mesh, found, [2] * 4)
            assert found[0].shape[2] == 8 and torch.equal(parts[0].cpu(), whole[0])
            for one, other in zip(gathered, attention(*whole, is_causal), strict=True):
                assert torch.allclose(one.cpu(), other, atol=1e-5)
    finally:
        set_rotate_method("allgather")
        ring._cp_options.enable_load_balance = True


def attention_of_distributed_tensors():
    """Each rank has some of the heads, or of the sequences."""
    mesh = init_device_mesh("cuda", (size,))
    torch.manual_seed(5)
    whole = [torch.randn(2 * size, 2 * size, 8, 4) for _ in range(3)]
    for dim, is_causal in ((0, True), (1, False)):
        divided = [distribute_tensor(each.cuda(), mesh, [Shard(dim)]) for each in whole]
        for one, other in zip(
            attention(*divided, is_causal), attention(*whole, is_causal), strict=True
        ):
            assert torch.allclose(one.full_tensor().cpu(), other, atol=1e-5)


def pipeline():
    whole = model()
    part = nn.Sequential(whole[0], whole[1]) if rank == 0 else whole[2]
    schedule = Schedule1F1B(
        PipelineStage(part.cuda(), rank, 2, device), n_microbatches=2, loss_fn=F.mse_loss
    )
    if rank == 0:
        schedule.step(inputs.cuda())
    else:
        losses = []
        schedule.step(target=targets.cuda(), losses=losses)
        assert abs(sum(losses).item() / 2 - expected[0].item()) < 1e-5


CASES = {
    case.__name__: case
    for case in (
        data_parallel, data_parallel_with_unused_parameters, zero, synchronized_batch_norm,
        synchronized_batch_norm_of_unequal_parts, synchronized_batch_norm_in_a_group_of_one, sharded, sharded_state,
        fully_sharded, fully_sharded_from_meta, checkpoints, tensor_parallel, context_parallel_attention,
        attention_of_distributed_tensors, pipeline,
    )
}  # fmt: skip

failed = False
for name in sys.argv[1:] or CASES:
    try:
        CASES[name]()
        sys.stdout.write(f"rank {rank}: {name} done\n")
    except Exception:
        failed = True
        traceback.print_exc()
        sys.stdout.write(f"rank {rank}: {name} failed\n")
    sys.stdout.flush()
dist.destroy_process_group()
sys.exit(failed)
