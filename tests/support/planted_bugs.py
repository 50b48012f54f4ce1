"""Bugs of GPU programs, each with a correct twin: a function whose argument chooses.

The bug must end with an error on a simulated device, or with wrong data, which its ``assert``
finds. The twin must not.
``docs/make_planted_bugs.py`` makes a table of them.
"""

from __future__ import annotations

import io
import os
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.cuda import comm

import torchdevice

N = 64


def begin_group() -> None:
    """Make this process the only rank of a group."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def end_group() -> None:
    """End the group, if there is one, and leave nothing of it in torch's module."""
    if dist.is_initialized():
        dist.destroy_process_group()
        dist.distributed_c10d._backend = _BACKEND
    dist.distributed_c10d._group_count = 0  # torch counts groups that it could not make


_BACKEND = dist.distributed_c10d._backend


def error_of(program: Callable[[bool], Any], correct: bool) -> BaseException | None:
    """Run a program or its twin, and return the error with which it ended."""
    try:
        program(correct)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # which hold tensors
        return error
    finally:
        torch.use_deterministic_algorithms(False)
    return None


class Planted(NamedTuple):
    """A bug and its twin.

    Attributes:
        kind: The kind of bug.
        mistake: What the program does wrong, in a few words.
        program: Called with whether it is to be correct.
        options: The options of ``simulate()`` that it takes to find the bug.
    """

    kind: str
    mistake: str
    program: Callable[[bool], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.__name__

    def run(self, correct: bool) -> BaseException | None:
        """Run the program or its twin in its own scope, and return the error that ended it."""
        with torchdevice.simulate(**{"count": 2, **self.options}):
            try:
                return error_of(self.program, correct)
            finally:
                end_group()


BUGS: list[Planted] = []


def bug(
    kind: str, mistake: str, **options: Any
) -> Callable[[Callable[[bool], Any]], Callable[[bool], Any]]:
    """Return a decorator that adds a program to ``BUGS``."""

    def add(program: Callable[[bool], Any]) -> Callable[[bool], Any]:
        BUGS.append(Planted(kind, mistake, program, options))
        return program

    return add


def main() -> Any:
    return torch.cuda.current_stream()


def rand(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(*(shape or (N,)), **{"device": "cuda", **options})


# ---- streams -------------------------------------------------------------------------------------

STREAMS = "race between streams"


@bug(
    STREAMS, "a side stream reads what the main stream writes, without `wait_stream`", races="error"
)
def missing_wait(correct: bool) -> None:
    side, x = torch.cuda.Stream(), rand()
    if correct:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1


@bug(STREAMS, "the main stream uses a side stream's result without waiting for it", races="error")
def missing_wait_back(correct: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = rand()
    if correct:
        main().wait_stream(side)
    x + 1


@bug(STREAMS, "a buffer is filled again while a side stream still reads it", races="error")
def buffer_filled_again(correct: bool) -> None:
    side, buffer = torch.cuda.Stream(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        buffer.sum()
    if correct:
        main().wait_stream(side)
    buffer.fill_(0)


@bug(STREAMS, "an event is recorded before the work that it should follow", races="error")
def event_recorded_early(correct: bool) -> None:
    side, x, done = torch.cuda.Stream(), rand(), torch.cuda.Event()
    if not correct:
        done.record()
    x.mul_(2)
    if correct:
        done.record()
    side.wait_event(done)
    with torch.cuda.stream(side):
        x + 1


@bug(STREAMS, "the wrong stream waits for an event", races="error")
def wrong_stream_waits(correct: bool) -> None:
    side, third, x = torch.cuda.Stream(), torch.cuda.Stream(), rand()
    (side if correct else third).wait_event(main().record_event())
    with torch.cuda.stream(side):
        x + 1


@bug(STREAMS, "`synchronize` of another device", races="error")
def synchronize_of_another_device(correct: bool) -> None:
    side, x = torch.cuda.Stream(), rand()
    torch.cuda.synchronize(0 if correct else 1)
    with torch.cuda.stream(side):
        x + 1


@bug(STREAMS, "memory is freed without `record_stream` while a side stream uses it", races="error")
def missing_record_stream(correct: bool) -> None:
    side, x = torch.cuda.Stream(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x + 1
    if correct:
        x.record_stream(side)
    del x
    rand()


@bug(STREAMS, "a prefetched batch is used without waiting for its copy", races="error")
def prefetched_batch(correct: bool) -> None:
    side, host = torch.cuda.Stream(), torch.rand(N).pin_memory()
    with torch.cuda.stream(side):
        batch = host.to("cuda", non_blocking=True)
    if correct:
        main().wait_stream(side)
    batch + 1


@bug(STREAMS, "the optimizer steps on a stream that does not wait for backward", races="error")
def optimizer_on_a_side_stream(correct: bool) -> None:
    side, layer = torch.cuda.Stream(), nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(rand(2, 4)).sum().backward()
    if correct:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        optimizer.step()


@bug(STREAMS, "two streams write overlapping parts of a tensor", races="error")
def overlapping_parts(correct: bool) -> None:
    side, x = torch.cuda.Stream(), rand()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        x[: N // 2].fill_(1)
    x[N // 2 if correct else N // 2 - 1 :].fill_(2)


@bug(STREAMS, "chunks are used without waiting for the streams given to `scatter`", races="error")
def scattered_on_streams(correct: bool) -> None:
    streams = [torch.cuda.Stream(0), torch.cuda.Stream(1)]
    _, chunk = comm.scatter(torch.rand(N).pin_memory(), (0, 1), streams=streams)
    if correct:
        torch.cuda.current_stream(1).wait_stream(streams[1])
    chunk + 1


@bug(STREAMS, "a copy between devices is used on a stream that does not wait for it", races="error")
def copy_between_devices(correct: bool) -> None:
    x, side = rand(), torch.cuda.Stream(1)
    y = x.to("cuda:1")
    if correct:
        side.wait_stream(torch.cuda.current_stream(1))
    with torch.cuda.stream(side):
        y + 1


# ---- copies in flight ----------------------------------------------------------------------------

COPIES = "copy in flight"


@bug(COPIES, "the host reads a `non_blocking` copy without `synchronize`", asynchronous=True)
def missing_synchronize(correct: bool) -> None:
    host = torch.ones(N, device="cuda").to("cpu", non_blocking=True)
    if correct:
        torch.cuda.synchronize()
    assert host.sum() == N


@bug(COPIES, "the host waits for an event that was recorded before the copy", asynchronous=True)
def event_before_the_copy(correct: bool) -> None:
    x, done = torch.ones(N, device="cuda"), torch.cuda.Event()
    if not correct:
        done.record()
    host = x.to("cpu", non_blocking=True)
    if correct:
        done.record()
    done.synchronize()
    assert host.sum() == N


@bug(COPIES, "a page-locked buffer is filled again before its copy is done", asynchronous=True)
def staging_buffer_filled_again(correct: bool) -> None:
    buffer, x = torch.ones(N).pin_memory(), torch.empty(N, device="cuda")
    x.copy_(buffer, non_blocking=True)
    if correct:
        torch.cuda.synchronize()
    buffer.fill_(2)
    assert x.sum().item() == N


@bug(
    COPIES,
    "a kernel on another stream reads the destination of a copy without waiting",
    asynchronous=True,
)
def kernel_reads_a_copy_early(correct: bool) -> None:
    side, buffer = torch.cuda.Stream(), torch.ones(N).pin_memory()
    x = torch.zeros(N, device="cuda")
    torch.cuda.synchronize()
    x.copy_(buffer, non_blocking=True)
    if correct:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        total = x.sum()
    torch.cuda.synchronize()
    assert total.item() == N


# ---- placement -----------------------------------------------------------------------------------

PLACEMENT = "placement"


@bug(PLACEMENT, "an operand is left on the CPU")
def operand_on_the_cpu(correct: bool) -> None:
    rand(3) + (rand(3) if correct else torch.rand(3))


@bug(PLACEMENT, "operands are on two devices")
def operands_on_two_devices(correct: bool) -> None:
    rand(3) + rand(3, device="cuda:0" if correct else "cuda:1")


class _Shifted(nn.Module):
    def __init__(self, is_buffer: bool):
        super().__init__()
        if is_buffer:
            self.register_buffer("shift", torch.ones(3))
        else:
            self.shift = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@bug(PLACEMENT, "a tensor of a module is no buffer, and `.cuda()` leaves it behind")
def forgotten_buffer(correct: bool) -> None:
    _Shifted(correct).cuda()(rand(3))


@bug(PLACEMENT, "`.numpy()` of a tensor of the device")
def numpy_of_the_device(correct: bool) -> None:
    x = rand(3)
    (x.cpu() if correct else x).numpy()


@bug(PLACEMENT, "the weights of a loss are left on the CPU")
def weights_of_a_loss(correct: bool) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    (loss.cuda() if correct else loss)(rand(2, 3), torch.tensor([0, 2], device="cuda"))


@bug(PLACEMENT, "the indices are on another GPU")
def indices_on_another_device(correct: bool) -> None:
    rand(4)[torch.tensor([1, 2], device="cuda:0" if correct else "cuda:1")]


@bug(PLACEMENT, "a generator of the CPU draws for the device")
def generator_of_the_cpu(correct: bool) -> None:
    torch.rand(3, device="cuda", generator=torch.Generator("cuda" if correct else "cpu"))


@bug(PLACEMENT, "a device that is not there")
def device_that_is_not_there(correct: bool) -> None:
    rand(3, device="cuda:1" if correct else "cuda:2")


@bug(PLACEMENT, "a checkpoint of a device that is not there is loaded without `map_location`")
def checkpoint_of_another_device(correct: bool) -> None:
    file = io.BytesIO()
    with torchdevice.simulate(count=8):
        torch.save(rand(3, device="cuda:7"), file)
    file.seek(0)
    torch.load(file, map_location="cuda:0" if correct else None)


@bug(PLACEMENT, "a legacy constructor gets a device of another type")
def legacy_constructor(correct: bool) -> None:
    torch.cuda.FloatTensor(3, device="cuda:1" if correct else "cpu")


# ---- what CUDA refuses ---------------------------------------------------------------------------

REFUSED = "refused by CUDA"


@bug(REFUSED, "a product of integers")
def product_of_integers(correct: bool) -> None:
    x = torch.ones(2, 2, dtype=torch.float32 if correct else torch.int64, device="cuda")
    x @ x


@bug(REFUSED, "a product of float8 on a GPU without units for it", profile="a100")
def product_of_float8(correct: bool) -> None:
    x, one = rand(16, 16).to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    if correct:
        x.float() @ x.float()
    else:
        torch._scaled_mm(x, x.t(), one, one)


@bug(REFUSED, "an operator without a kernel for CUDA")
def operator_of_the_cpu(correct: bool) -> None:
    x = rand(8)
    torch.histogram(x.cpu() if correct else x, 4)


@bug(REFUSED, "`pin_memory()` of a tensor of the device")
def pinned_twice(correct: bool) -> None:
    (torch.rand(3) if correct else rand(3)).pin_memory()


@bug(REFUSED, "memory is unregistered twice")
def unregistered_twice(correct: bool) -> None:
    x, cudart = torch.rand(8), torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(x.data_ptr(), 32, 0))
    for _ in range(1 if correct else 2):
        torch.cuda.check_error(cudart.cudaHostUnregister(x.data_ptr()))


@bug(REFUSED, "a class that is out of range")
def class_out_of_range(correct: bool) -> None:
    F.cross_entropy(rand(2, 3), torch.tensor([0, 2 if correct else 3], device="cuda"))


@bug(REFUSED, "an index of an embedding that is out of range")
def token_out_of_range(correct: bool) -> None:
    nn.Embedding(4, 2, device="cuda")(torch.tensor([3 if correct else 4], device="cuda"))


@bug(REFUSED, "a nondeterministic kernel where the program asks for deterministic ones")
def nondeterministic_kernel(correct: bool) -> None:
    torch.use_deterministic_algorithms(True)
    classes, weights = torch.tensor([1, 1], device="cuda"), rand(2)
    if correct:
        torch.zeros(2, device="cuda").index_add_(0, classes, weights)
    else:
        torch.bincount(classes, weights=weights)


@bug(REFUSED, "the losses of all steps are kept with their graphs", memory="32MiB")
def kept_graphs(correct: bool) -> None:
    layer, losses = nn.Linear(64, 64, device="cuda"), []
    for _ in range(200):
        loss = layer(rand(1024, 64)).exp().sum()
        losses.append(loss.detach() if correct else loss)


@bug(REFUSED, "the time between events that have no timing")
def events_without_timing(correct: bool) -> None:
    events = [torch.cuda.Event(enable_timing=correct) for _ in range(2)]
    for each in events:
        each.record()
    torch.cuda.synchronize()
    events[0].elapsed_time(events[1])


@bug(REFUSED, "the time up to an event that the host has not waited for")
def time_of_unfinished_work(correct: bool) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(1_000_000 if correct else 10_000_000_000)
    end.record()
    if correct:
        end.synchronize()
    start.elapsed_time(end)


@bug(REFUSED, "an event is recorded in streams of two devices")
def event_of_two_devices(correct: bool) -> None:
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(0))
    event.record(torch.cuda.Stream(0 if correct else 1))


@bug(REFUSED, "CUDA is used in a forked child")
def used_in_a_fork(correct: bool) -> None:
    rand(3)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python says that threads and forks do not go together
        child = os.fork()
    if not child:
        try:
            torch.rand(3) if correct else rand(3)
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        text = said.read()
    if text:
        raise RuntimeError(text)


# ---- graphs --------------------------------------------------------------------------------------

GRAPHS = "graph"


@bug(GRAPHS, "the host waits for a value during a capture")
def item_in_a_capture(correct: bool) -> None:
    x = torch.ones(3, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x.sum()
        if not correct:
            y.item()


@bug(GRAPHS, "a capture on the default stream")
def capture_on_the_default_stream(correct: bool) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream() if correct else torch.cuda.default_stream()):
        graph.capture_begin()
        x + 1
        graph.capture_end()


@bug(GRAPHS, "a replay without a capture")
def replay_without_a_capture(correct: bool) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    if correct:
        with torch.cuda.graph(graph):
            x + 1
    graph.replay()


@bug(GRAPHS, "a new tensor takes the place of the graph's input")
def replaced_input(correct: bool) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    if correct:
        x.fill_(5)
    else:
        x = torch.full((3,), 5.0, device="cuda")
    graph.replay()
    assert y.tolist() == [10, 10, 10]


@bug(GRAPHS, "the graph draws from a generator that is not registered with it")
def generator_of_no_graph(correct: bool) -> None:
    generator, graph = torch.Generator("cuda"), torch.cuda.CUDAGraph()
    if correct:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        torch.rand(3, device="cuda", generator=generator)


@bug(GRAPHS, "the results of a capture are read before a replay")
def results_before_a_replay(correct: bool) -> None:
    x = torch.ones(3, device="cuda")
    total = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total += x
    if correct:
        graph.replay()
    assert total.tolist() == [1, 1, 1]


@bug(GRAPHS, "the input is written on a stream for which the replay does not wait", races="error")
def replay_races_with_its_input(correct: bool) -> None:
    x, graph, side = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x * 2
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.fill_(5)
    if correct:
        main().wait_stream(side)
    graph.replay()


@bug(GRAPHS, "the graph's input is freed, and the graph reads its memory", races="error")
def freed_input(correct: bool) -> None:
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x * 2
    if not correct:
        x = torch.full((3,), 5.0, device="cuda")
    graph.replay()


@bug(GRAPHS, "two graphs that share a memory pool are replayed at the same time", races="error")
def pool_of_two_graphs(correct: bool) -> None:
    x, pool, graphs = torch.ones(3, device="cuda"), torch.cuda.graph_pool_handle(), []
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    for factor in (2, 3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            (x * factor).sum()
    torch.cuda.synchronize()
    for graph, side in zip(graphs, sides, strict=True):
        with torch.cuda.stream(side):
            graph.replay()
        if correct:
            sides[1].wait_stream(sides[0])


@bug(GRAPHS, "the result of each replay is kept without a copy, and all are stacked", races="error")
def results_of_replays(correct: bool) -> None:
    x, graph, kept = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        result = x * 2
    for value in range(3):
        x.fill_(value)
        graph.replay()
        kept.append(result.clone() if correct else result.detach())
    torch.stack(kept)


# ---- collectives ---------------------------------------------------------------------------------

COLLECTIVES = "collective"


@bug(COLLECTIVES, "NCCL gets a tensor of the CPU")
def collective_of_the_cpu(correct: bool) -> None:
    begin_group()
    dist.all_reduce(rand(3) if correct else torch.rand(3))


@bug(COLLECTIVES, "NCCL gets a tensor that is not contiguous")
def collective_with_gaps(correct: bool) -> None:
    begin_group()
    x = rand(4, 4)
    dist.all_reduce(x.t().contiguous() if correct else x.t())


@bug(
    COLLECTIVES, "a gradient is reduced on a stream that does not wait for backward", races="error"
)
def collective_before_backward(correct: bool) -> None:
    begin_group()
    side, gradient = torch.cuda.Stream(), rand()
    if correct:
        side.wait_stream(main())
    with torch.cuda.stream(side):
        dist.all_reduce(gradient)


@bug(
    COLLECTIVES, "the result of an asynchronous collective is read without `wait()`", races="error"
)
def asynchronous_collective(correct: bool) -> None:
    begin_group()
    x = rand()
    work = dist.all_reduce(x, async_op=True)
    if correct:
        work.wait()
    x + 1


@bug(
    COLLECTIVES, "the input of an asynchronous collective is written before `wait()`", races="error"
)
def input_of_a_collective(correct: bool) -> None:
    begin_group()
    x, out = rand(), rand()
    work = dist.all_gather([out], x, async_op=True)
    if correct:
        work.wait()
    x.zero_()


@bug(COLLECTIVES, "the chunks given to `gather` are on the CPU")
def gathered_from_the_cpu(correct: bool) -> None:
    comm.gather([rand(2), rand(2, device="cuda:1") if correct else torch.rand(2)])
