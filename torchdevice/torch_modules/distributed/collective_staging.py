"""The CPU tensors behind target tensors in a collective: one-dimensional numbers or bytes.

The thread that calls a collective makes them. The exchange with the other ranks needs nothing of a
scope, so that it can go on in another thread while the program computes, as with ``async_op=True``.
That thread does one after the other, since the ranks of a group do theirs in one order. The program
waits for them by their works, by its next collective of the group that does not go on, and where it
waits for the whole device, as NCCL's own stream is one of the device's.
"""

from __future__ import annotations

import datetime
import functools
import operator
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.kernel import thread_state
from torchdevice.kernel.devices.observer import Observer
from torchdevice.kernel.journal import callers
from torchdevice.kernel.torch_internals import data_ptr
from torchdevice.torch_modules.distributed import collective_checks, gloo_waits
from torchdevice.torch_modules.distributed.nccl_group import (
    NcclGroup,
    Work,
    check_for_nan,
    finished,
    observers,
)


class Staging:
    """The CPU tensors that stand for tensors of the target during one collective.

    Args:
        group: The group of the collective.
        name: The collective.
        connects: Whether all ranks take part, so that they can tell each other on which devices
            they are.
    """

    def __init__(self, group: NcclGroup, name: str, *, connects: bool = True):
        self._group = group
        self._name = name
        self._connects = connects
        self._observers = observers()
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ordinals: list[int] = []

    def numbers(self, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Return a tensor's elements as one-dimensional CPU tensor.

        Args:
            tensor: A tensor of the target.
            written: Whether :meth:`write_back` copies the collective's result to the tensor.
        """
        # Outside autograd: torch's collectives are not differentiated either.
        tensor = tensor.detach()
        alias = self._group.checked_alias(tensor, between_two=not self._connects)
        # CPU tensors of a mixed group are on no GPU that could be used twice.
        if self._connects and alias is not tensor:
            self._ordinals.append(tensor.get_device())
        for observer in self._observers:
            observer.collective_used(self._name, tensor, written)
        # Without a CPU alias of the memory the values are copied.
        host = tensor.cpu() if alias is None else alias
        # Gloo knows no lazy conjugation, and wants one dimension.
        flat = host.resolve_conj().resolve_neg().reshape(-1)
        # A tensor in other memory has to be written back: a copy, or a reshape of gaps.
        if written and (alias is None or data_ptr(flat) != data_ptr(host)):
            self._copied.append((tensor, flat))
        return flat

    def bytes(self, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Return a tensor's bytes as a one-dimensional CPU tensor, see :meth:`numbers`."""
        return self.numbers(tensor, written=written).view(torch.uint8)

    def write_back(self) -> None:
        """Copy written data to the target's tensors that do not share the CPU's memory."""
        for tensor, flat in self._copied:
            tensor.copy_(flat.view(tensor.shape))


class Collective(Staging):
    """A collective of all ranks.

    Args:
        group: The group of the ranks.
        opts: The arguments of the operator, with the time-out of the call.
        name: The name of the collective.
        tensors: The tensors that are sent, or received where not every rank sends.
        alike: Further values that must be the same on all ranks.
    """

    def __init__(
        self, group: NcclGroup, opts: Any, name: str, tensors: Sequence[torch.Tensor], *alike: Any
    ):
        super().__init__(group, name)
        # In these only the root's tensors are sent.
        is_sent = name not in ("broadcast", "scatter") or opts.root_rank == group.rank()
        if group.checks_nan and is_sent:
            check_for_nan(tensors)
        self._opts = opts
        self._tensors = tensors
        self._alike = alike

    def _call(self) -> collective_checks.Call:
        """Return what this rank calls."""
        # Ranks must agree on dtypes in any case. The numbers of elements differ from rank to rank
        # in two collectives.
        parts_differ = self._name in ("all_gather", "all_to_all")
        dtypes = [(each.dtype, None if parts_differ else each.numel()) for each in self._tensors]
        alike = (dtypes, *map(_named, self._alike))
        return collective_checks.Call(self._name, self._tensors, alike)

    def run(self, result: Any, exchange: Callable[[], object]) -> Any:
        """Return work with a result, once all ranks take part, or at once if the program goes on.

        Args:
            result: The tensors of the target.
            exchange: Does the collective for the CPU tensors. It uses nothing of a scope.
        """
        group = self._group
        began = datetime.datetime.now()
        times = group.begin()
        if group.size() == 1:
            self._exchange(exchange)
        elif self._opts.async_op and self._may_go_on():
            return Work(result, [self._go_on(exchange, times)])
        else:
            self._wait(exchange, times)
        # After an error nothing is written to the tensors.
        if self._copied:
            self.write_back()
        if group.hooks:
            group.completed(self._name, began)
        return finished(result, self._observers)

    def _may_go_on(self) -> bool:
        """Return whether the program can go on before the other ranks have come."""
        # Copies, hooks and captures are of the thread that has called the collective.
        context = thread_state.state.context
        is_capturing = context is not None and context.thread.capture is not None
        return not (self._copied or self._group.hooks or is_capturing)

    def _go_on(self, exchange: Callable[[], object], times: int) -> Ongoing:
        """Do the collective in another thread."""
        # What another thread says names the line all the same.
        call = self._call()._replace(line=callers.site_of(callers.program_line()))
        mode = torch.inference_mode(torch.is_inference_mode_enabled())
        agree = functools.partial(self._agree, call, operator.methodcaller("wait"))
        run = functools.partial(self._exchange, mode(exchange), agree)
        return Ongoing(self._group, call, times, run)

    def _wait(self, exchange: Callable[[], object], times: int) -> None:
        """Do the collective in this thread, after those that go on."""
        group = self._group
        call = self._call()
        if group.ongoing is not None:
            group.ongoing.settle()

        def wait(work: Any) -> None:
            group.wait_for(functools.partial(collective_checks.ended, work), call, times)

        self._exchange(exchange, functools.partial(self._agree, call, wait))

    def _agree(self, call: collective_checks.Call, wait: Callable[[Any], object]) -> None:
        self._group.agree(call, self._opts.timeout, wait)
        for ordinal in self._ordinals:
            self._group.know_devices(ordinal)

    def _exchange(
        self, exchange: Callable[[], object], agree: Callable[[], object] | None = None
    ) -> None:
        """Do the collective once the ranks agree. A single rank agrees with itself."""
        try:
            if agree is not None:
                agree()
            exchange()
        except RuntimeError as error:
            self._group.raise_named(self._name, error)
            raise


def _named(value: Any) -> Any:
    """Return the name of a reduction's operation, and any other value unchanged."""
    return value.__getstate__()[0].name if isinstance(value, dist.ReduceOp) else value  # type: ignore[attr-defined]


class Ongoing(Observer):
    """A collective in another thread.

    Args:
        group: The group of the ranks.
        call: The collective that this rank calls.
        times: The number of the group's collectives that this rank has begun.
        exchange: Does the collective. It uses nothing of a scope.
    """

    def __init__(
        self,
        group: NcclGroup,
        call: collective_checks.Call,
        times: int,
        exchange: Callable[[], object],
    ):
        self._group = group
        self._call = call
        self._times = times
        self._context = thread_state.state.context
        before = None if group.ongoing is None else group.ongoing._result
        self._result = gloo_waits.begin(functools.partial(_in_order, before, exchange))
        group.ongoing = self
        if self._context is not None:
            # Drop finished works: they keep tensors alive, and the program may never wait on them.
            for each in [*self._context.observers.order]:
                if isinstance(each, Ongoing) and each.is_completed():
                    each._unwatch()
            self._unwatch: Callable[[], None] = self._context.observers.add(self)

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        """Wait until it has ended.

        Raises:
            RuntimeError: It has failed.
            DistBackendError: It has not ended within the time-out.
        """
        if timeout is not None and not gloo_waits.ended(self._result, timeout):
            reason = f"Watchdog caught collective operation timeout: {self._call.name}"
            self._group.abort(reason)
            raise dist.DistBackendError(reason)
        try:
            has_ended = functools.partial(
                gloo_waits.ended, self._result, collective_checks.PATIENCE
            )
            self._group.wait_for(has_ended, self._call, self._times)
        finally:
            self._drop()

    def is_completed(self) -> bool:
        """Return whether it has ended, also by an error."""
        return self._result.done()

    def device_synchronized(self, index: int) -> None:
        """The host has waited for a device."""
        self.settle()

    def settle(self) -> None:
        """Wait for the end. :meth:`wait` raises its error, unless it can never end."""
        try:
            self.wait()
        except Exception:
            if not self.is_completed():
                raise

    def _drop(self) -> None:
        if self._group.ongoing is self:
            self._group.ongoing = None
        if self._context is not None:
            self._unwatch()


def _in_order(before: futures.Future[Any] | None, exchange: Callable[[], object]) -> None:
    futures.wait([before] if before is not None else [])
    exchange()
