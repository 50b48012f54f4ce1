"""The memory of simulated devices as programs see it: exact figures, limits, forks."""

from __future__ import annotations

import gc
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import torchdevice
from torchdevice.simulation.allocator import storages


@pytest.mark.one_engine
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_another_thread_allocates(tmp_path: Path) -> None:
    """The child must not wait for a lock that a thread missing in the child held."""
    program = """
    import os, sys, threading, time
    import torch, torchdevice

    sys.setswitchinterval(1e-5)  # so that a thread often is in the middle of something

    def wait(pid: int) -> None:
        for _ in range(2000):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.005)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise SystemExit(f"child {pid} hangs")

    with torchdevice.simulate("mps"):  # CUDA refuses to work in the child
        stop = False

        def allocate() -> None:
            while not stop:
                torch.cuda.memory_allocated()
                kept = [torch.empty(n, device="cuda") for n in (1, 300, 1 << 12)]

        thread = threading.Thread(target=allocate)
        thread.start()
        try:
            for _ in range(150):
                pid = os.fork()
                if not pid:
                    x = torch.ones(7, device="cuda") + 1
                    os._exit(0 if torch.cuda.memory_allocated() and x.sum() == 14 else 1)
                wait(pid)
        finally:
            stop = True
            thread.join()
    print("done")
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    result = run_python("-W", "ignore", str(path))
    assert result.stdout.split() == ["done"], result.stderr


class TestMemory:
    @pytest.mark.usefixtures("no_collections")
    def test_figures_are_exact(self, devices: torchdevice.Scope) -> None:
        gc.collect()
        base = torch.cuda.memory_allocated(1)
        torch.cuda.reset_peak_memory_stats(1)
        x = torch.empty(1024, device="cuda:1")
        assert torch.cuda.memory_allocated(1) - base == 4096
        y = torch.empty(3, device="cuda:1")
        assert torch.cuda.memory_allocated(1) - base == 4096 + 512, "rounded up to CUDA's blocks"
        view = x[10:]
        del x
        assert torch.cuda.memory_allocated(1) - base == 4096 + 512, "a view keeps the memory"
        del view
        assert torch.cuda.memory_allocated(1) - base == 512
        assert torch.cuda.max_memory_allocated(1) - base == 4096 + 512
        z = y.clone().add(1)
        del y, z
        assert torch.cuda.memory_allocated(1) == base and torch.cuda.memory_allocated(0) >= 0

    def test_training_does_not_leak(self, devices: torchdevice.Scope) -> None:
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(2, 5, 16, device="cuda")

        def step() -> int:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return torch.cuda.memory_allocated()

        step()
        assert len({step() for _ in range(4)}) == 1

    @pytest.mark.usefixtures("no_collections")
    def test_a_limit_raises_cudas_error(self) -> None:
        with torchdevice.simulate(memory=128 << 20) as scope:
            gc.collect()
            held = torch.empty(16 << 20, device="cuda")
            small = torch.empty(1 << 19, device="cuda")
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            # Of a segment of 20 MiB.
            assert reserved - allocated >= 18 << 20 and small.nbytes == 2 << 20
            with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
                torch.empty(32 << 20, device="cuda")
            text = str(caught.value)
            assert text.startswith(
                "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of "
                "128.00 MiB"
            )
            assert f"{allocated / (1 << 20):.2f} MiB is allocated by PyTorch" in text
            assert (
                f"{(reserved - allocated) / (1 << 20):.2f} MiB is reserved by PyTorch but "
                "unallocated" in text
            )
            assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text
            assert torch.cuda.memory_allocated() == allocated
            del held
            assert torch.empty(16 << 20, device="cuda").numel() == 16 << 20
            assert torch.cuda.get_device_properties(0).total_memory == 128 << 20
            assert torch.cuda.mem_get_info()[1] == 128 << 20
            batch, tried = 1 << 16, []
            while True:  # what batch-size finders do
                try:
                    torch.randn(batch, 1024, device="cuda").relu()
                    break
                except torch.cuda.OutOfMemoryError:
                    tried.append(batch)
                    batch //= 2
            assert tried and batch >= 4096 and scope.options.memory == 128 << 20
        with torchdevice.simulate():
            torch.empty(64 << 20, device="cuda")

    @pytest.mark.usefixtures("no_collections")
    def test_a_fraction_is_a_limit(self) -> None:
        with torchdevice.simulate(memory=160 << 20, count=2):
            gc.collect()
            torch.cuda.set_per_process_memory_fraction(0.25, 1)
            assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
            torch.empty(20 << 20, device="cuda:0")
            with pytest.raises(
                torch.cuda.OutOfMemoryError,
                match=r"capacity of 160\.00 MiB .* 40\.00 MiB allowed; Of",
            ):
                torch.empty(20 << 20, device="cuda:1")
        with torchdevice.simulate(memory=160 << 20, count=2):
            torch.empty(20 << 20, device="cuda:1")

    @pytest.mark.usefixtures("no_collections")
    def test_a_failing_backward_gives_its_memory_back(self) -> None:
        gc.collect()
        with torchdevice.simulate() as scope:
            base = torch.cuda.memory_allocated()
        with torchdevice.simulate(memory=base + (6 << 20)):
            x = torch.randn(1 << 18, device="cuda", requires_grad=True)
            with pytest.raises(torch.cuda.OutOfMemoryError):
                (x.sin().cos() * x.exp()).sum().backward()
            del x
        gc.collect()
        with scope:
            assert torch.cuda.memory_allocated() == base


_SIDE = 1 << 22
"""Of a square matrix that no machine has memory for."""

BEYOND_THE_HOST = {
    "a result": lambda x: torch.outer(x, x),
    "a handwritten kernel": lambda x: x.expand(_SIDE, -1).clone(),
    "a composition": lambda x: x.repeat(_SIDE),
    "random numbers": lambda x: torch.rand_like(x.expand(_SIDE, -1)),
    "an out argument": lambda x: torch.mul(x[:, None], x, out=torch.empty(0, device="cuda")),
    "resize_": lambda x: x.new_empty(0).resize_(_SIDE, _SIDE),
    "a storage": lambda x: torch.UntypedStorage(4 * _SIDE * _SIDE, device="cuda"),
    "a derivative": lambda x: x.requires_grad_().expand(_SIDE, -1).sin().sum().backward(),
}
"""Ways to ask for memory, most of them without a device that a wrapper would see."""


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("memory", [None, "8GiB"])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("way", BEYOND_THE_HOST)
def test_memory_that_the_host_lacks_is_an_error_of_cuda(way: str, engine: Any, memory: Any) -> None:
    # A class of torch's that a program may have kept, as batch-size finders do.
    kept = torch.OutOfMemoryError
    with torchdevice.simulate(memory=memory, engine=engine):
        x = torch.ones(_SIDE, device="cuda")
        with pytest.raises(
            RuntimeError, match=r"^CUDA out of memory\. Tried to allocate"
        ) as caught:
            BEYOND_THE_HOST[way](x)
        assert type(caught.value) is kept
        notes = getattr(caught.value, "__notes__", [])
        assert any("This machine's memory ran out" in note for note in notes) == (memory is None)
        assert torch.cuda.memory_stats()["num_ooms"] == 1
        assert torch.cuda.memory_allocated() == x.nbytes


def test_a_kernel_finds_what_has_ended_released() -> None:
    """So the CPU may give it the same memory, which is in the processor's cache."""
    left: list[int] = []
    with torch.library._scoped_library("growing", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: left.append(len(storages.device(0).ended)) or x * 2, "CPU")
        with torchdevice.simulate(native="never"):
            x = torch.ones(1000, device="cuda")
            for _ in range(3):
                torch.ops.growing.twice(x)
    assert left == [0, 0, 0]
