"""NCCL's process group, on gloo.

NCCL moves flat memory: it compares numbers of elements, and takes every shape. gloo compares
shapes, has fewer dtypes, and ends the process where the shapes of a reduce-scatter differ from what
it expects. Therefore gloo gets one-dimensional CPU tensors only: bytes from collectives that move
data, numbers from those that compute.

A collective has finished when it returns, but with ``async_op=True``. Sending and receiving do not
wait.

Source of the rules and of the error texts: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``.
"""

# The methods take what torch itself passes to a group's methods, not all that their overloads take.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice.kernel import registered_kernels, thread_state
from torchdevice.torch_modules.distributed import (
    collective_checks,
    flight_recorder,
    gloo_waits,
    point_to_point,
)
from torchdevice.torch_modules.distributed.collective_operators import as_operator
from torchdevice.torch_modules.distributed.collective_staging import Collective
from torchdevice.torch_modules.distributed.nccl_group import Gloo, NcclGroup, Work, is_set

_c10d = dist.distributed_c10d

_Tensors = Sequence[torch.Tensor]


def register(kind: str) -> str:
    """Register the process group with ``torch.distributed``, once in a process.

    Args:
        kind: ``"nccl"``, ``"gloo"``, or ``"nccl and gloo"`` for a group as ``"cpu:gloo,cuda:nccl"``
            gives it.

    Returns:
        The name to ask for it by.
    """
    name = kind.replace(" ", "_") + "_on_gloo"
    # A name can be registered once, and stays for the process.
    if name.upper() not in dist.distributed_c10d.Backend._plugins:
        # Its tensors are staged on the CPU, hence the device.
        dist.Backend.register_backend(name, functools.partial(create, kind), devices=["cpu"])
    return name


def create(kind: str, store: Any, rank: int, size: int, timeout: Any) -> NcclOnGloo:
    """Return a group, see :func:`register`."""
    context = thread_state.state.context
    assert context is not None, "this process group is asked for in scopes only"
    is_set("TORCH_NCCL_BLOCKING_WAIT")  # no more than a check: every wait of the host blocks
    gloo_waits.wait_at_end()
    _register_functional()
    # Torchrun's agents keep one store for all attempts.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = gloo_waits.store_of_this_attempt(store, rank, size)
    # Under a prefix, since a program may make a group of gloo from the same store.
    own = dist.PrefixStore(kind, store)  # type: ignore[attr-defined]
    gloo = Gloo(own, rank, size, timeout)
    gloo_waits.wait_for_all(own, size, timeout)
    # One object in a program, made with its first group, which is the default group.
    default = _c10d._get_default_group() if dist.is_initialized() else None
    if isinstance(default, NcclOnGloo):
        waiting = default.waiting
    else:
        waiting = collective_checks.Waiting(store, rank, size)
    group = NcclOnGloo(gloo, context.runtime, kind, store, waiting)
    if default is None and group.recorder.size and os.environ.get(flight_recorder.PIPE):
        group.pipe = flight_recorder.Pipe(group.recorder, waiting.rank)
    return group


