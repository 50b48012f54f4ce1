"""A process group that does on gloo what NCCL does.

NCCL moves flat memory: it compares numbers of elements, and takes every dtype and shape. gloo compares shapes, has few
dtypes, and ends the process where the shapes of a reduce-scatter differ from what it expects. Therefore gloo gets
one-dimensional CPU tensors only: bytes from collectives that move data, numbers from those that compute.

A collective has finished when it returns; ``async_op=True`` returns finished work. Sending and receiving do not wait.

Source of the rules and of the error texts: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp``.
"""

# The methods take what torch itself passes to a group's methods, not all that their overloads take.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchdevice import thread_state
from torchdevice.devices.runtime import Runtime
from torchdevice.leaving import block
from torchdevice.torch_apis import agreement, gloo_processes, nccl_devices, waits_in_threads
from torchdevice.torch_internals import require

_c10d = require(torch._C, "_distributed_c10d")

_memory_format_of = require(torch._prims_common, "suggest_memory_format")

_work_of = require(_c10d, "_create_work_from_future")

_Tensors = Sequence[torch.Tensor]


def register(*, takes_cpu: bool) -> str:
    """Register the process group with ``torch.distributed``, once in a process.

    Args:
        takes_cpu: Whether its collectives take CPU tensors too, as those of ``"cpu:gloo,cuda:nccl"`` do.

    Returns:
        The name to ask for it by.
    """
    name = "nccl_and_gloo_on_gloo" if takes_cpu else "nccl_on_gloo"
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, functools.partial(_create, takes_cpu), devices=["cpu"])
    return name


