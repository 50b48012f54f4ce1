"""``torch.cuda.comm`` on simulated devices: places of chunks and copies, CUDA's refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.cuda import comm
from torch.nn.parallel import scatter_gather

import torchdevice
from torchdevice.errors import RaceError


@pytest.fixture
def cuda() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate(count=2) as scope:
        yield scope


def rand(*shape: int, device: Any = 0) -> torch.Tensor:
    return torch.rand(*shape, device=device)


def test_the_tensor_itself_is_on_its_own_device(cuda: torchdevice.Scope) -> None:
    x = rand(3, device=1)
    zero, one = comm.broadcast(x, (0, 1))
    assert one is x and zero.get_device() == 0 and zero.tolist() == x.tolist()
    for copy in comm.broadcast(torch.ones(3), (0, 1)):
        assert copy.is_cuda and copy.tolist() == [1, 1, 1]
    first, second = comm.broadcast_coalesced([rand(2), rand(3)], (0, 1))
    assert [t.get_device() for t in (*first, *second)] == [0, 0, 1, 1]


@pytest.mark.usefixtures("no_collections")
def test_chunks_on_streams_of_their_devices() -> None:
    with torchdevice.simulate(count=2, races="error"):
        streams = [torch.cuda.Stream(device) for device in (0, 1)]
        x = torch.arange(4.0).pin_memory()
        chunks = comm.scatter(x, (0, 1), streams=streams)
        with pytest.raises(RaceError, match=f"stream {streams[1].stream_id} of cuda:1"):
            chunks[1] + 1
        with pytest.raises(
            RuntimeError,
            match=r"^Expected the device associated with the stream at index 0 \(was 1\)",
        ):
            comm.scatter(x, (0, 1), streams=streams[::-1])


@pytest.mark.usefixtures("no_collections")
def test_scatter_of_a_module_waits_for_its_copies() -> None:
    with torchdevice.simulate(count=2, races="error"):
        (first,), (second,) = scatter_gather.scatter((torch.ones(4).pin_memory(),), [0, 1])
        assert (first + 1).tolist() == (second + 1).tolist() == [2, 2]


def test_results_are_written_into_what_was_given(cuda: torchdevice.Scope) -> None:
    x = torch.arange(6.0, device=0).view(2, 3)
    copies = [torch.zeros(2, 3, device=device) for device in (0, 1)]
    chunks = [torch.zeros(2, size, device=device) for size, device in ((1, 1), (2, 0))]
    whole = torch.zeros(2, 3, device=1)
    assert all(a is b for a, b in zip(comm.broadcast(x, out=copies), copies, strict=True))
    assert [copy.tolist() for copy in copies] == [x.tolist()] * 2
    assert all(a is b for a, b in zip(comm.scatter(x, dim=-1, out=chunks), chunks, strict=True))
    assert [chunk.tolist() for chunk in chunks] == [[[0], [3]], [[1, 2], [4, 5]]]
    assert comm.gather(chunks, dim=1, out=whole) is whole and whole.tolist() == x.tolist()


def test_a_sum_is_on_its_destination(cuda: torchdevice.Scope) -> None:
    total = comm.reduce_add(
        [rand(3, device=device) * 0 + device + 1 for device in (0, 1)], destination=1
    )
    assert total.get_device() == 1 and total.tolist() == [3.0] * 3
    with pytest.raises(AssertionError, match="expects all inputs to be on GPUs"):
        comm.reduce_add([torch.ones(2), torch.ones(2)])


REFUSED: dict[str, Callable[[], Any]] = {
    r"Expected all output tensors to be CUDA tensors, but output tensor at index 1 has device "
    r"'cpu'": lambda: comm.broadcast(rand(2), out=[rand(2), torch.rand(2)]),
    r"Expected all output tensors to have same shape as the source tensor \[2\], but output tensor "
    r"at index 0 has "
    r"shape \[2, 1\]": lambda: comm.broadcast(rand(2), out=[rand(2, 1)]),
    r"All tensors must be on devices\[0\]: 1": lambda: comm.broadcast_coalesced([rand(2)], (1, 0)),
    r"Expected at least one device to scatter to": lambda: comm.scatter(rand(2), ()),
    r"Expected devices and chunk_sizes to be of same length, but got len\(devices\) = 2 and "
    r"len\(chunk_sizes\) = 1": (lambda: comm.scatter(rand(2), (0, 1), [2])),
    r"Expected at least one output tensor to scatter to": lambda: comm.scatter(rand(2), out=[]),
    r"Expected all output tensors to be CUDA tensors, but output tensor at index 0 has device "
    r"'cpu'": lambda: comm.scatter(rand(2), out=[torch.rand(2)]),
    r"Output tensor at index 1 has incorrect shape: \[1, 2\]. Expected same shape except for "
    r"scatter dim 0 as the "
    r"source tensor: \[2\]": lambda: comm.scatter(rand(2), out=[rand(1), rand(1, 2)]),
    r"Total size for output tensors along scatter dim 1 does not match the source tensor size at "
    r"dim 1. Expected 3, but"
    r" got total size 2": lambda: comm.scatter(rand(2, 3), dim=-1, out=[rand(2, 1), rand(2, 1)]),
    r"Expected at least one tensor to gather from": lambda: comm.gather(()),
    r"Expected all input tensors to be CUDA tensors, but tensor at index 0 has device "
    r"'cpu'": lambda: comm.gather((torch.rand(2), rand(2))),
    r"Expected all input tensors to have the same number of dimensions": lambda: comm.gather(
        (rand(2), rand(2, 1))
    ),
    r"Input tensor at index 1 has invalid shape \[2, 3\], but expected \[2, 2\]": lambda: (
        comm.gather((rand(2, 2), rand(2, 3)))
    ),
    r"Expected out tensor to have shape \[4\], but got \[5\]": lambda: comm.gather(
        (rand(2), rand(2)), out=rand(5)
    ),
}


@pytest.mark.parametrize("text", sorted(REFUSED))
def test_refusals(cuda: torchdevice.Scope, text: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{text}"):
        REFUSED[text]()


@pytest.mark.parametrize("call", [comm.scatter, comm.broadcast])
def test_no_device_is_negative(cuda: torchdevice.Scope, call: Callable[..., Any]) -> None:
    with pytest.raises((RuntimeError, ValueError), match="device"):
        call(rand(2), (-3,))


def test_a_target_that_is_the_cpu_refuses_nothing_by_device() -> None:
    with torchdevice.portable("cpu"):
        x = torch.ones(4)
        assert [each.tolist() for each in comm.scatter(x.cuda(), [0])] == [[1, 1, 1, 1]]
        for destination in (0, "cpu", "cuda:0", torch.device("cuda"), torch.device("cpu")):
            assert comm.gather([x, x], destination=destination).tolist() == [1] * 8
        assert comm.reduce_add([x.cuda(), x.cuda()]).tolist() == [2] * 4
        with pytest.raises(RuntimeError, match=r"^Expected at least one tensor"):
            comm.gather([])
