"""Copies that continue after their call (``asynchronous=True``): non-blocking, of locked memory.

Until the host has waited for a copy to the host, its destination holds garbage. A copy to the
device takes the values of its source as late as it can: where a kernel that is ordered after it
reads the destination, or where the host has waited for it; what reads the destination in no order
reads garbage. Where the host has written to the source after a kernel had read the copy, and before
it had waited for it, the wait raises :class:`CopyInFlightError`. Garbage is NaN in numbers, bytes
of their own in other values, and in bools the opposite of the copied value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchdevice.errors import CopyInFlightError
from torchdevice.kernel.context import Context
from torchdevice.kernel.devices.stream_order import Stream
from torchdevice.kernel.journal.callers import program_line, site_of
from torchdevice.kernel.stand_ins import same_bits
from torchdevice.simulation.kernels.cpu_kernels import aliased, index_of
from torchdevice.simulation.observe.happens_before import (
    Order,
    in_flight,
    knows,
    of_device,
    sparse_indices,
)

_preserve_version = torch.autograd.grad_mode._unsafe_preserve_version_counter


_BYTE = 0xA5
"""The byte of which garbage consists, except that of floating-point numbers, which is NaN: all bits
are 1.
"""


class _Copy:
    """A copy in flight.

    Args:
        stream: The stream on which it runs.
        number: Its number among the kernels.
        destination: Where it writes, as CPU tensor.
    """

    def __init__(self, stream: Stream, number: int, destination: torch.Tensor):
        self.stream = stream
        self.number = number
        self.destination = destination
        self.site = site_of(program_line())
        # Torch has done the copy already.
        self.write(_garbage(destination))

    def write(self, values: torch.Tensor) -> None:
        """Write to the destination. Autograd does not count this: the call itself was counted."""
        # The version counter is what autograd checks between forward and backward.
        with torch._C.DisableTorchFunction(), torch.no_grad(), _preserve_version(self.destination):
            self.destination.copy_(values)

    def finish(self) -> CopyInFlightError | None:
        """Finish the copy once the host has waited. Return the error of a wrong copy, if any."""
        raise NotImplementedError


class _ToHost(_Copy):
    """A copy to the host with known values. The destination gets them when the host has waited."""

    def __init__(self, stream: Stream, number: int, destination: torch.Tensor):
        self._values = destination.detach().clone()
        super().__init__(stream, number, destination)

    def finish(self) -> None:
        self.write(self._values)


class _ToDevice(_Copy):
    """A copy to the device.

    Args:
        block: The address of the memory on the device.
        source: The page-locked memory.
    """

    def __init__(
        self,
        stream: Stream,
        number: int,
        destination: torch.Tensor,
        block: int,
        source: torch.Tensor,
    ):
        super().__init__(stream, number, destination)
        self.block = block
        self._source = source.detach()
        self._taken: torch.Tensor | None = None

    def run(self) -> None:
        """Take the source's values, because a kernel needs them."""
        if self._taken is None:
            self._taken = self._source.clone()
            self.write(self._source)

    def finish(self) -> CopyInFlightError | None:
        taken = self._taken
        if taken is None:
            self.write(self._source)
            return None
        return None if same_bits(taken, self._source) else CopyInFlightError(self.site, self.stream)


class InFlight(Order):
    """The copies in flight of one context.

    Args:
        context: The context.
    """

    def __init__(self, context: Context):
        super().__init__(context)
        self._copies: list[_Copy] = []

    def run(
        self, op: Any, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a kernel after the copies that it needs, or begin a copy.

        Raises:
            CopyInFlightError: The call waits for a copy whose source was written too early.
        """
        # Without copies in flight a kernel pays nothing more than this question.
        if self._copies:
            with torch._C.DisableTorchFunction(), self.lock:
                self._run_needed(args, kwargs)
        return super().run(op, kernel, args, kwargs)

    def ran(
        self, op: Any, args: Any, kwargs: Any, result: Any, used: list[tuple[torch.Tensor, bool]]
    ) -> None:
        host = in_flight(self.context, op, args, kwargs, result)
        stream = self.current(index_of(used[0][0]))
        if host is None:
            return
        if result is host:
            self._copies.append(_ToHost(stream, self.number, host))
        elif result.numel():
            block = result.untyped_storage().data_ptr()
            self._copies.append(_ToDevice(stream, self.number, aliased(result), block, host))

    def _run_needed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the copies whose destinations a kernel uses, if its stream has waited for them."""
        # By the address of the storage, since views share it.
        used = {
            each.untyped_storage().data_ptr(): index_of(each) for each in of_device((args, kwargs))
        }
        needed = [
            copy for copy in self._copies if isinstance(copy, _ToDevice) and copy.block in used
        ]
        # CPU kernels do not check indices, and garbage would end the process.
        if needed:
            trusted = {each.untyped_storage().data_ptr() for each in sparse_indices((args, kwargs))}
        else:
            trusted = set()
        for copy in needed:
            # A stream that does not know of the copy reads what is there: garbage.
            if copy.block not in trusted:
                clock = self.clock(self.current(used[copy.block]))
                if not knows(clock, copy.stream, copy.number):
                    continue
            copy.run()

    def collective_used(self, name: str, tensor: Any, writes: bool) -> None:
        with torch._C.DisableTorchFunction(), self.lock:
            self._run_needed((tensor,), {})

    def backward_began(self) -> None:
        """Order backward after all copies, as torch orders it after the forward, and run these."""
        super().backward_began()
        with self.lock:
            for copy in self._copies:
                if isinstance(copy, _ToDevice):
                    copy.run()

    def host_learned(self) -> None:
        """Finish the copies that the host has waited for."""
        done = [copy for copy in self._copies if knows(self.host, copy.stream, copy.number)]
        # Before the copies are finished, which may raise.
        self._copies = [copy for copy in self._copies if copy not in done]
        # The first error alone; the other copies are finished all the same.
        errors = [error for error in [copy.finish() for copy in done] if error is not None]
        if errors:
            raise errors.pop(0)

    def land(self) -> None:
        """Finish all copies, when the scope is left."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.finish()  # the program never waited, so that nothing is wrong before its end


def _garbage(like: torch.Tensor) -> torch.Tensor:
    """Return garbage in the shape and dtype of a CPU tensor."""
    if like.dtype is torch.bool:
        return torch.logical_not(like)
    garbage = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    number = like.dtype.is_floating_point or like.dtype.is_complex
    garbage.reshape(-1).view(torch.uint8).fill_(0xFF if number else _BYTE)
    return garbage
