"""torch's sanitizer and its events on simulated devices, each in a process it marks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from places import TESTS
from processes import run_program, run_python

OPTIONS = ["--target", "simulated:cuda:2"]

DOCUMENTED = """
import torch

a = torch.rand(4, 2, device="cuda")

with torch.cuda.stream(torch.cuda.Stream()):
    torch.mul(a, 5, out=a)
"""
"""The example of torch's documentation, docs/source/cuda._sanitizer.md."""


@pytest.mark.one_engine
@pytest.mark.sampled(8, of="long programs")
def test_the_documented_example(tmp_path: Path) -> None:
    result = run_program(tmp_path, DOCUMENTED, options=OPTIONS, TORCH_CUDA_SANITIZER="1")
    assert result.returncode == 1 and "CUDASanitizerErrors: detected 1 errors" in result.stderr
    assert "CSAN detected a possible data race on tensor with data pointer" in result.stderr
    assert (
        "aten::mul.out" in result.stderr
        and "writing to argument(s) self, out, and to the output" in result.stderr
    )
    assert "Previous access by stream 0 during kernel:\naten::rand" in result.stderr
    fixed = DOCUMENTED.replace("torch.cuda.Stream()", "torch.cuda.default_stream()")
    result = run_program(tmp_path, fixed, options=OPTIONS, TORCH_CUDA_SANITIZER="1")
    assert result.returncode == 0 and "CSAN" not in result.stderr, result.stderr


FOLDERS = os.pathsep.join(
    map(str, (TESTS, TESTS / "support", TESTS / "simulation/observe", TESTS.parent))
)

KINDS = """
import contextlib, io, sys
import torch
import torch.cuda._sanitizer as sanitizer
import test_races as races

sanitizer.enable_cuda_sanitizer()
NOT_SEEN = {
    races.view, races.parts_of_a_tensor,  # it knows a tensor by its first byte
    races.freed_and_used_again, races.freed_after_a_wait,  # and forgets freed memory
    races.host_asks_event,  # and what a query tells the host
    races.blocking_batch,
    races.another_thread,  # its mode is the main thread's
    races.two_devices,  # it has one default stream
    races.optimizer_step,  # and knows nothing of backward
    races.host_waits_for_device,
}
seen = [kind for kind in races.KINDS if kind not in NOT_SEEN]
for kind in seen:
    torch.cuda.synchronize()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            kind(False)
        except sanitizer.CUDASanitizerErrors:
            pass
        else:
            print("not seen:", kind.__name__)
    torch.cuda.synchronize()
    kind(True)
print("kinds", len(seen))
"""


@pytest.mark.parametrize("engine", ["mode", "wrap"])
def test_kinds_of_races(tmp_path: Path, engine: str) -> None:
    result = run_program(
        tmp_path, KINDS, options=[*OPTIONS, "--engine", engine], PYTHONPATH=FOLDERS
    )
    assert result.stdout.splitlines() == ["kinds 13"], result.stdout + result.stderr[-3000:]


EVENTS = """
import gc
import torch, torchdevice
from torch.cuda import _gpu_trace as trace

calls = []
for name in ("event_creation", "event_deletion", "event_record", "event_wait", "memory_allocation",
             "memory_deallocation", "stream_creation", "device_synchronization", "stream_synchronization",
             "event_synchronization"):
    register = getattr(trace, f"register_callback_for_{name}")
    register(lambda *args, name=name: calls.append((name, *args)))

def since():
    found, calls[:] = list(calls), []
    return found

with torchdevice.simulate(count=2):
    torch.empty(3, device="cuda")
    assert since() == []
    torch._C._activate_gpu_trace()
    event = torch.cuda.Event()
    assert since() == [] and event.cuda_event == 0
    event.record()
    handle = event._as_parameter_.value
    assert handle and since() == [("event_creation", handle), ("event_record", handle, 0)]
    event.wait()
    event.synchronize()
    assert since() == [("event_wait", handle, 0), ("event_synchronization", handle)]
    del event
    assert since() == [("event_deletion", handle)]
    stream = torch.cuda.Stream()
    assert since() == [("stream_creation", stream.cuda_stream)] and stream.cuda_stream > 0
    stream.synchronize()
    torch.cuda.synchronize()
    assert since() == [("stream_synchronization", stream.cuda_stream), ("device_synchronization",)]
    x = torch.empty(10, 4, device="cuda")
    address = x.data_ptr()
    del x
    assert since() == [("memory_allocation", address), ("memory_deallocation", address)]
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream().record_event(torch.cuda.Event()).query()
        assert torch._C._cuda_getCurrentRawStream(0) == stream.cuda_stream
    assert [each[0] for each in since()][:2] == ["event_creation", "event_record"]
    x = torch.ones(3, device="cuda")
    since()
    for wait in (x.nonzero, x.sum().item, x.cpu):
        since()
        wait()
        assert [each for each in since() if each[0].endswith("synchronization")] == [("stream_synchronization", 0)]
    there = torch.cuda.Stream("cuda:1")
    assert torch.cuda.ExternalStream(there.cuda_stream, device=1) == there != stream
    assert torch.cuda.get_stream_from_external(stream.cuda_stream, 0) == stream
    assert torch.cuda.ExternalStream(0) == torch.cuda.default_stream()
    for pointer in (1234, stream.cuda_stream + 1000):
        try:
            torch.cuda.ExternalStream(pointer)
        except NotImplementedError as error:
            assert "no stream of torch at that address" in str(error)
        else:
            raise AssertionError(pointer)
since()
with torchdevice.simulate():
    torch.cuda.synchronize()
    assert since() == [("device_synchronization",)]  # as in C++, for the life of the process
with torchdevice.portable("cpu"):
    torch.cuda.synchronize()
    torch.ones(2, device="cuda")
    try:
        torch._C._activate_gpu_trace()
    except NotImplementedError as error:
        assert "Use a simulated device" in str(error)
    else:
        raise AssertionError("activated")
gc.collect()
assert since() == []
print("done")
"""


def test_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(EVENTS)
    result = run_python(str(path))
    assert result.stdout.split() == ["done"], result.stderr