def _for_each_pair(collective: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return that method, which runs a collective for each pair of an output and an input."""
    for_one = inspect.unwrap(collective)  # not an operator for each pair

    def coalesced(self: NcclOnGloo, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Any:
        return Work(
            outputs, [for_one(self, *each, opts) for each in zip(outputs, inputs, strict=True)]
        )

    return as_operator(coalesced, name)


def _of_root(options: Any, root: int) -> Any:
    """Return options for gloo, with the root."""
    options.rootRank = root
    return options


def _check_list(
    group: NcclGroup,
    name: str,
    own: torch.Tensor,
    listed: str,
    lists: Sequence[_Tensors],
    root: int,
) -> None:
    """Refuse a root that is no rank, or at the root a list that does not fit, as torch's groups do.

    Gloo would compare bytes instead of shapes.

    Args:
        group: The group.
        name: The collective.
        own: The tensor that each rank gives or gets.
        listed: What the root lists, ``"input"`` or ``"output"``.
        lists: The root's list, in a list; nothing on other ranks.
        root: The root.

    Raises:
        RuntimeError: They do not fit, and gloo would be asked.
        ValueError: They do not fit, and NCCL would be asked.
    """
    by_gloo = group.is_gloo or own.is_cpu
    why = _misfit(group.size(), own, listed, lists, root)
    if why:
        error = RuntimeError if by_gloo else ValueError
        raise error(f"ProcessGroup{'Gloo' if by_gloo else 'NCCL'}::{name}: {why}")


def _misfit(size: int, own: torch.Tensor, listed: str, lists: Sequence[_Tensors], root: int) -> str:
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    for each in lists:
        if len(each) != size:
            return (
                f"Incorrect {listed} list size {len(each)}. {listed.capitalize()} list size should "
                f"be {size}, same as size of the process group."
            )
        for index, tensor in enumerate(each):
            if tensor.shape != own.shape:
                sizes = f"(expected {_sizes(own)}, got {_sizes(tensor)})"
                return f"invalid tensor size at index {index} {sizes}"
    return ""


def _sizes(tensor: torch.Tensor) -> str:
    """Return a shape as torch's groups write it, with no comma after a single size."""
    return f"({', '.join(map(str, tensor.shape))})"


class NcclOnGloo(NcclGroup):
    """NCCL's collectives for tensors of a target, by gloo."""

    # ---- collectives that compute ----------------------------------------------------------------

    @as_operator
    def allreduce(self, tensors: _Tensors, opts: Any) -> Any:
        """Reduce over all ranks, to all of them.

        Raises:
            RuntimeError: A tensor is sparse.
        """
        if not self.is_gloo:
            _refuse_sparse(tensors)
        collective = Collective(self, opts, "all_reduce", tensors, opts.reduce_op)
        flats = [collective.numbers(tensor, written=True) for tensor in tensors]
        return collective.run(tensors, functools.partial(self._all_reduce, flats, opts.reduce_op))

    allreduce_coalesced = as_operator(inspect.unwrap(allreduce), "allreduce_coalesced")

    @as_operator
    def reduce(self, tensors: _Tensors, opts: Any) -> Any:
        """Reduce over all ranks, to one. The tensors of the others stay as they are."""
        collective = Collective(
            self, opts, "reduce", tensors, opts.reduce_op, f"to rank {opts.root_rank}"
        )
        is_root = self.rank() == opts.root_rank
        flat = collective.numbers(tensors[0], written=is_root)
        # A copy: gloo computes in every rank's memory, and that of the others must stay.
        summed = flat if is_root else flat.clone()
        to_root = _of_root(_c10d.ReduceOptions(), opts.root_rank)

        def run() -> None:
            reduce_flat(summed, opts.reduce_op, self.size(), self.gloo.reduce, to_root)

        return collective.run(tensors, run)

    @as_operator
    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Any:
        """Reduce lists of tensors over ranks; each rank gets that at its place, of any size."""
        collective = Collective(self, opts, "reduce_scatter", inputs[0], opts.reduce_op)
        flats = [collective.numbers(tensor) for tensor in inputs[0]]
        mine = collective.numbers(outputs[0], written=True)
        return collective.run(outputs, lambda: self._reduce_scatter(mine, flats, opts.reduce_op))

    @as_operator
    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks; each rank gets its part.

        Raises:
            TypeError: The dtypes differ.
            ValueError: The input has not as many elements as the outputs of all ranks.
        """
        if input.dtype != output.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if input.numel() != output.numel() * self.size():
            raise ValueError("input tensor must be the same size as output size times world size")
        collective = Collective(self, opts, "reduce_scatter", [input], opts.reduce_op)
        # As many of an empty tensor, too.
        flats = collective.numbers(input).tensor_split(self.size())
        mine = collective.numbers(output, written=True)
        return collective.run(output, lambda: self._reduce_scatter(mine, flats, opts.reduce_op))

    reduce_scatter_tensor_coalesced = _for_each_pair(
        _reduce_scatter_base, "reduce_scatter_tensor_coalesced"
    )

    # The names since torch 2.12.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _all_reduce(self, flats: _Tensors, op: Any) -> None:
        for flat in flats:
            is_few = flat.nbytes <= _FEW and self.size() > 1 and not self.is_gloo
            collective = self._all_reduce_few if is_few else self.gloo.allreduce
            reduce_flat(flat, op, self.size(), collective, _c10d.AllreduceOptions())

    def _all_reduce_few(self, tensors: _Tensors, options: Any) -> Any:
        """All-reduce by way of the first rank: gloo's own takes two turns around all ranks."""
        (mine,) = tensors
        gathered = []
        if self.rank() == 0:
            gathered.append([torch.empty_like(mine) for _ in range(self.size())])
        self.gloo.gather(gathered, tensors, _of_root(_c10d.GatherOptions(), 0)).wait()
        kind, _ = options.reduceOp.__getstate__()
        for rows in gathered:
            reduced = _REDUCED[kind](torch.stack(rows))
            mine.copy_(reduced)
        return self.gloo.broadcast(tensors, _of_root(_c10d.BroadcastOptions(), 0))

    def _reduce_scatter(self, output: torch.Tensor, flats: _Tensors, op: Any) -> None:
        if not flats:
            return
        sizes = [flat.numel() for flat in flats]
        whole = torch.cat(list(flats))
        # Gloo's reduce-scatter crashes for some shapes, so each rank reduces all and keeps a part.
        self._all_reduce([whole], op)
        parts = whole.split(sizes)
        output.copy_(parts[self.rank()])

    # ---- collectives that move data --------------------------------------------------------------

    @as_operator
    def broadcast(self, tensors: _Tensors, opts: Any) -> Any:
        """Send a tensor of one rank to all."""
        collective = Collective(self, opts, "broadcast", tensors, f"from rank {opts.root_rank}")
        flats = [collective.bytes(tensor, written=True) for tensor in tensors]
        return collective.run(tensors, lambda: self._broadcast(flats, opts.root_rank))

    def _broadcast(self, flats: _Tensors, root: int) -> None:
        for flat in flats:
            self.gloo.broadcast([flat], _of_root(_c10d.BroadcastOptions(), root)).wait()

    @as_operator
    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """Send a tensor of each rank to all. Their sizes may differ."""
        sizes = [[tensor.numel() for tensor in each] for each in outputs]
        # An input of another size than the output for it fits nowhere, so the ranks must not agree.
        fits = all(
            own[self.rank()] == given.numel() for own, given in zip(sizes, inputs, strict=True)
        )
        collective = Collective(
            self, opts, "all_gather", inputs, sizes, _into(sizes), fits or self.rank()
        )
        gathered = [[collective.bytes(tensor, written=True) for tensor in each] for each in outputs]
        given = [collective.bytes(tensor) for tensor in inputs]
        return collective.run(outputs, lambda: self._all_gather(gathered, given))

    def _all_gather(self, outputs: Sequence[_Tensors], inputs: _Tensors) -> None:
        for gathered, given in zip(outputs, inputs, strict=True):
            # Sizes are the same on all ranks, so all take the same branch.
            if all(output.numel() == given.numel() for output in gathered):
                self.gloo.allgather([list(gathered)], [given]).wait()
                continue
            gathered[self.rank()].copy_(given)
            # Gloo gathers equal sizes only; one broadcast from each rank does the same.
            for root, output in enumerate(gathered):
                self._broadcast([output], root)

    @as_operator
    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """Do an all-gather for each input: ``outputs[rank][i]`` is input ``i`` of a rank."""
        # Transposed: torch lists the outputs by rank, `allgather` by input.
        return inspect.unwrap(NcclOnGloo.allgather)(
            self, list(zip(*outputs, strict=True)), inputs, opts
        )

    @as_operator
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """Send a tensor of each rank to all, into one tensor of any shape.

        Raises:
            TypeError: The dtypes differ.
            ValueError: The output has not as many elements as the inputs of all ranks.
        """
        if input.dtype != output.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if input.numel() * self.size() != output.numel():
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size"
            )
        collective = Collective(self, opts, "all_gather", [input], [[input.numel()] * self.size()])
        given = collective.bytes(input)
        parts = collective.bytes(output, written=True).split(max(1, given.numel()))
        lists = ([parts], [given]) if given.numel() else ((), ())
        return collective.run(output, lambda: self._all_gather(*lists))

    allgather_into_tensor_coalesced = _for_each_pair(
        _allgather_base, "allgather_into_tensor_coalesced"
    )

    # The names since torch 2.12.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    @as_operator
    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """Send a tensor of each rank to one.

        Raises:
            ValueError: The root is no rank, or the outputs do not fit.
        """
        _check_list(self, "gather", inputs[0], "output", outputs, opts.root_rank)
        collective = Collective(self, opts, "gather", inputs, f"to rank {opts.root_rank}")
        gathered = [[collective.bytes(tensor, written=True) for tensor in each] for each in outputs]
        given = [collective.bytes(inputs[0])]
        options = _of_root(_c10d.GatherOptions(), opts.root_rank)
        return collective.run(outputs, lambda: self.gloo.gather(gathered, given, options).wait())

    @as_operator
    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Any:
        """Send a tensor of one rank to each.

        Raises:
            ValueError: The root is no rank, or the inputs do not fit.
        """
        _check_list(self, "scatter", outputs[0], "input", inputs, opts.root_rank)
        collective = Collective(self, opts, "scatter", outputs, f"from rank {opts.root_rank}")
        scattered = [[collective.bytes(tensor) for tensor in each] for each in inputs]
        mine = [collective.bytes(outputs[0], written=True)]
        options = _of_root(_c10d.ScatterOptions(), opts.root_rank)
        return collective.run(outputs, lambda: self.gloo.scatter(mine, scattered, options).wait())

    @as_operator
    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any) -> Any:
        """Send a tensor of each rank to each."""
        # One input stands for the dtype of all.
        collective = Collective(self, opts, "all_to_all", inputs[:1])
        received = [collective.bytes(tensor, written=True) for tensor in outputs]
        sent = [collective.bytes(tensor) for tensor in inputs]
        return collective.run(outputs, lambda: self._exchange(received, sent))

    @as_operator
    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """Send each rank a part of a tensor. Sizes are of dimension 0; the default is equal parts.

        Raises:
            RuntimeError: The sizes do not add up to the tensor's.
        """
        collective = Collective(self, opts, "all_to_all", [input])
        received = self._parts(
            collective.bytes(output, written=True), output, opts.output_split_sizes
        )
        sent = self._parts(collective.bytes(input), input, opts.input_split_sizes)
        return collective.run(output, lambda: self._exchange(received, sent))

    all_to_all_single = alltoall_base  # the name since torch 2.12

    def _parts(
        self, flat: torch.Tensor, tensor: torch.Tensor, sizes: list[int]
    ) -> list[torch.Tensor]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not sizes and rows % self.size():
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        sizes = sizes or [rows // self.size()] * self.size()
        if sum(sizes) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        # Bytes of a row, since `flat` is the tensor's bytes.
        row = flat.numel() // rows if rows else 0
        return list(flat.split([size * row for size in sizes]))

    def _exchange(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        sizes = [output.numel() for output in outputs]
        sent_sizes = [each.numel() for each in inputs]
        # Gloo receives into one tensor; the parts are copied into place afterwards.
        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        self.gloo.alltoall_base(received, torch.cat(inputs), sizes, sent_sizes).wait()
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.copy_(part)

    @as_operator
    def barrier(self, tensor: torch.Tensor, opts: Any) -> Any:
        """Wait for all ranks."""
        return Collective(self, opts, "barrier", []).run(None, lambda: self.gloo.barrier().wait())

    # ---- point to point --------------------------------------------------------------------------

    send = as_operator(point_to_point.send)
    recv = as_operator(point_to_point.recv)
    recv_anysource = as_operator(point_to_point.recv, "recv_anysource")


def _refuse_sparse(tensors: _Tensors) -> None:
    for each in tensors:
        if each.is_sparse:
            raise RuntimeError(
                "NCCL does not support all_reduce with sparse tensors. Please use dense tensors "
                "instead."
            )


def _into(sizes: Sequence[Sequence[int]]) -> str:
    """Return the element numbers of an all-gather's outputs in words: ``"into [2, 2, 2]"``."""
    shown = (str(list(each[:_SHOWN])) for each in sizes)
    return f"into {', '.join(shown)}"


_SHOWN = 16
"""The number of outputs that an error lists."""


@functools.cache  # once in a process
def _register_functional() -> None:
    """Register functional collectives that torch's C++ runs without a group's Python methods."""
    put = functools.partial(registered_kernels.put, key="PrivateUse1", file=__file__)
    put("_c10d_functional::all_gather_into_tensor_out", _all_gather)
    put("_c10d_functional::reduce_scatter_tensor_out", _reduce_scatter)


def _all_gather(
    given: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    _c10d._resolve_process_group(group_name)._allgather_base(out, given).wait()  # type: ignore[attr-defined]
    return out


def _reduce_scatter(
    given: torch.Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
    _c10d._resolve_process_group(group_name)._reduce_scatter_base(out, given, options).wait()  # type: ignore[attr-defined]
    return out


# ---- reductions as NCCL has them, by the operations and dtypes that gloo has ---------------------

_Kind: Any = dist.ReduceOp.RedOpType

_NOT_OF_NCCL = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)

# On bytes of 0 and 1 the largest is the logical or, and the smallest the logical and.
_OF_BOOL = {_Kind.SUM: _Kind.MAX, _Kind.PRODUCT: _Kind.MIN}
"""The operations for bools: the logical or in place of sums, the logical and in place of products.
"""

_FEW = 4096
"""Up to how many bytes one rank reduces those of all."""

_REDUCED: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    _Kind.SUM: lambda rows: rows.sum(0),
    _Kind.PRODUCT: lambda rows: rows.prod(0),
    _Kind.MIN: lambda rows: rows.amin(0),
    _Kind.MAX: lambda rows: rows.amax(0),
}
"""The operation -> the reduction of rows, one of each rank."""


def reduce_flat(
    flat: torch.Tensor, op: Any, size: int, collective: Callable[..., Any], options: Any
) -> None:
    """Reduce one-dimensional numbers in place.

    Args:
        flat: The numbers of this rank.
        op: The operation that the program asks for.
        size: The number of ranks.
        collective: gloo's, which does it for the dtypes and operations that gloo has.
        options: Its options, without the operation.
    """
    # A ReduceOp shows its kind, and the factor of `PREMUL_SUM`, by its pickled state only.
    kind, factor = op.__getstate__()
    if kind in _NOT_OF_NCCL:
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with NCCL")
    if "float8" in str(flat.dtype):
        raise RuntimeError("Float8 dtypes are not currenlty supported for NCCL reductions")
    if flat.is_complex():
        if kind in (_Kind.MAX, _Kind.MIN, _Kind.PRODUCT):
            raise RuntimeError(
                f"all_reduce does not support ReduceOp.{kind.name} on complex tensors"
            )
        # Sums and averages of complex numbers are those of their parts.
        flat = torch.view_as_real(flat).view(-1)
    if flat.dtype is torch.bool:
        if kind == _Kind.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        kind = _OF_BOOL.get(kind, kind)
        # Gloo has no bool, and a bool is one byte.
        flat = flat.view(torch.uint8)
    if kind == _Kind.PREMUL_SUM:
        # In the rank's own numbers, before they are sent.
        flat.mul_(factor.cpu() if isinstance(factor, torch.Tensor) else factor)
    if kind in (_Kind.PREMUL_SUM, _Kind.AVG):
        options.reduceOp = dist.ReduceOp.SUM
    else:
        options.reduceOp = dist.ReduceOp(kind)
    collective([flat], options).wait()
    if kind == _Kind.AVG:
        # NCCL divides integers and drops the remainder, towards 0.
        flat.div_(size, rounding_mode=None if flat.is_floating_point() else "trunc")
