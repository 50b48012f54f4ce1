"""The messages among the ranks of a plan: shapes of a pipeline, and objects of the program.

The ranks are planned in processes of their own, which leave files for each other. Tensors have no
values in a plan, so a receiver could not read objects from the bytes that torch sends.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.torch_modules.distributed.process_groups import FAKE_RANKS, FakeRanks

ENDED = "ended-{}"
"""The name of the file that shows that the plan of a rank has ended."""

WAITS = "waits-{}"
"""The name of the file that shows that the plan of a rank waits for another one's."""

_LOOK = 0.05
"""Seconds between two looks for another plan's file."""

# As texts, nothing waits for them in a build without them.
_C10D: Any = dist.distributed_c10d if dist.is_available() else "torch.distributed.distributed_c10d"
_PIPELINE_STAGE = "torch.distributed.pipelining.stage:PipelineStage"


@replaces(_PIPELINE_STAGE, "_recv_meta", native_to="cuda", optional=True)
def _received_meta(context: Context, original: Any, self: Any, src_stage: int) -> Any:
    """``PipelineStage._recv_meta``: the other stages do not run in a plan.

    The next stage would tell the gradients of the outputs, which follow from the outputs. The stage
    before has left the shapes of its outputs where all ranks are planned.
    """
    ranks: FakeRanks | None = context.settings.get(FAKE_RANKS)
    if ranks is None:
        return original(self, src_stage)
    if src_stage < self.stage_index:
        path = _path(ranks, f"{src_stage}-{self.stage_index}")
        if path is None:
            _refuse(
                f"Stage {self.stage_index} of a pipeline gets the shapes of its inputs from stage "
                f"{src_stage}"
            )
        return _awaited(
            ranks,
            self.stage_index_to_group_rank[src_stage],
            lambda: path if os.path.exists(path) else None,
            f"Stage {src_stage} of the pipeline ended before it had the shapes of the inputs of "
            f"stage {self.stage_index}.",
        )
    from torch.distributed.pipelining import stage

    return stage._StageBackwardMeta(stage._derive_grad_metas(self._stage_meta.outputs))  # type: ignore[attr-defined]


@replaces(_PIPELINE_STAGE, "_send_meta", native_to="cuda", optional=True)
def _sent_meta(context: Context, original: Any, self: Any, meta: Any, dst_stage: int) -> None:
    """``PipelineStage._send_meta``: leave the shapes for the plan of the next stage."""
    ranks: FakeRanks | None = context.settings.get(FAKE_RANKS)
    if ranks is None:
        original(self, meta, dst_stage)
    elif dst_stage > self.stage_index:
        _leave(_path(ranks, f"{self.stage_index}-{dst_stage}"), meta)


@replaces(_C10D, "send_object_list", native_to="cuda", by_value=True)
def _send_object_list(
    context: Context,
    original: Any,
    object_list: Any,
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``send_object_list``: leave the objects for the plan of another rank."""
    ranks: FakeRanks | None = context.settings.get(FAKE_RANKS)
    if ranks is None:
        original(object_list, dst, group, device, group_dst, *args, **kwargs)
        return
    to = _rank_of(group, dst, group_dst)
    # By time, so that a pair's objects arrive in their order.
    _leave(_path(ranks, f"objects-{ranks.rank}-{to}-{time.monotonic_ns():020}"), list(object_list))


@replaces(_C10D, "recv_object_list", native_to="cuda", by_value=True)
def _recv_object_list(
    context: Context,
    original: Any,
    object_list: Any,
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    """``recv_object_list``: take the objects that the plan of another rank left.

    Raises:
        RuntimeError: No other rank is planned, or its plan has ended.
    """
    ranks: FakeRanks | None = context.settings.get(FAKE_RANKS)
    if ranks is None:
        received: int = original(object_list, src, group, device, group_src, *args, **kwargs)
        return received
    sender = _rank_of(group, src, group_src)
    if ranks.folder is None:
        _refuse(f"Rank {ranks.rank} gets objects from rank {sender}")
    prefix = f"objects-{sender}-{ranks.rank}-"
    folder = ranks.folder

    def first() -> str | None:
        names = [each for each in os.listdir(folder) if each.startswith(prefix)]
        return min((os.path.join(folder, each) for each in names), default=None)

    object_list[:] = _awaited(
        ranks,
        sender,
        first,
        f"Rank {sender} ended before it sent what rank {ranks.rank} waits for.",
        take=True,
    )
    return sender


def _rank_of(group: Any, rank: int | None, rank_in_group: int | None) -> int:
    """Return the other rank of a call, which is given in one of two ways.

    Raises:
        RuntimeError: It is not given. A receiver then takes what comes first, from any rank.
    """
    if rank is None and rank_in_group is None:
        raise RuntimeError("A plan of ranks needs the other rank: give src to recv_object_list")
    if rank is None:
        found: int = dist.get_global_rank(group or dist.group.WORLD, rank_in_group)  # type: ignore[arg-type]
        return found
    return rank


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(f"{what}, which is not planned. Plan all ranks by --rank all.")


def _path(ranks: FakeRanks, name: str) -> str | None:
    """Return the path of a file for another plan; None where there is no other."""
    return None if ranks.folder is None else os.path.join(ranks.folder, name)


def _leave(path: str | None, value: Any) -> None:
    """Leave a value for another plan, where there is one."""
    if path is None:
        return
    folder, name = os.path.split(path)
    begun = os.path.join(folder, f"begun-{name}")
    with open(begun, "wb") as file:
        pickle.dump(value, file)
    os.replace(begun, path)  # a whole file, as soon as it is there


def _awaited(
    ranks: FakeRanks, sender: int, find: Callable[[], str | None], ended: str, take: bool = False
) -> Any:
    """Return the file that another rank's plan leaves, as soon as it is there.

    Args:
        ranks: The ranks of the plan, which share a folder.
        sender: The other rank.
        find: Return the path of its file, as soon as there is one.
        ended: The error if its plan ends before.
        take: Whether to remove the file.

    Raises:
        RuntimeError: Its plan has ended.
    """
    assert ranks.folder is not None
    mark = Path(ranks.folder, WAITS.format(ranks.rank))
    mark.touch()
    try:
        while True:
            # Asked first: a plan that has ended since has left its file before.
            has_ended = Path(ranks.folder, ENDED.format(sender)).exists()
            path = find()
            if path is not None:
                return _read(path, take)
            if has_ended:
                raise RuntimeError(f"{ended} Its plan shows why.")
            time.sleep(_LOOK)
    finally:
        mark.unlink(missing_ok=True)


def _read(path: str, take: bool) -> Any:
    with open(path, "rb") as file:
        value = pickle.load(file)
    if take:
        os.remove(path)
    return value
