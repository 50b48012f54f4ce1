"""The CPU tensors that stand for tensors of the target during a collective: one-dimensional, numbers or bytes."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchdevice.foundation.interrupt_safe_exit import block
from torchdevice.torch_apis.distributed import collective_checks
from torchdevice.torch_apis.distributed.collective_reductions import named
from torchdevice.torch_apis.distributed.collective_works import observers
from torchdevice.torch_apis.distributed.nccl_group import NcclGroup


class Staging:
    """The CPU tensors that stand for tensors of the target during one collective.

    Args:
        group: The group of the collective.
        name: The collective.
        connects: Whether all ranks take part, so that they can tell each other where they are.
    """

    def __init__(self, group: NcclGroup, name: str, *, connects: bool = True):
        self._group, self._name, self._connects = group, name, connects
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def numbers(self, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Return a tensor's elements as one-dimensional CPU tensor.

        Args:
            tensor: A tensor of the target.
            written: Whether what the collective writes there is written to the tensor by :meth:`write_back`.
        """
        # Outside autograd: torch's collectives are not differentiated either.
        tensor = tensor.detach()
        alias = self._group.checked_alias(tensor, between_two=not self._connects)
        # CPU tensors of a mixed group are on no GPU that could be used twice.
        if self._connects and alias is not tensor:
            self._group.know_devices(tensor.get_device())
        for observer in observers():
            observer.collective_used(self._name, tensor, written)
        # Without a CPU alias of the memory the values are copied.
        host = tensor.cpu() if alias is None else alias
        # Gloo knows no lazy conjugation, and wants one dimension.
        flat = host.resolve_conj().resolve_neg().reshape(-1)
        # A tensor in other memory has to be written back: a copy, or a reshape of gaps.
        if written and (alias is None or flat.data_ptr() != host.data_ptr()):
            self._copied.append((tensor, flat))
        return flat

    def bytes(self, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Return the bytes of a tensor's elements as one-dimensional CPU tensor, see :meth:`numbers`."""
        return self.numbers(tensor, written=written).view(torch.uint8)

    def write_back(self) -> None:
        """Bring what was written into the tensors of the target that do not share their memory with the CPU."""
        for tensor, flat in self._copied:
            tensor.copy_(flat.view(tensor.shape))


@block
def staged(
    group: NcclGroup, opts: Any, name: str, tensors: Sequence[torch.Tensor], *alike: Any, parts_differ: bool = False
) -> Iterator[Staging]:
    """Give the CPU tensors for a collective, once all ranks are in it.

    Args:
        group: The group of the ranks.
        opts: The arguments of the operator, with the time-out of the call.
        name: The name of the collective.
        tensors: The tensors that are sent, or received where not every rank sends.
        alike: Further values that must be the same on all ranks.
        parts_differ: Whether the tensors may have another number of elements on each rank.
    """
    with group.naming(name), torch._C.DisableTorchFunction():
        # Ranks must agree on dtypes in any case.
        dtypes = [(each.dtype, None if parts_differ else each.numel()) for each in tensors]
        # In these only the root's tensors are sent.
        if name not in ("broadcast", "scatter") or opts.root_rank == group.rank():
            group.check_for_nan(tensors)
        began = datetime.datetime.now()
        group.agree(collective_checks.Call(name, tensors, (dtypes, *map(named, alike))), opts.timeout)
        staging = Staging(group, name)
        yield staging
        # Not in a `finally`: after an error nothing is written to the tensors.
        staging.write_back()
    group.completed(name, began)
