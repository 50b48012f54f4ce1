"""The traffic of a rank of a plan, by collective.

The bytes that a rank sends are those of NCCL's ring algorithms. For a message of S bytes among n
ranks they are 2 S (n - 1) / n in an all-reduce, and S (n - 1) / n in an all-gather and in a
reduce-scatter. The message of an all-gather is its whole result, that of a reduce-scatter its whole
input. A broadcast passes the whole message on. Only tensors on GPUs are counted.

Source: ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests ("bus bandwidth").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers

from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.kernel.context import Context
from torchdevice.kernel.stand_ins import tensors


class _Collective(NamedTuple):
    """A collective, as an operator of ``c10d``.

    Attributes:
        name: Its name for people.
        message: The place of the argument with the message: a tensor, or lists of them.
        factor: Is called with the number of ranks, and returns how many times the message a rank
            sends.
        receiver: The place of the argument with the rank that only receives, if there is one.
    """

    name: str
    message: int
    factor: Callable[[int], float]
    receiver: int | None = None


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


_ALL_REDUCE = _Collective("all-reduce", 0, lambda ranks: 2 * _all_but_own(ranks))
_ALL_GATHER = _Collective("all-gather", 0, _all_but_own)
_REDUCE_SCATTER = _Collective("reduce-scatter", 1, _all_but_own)
_ALL_TO_ALL = _Collective("all-to-all", 1, _all_but_own)
_GATHER = _Collective("gather", 1, lambda ranks: 1, receiver=3)
_RECEIVE = _Collective("receive", 0, lambda ranks: 0)

COLLECTIVES: Mapping[str, _Collective] = {
    "allreduce_": _ALL_REDUCE,
    "allreduce_coalesced_": _ALL_REDUCE,
    "allgather_": _ALL_GATHER,
    "_allgather_base_": _ALL_GATHER,
    "allgather_coalesced_": _ALL_GATHER,
    "allgather_into_tensor_coalesced_": _ALL_GATHER,
    "reduce_scatter_": _REDUCE_SCATTER,
    "_reduce_scatter_base_": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "alltoall_": _ALL_TO_ALL,
    "alltoall_base_": _ALL_TO_ALL,
    "broadcast_": _Collective("broadcast", 0, lambda ranks: 1),
    "reduce_": _Collective("reduce", 0, lambda ranks: 1),
    # The input of the root, which keeps its own part; the other ranks have none.
    "scatter_": _Collective("scatter", 1, _all_but_own),
    "gather_": _GATHER,
    "gather_into_tensor_": _GATHER,  # since torch 2.14
    "send": _Collective("send", 0, lambda ranks: 1),
    "recv_": _RECEIVE,
    "recv_any_source_": _RECEIVE,
}
"""The operators of ``c10d`` that have a message."""


@dataclass
class _Sum:
    """How often a collective ran, and the bytes of its messages and those that this rank sent."""

    calls: int = 0
    message: int = 0
    sent: float = 0

    def without(self, other: _Sum) -> _Sum:
        """Return the traffic since ``other``."""
        return _Sum(self.calls - other.calls, self.message - other.message, self.sent - other.sent)


class Traffic:
    """The collectives of a rank, in all and in the last step of its first optimizer."""

    def __init__(self) -> None:
        self._all: dict[str, _Sum] = {}
        self._marks: list[dict[str, _Sum]] = []
        self._first: weakref.ref[Any] | None = None

    def follow(self, context: Context) -> Callable[[], None]:
        """Count the collectives of a context from now on, and return a function that ends this."""
        context.settings[Traffic] = self
        for name, collective in COLLECTIVES.items():
            registered_kernels.put_in_front(
                f"c10d::{name}", "PrivateUse1", _counted(collective), "the traffic of a plan"
            )
        hook = optimizers.register_optimizer_step_post_hook(self._stepped)

        def stop() -> None:
            hook.remove()
            context.settings.pop(Traffic, None)

        return stop

    def note(self, name: str, message: int, sent: float) -> None:
        """Count a collective."""
        found = self._all.setdefault(name, _Sum())
        found.calls += 1
        found.message += message
        found.sent += sent

    def _stepped(self, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            copied = {name: each.without(_Sum()) for name, each in self._all.items()}
            self._marks = [*self._marks[-1:], copied]

    def data(self) -> dict[str, Any]:
        """Return the counts as data for JSON: from the end of the last optimizer's step but one to
        that of the last; of a program with fewer steps, all of it.
        """
        if len(self._marks) == 2:
            before, after = self._marks
            counted = {name: each.without(before.get(name, _Sum())) for name, each in after.items()}
        else:
            counted = self._all
        return {
            "in": "a step" if len(self._marks) == 2 else "the program",
            "collectives": [
                {
                    "collective": name,
                    "calls": each.calls,
                    "bytes": each.message,
                    "sent": round(each.sent),
                }
                for name, each in sorted(counted.items())
                if each.calls
            ],
        }


def _counted(collective: _Collective) -> registered_kernels.Kernel:
    """Return an operator's kernel that counts its call if the thread's context asks for that."""

    def run(keys: Any, own: registered_kernels.Own, *args: Any, **kwargs: Any) -> Any:
        context = thread_state.state.context
        traffic = None if context is None else context.settings.get(Traffic)
        if traffic is not None:
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            group: Any = dist.ProcessGroup.unbox(boxed)  # type: ignore[attr-defined]
            message = sum(each.nbytes for each in tensors(args[collective.message]))
            receives = collective.receiver is not None and args[collective.receiver] == group.rank()
            factor = 0 if receives else collective.factor(group.size())
            traffic.note(collective.name, message, message * factor)
        return own(*args, **kwargs)

    return run
