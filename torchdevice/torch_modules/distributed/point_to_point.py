"""Sends and receives of a tensor: both return at once, and raise if it can never arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.torch_modules.distributed import collective_checks, gloo_waits
from torchdevice.torch_modules.distributed.collective_staging import Staging
from torchdevice.torch_modules.distributed.nccl_group import NcclGroup, collectives_waited

_Tensors = Sequence[torch.Tensor]


class _Begun(dist.distributed_c10d.Work):
    """A tensor on its way between two ranks. ``wait`` copies the received values to the target.

    Args:
        group: The group of the ranks.
        call: The call of the program.
        work: gloo's work.
        staging: The CPU tensor that stands for the tensor.
        awaited: The calls that the other rank has to begin.
        received: Is called with the rank that a tensor of any rank came from.
    """

    def __init__(
        self,
        group: NcclGroup,
        call: collective_checks.Call,
        work: Any,
        staging: Staging,
        awaited: collective_checks.Awaited,
        received: Callable[[int], None] | None = None,
    ):
        super().__init__()
        self._group = group
        self._call = call
        self._work = work
        self._staging = staging
        self._awaited = awaited
        self._received = received
        # Begun at the first wait or query, because a wait takes a thread.
        self._arrival: futures.Future[Any] | None = None
        self._is_written = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the tensor has been sent or received.

        Raises:
            DistBackendError: It can never be, or the other rank has ended or has not come within
                the time-out.
        """
        with self._group.naming(self._call.name), torch._C.DisableTorchFunction():
            has_ended = functools.partial(
                gloo_waits.ended, self._waited(timeout), collective_checks.PATIENCE
            )
            self._group.waiting.wait(has_ended, self._call, lambda: self._awaited)
            # A second `wait` must not overwrite the program's later writes.
            if not self._is_written:
                self._is_written = True
                self._staging.write_back()
                if self._received is not None:
                    self._received(self._source_rank())
        collectives_waited()
        return True

    def is_completed(self) -> bool:
        """Return whether the tensor has arrived, or never can, for which :meth:`wait` raises."""
        return self._waited().done()

    def _waited(self, timeout: Any = None) -> futures.Future[Any]:
        if self._arrival is None:
            # Without a time-out gloo takes the group's.
            given = () if timeout is None else (timeout,)
            # In gloo's group, so that a thread that waits for ever at the end is undisturbed.
            self._arrival = gloo_waits.begin(
                functools.partial(_wait, self._group.gloo, self._work, *given)
            )
        return self._arrival

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _wait(gloo: Any, work: Any, *timeout: Any) -> None:
    work.wait(*timeout)


def send(group: NcclGroup, tensors: _Tensors, opts: Any) -> Any:
    """Begin to send a tensor to a rank."""
    rank, tag = opts.dst, opts.tag
    call = collective_checks.Call("send", tensors, (f"to rank {rank}",))
    with _staged(group, call) as staging:
        work = group.gloo.send([staging.bytes(tensors[0])], rank, tag)
        times = group.waiting.begin(_key(group, "send", rank, tag))
        # What the other rank must begin: a `recv` from this rank, or from any rank.
        keys = [_key(group, "recv", group.rank(), tag), _key(group, "recv", None, tag)]
        return _Begun(
            group,
            call,
            work,
            staging,
            collective_checks.Awaited(keys, times, [group.ranks()[rank]]),
        )


def recv(group: NcclGroup, tensors: _Tensors, opts: Any) -> Any:
    """Begin to receive a tensor from a rank, or from any rank where ``opts`` has none.

    Raises:
        NotImplementedError: NCCL receives from a rank that the program names.
    """
    rank, tag = getattr(opts, "src", None), opts.tag
    if rank is None and not group.is_gloo and not tensors[0].is_cpu:
        raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")
    sources = range(group.size()) if rank is None else [rank]
    call = collective_checks.Call(
        "recv", tensors, ("from any rank" if rank is None else f"from rank {rank}",)
    )
    own = _key(group, "recv", rank, tag)

    def received(source: int) -> None:
        # Where any rank may send, it is known only now which one did.
        group.waiting.rename(own, _key(group, "recv", source, tag))

    with _staged(group, call) as staging:
        flat = [staging.bytes(tensors[0], written=True)]
        if rank is None:
            work = group.gloo.recv_anysource(flat, tag)
        else:
            work = group.gloo.recv(flat, rank, tag)
        group.waiting.begin(own)
        # A tensor from any rank may have been counted under its rank already.
        times = group.waiting.times(
            *{own, *(_key(group, "recv", source, tag) for source in sources)}
        )
        ranks = [group.ranks()[source] for source in sources]
        awaited = collective_checks.Awaited(
            [_key(group, "send", group.rank(), tag)], times, ranks, rank is None
        )
        return _Begun(group, call, work, staging, awaited, received)


def _key(group: NcclGroup, what: str, rank: int | None, tag: int) -> str:
    """Return the name that counts this rank's sends to, or receives from, another rank."""
    return f"{group.group_name} {what} {rank} {tag}"


@block
def _staged(group: NcclGroup, call: collective_checks.Call) -> Iterator[Staging]:
    # As for collectives: errors of connections name the operation and the rank.
    with group.naming(call.name), torch._C.DisableTorchFunction():
        yield Staging(group, call.name, connects=False)