def _create(takes_cpu: bool, store: Any, rank: int, size: int, timeout: Any) -> NcclOnGloo:
    context = thread_state.current()
    assert context is not None, "this process group is asked for in scopes only"
    gloo_processes.wait_at_end()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = gloo_processes.store_of_this_attempt(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    return NcclOnGloo(rank, size, gloo, context.runtime, takes_cpu, _waiting(store, rank, size))


def _waiting(store: Any, rank: int, size: int) -> agreement.Waiting:
    """Return how ranks wait for each other: one object in a program, made with its first group."""
    if not dist.is_initialized():
        return agreement.Waiting(store, rank, size)
    default = dist.distributed_c10d._get_default_group()
    if isinstance(default, NcclOnGloo):
        return default.waiting
    return agreement.Waiting(store, rank, size)


class _Staging:
    """The CPU tensors that stand for tensors of the target during one collective.

    Args:
        group: The group of the collective.
        name: The collective.
        connects: Whether all ranks take part, so that they can tell each other where they are.
    """

    def __init__(self, group: NcclOnGloo, name: str, *, connects: bool = True):
        self._group, self._name, self._connects = group, name, connects
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def numbers(self, tensor: torch.Tensor, *, written: bool = False) -> torch.Tensor:
        """Return a tensor's elements as one-dimensional CPU tensor.

        Args:
            tensor: A tensor of the target.
            written: Whether what the collective writes there is written to the tensor by :meth:`write_back`.
        """
        tensor = tensor.detach()
        alias = self._group.checked_alias(tensor, between_two=not self._connects)
        if self._connects and alias is not tensor:
            self._group.know_devices(tensor.get_device())
        for observer in _observers():
            observer.collective_used(self._name, tensor, written)
        host = tensor.cpu() if alias is None else alias
        flat = host.resolve_conj().resolve_neg().reshape(-1)
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


class _Begun(dist.distributed_c10d.Work):
    """A tensor on its way between two ranks. ``wait`` brings what was received to the target.

    Args:
        group: The group of the ranks.
        call: What the program has called.
        work: gloo's work.
        staging: The CPU tensor that stands for the tensor.
        awaited: What the other rank has to begin.
        received: Is called with the rank that a tensor of any rank came from.
    """

    def __init__(
        self,
        group: NcclOnGloo,
        call: agreement.Call,
        work: Any,
        staging: _Staging,
        awaited: agreement.Awaited,
        received: Callable[[int], None] | None,
    ):
        super().__init__()
        self._group, self._call, self._work, self._staging, self._awaited = group, call, work, staging, awaited
        self._received = received
        self._wait: waits_in_threads.Wait | None = None
        self._is_written = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the tensor has been sent or received.

        Raises:
            DistBackendError: It can never be, or the other rank has ended or has not come within the time-out.
        """
        with self._group.naming(self._call.name), torch._C.DisableTorchFunction():
            wait = self._waited(timeout)
            self._group.waiting.wait(lambda: wait.ended(agreement.PATIENCE), self._call, lambda: self._awaited)
            if not self._is_written:
                self._is_written = True
                self._staging.write_back()
                if self._received is not None:
                    self._received(self._source_rank())
        _collectives_waited()
        return True

    def is_completed(self) -> bool:
        """Return whether the tensor has been sent or received."""
        with contextlib.suppress(RuntimeError):  # wait raises it
            return self._waited().ended(datetime.timedelta())
        return True

    def _waited(self, timeout: Any = None) -> waits_in_threads.Wait:
        if self._wait is None:
            given = () if timeout is None else (timeout,)
            # With gloo's group, so that a thread which waits for ever at the end of the process is not disturbed.
            self._wait = waits_in_threads.Wait(functools.partial(_wait, self._group.gloo, self._work, *given))
        return self._wait

    def _source_rank(self) -> int:
        return self._work._source_rank()


def _wait(gloo: Any, work: Any, *timeout: Any) -> None:
    work.wait(*timeout)


def _for_each_pair(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that does a collective for each pair of an output and an input of two lists."""

    def coalesced(self: NcclOnGloo, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            collective(self, output, given, opts)
        return _finished(outputs)

    return coalesced


class NcclOnGloo(dist.ProcessGroup):
    """NCCL's collectives for tensors of a target, by gloo.

    Args:
        rank: The rank of this process in the group.
        size: The number of processes in the group.
        gloo: The gloo backend of the group.
        runtime: What the target can do.
        takes_cpu: Whether CPU tensors are taken too.
        waiting: How this process waits for other ranks.
    """

    def __init__(self, rank: int, size: int, gloo: Any, runtime: Runtime, takes_cpu: bool, waiting: agreement.Waiting):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo, self.runtime, self.waiting = gloo, runtime, waiting
        self._takes_cpu = takes_cpu or runtime.shares_host_memory
        self._name = self._description = ""
        self._knows_devices = size == 1 or runtime.shared_by_ranks

    def know_devices(self, index: int) -> None:
        """Refuse, as NCCL does when it connects the ranks, that two of them are on one device."""
        if not self._knows_devices:
            nccl_devices.check(self.rank(), index, self._gathered)
            self._knows_devices = True

    def _gathered(self, mine: torch.Tensor) -> torch.Tensor:
        of_all = [torch.empty_like(mine) for _ in range(self.size())]
        self.gloo.allgather([of_all], [mine]).wait()
        return torch.cat(of_all)

    def checked_alias(self, tensor: torch.Tensor, *, between_two: bool = False) -> torch.Tensor | None:
        """Return the CPU tensor with a tensor's memory, if there is one, and refuse what NCCL refuses.

        Raises:
            RuntimeError: The tensor is on a device that the group does not serve.
            ValueError: The tensor is sparse, or not contiguous in a memory format. Between two ranks the latter is
                allowed, unless the tensor has gaps in memory, or shares memory with itself.
        """
        if tensor.layout is not torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        alias = self.runtime.host_alias(tensor)
        is_on_cpu = alias is tensor
        if not (self._takes_cpu if is_on_cpu else tensor.device.type == self.runtime.device_type):
            raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
        if between_two and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            raise ValueError("Tensors for P2P must be non-overlapping and dense")
        if not between_two and not tensor.is_contiguous(memory_format=_memory_format_of(tensor)):
            raise ValueError("Tensors must be contiguous")
        return alias

    # ---- what torch asks of a group --------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend that the group behaves as."""
        return "nccl"

    def getGroupName(self) -> str:
        """Return the name that torch gave to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Take the name by which functional collectives find the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description that the program gave to the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Take the description."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes. Object collectives use the first, or the CPU if it is one."""
        context = thread_state.current()
        # As torch's own code spells it, which looks for it in this list; the scope rewrites both.
        types = [self.runtime.device_type if context is None else context.options.written_for]
        if self._takes_cpu and not self.runtime.shares_host_memory:
            types.insert(0, "cpu")
        return [torch.device(each) for each in types]

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo

    def _set_sequence_number_for_group(self) -> None:
        self.gloo._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        return self.gloo._get_sequence_number_for_group()

    def _start_coalescing(self, device: torch.device) -> None:
        """Begin a list of collectives that NCCL starts together. Here each is done when it is called."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return _finished(None)

    # ---- collectives that compute ----------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """Reduce over all ranks, to all of them."""
        with self._staging("all_reduce", tensors, _op_of(opts)) as staging:
            for tensor in tensors:
                self._all_reduce(staging.numbers(tensor, written=True), _op_of(opts))
        return _finished(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: _Tensors, opts: Any) -> Any:
        """Reduce over all ranks, to one. The tensors of the others stay as they are."""
        to = _c10d.ReduceOptions()
        to.rootRank = opts.rootRank

        def reduce(flat: torch.Tensor, op: Any) -> None:
            to.reduceOp = op
            self.gloo.reduce([flat], to).wait()

        with self._staging("reduce", tensors, opts.reduceOp, f"to rank {opts.rootRank}") as staging:
            if self.rank() == opts.rootRank:
                flat = staging.numbers(tensors[0], written=True)
            else:  # gloo computes in the memory of every rank
                flat = staging.numbers(tensors[0]).clone()
            _reduce(flat, opts.reduceOp, self.size(), reduce)
        return _finished(tensors)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Reduce lists of tensors over all ranks; each rank gets the tensor at its place. Their sizes may differ."""
        with self._staging("reduce_scatter", inputs[0], _op_of(opts)) as staging:
            flats = [staging.numbers(tensor) for tensor in inputs[0]]
            self._reduce_scatter(staging.numbers(outputs[0], written=True), flats, _op_of(opts))
        return _finished(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks; each rank gets its part.

        Raises:
            TypeError: The dtypes differ.
            ValueError: The input has not as many elements as the outputs of all ranks.
        """
        if input.dtype != output.dtype:
            raise TypeError("input tensor must be the same type as the output tensor.")
        if input.numel() != output.numel() * self.size():
            raise ValueError("input tensor must be the same size as output size times world size")
        with self._staging("reduce_scatter", [input], _op_of(opts)) as staging:
            flats = staging.numbers(input).split(max(1, output.numel()))
            self._reduce_scatter(staging.numbers(output, written=True), flats, _op_of(opts))
        return _finished(output)

    reduce_scatter_single_coalesced = _for_each_pair(reduce_scatter_single)

    # The names before torch 2.12.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _all_reduce(self, flat: torch.Tensor, op: Any) -> None:
        options = _c10d.AllreduceOptions()

        def reduce(numbers: torch.Tensor, operation: Any) -> None:
            options.reduceOp = operation
            self.gloo.allreduce([numbers], options).wait()

        _reduce(flat, op, self.size(), reduce)

    def _reduce_scatter(self, output: torch.Tensor, flats: _Tensors, op: Any) -> None:
        if not flats:
            return
        whole = torch.cat(list(flats))
        self._all_reduce(whole, op)
        output.copy_(whole.split([flat.numel() for flat in flats])[self.rank()])

    # ---- collectives that move data --------------------------------------------------------------------------------

    def broadcast(self, tensors: _Tensors, opts: Any) -> Any:
        """Send a tensor of one rank to all."""
        with self._staging("broadcast", tensors, f"from rank {opts.rootRank}") as staging:
            for tensor in tensors:
                self._broadcast(staging.bytes(tensor, written=True), opts.rootRank)
        return _finished(tensors)

    def _broadcast(self, flat: torch.Tensor, root: int) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = root
        self.gloo.broadcast([flat], options).wait()

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Send a tensor of each rank to all. Their sizes may differ."""
        sizes = [[tensor.numel() for tensor in each] for each in outputs]
        with self._staging("all_gather", inputs, sizes, parts_differ=True) as staging:
            for gathered, given in zip(outputs, inputs, strict=True):
                self._all_gather([staging.bytes(tensor, written=True) for tensor in gathered], staging.bytes(given))
        return _finished(outputs)

    def _all_gather(self, outputs: list[torch.Tensor], given: torch.Tensor) -> None:
        if all(output.numel() == given.numel() for output in outputs):
            self.gloo.allgather([outputs], [given]).wait()
            return
        outputs[self.rank()].copy_(given)
        for root, output in enumerate(outputs):
            self._broadcast(output, root)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Do an all-gather for each input: ``outputs[rank][i]`` is input ``i`` of a rank."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Send a tensor of each rank to all, into one tensor of any shape.

        Raises:
            TypeError: The dtypes differ.
            ValueError: The output has not as many elements as the inputs of all ranks.
        """
        if input.dtype != output.dtype:
            raise TypeError("output tensor must have the same type as input tensor")
        if input.numel() * self.size() != output.numel():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        with self._staging("all_gather", [input], [[input.numel()] * self.size()], parts_differ=True) as staging:
            given = staging.bytes(input)
            parts = staging.bytes(output, written=True).split(max(1, given.numel()))
            if parts and given.numel():
                self._all_gather(list(parts), given)
        return _finished(output)

    all_gather_single_coalesced = _for_each_pair(all_gather_single)

    # The names before torch 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any) -> Any:
        """Send a tensor of each rank to one."""
        with self._staging("gather", inputs, f"to rank {opts.rootRank}") as staging:
            gathered = [[staging.bytes(tensor, written=True) for tensor in each] for each in outputs]
            self.gloo.gather(gathered, [staging.bytes(inputs[0])], opts).wait()
        return _finished(outputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any) -> Any:
        """Send a tensor of one rank to each."""
        with self._staging("scatter", outputs, f"from rank {opts.rootRank}") as staging:
            scattered = [[staging.bytes(tensor) for tensor in each] for each in inputs]
            self.gloo.scatter([staging.bytes(outputs[0], written=True)], scattered, opts).wait()
        return _finished(outputs)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """Send a tensor of each rank to each."""
        with self._staging("all_to_all", inputs[:1], parts_differ=True) as staging:
            received = [staging.bytes(tensor, written=True) for tensor in outputs]
            sent = [staging.bytes(tensor) for tensor in inputs]
            self._exchange(received, sent)
        return _finished(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> Any:
        """Send a part of a tensor of each rank to each. Sizes count along dimension 0; without them they are equal.

        Raises:
            RuntimeError: The sizes do not add up to the tensor's.
        """
        with self._staging("all_to_all", [input], parts_differ=True) as staging:
            received = self._parts(staging.bytes(output, written=True), output, output_sizes)
            self._exchange(received, self._parts(staging.bytes(input), input, input_sizes))
        return _finished(output)

    alltoall_base = all_to_all_single  # the name before torch 2.12

    def _parts(self, flat: torch.Tensor, tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
        rows = tensor.size(0) if tensor.dim() else 1
        if not sizes and rows % self.size():
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        sizes = sizes or [rows // self.size()] * self.size()
        if sum(sizes) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        row = flat.numel() // rows if rows else 0
        return list(flat.split([size * row for size in sizes]))

    def _exchange(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        received = torch.empty(sum(output.numel() for output in outputs), dtype=torch.uint8, device="cpu")
        sizes = [output.numel() for output in outputs]
        self.gloo.alltoall_base(received, torch.cat(inputs), sizes, [each.numel() for each in inputs]).wait()
        for output, part in zip(outputs, received.split(sizes), strict=True):
            output.copy_(part)

    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks."""
        with self._staging("barrier", []):
            self.gloo.barrier(opts).wait()
        return _finished(None)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, and name those that do not come. torch offers it for groups that say gloo."""
        self.gloo.monitored_barrier(*args, **kwargs)

    # ---- point to point --------------------------------------------------------------------------------------------

    def send(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """Begin to send a tensor to a rank."""

        def awaited() -> agreement.Awaited:
            times = self.waiting.begin(self._key("send", rank, tag))
            keys = [self._key("recv", self.rank(), tag), self._key("recv", None, tag)]
            return agreement.Awaited(keys, times, [self._ranks()[rank]])

        def begin(staging: _Staging) -> Any:
            return self.gloo.send([staging.bytes(tensors[0])], rank, tag)

        return self._begin(agreement.Call("send", tensors, (f"to rank {rank}",)), begin, awaited)

    def recv(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """Begin to receive a tensor from a rank."""

        def awaited() -> agreement.Awaited:
            times = self.waiting.begin(self._key("recv", rank, tag))
            return agreement.Awaited([self._key("send", self.rank(), tag)], times, [self._ranks()[rank]])

        def begin(staging: _Staging) -> Any:
            return self.gloo.recv([staging.bytes(tensors[0], written=True)], rank, tag)

        return self._begin(agreement.Call("recv", tensors, (f"from rank {rank}",)), begin, awaited)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Any:
        """Begin to receive a tensor from any rank."""

        def awaited() -> agreement.Awaited:
            self.waiting.begin(self._key("recv", None, tag))
            received = self.waiting.times(*(self._key("recv", rank, tag) for rank in (None, *range(self.size()))))
            return agreement.Awaited([self._key("send", self.rank(), tag)], received, self._ranks(), of_one=True)

        def begin(staging: _Staging) -> Any:
            return self.gloo.recv_anysource([staging.bytes(tensors[0], written=True)], tag)

        def received(rank: int) -> None:
            self.waiting.rename(self._key("recv", None, tag), self._key("recv", rank, tag))

        return self._begin(agreement.Call("recv", tensors, ("from any rank",)), begin, awaited, received)

    def _key(self, what: str, rank: int | None, tag: int) -> str:
        """Return by what name this rank counts the tensors that it sends to, or receives from, a rank of the group."""
        return f"{self._name} {what} {rank} {tag}"

    def _begin(
        self,
        call: agreement.Call,
        begin: Callable[[_Staging], Any],
        awaited: Callable[[], agreement.Awaited],
        received: Callable[[int], None] | None = None,
    ) -> _Begun:
        with self.naming(call.name), torch._C.DisableTorchFunction():
            staging = _Staging(self, call.name, connects=False)
            work = begin(staging)
            return _Begun(self, call, work, staging, awaited(), received)

    @block
    def _staging(self, name: str, tensors: _Tensors, *alike: Any, parts_differ: bool = False) -> Iterator[_Staging]:
        """Give the CPU tensors for a collective, once all ranks are in it.

        Args:
            name: The name of the collective.
            tensors: What is sent, or received where not every rank sends.
            alike: What else must be the same on all ranks.
            parts_differ: Whether the tensors may have another number of elements on each rank.
        """
        with self.naming(name), torch._C.DisableTorchFunction():
            dtypes = [(each.dtype, None if parts_differ else each.numel()) for each in tensors]
            self._agree(agreement.Call(name, tensors, (dtypes, *map(_named, alike))))
            staging = _Staging(self, name)
            yield staging
            staging.write_back()

    def _agree(self, call: agreement.Call) -> None:
        """Wait until all ranks are in a collective.

        Raises:
            DistBackendError: They are in different ones, or will never come.
        """
        if self.size() == 1:
            return
        times = self.waiting.begin(self._name)
        mine = call.digest()
        of_all = [torch.empty_like(mine) for _ in range(self.size())]
        work = self.gloo.allgather([of_all], [mine])
        self.waiting.wait(
            functools.partial(agreement.ended, work),
            call,
            lambda: agreement.Awaited([self._name], times, self._ranks()),
        )
        if any(not torch.equal(each, mine) for each in of_all):
            raise agreement.mismatch(self._description or self._name, self._gathered_texts(str(call)))

    def _ranks(self) -> list[int]:
        """Return the ranks of the group, as numbers in the whole program."""
        return dist.get_process_group_ranks(self)

    def _gathered_texts(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = self._gathered(torch.tensor([mine.numel()], device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        rows = self._gathered(padded).view(self.size(), -1)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    @block
    def naming(self, collective: str) -> Iterator[None]:
        """Let an error of gloo say which collective failed, and on which rank.

        Raises:
            DistBackendError: A rank has ended, or has not come within the time-out of the group.
        """
        try:
            yield
        except RuntimeError as error:
            if _OF_TRANSPORT not in str(error):
                raise
            where = f"rank {dist.get_rank()}, in the group {self._description!r} of {self.size()} ranks"
            raise dist.DistBackendError(f"{collective} failed on {where}: {error}") from error


def _finished(result: Any) -> Any:
    """Return finished work with that result."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _Finished(future) if _observers() else _work_of(future)


class _Finished(dist.distributed_c10d.Work):
    """Finished work. The program's streams are ordered after it once the program has waited for it."""

    def __init__(self, future: Any):
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream of each device wait for the collectives so far."""
        _collectives_waited()
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the tensors."""
        return self._future.value()

    def get_future(self) -> Any:
        """Return the future of the result. torch's C++ waits for it in the place of :meth:`wait`."""
        _collectives_waited()
        return self._future


def _observers() -> Sequence[Any]:
    context = thread_state.state.context
    return () if context is None else context.stream_observers


def _collectives_waited() -> None:
    for observer in _observers():
        observer.collectives_waited()


def _named(value: Any) -> Any:
    """Return an operation of a reduction by its name, and anything else as it is."""
    return _kind_of(value)[0].name if isinstance(value, (dist.ReduceOp, _Kind)) else value


def _op_of(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else options.reduceOp


def _reduce(flat: torch.Tensor, op: Any, size: int, reduce: Callable[[torch.Tensor, Any], None]) -> None:
    """Reduce one-dimensional numbers in place.

    Args:
        flat: The numbers of this rank.
        op: The operation that the program asks for.
        size: The number of ranks.
        reduce: Does it for a dtype and an operation that gloo has.
    """
    kind, factor = _kind_of(op)
    if kind in _NOT_OF_NCCL:
        raise ValueError(f"Cannot use ReduceOp.{kind.name} with NCCL")
    if flat.is_complex():
        if kind in (_Kind.MAX, _Kind.MIN, _Kind.PRODUCT):
            raise RuntimeError(f"all_reduce does not support ReduceOp.{kind.name} on complex tensors")
        flat = torch.view_as_real(flat).view(-1)
    if flat.dtype is torch.bool:
        if kind == _Kind.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        kind = _OF_BOOL.get(kind, kind)
        flat = flat.view(torch.uint8)
    if kind == _Kind.PREMUL_SUM:
        flat.mul_(factor.cpu() if isinstance(factor, torch.Tensor) else factor)
    reduce(flat, dist.ReduceOp.SUM if kind in (_Kind.PREMUL_SUM, _Kind.AVG) else dist.ReduceOp(kind))
    if kind == _Kind.AVG:
        flat.div_(size, rounding_mode=None if flat.is_floating_point() else "trunc")


def _kind_of(op: Any) -> tuple[Any, Any]:
    """Return the operation, and the factor of ``PREMUL_SUM``."""
    return (op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)).__getstate__()


_OF_TRANSPORT = "gloo/transport/"
"""What errors of gloo's connections hold, in the name of the file that they are from."""

_Kind = dist.ReduceOp.RedOpType

_NOT_OF_NCCL = (_Kind.BAND, _Kind.BOR, _Kind.BXOR)

_OF_BOOL = {_Kind.SUM: _Kind.MAX, _Kind.PRODUCT: _Kind.MIN}
"""What stands for an operation on bools: the logical or, and the logical and."""
