"""The simulated accelerator: where it differs from the CPU, and what its profiles lack.

The contract tests, which run on it too, cover the rest.
"""

from __future__ import annotations

import ast
import copy
import gc
import io
import itertools
import os
import pickle
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import sweeping
import torch
from conftest import free_port, plain_torch, run_program, run_python
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import torchdevice
from torchdevice.errors import FidelityError, PortabilityWarning, ScopeError, UnknownTargetError
from torchdevice.simulation import inductor, machine


@pytest.fixture
def devices() -> Iterator[torchdevice.Scope]:
    """Two simulated CUDA devices whose tensors say cuda."""
    with torchdevice.simulate(count=2) as scope:
        yield scope


class TestWaysIn:
    def test_context_decorator_and_target(self) -> None:
        def place() -> torch.device:
            return torch.zeros(1, device="cuda:3").device

        fourth = "simulated:3"
        with torchdevice.simulate(profile="cuda", count=4):
            assert str(place()) == "cuda:3" and torch.cuda.device_count() == 4
        assert str(torchdevice.simulate("cuda", 4)(place)()) == "cuda:3"
        assert str(torchdevice.simulate("cuda", 4, identity="target")(place)()) == fourth
        assert str(torchdevice.portable("simulated:cuda:4")(place)()) == "cuda:3"
        assert str(torchdevice.portable("simulated", devices=4, identity="target")(place)()) == fourth

    def test_as_many_devices_as_torch_numbers(self) -> None:
        with torchdevice.simulate(count=128):
            assert str(torch.ones(1, device="cuda:127").device) == "cuda:127"
        for count in (0, 129, 255):
            with pytest.raises(ValueError, match="Use an int from 1 to 128, torch's limit"):
                torchdevice.simulate(count=count)
        with pytest.raises(ValueError, match="cannot have 255 devices: torch numbers 128 at most"):
            torchdevice.portable("simulated:cuda:255").__enter__()

    def test_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHDEVICE_TARGET", "simulated:mps")
        with torchdevice.portable() as scope:
            assert torch.zeros(1, device="cuda").is_cuda
            assert repr(scope) == "<torchdevice.Scope target='simulated:mps:1'>"

    def test_command(self, tmp_path: Path) -> None:
        program = """
        import torch, subprocess, sys
        x = torch.ones(2).to("cuda:1")
        print(torch.cuda.device_count(), x.device, x.is_cuda)
        child = "import torch; print(torch.zeros(1, device='cuda:1').is_cuda)"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip())
        """
        options = ["--target", "simulated:cuda", "--devices", "2"]
        result = run_program(tmp_path, program, options=options)
        assert result.stdout.splitlines() == ["2 cuda:1 True", "True"], result.stderr

    def test_an_ordinal_too_many_is_cudas_error(self, devices: torchdevice.Scope) -> None:
        with pytest.raises(torch.AcceleratorError, match="CUDA error: invalid device ordinal"):
            torch.zeros(1, device="cuda:2")

    def test_current_device_is_where_things_are_made(self, devices: torchdevice.Scope) -> None:
        with torch.cuda.device(1):
            assert torch.zeros(1, device="cuda").get_device() == torch.zeros(1).cuda().get_device() == 1
        assert torch.zeros(1, device="cuda").get_device() == 0

    def test_bad_arguments(self) -> None:
        with pytest.raises(UnknownTargetError, match=r"'simulated:tpu' is not a target.*simulated:strict"):
            torchdevice.simulate("tpu").__enter__()
        with pytest.raises(ValueError, match=r"cannot have .* devices: the profile has one"):
            torchdevice.simulate("mps", count=2).__enter__()
        with pytest.raises(ValueError, match=r"memory=0 is not a number of bytes\. Use an int"):
            torchdevice.simulate(memory=0)
        with pytest.raises(ValueError, match="limits simulated devices, and 'cpu' is not one"):
            torchdevice.portable("cpu", memory=1).__enter__()
        with pytest.raises(ValueError, match="count=0"):
            torchdevice.simulate(count=0)


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("visible", "count"),
        [
            *[("0", 1), ("1,3", 2), ("2,9,0", 1), ("0,1,2,3", 4), ("-1", 0), ("", 0)],
            # What follows is how torch's own parser reads it: nothing where an ordinal is repeated, leading numbers.
            *[("0,0", 0), ("0,1,0", 0), (" 1 , 2 ", 2), ("1gpu2,2ampere", 2), ("+1", 1), ("0,x,1", 1), ("-", 0)],
            ("GPU-0123", 0),
        ],
    )
    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    def test_the_variable_limits_the_number_of_devices(
        self, target: str, visible: str, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchdevice.portable(target, devices=4):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)  # as a program does before it uses CUDA
            assert torch.cuda.device_count() == count and torch.cuda.is_available() == (count > 0)
            if not count:
                with pytest.raises(RuntimeError, match="No CUDA GPUs are available"):
                    torch.zeros(1, device="cuda")
                return
            assert torch.zeros(1, device=f"cuda:{count - 1}").numel() == 1
            with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
                torch.zeros(1, device=f"cuda:{count}")

    def test_the_variable_counts_until_the_first_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with torchdevice.simulate(count=4):
            assert torch.cuda.device_count() == 4
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
            assert torch.cuda.device_count() == 2
            torch.zeros(1, device="cuda")
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
            assert torch.cuda.device_count() == 2

    def test_the_variable_hides_no_device_where_ordinals_fold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with torchdevice.portable("cpu"):
            assert torch.cuda.is_available() and torch.zeros(1, device="cuda").numel() == 1


class TestIdentity:
    def test_reads_say_cuda(self, devices: torchdevice.Scope) -> None:
        x = torch.zeros(2, device="cuda:1")
        assert x.device == torch.device("cuda:1") and x.is_cuda and x.get_device() == 1
        assert torch.device(1) == x.device and torch.zeros(1, device=torch.device(1)).device == x.device
        assert x.type() == "torch.cuda.FloatTensor"
        assert repr(x) == "tensor([0., 0.], device='cuda:1')"
        assert str(torch.nn.Parameter(x)).endswith("device='cuda:1', requires_grad=True)")
        assert torch.Generator("cuda:1").device == torch.device("cuda:1")
        assert not torch.zeros(1).is_cuda and torch.zeros(1).device.type == "cpu"

    def test_storages_and_texts_say_cuda(self, devices: torchdevice.Scope) -> None:
        x, second = torch.ones(2, device="cuda:1"), torch.device("cuda:1")
        storage = x.untyped_storage()
        assert storage.device == x.storage().device == torch.UntypedStorage(4, device="cuda:1").device == second
        assert storage.is_cuda and x.storage().is_cuda and storage.get_device() == 1
        assert "device=cuda:1" in repr(storage) and "device=cuda:1" in repr(x.storage())
        assert f"{x.device} {x}" == "cuda:1 tensor([1., 1.], device='cuda:1')"
        assert torch.Generator("cuda:1").clone_state().device == torch.cuda.default_generators[1].device == second
        assert not torch.UntypedStorage(4).is_cuda and torch.ones(1).untyped_storage().device.type == "cpu"

    @pytest.mark.parametrize("identity", ["program", "target"])
    def test_work_with_storages(self, identity: str) -> None:
        with torchdevice.simulate(count=2, identity=identity):
            x = torch.arange(3.0, device="cuda:1")
            storage = x.untyped_storage()
            for copied in (storage.clone(), copy.deepcopy(storage), storage.cpu().to(device=torch.device("cuda:1"))):
                assert copied.device == x.device and torch.empty(0, device="cuda:1").set_(copied).numel() == 3
            assert storage.to(device=torch.device("cuda:1")) is storage
            assert storage.cpu().device.type == "cpu"
            assert torch.tensor(x.storage(), device="cuda:1").tolist() == [0, 1, 2]
            assert torch.tensor(torch.ones(2, device="cuda").storage()).tolist() == [1, 1]
            first = torch.ones(2, device="cuda").untyped_storage()
            assert torch.cuda.FloatStorage(wrap_storage=first).tolist() == [1, 1]
            file = io.BytesIO()
            torch.save(x, file)
        assert b"cuda:1" in file.getvalue()

    def test_identity_target_says_simulated(self) -> None:
        with torchdevice.simulate(identity="target"):
            x = torch.zeros(2, device="cuda")
            assert str(x.device) == "simulated:0" and not x.is_cuda and "simulated:0" in repr(x)
            assert str(x.untyped_storage().device) == "simulated:0" and "simulated:0" in f"{x}"
            assert x.type() == "torch.simulated.FloatTensor"


# ---- bugs that only a device shows -----------------------------------------------------------------------------------


class WithBuffer(torch.nn.Module):
    """A module with a tensor that is no buffer, so that ``.cuda()`` does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def mask_on_the_cpu() -> Any:
    x = torch.randn(3, 3, device="cuda")
    return x.masked_fill(torch.ones(3, 3).tril() == 0, -1.0)


def position_ids_on_the_cpu() -> Any:
    return torch.nn.Embedding(4, 2).cuda()(torch.arange(3))


def labels_on_the_cpu() -> Any:
    return torch.nn.functional.cross_entropy(torch.randn(3, 5, device="cuda"), torch.tensor([0, 1, 2]))


def model_left_on_the_cpu() -> Any:
    return torch.nn.Linear(4, 2)(torch.randn(1, 4, device="cuda"))


def concatenated_with_the_cpu() -> Any:
    return torch.cat([torch.ones(2, device="cuda"), torch.ones(2)])


def attention_mask_on_the_cpu() -> Any:
    q = torch.randn(1, 1, 4, 8, device="cuda")
    return torch.nn.functional.scaled_dot_product_attention(q, q.cpu(), q)


TWO_DEVICES = r"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
WRONG_ARGUMENT = (
    r"Expected all tensors to be on the same device, but got {} is on {}, different from other tensors on {}"
)

BY_WRAPPER = r" \(when checking argument in method wrapper_CUDA_{}\)"
INDICES = r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"
NUMPY = r"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\)"

BUGS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a buffer that is none": (lambda: WithBuffer().cuda()(torch.ones(4, device="cuda")), RuntimeError, TWO_DEVICES),
    "a mask": (
        mask_on_the_cpu,
        RuntimeError,
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "position ids": (
        position_ids_on_the_cpu,
        RuntimeError,
        WRONG_ARGUMENT.format("index", "cpu", "cuda:0") + BY_WRAPPER.format("_index_select"),
    ),
    "labels": (labels_on_the_cpu, RuntimeError, WRONG_ARGUMENT.format("target", "cpu", "cuda:0")),
    "a model": (
        model_left_on_the_cpu,
        RuntimeError,
        WRONG_ARGUMENT.format("mat1", "cuda:0", "cpu") + BY_WRAPPER.format("addmm"),
    ),
    "cat": (concatenated_with_the_cpu, RuntimeError, WRONG_ARGUMENT.format("tensors", "cpu", "cuda:0")),
    "attention": (
        attention_mask_on_the_cpu,
        RuntimeError,
        "Expected query, key, and value to have the same device type",
    ),
    "numpy": (lambda: torch.ones(2, device="cuda").numpy(), TypeError, NUMPY),
    "an index": (lambda: torch.ones(4)[torch.ones(4, device="cuda") > 0], RuntimeError, INDICES),
    "a generator": (
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        RuntimeError,
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "in place": (lambda: torch.ones(2).add_(torch.ones(2, device="cuda")), RuntimeError, TWO_DEVICES),
    "where": (
        lambda: torch.where(torch.ones(2) > 0, torch.ones(2, device="cuda"), torch.zeros(2)),
        RuntimeError,
        "Expected (all tensors|condition)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_that_only_a_device_shows(name: str) -> None:
    program, error, message = BUGS[name]
    with torchdevice.portable("cpu"):
        program()
    with torchdevice.simulate(identity="program"), pytest.raises(error, match=message):
        program()


def test_weights_and_inputs_on_two_devices(devices: torchdevice.Scope) -> None:
    layer, x = torch.nn.Linear(2, 2).to("cuda:1"), torch.ones(1, 2, device="cuda:0")
    with pytest.raises(RuntimeError, match=r"but got mat1 is on cuda:0, different from other tensors on cuda:1"):
        layer(x)
    with pytest.raises(RuntimeError, match=r"found at least two devices, cuda:0 and cuda:1!"):
        x + torch.ones(1, 2, device="cuda:1")
    assert layer(x.to("cuda:1")).get_device() == 1


def test_what_cuda_accepts_is_accepted(devices: torchdevice.Scope) -> None:
    x = torch.arange(4.0, device="cuda")
    assert (x + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0, 5.0], "a CPU scalar"
    assert x[torch.tensor([0, 3])].tolist() == [0.0, 3.0], "CPU indices"
    assert x[torch.tensor([True, False, False, True])].tolist() == [0.0, 3.0], "a CPU mask as an index"
    x[torch.tensor([1])] = torch.tensor(9.0)
    assert x.tolist() == [0.0, 9.0, 2.0, 3.0] and float(x[1]) == 9.0 and int(x.argmax()) == 1


# ---- values ----------------------------------------------------------------------------------------------------------


class TestRandomNumbers:
    def test_a_seed_gives_the_cpus_numbers(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(5)
        on_cpu = [torch.randn(20), torch.rand(3), torch.randperm(9), torch.nn.functional.dropout(torch.ones(64), 0.3)]
        torch.manual_seed(5)
        x = torch.ones(64, device="cuda:1")
        on_device = [
            torch.randn(20, device="cuda:1"),
            torch.rand(3, device="cuda:1"),
            torch.randperm(9, device="cuda:1"),
            torch.nn.functional.dropout(x, 0.3),
        ]
        assert all(torch.equal(one, other.cpu()) for one, other in zip(on_cpu, on_device, strict=True))

    def test_devices_and_the_cpu_draw_apart(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(1)
        first = torch.randn(4, device="cuda:0")
        torch.randn(7), torch.randn(7, device="cuda:1")
        second = torch.randn(4, device="cuda:0")
        torch.manual_seed(1)
        assert torch.equal(torch.randn(8, device="cuda:0").cpu()[:4], first.cpu())
        torch.cuda.manual_seed_all(1)
        torch.randn(4, device="cuda:0")
        assert torch.equal(torch.randn(4, device="cuda:0"), second)

    @pytest.mark.parametrize("train", [True, False, None])
    @pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
    def test_dropout_drops_what_it_drops_on_the_cpu(
        self, devices: torchdevice.Scope, p: float, train: bool | None
    ) -> None:
        def dropped(device: str) -> list[torch.Tensor]:
            torch.manual_seed(3)
            x = torch.arange(8.0).to(device).requires_grad_()
            found, mask = torch.native_dropout(x, p, train)
            found.sum().backward()
            return [found.detach().cpu(), mask.cpu(), x.grad.cpu()]  # type: ignore[union-attr]

        assert all(map(torch.equal, dropped("cuda"), dropped("cpu")))

    def test_states(self, devices: torchdevice.Scope) -> None:
        state = torch.cuda.get_rng_state(1)
        drawn = torch.rand(3, device="cuda:1")
        torch.cuda.set_rng_state(state, 1)
        assert torch.equal(torch.rand(3, device="cuda:1"), drawn)
        with torch.random.fork_rng(devices=[0, 1]):
            torch.rand(3, device="cuda:1")
        generator = torch.Generator("cuda:1").manual_seed(3)
        restored = pickle.loads(pickle.dumps(generator))
        assert torch.equal(*(torch.rand(2, generator=each, device="cuda:1") for each in (generator, restored)))


def round_trips(generator: torch.Generator) -> list[torch.Generator]:
    """Return copies of a generator, one for each way to copy it."""
    file = io.BytesIO()
    torch.save({"g": generator}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["g"]
    return [pickle.loads(pickle.dumps(generator)), copy.deepcopy(generator), copy.copy(generator), loaded]


class TestPickledGenerators:
    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_round_trips_in_a_scope(self, target: str, device: str) -> None:
        with torchdevice.portable(target):

            class Own(torch.Generator):
                pass

            generator = torch.Generator(device).manual_seed(3)
            copies = round_trips(generator)
            expected = torch.rand(4, device=device, generator=generator).tolist()
            assert [torch.rand(4, device=device, generator=each).tolist() for each in copies] == [expected] * 4
            assert all(isinstance(each, torch.Generator) and each.device == generator.device for each in copies)
            own = round_trips(Own().manual_seed(3))
            assert [each.initial_seed() for each in own] == [3] * 4

    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    def test_pickles_cross_the_border_of_a_scope(self, target: str) -> None:
        before = pickle.dumps(torch.Generator().manual_seed(5))
        with torchdevice.portable(target):
            within = pickle.dumps(torch.Generator().manual_seed(5))
            assert torch.equal(pickle.loads(before).get_state(), pickle.loads(within).get_state())
        program = "import pickle, sys; seed = pickle.load(sys.stdin.buffer).initial_seed()"
        command = [sys.executable, "-c", f"{program}; print(seed, 'torchdevice' in sys.modules)"]
        alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch without this package
        result = subprocess.run(command, input=within, env=alone, capture_output=True, check=False)
        assert result.stdout.split() == [b"5", b"False"], result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_another_thread_allocates(tmp_path: Path) -> None:
    """The child must not wait for a lock that was held, at the fork, by a thread which the child does not have."""
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


def test_model_parallel_training_is_identical_to_the_cpu(devices: torchdevice.Scope) -> None:
    def train(first: str, second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        one, two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        x, y = torch.randn(5, 6), torch.randint(3, (5,))
        one.to(first), two.to(second)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = one(x.to(first)).relu().to(second)
            torch.nn.functional.cross_entropy(two(hidden), y.to(second)).backward()
            optimizer.step()
        assert one.weight.grad is not None and two.weight.grad is not None
        assert str(one.weight.grad.device) == first and str(two.weight.grad.device) == second
        return [p.detach().cpu() for p in (*one.parameters(), *two.parameters())]

    expected = train("cpu", "cpu")
    assert all(torch.equal(a, b) for a, b in zip(expected, train("cuda:0", "cuda:1"), strict=True))


def test_threads_train_on_devices_of_their_own(devices: torchdevice.Scope) -> None:
    results: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        torch.cuda.set_device(index)
        weight = torch.full((3,), float(index + 1), device="cuda", requires_grad=True)
        for _ in range(20):
            (weight * weight).sum().backward()
        assert weight.grad is not None
        results[index] = weight.grad

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: (g.get_device(), g.tolist()) for i, g in results.items()} == {0: (0, [40.0] * 3), 1: (1, [80.0] * 3)}


@pytest.mark.parametrize("mask", [torch.eye(4), torch.eye(4) == 0, None], ids=["float", "bool", "none"])
def test_attention_with_a_mask_is_identical_to_the_cpu(devices: torchdevice.Scope, mask: torch.Tensor | None) -> None:
    def computed(device: str) -> list[torch.Tensor]:
        inputs = [each.to(device).requires_grad_() for each in torch.arange(192.0).sin().view(3, 2, 2, 4, 4)]
        masked = None if mask is None else mask.to(device)
        found = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=masked)
        return [each.cpu() for each in (found.detach(), *torch.autograd.grad(found.sum(), inputs))]

    assert all(map(torch.equal, computed("cuda"), computed("cpu")))


def test_functional_transforms(devices: torchdevice.Scope) -> None:
    weight, x = torch.randn(3, 3, device="cuda"), torch.randn(5, 3, device="cuda")

    def loss(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return (row @ w).tanh().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)
    looped = torch.stack([torch.func.grad(loss)(weight, row) for row in x])
    assert per_sample.is_cuda and torch.allclose(per_sample, looped)
    assert torch.func.jacrev(torch.sin)(x[0]).is_cuda and torch.func.hessian(lambda v: v.pow(3).sum())(x[0]).is_cuda
    _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    assert torch.allclose(tangent, x.cos())
    with torch.inference_mode():
        assert (x @ weight).is_inference()
    values = torch.func.functional_call(torch.nn.Linear(3, 2).cuda(), {}, (x,))
    assert values.is_cuda


class TestAutocast:
    def test_cudas_policies(self, devices: torchdevice.Scope) -> None:
        x = torch.randn(4, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            half = x @ x
            assert half.dtype is torch.float16 and torch.nn.functional.linear(x, x).dtype is torch.float16
            assert torch.nn.Conv1d(4, 4, 1).cuda()(x).dtype is torch.float16
            for function in (torch.exp, torch.sum, torch.cumsum, torch.nn.functional.layer_norm, torch.norm):
                arguments = {torch.cumsum: (0,), torch.nn.functional.layer_norm: ((4,),)}.get(function, ())
                assert function(half, *arguments).dtype is torch.float32, function
            assert (
                half.softmax(0).dtype is torch.float32 and half.softmax(0, dtype=torch.float16).dtype is torch.float16
            )
            assert torch.addcmul(half, x, half).dtype is torch.float32 and (half + half).dtype is torch.float16
            assert (x.double() @ x.double()).dtype is torch.float64
            with pytest.raises(RuntimeError, match="are unsafe to autocast"):
                torch.nn.functional.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        assert (x @ x).dtype is torch.float32

    def test_a_weight_is_cast_once_in_a_region(self, devices: torchdevice.Scope) -> None:
        weight = torch.nn.Parameter(torch.randn(4, 4, device="cuda"))
        x = torch.randn(2, 4, device="cuda")

        def casts(function: Callable[[], Any]) -> int:
            counted = 0

            class Counting(TorchDispatchMode):
                def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                    nonlocal counted
                    counted += func is torch.ops.aten._to_copy.default and args[0].shape == weight.shape
                    return func(*args, **kwargs or {})

            with Counting():
                function()
            return counted

        def twice(**options: Any) -> None:
            with torch.autocast("cuda", dtype=torch.float16, **options):
                (x @ weight) @ weight

        def nested() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                twice()
                with torch.autocast("cuda", enabled=False):
                    assert (x @ weight).dtype is torch.float32
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    assert (x @ weight).dtype is torch.bfloat16
                twice()

        assert casts(twice) == 1 and casts(twice) == 1
        assert casts(lambda: twice(cache_enabled=False)) == 2
        assert casts(nested) == 2  # one for each dtype
        weight.requires_grad_(False)
        assert casts(twice) == 2
        weight.requires_grad_()

        def changed() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                first = x @ weight
                torch.clear_autocast_cache()
                weight.data.mul_(2)
                assert torch.equal(x @ weight, first * 2)

        assert casts(changed) == 2

    def test_gradients_through_a_cached_cast(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(4, 4, device="cuda"))
        x, found = torch.randn(2, 4, device="cuda"), []
        for cached in (True, False):
            for _ in range(2):
                weight.grad = None
                with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached):
                    loss = ((x @ weight) @ weight).float().sum()
                loss.backward()
                found.append(weight.grad.clone())
        assert all(torch.allclose(each, found[0], atol=0.05) for each in found) and found[0].dtype is torch.float32
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])

    def test_cached_casts_keep_no_memory(self, devices: torchdevice.Scope) -> None:
        weight = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
        x = torch.randn(2, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.float16), torch.no_grad():
            y = x @ weight
            assert torch.cuda.memory_allocated() - before >= weight.numel() * 2
            torch.nn.Parameter(torch.zeros(512, 512, device="cuda")) @ y.t()
        del y
        assert torch.cuda.memory_allocated() == before
        region = torch.autocast("cuda", dtype=torch.float16)
        with torchdevice.simulate(), region:
            x @ weight
        assert torch.cuda.memory_allocated() == before

    def test_training_with_a_scaler(self, devices: torchdevice.Scope) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).cuda()
        x = torch.randn(32, 8, device="cuda")
        y = x.sum(1, keepdim=True)
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cuda")
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2


# ---- modules, storages, files ----------------------------------------------------------------------------------------


class TestMoves:
    def test_parameters_stay_the_same_objects(self, devices: torchdevice.Scope) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        model[1].weight = model[0].weight
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        seen: list[torch.Size] = []
        model[0].weight.register_hook(lambda grad: seen.append(grad.shape))
        before = model[0].weight.grad.clone()
        model.cuda()
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert model[0].weight is model[1].weight and all(
            p.is_cuda and p.is_leaf and p.requires_grad for p in parameters
        )
        assert model[0].weight.grad.is_cuda and torch.equal(model[0].weight.grad.cpu(), before)
        optimizer.zero_grad()
        model(torch.ones(1, 3, device="cuda")).sum().backward()
        optimizer.step()
        assert seen, "a hook was lost on the way"
        model.cpu()
        assert not model[0].weight.is_cuda and model[0].weight is model[1].weight
        model(torch.ones(1, 3)).sum().backward()

    @pytest.mark.parametrize("options", [{}, {"compute": "meta"}], ids=str)
    @pytest.mark.parametrize("device", [None, "cuda:0", "cuda:1", "cpu", torch.device("cpu", 0), "meta"], ids=str)
    def test_a_tensor_like_another_is_where_the_program_says(self, device: Any, options: dict[str, Any]) -> None:
        made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            **{
                name: lambda x, name=name: getattr(torch, f"{name}_like")(x, device=device)
                for name in ("empty", "zeros", "ones", "rand", "randn")
            },
            "full": lambda x: torch.full_like(x, 3, device=device),
            "randint": lambda x: torch.randint_like(x, 9, device=device),
            "new_empty": lambda x: x.new_empty(2, device=device),
            "new_full": lambda x: x.new_full((2,), 3, device=device),
            "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (1, 2), device=device),
        }
        with torchdevice.simulate(count=2, **options):
            x, of_cpu = torch.ones(2, 3, device="cuda:1").t(), torch.ones(2, 3).t()
            for name, make in made.items():
                found, expected = make(x), make(of_cpu)
                assert found.device == (x.device if device is None else expected.device), name
                assert (found.stride(), found.dtype) == (expected.stride(), expected.dtype), name

    def test_setting_data(self, devices: torchdevice.Scope) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.data = parameter.data.cuda()
        assert parameter.is_cuda and parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)
        (parameter * 2).sum().backward()
        assert parameter.grad is not None and parameter.grad.is_cuda

    def test_to_the_meta_device_and_back(self, devices: torchdevice.Scope) -> None:
        x = torch.ones(2, 3, device="cuda").t()
        shape = x.to("meta", torch.float16)
        assert (shape.device.type, shape.stride(), shape.dtype) == ("meta", (1, 3), torch.float16)
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor; no data!"):
            x.copy_(shape)
        assert torch.empty(3, 2, device="meta").copy_(x).is_meta

    def test_copies_are_counted(self, devices: torchdevice.Scope) -> None:
        before = machine.current().copies.copy()
        x = torch.ones(1000).cuda()
        x.to("cuda:1").cpu()
        x.cpu()
        counted = machine.current().copies - before
        assert counted == {
            ("cpu", "simulated:0"): 1,
            ("simulated:0", "simulated:1"): 1,
            ("simulated:1", "cpu"): 1,
            ("simulated:0", "cpu"): 1,
        }
        assert machine.current().copied_bytes["simulated:0", "cpu"] >= 4000

    def test_a_move_does_not_share_memory(self, devices: torchdevice.Scope) -> None:
        x = torch.zeros(3)
        y = x.cuda()
        x += 1
        z = y.cpu()
        y += 5
        assert (x.tolist(), y.tolist(), z.tolist()) == ([1.0] * 3, [5.0] * 3, [0.0] * 3)


def _through_a_file(value: Any, folder: Path) -> Any:
    torch.save(value, folder / "value.pt")
    return torch.load(folder / "value.pt", weights_only=False)


class TestData:
    """``tensor.data = value`` between the devices leaves the C++ tensor in place, as on CUDA."""

    def test_a_gradient_arrives_after_the_data_has_moved_away(self, devices: torchdevice.Scope) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        address = parameter._cdata
        parameter.data = parameter.data.cuda()
        result = (parameter * 2).sum()
        parameter.data = parameter.data.cpu()
        result.backward()
        assert parameter._cdata == address and parameter.get_device() == -1
        assert parameter.grad is not None and parameter.grad.tolist() == [2.0] * 3

    def test_a_failed_assignment_changes_nothing(self, devices: torchdevice.Scope) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(RuntimeError):
            parameter.data = torch.ones(3, dtype=torch.int64, device="cuda")
        assert parameter.get_device() == -1 and (parameter * 2).tolist() == [2.0] * 3

    def test_a_scripted_module_moves(self, devices: torchdevice.Scope) -> None:
        module = torch.jit.script(torch.nn.Linear(2, 2))
        weight = module.weight
        assert module.cuda().weight is weight and weight.get_device() == 0
        assert module(torch.ones(1, 2, device="cuda")).get_device() == 0


class TestDataParallel:
    def test_it_runs_a_replica_on_each_device(self, devices: torchdevice.Scope) -> None:
        class Seen(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.norm = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append((len(x), x.get_device(), self.layer.weight.get_device(), torch.cuda.current_device()))
                return self.norm(self.layer(x))

        seen: list[tuple[int, ...]] = []
        plain = Seen()
        parallel, x = torch.nn.DataParallel(copy.deepcopy(plain)).cuda(), torch.randn(10, 8)
        result = parallel(x.cuda())
        assert sorted(seen) == [(5, 0, 0, 0), (5, 1, 1, 1)] and result.get_device() == 0
        result.square().sum().backward()
        expected = torch.cat([copy.deepcopy(plain)(part) for part in x.chunk(2)])
        assert torch.equal(result.cpu(), expected)
        torch.cat([plain(part) for part in x.chunk(2)]).square().sum().backward()
        for one, other in zip(parallel.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.allclose(one.grad.cpu(), other.grad, atol=1e-5)

    def test_an_error_names_the_replica(self, devices: torchdevice.Scope) -> None:
        class Failing(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if x.get_device() == 1:
                    raise ValueError("no")
                return x

        with pytest.raises(ValueError, match="in replica 1 on device 1"):
            torch.nn.DataParallel(Failing())(torch.ones(4, 2, device="cuda"))


def test_a_reducer_gets_page_locked_memory(tmp_path: Path) -> None:
    program = """
        import sys, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
        for options in ({"find_unused_parameters": True}, {"static_graph": True}):
            model = DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[0], **options)
            for _ in range(2):
                model(torch.ones(1, 2, device="cuda")).sum().backward()
            print(model.module.weight.grad.tolist())
        dist.destroy_process_group()
        with torch._C.DisableTorchFunction():
            print(torch.ones(1).is_pinned())
    """
    done = run_program(tmp_path, program, str(tmp_path), options=["--target", "simulated:cuda"])
    assert done.stdout.split("\n")[:3] == ["[[2.0, 2.0], [2.0, 2.0]]"] * 2 + ["False"], done.stderr[-2000:]


class TestStorages:
    def test_views_share_and_resizes_do_not_lose(self, devices: torchdevice.Scope) -> None:
        x = torch.arange(6.0, device="cuda")
        view = x.view(2, 3)[1]
        view += 10
        assert x.tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        x.resize_(8)
        assert x[:6].tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0] and x.shape == (8,)
        out = torch.empty(0, device="cuda")
        torch.add(x[:2], 1, out=out)
        assert out.tolist() == [1.0, 2.0]
        y = torch.empty(0, device="cuda").set_(x.untyped_storage(), 3, (2,), (1,))
        assert y.tolist() == [13.0, 14.0]
        assert torch.empty(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last).stride() == (60, 1, 15, 3)

    def test_tensors_are_set_to_other_memory_as_on_the_cpu(self, devices: torchdevice.Scope) -> None:
        def found(device: str) -> list[tuple[Any, ...]]:
            source = torch.arange(6.0, device=device)
            storage = source.untyped_storage()
            given = [(), (storage,), (storage, 1, (2, 2)), (source,), (source, 1, (2,), (2,)), (source[1:],)]
            made = [torch.zeros(6, device=device).set_(*each) for each in given]
            same = [source.is_set_to(each) for each in (*made, source, source.clone())]
            return [same, *((each.tolist(), each.stride(), each.storage_offset()) for each in made)]

        assert found("cuda") == found("cpu")

    def test_a_storage_is_resized_in_place(self, devices: torchdevice.Scope) -> None:
        x = torch.arange(1000.0, device="cuda:1")
        view, storage, before = x[10:13], x.untyped_storage(), torch.cuda.memory_allocated(1)
        blocks = torch.cuda.memory_stats(1)["allocation.all.current"]
        assert storage.resizable()
        storage.resize_(0)
        assert (storage.nbytes(), x.data_ptr(), before - torch.cuda.memory_allocated(1)) == (0, 0, 4096)
        storage.resize_(4000)
        torch.add(torch.ones(1000, device="cuda:1"), 1, out=x)
        assert view.tolist() == [2.0] * 3 and x.sum().item() == 2000 and x.get_device() == 1
        storage.resize_(8000)
        whole = torch.empty(0, device="cuda:1").set_(storage, 0, (2000,), (1,))
        assert torch.cuda.memory_allocated(1) - before == 4096
        assert whole[:1000].tolist() == [2.0] * 1000
        whole.fill_(3)
        assert view.tolist() == [3.0] * 3
        storage.resize_(0)
        del x, view, whole, storage
        assert torch.cuda.memory_allocated(1) == before - 4096
        assert torch.cuda.memory_stats(1)["allocation.all.current"] == blocks - 1

    def test_a_storage_that_was_empty_grows(self, devices: torchdevice.Scope) -> None:
        before = torch.cuda.memory_allocated()
        x = torch.empty(0, device="cuda")
        x.untyped_storage().resize_(12)
        x.set_(x.untyped_storage(), 0, (3,), (1,)).fill_(1)
        view = x[1:]
        x.resize_(100).fill_(2)
        assert view.tolist() == [2.0, 2.0]
        assert torch.cuda.memory_allocated() - before == 512

    def test_a_storage_does_not_grow_beyond_the_limit(self) -> None:
        with torchdevice.simulate("cuda", memory="4MiB"):
            x = torch.ones(3, device="cuda")
            with pytest.raises(torch.OutOfMemoryError):
                x.untyped_storage().resize_(2 << 20)
            assert x.tolist() == [1.0] * 3

    def test_a_freed_storage_returns_the_hosts_memory(self, devices: torchdevice.Scope) -> None:
        size = 256 << 20
        resident = psutil.Process().memory_info
        storage = torch.ones(size, dtype=torch.uint8, device="cuda").untyped_storage()
        for _ in range(3):
            before = resident().rss
            storage.resize_(0)
            assert before - resident().rss > size // 2
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(1)

    def test_copies_and_files(self, devices: torchdevice.Scope, tmp_path: Path) -> None:
        base = torch.arange(4.0, device="cuda:1")
        value = {"a": base, "b": base[1:], "c": torch.nn.Linear(2, 2).to("cuda:1")}
        clone = pickle.loads(pickle.dumps(value))
        assert clone["b"].tolist() == [1.0, 2.0, 3.0] and clone["c"].weight.get_device() == 1
        for clone in (copy.deepcopy(value), _through_a_file(value, tmp_path)):
            assert clone["a"].get_device() == clone["c"].weight.get_device() == 1
            clone["a"] += 1
            assert clone["b"].tolist() == [2.0, 3.0, 4.0] and base.tolist() == [0.0, 1.0, 2.0, 3.0]
        torch.save({"a": base}, tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt")["a"].get_device() == 1
        assert torch.load(tmp_path / "x.pt", map_location="cuda:0")["a"].get_device() == 0
        assert not torch.load(tmp_path / "x.pt", map_location="cpu")["a"].is_cuda
        with plain_torch(), pytest.raises(RuntimeError, match="on a CUDA device but"):
            torch.load(tmp_path / "x.pt")

    def test_sparse(self, devices: torchdevice.Scope) -> None:
        x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
        sparse = x.cuda().to_sparse()
        assert sparse.is_sparse and sparse.is_cuda and torch.equal((sparse + sparse).to_dense().cpu(), x * 2)
        assert torch.equal(torch.sparse.mm(sparse, x.cuda()).cpu(), x @ x)
        table = torch.nn.Embedding(5, 2, sparse=True).cuda()
        for _ in range(2):
            table(torch.tensor([1, 1, 3], device="cuda")).sum().backward()
        assert table.weight.grad is not None and table.weight.grad._nnz() == 6
        assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 4.0, 0.0, 2.0, 0.0]
        torch.optim.SGD(table.parameters(), lr=0.1).step()


# ---- memory ----------------------------------------------------------------------------------------------------------


class TestMemory:
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

    def test_a_limit_raises_cudas_error(self) -> None:
        with torchdevice.simulate(memory=128 << 20) as scope:
            gc.collect()
            held = torch.empty(16 << 20, device="cuda")
            small = torch.empty(1 << 19, device="cuda")
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert reserved - allocated >= 18 << 20 and small.nbytes == 2 << 20  # of a segment of 20 MiB
            with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
                torch.empty(32 << 20, device="cuda")
            text = str(caught.value)
            assert text.startswith(
                "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 128.00 MiB"
            )
            assert f"{allocated / (1 << 20):.2f} MiB is allocated by PyTorch" in text
            assert f"{(reserved - allocated) / (1 << 20):.2f} MiB is reserved by PyTorch but unallocated" in text
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

    def test_a_fraction_is_a_limit(self) -> None:
        with torchdevice.simulate(memory=160 << 20, count=2):
            gc.collect()
            torch.cuda.set_per_process_memory_fraction(0.25, 1)
            assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
            torch.empty(20 << 20, device="cuda:0")
            with pytest.raises(torch.cuda.OutOfMemoryError, match=r"capacity of 160\.00 MiB .* 40\.00 MiB allowed; Of"):
                torch.empty(20 << 20, device="cuda:1")
        with torchdevice.simulate(memory=160 << 20, count=2):
            torch.empty(20 << 20, device="cuda:1")

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


# ---- profiles --------------------------------------------------------------------------------------------------------


class TestMps:
    def test_float64_becomes_float32_or_is_refused(self) -> None:
        with torchdevice.simulate("mps"):
            with pytest.warns(PortabilityWarning, match="has no torch.float64"):
                x = torch.zeros(2, dtype=torch.float64, device="cuda")
            assert x.dtype is torch.float32
            with pytest.warns(PortabilityWarning, match="has no torch.float64"):
                assert torch.from_numpy(torch.zeros(2).double().numpy()).cuda().dtype is torch.float32
        with (
            torchdevice.simulate("mps", float64="error"),
            pytest.raises(TypeError, match="MPS Tensor to float64 dtype"),
        ):
            torch.zeros(2, dtype=torch.float64, device="cuda")
        with torchdevice.simulate("mps", float64="error"), pytest.raises(TypeError, match="doesn't support complex128"):
            torch.ones(1, device="cuda", dtype=torch.complex64).to(torch.complex128)

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    @pytest.mark.parametrize(
        "make",
        [
            lambda x: x.double(),
            lambda x: x.to(torch.float64),
            lambda x: x.to(dtype=torch.float64),
            lambda x: x.cpu().double().to("cuda"),
            lambda x: x.cpu().double().to("cuda", None, True),
            lambda x: x.cpu().double().to("cuda", non_blocking=True),
            lambda x: x.cpu().double().cuda(),
            lambda x: torch.nn.Parameter(x.cpu().double()).to("cuda"),
            lambda x: torch.nn.Linear(1, 1).double().to("cuda").weight,
            lambda x: torch.nn.Linear(1, 1).cuda().double().weight,
            lambda x: torch.zeros_like(x, dtype=torch.float64),
            lambda x: torch.rand_like(x, dtype=torch.float64),
            lambda x: x.new_zeros(2, dtype=torch.float64),
            lambda x: x.new_tensor([1.0], dtype=torch.float64),
            lambda x: torch.tensor(1.0, dtype=torch.float64, device="cuda"),
            lambda x: torch.as_tensor(numpy.ones(2), device="cuda"),
            lambda x: torch.from_numpy(numpy.ones(2)).cuda(),
            lambda x: torch.linspace(0, 1, 3, dtype=torch.float64, device="cuda"),
        ],
    )
    def test_float64_becomes_float32_by_every_road(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with torchdevice.simulate("mps"):
            made = make(torch.ones(2, device="cuda"))
            assert made.dtype is torch.float32 and made.is_cuda

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    def test_float64_on_the_default_device_becomes_float32(self) -> None:
        with torchdevice.simulate("mps"), torch.device("cuda"):
            assert torch.zeros(2, dtype=torch.float64).dtype is torch.float32

    def test_tensors_print_without_float64(self) -> None:
        with torchdevice.simulate("mps", identity="target"):
            assert repr(torch.tensor([1.5, 2.25], device="cuda")) == "tensor([1.5000, 2.2500], device='simulated:0')"

    def test_a_missing_operator_runs_on_the_cpu_where_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        with torchdevice.simulate("mps") as scope:
            x = torch.randn(3, 3, device="cuda")
            assert torch.linalg.eig(x)[0].shape == (3,)
            assert machine.current().fallbacks["aten::linalg_eig"] >= 1
            assert any("linalg_eig" in entry.requested for entry in scope.journal.degraded)

    def test_a_missing_operator_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        message = (
            r"The operator 'aten::linalg_eig' is not currently implemented for the MPS device\. If you want this op to "
            r"be considered for addition please comment on https://github\.com/pytorch/pytorch/issues/141287"
        )
        x = torch.randn(3, 3)
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
        with torchdevice.simulate("mps"), pytest.raises(NotImplementedError, match=message):
            torch.linalg.eig(x.cuda())
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        with torchdevice.simulate("mps", strict=True), pytest.raises(NotImplementedError, match=message):
            torch.linalg.eig(x.cuda())

    def test_one_device_onto_which_the_others_fold(self) -> None:
        with torchdevice.simulate("mps") as scope:
            assert torch.cuda.device_count() == 1
            assert torch.zeros(1, device="cuda:1").get_device() == 0
            assert any("cuda:1" in entry.requested for entry in scope.journal.degraded)

    def test_files_say_mps(self, tmp_path: Path) -> None:
        with torchdevice.simulate("mps", identity="target"):
            torch.save(torch.ones(2, device="cuda"), tmp_path / "x.pt")
            assert torch.load(tmp_path / "x.pt").device.type == "simulated"
        assert b"mps:0" in (tmp_path / "x.pt").read_bytes()

    def test_a_transformer_trains(self) -> None:
        torch.manual_seed(0)
        with torchdevice.simulate("mps", strict=True):
            model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            x = torch.randn(4, 5, 16, device="cuda")
            losses = []
            for _ in range(10):
                optimizer.zero_grad()
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[-1] < losses[0]

    @pytest.mark.filterwarnings("ignore")
    def test_refused_operators_are_those_that_torchs_own_tests_list(
        self, sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """``UNIMPLEMENTED_XFAILLIST`` of common_mps.py lists the operators that have no kernel on MPS."""
        expected = _unimplemented_on_mps()
        agreed, others = 0, []
        for op in sweeping.choose([op for op in op_db if torch.float32 in op.supported_dtypes("cpu")], sweep, 60):
            refused = _is_refused(op)
            if refused is None:
                continue
            if refused == (op.name + op.variant_test_name in expected):
                agreed += 1
            else:
                others.append(f"{'refused' if refused else 'runs'}: {op.formatted_name}")
        with capsys.disabled():
            print(f"\nmps profile: {agreed} of {agreed + len(others)} operators as torch's tests expect; not these:")
            print("  " + ", ".join(sorted(others)))
        assert agreed > (600 if sweep[0] else 45) and len(others) < (0.07 if sweep[0] else 0.15) * agreed


def _unimplemented_on_mps() -> set[str]:
    path = Path(torch.__file__).parent / "testing/_internal/common_mps.py"
    found = re.search(r"UNIMPLEMENTED_XFAILLIST: [^=]+ = (\{.*?\n        \})", path.read_text(), re.S)
    assert found is not None
    table = ast.parse(found[1], mode="eval").body
    assert isinstance(table, ast.Dict)
    everywhere = ast.unparse(ast.Constant(None))
    return {
        ast.literal_eval(key)
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None and (ast.unparse(value) == everywhere or "torch.float32" in ast.unparse(value))
    }


def _is_refused(op: Any) -> bool | None:
    """Return whether the profile lacks an operator; None if no sample of the operator runs on the plain CPU."""
    runs = None
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 3):
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # nothing to compare with
            continue
        with torchdevice.simulate("mps", strict=True, float64="error"):
            try:
                moved = sample.transform(lambda value: value.cuda() if isinstance(value, torch.Tensor) else value)
                op(moved.input, *moved.args, **moved.kwargs)
                runs = False if runs is None else runs
            except NotImplementedError:
                return True
            except (RuntimeError, TypeError, FidelityError):  # float64 or a sparse layout is refused, not the operator
                continue
    return runs


class TestStrict:
    def test_it_refuses_what_cuda_or_mps_lacks(self) -> None:
        with torchdevice.simulate("strict", count=2, float64="error"):
            assert (torch.ones(2, device="cuda:1") * 2).tolist() == [2.0, 2.0]
            with pytest.raises(NotImplementedError, match="aten::linalg_eig"):
                torch.linalg.eig(torch.randn(2, 2, device="cuda"))
            with pytest.raises(TypeError, match="float64"):
                torch.zeros(1, device="cuda", dtype=torch.float64)
            with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
                torch.zeros(1, device="cuda:2")


# ---- existing only in a scope ----------------------------------------------------------------------------------------


class TestOutsideAScope:
    def test_nothing_is_available_and_nothing_is_made(self) -> None:
        assert not torch.cuda.is_available() and not torch.accelerator.is_available()
        assert torch.simulated.device_count() == 0  # type: ignore[attr-defined]
        for make in (lambda: torch.zeros(1, device="simulated"), lambda: torch.ones(1).to("simulated:0")):
            with pytest.raises(RuntimeError, match="no scope on a simulated device is active in this thread"):
                make()

    def test_remaining_tensors_can_be_printed_and_copied(self) -> None:
        with torchdevice.simulate():
            x = torch.arange(3.0, device="cuda")
        assert repr(x) == "tensor([0., 1., 2.], device='simulated:0')"
        assert x.cpu().tolist() == x.tolist() == [0.0, 1.0, 2.0] and x.sum().item() == 3.0

    def test_another_thread_is_outside(self, devices: torchdevice.Scope) -> None:
        seen: list[bool] = []
        import _thread

        done = threading.Event()
        _thread.start_new_thread(lambda: (seen.append(torch.cuda.is_available()), done.set()), ())
        assert done.wait(30) and seen == [False]

    def test_backward_is_on_engine_threads_again(self) -> None:
        before = torch._C._is_multithreading_enabled()
        with torchdevice.simulate():
            assert not torch._C._is_multithreading_enabled()
            with torchdevice.simulate():
                pass
            assert not torch._C._is_multithreading_enabled()
        assert torch._C._is_multithreading_enabled() is before

    def test_importing_registers_nothing(self, tmp_path: Path) -> None:
        program = (
            "import torch, sys, torchdevice\n"
            "with torchdevice.portable('cpu'): torch.ones(1).cuda()\n"
            "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
            "assert 'torchdevice.simulation' not in sys.modules and not hasattr(torch, 'simulated')\n"
            "with torchdevice.portable('simulated'): assert torch.ones(1).cuda().device.type == 'cuda'\n"
            "print('as said')\n"
        )
        result = run_python("-c", program, cwd=tmp_path)
        assert result.stdout == "as said\n", result.stderr

    def test_the_first_use_may_be_inside_another_scope(self, tmp_path: Path) -> None:
        program = (
            "import copy, torch, torchdevice\n"
            "with torchdevice.portable('cpu'):\n"
            "    with torchdevice.simulate(identity='target'):\n"
            "        x = torch.ones(2, device='cuda')\n"
            "        assert torch.UntypedStorage(4, device='cuda').device.type == 'simulated'\n"
            "        assert copy.deepcopy(x).device.type == 'simulated'\n"
            "    assert torch.UntypedStorage(4, device='cuda').device.type == 'cpu'\n"
            "for make in (lambda: copy.deepcopy(x), lambda: torch.UntypedStorage(4, device='simulated')):\n"
            "    try:\n"
            "        make()\n"
            "    except RuntimeError as error:\n"
            "        assert 'no scope on a simulated device' in str(error)\n"
            "print(torch.UntypedStorage(4).device, torch.UntypedStorage([1, 2]).tolist())\n"
        )
        result = run_python("-c", program, cwd=tmp_path)
        assert result.stdout == "cpu [1, 2]\n", result.stderr

    def test_a_second_backend_is_refused_by_name(self, tmp_path: Path) -> None:
        program = (
            "import torch, torchdevice\n"
            "torch.utils.rename_privateuse1_backend('npu')\n"
            "try:\n"
            "    torchdevice.simulate().__enter__()\n"
            "except torchdevice.errors.BackendTakenError as error:\n"
            "    print(error.name, '|', error)\n"
            "assert torchdevice.current() is None and not torch.cuda.is_available()\n"
        )
        result = run_python("-c", program, cwd=tmp_path)
        assert result.stdout.startswith("npu | torch has room for one out-of-tree backend in a process, and 'npu'"), (
            result.stderr
        )


@pytest.mark.parametrize("profile", ["cuda", "mps"])
def test_what_is_not_compiled_runs_and_is_reported(profile: str) -> None:
    functions: dict[str, tuple[Callable[..., Any], str]] = {
        "two devices": (lambda x: (x * 2).cpu().sin(), "its tensors are on cpu and simulated:0"),
        "another graph": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,)), "contains another one"),
    }
    if profile == "mps":
        functions = {"anything": (lambda x: (x * 2).sin(), "has what 'mps' lacks")}
    for name, (function, reason) in functions.items():
        torch._dynamo.reset()
        with torchdevice.simulate(profile) as scope:
            x = torch.eye(3, device="cuda") + 1
            found = torch.compile(function)(x)
            assert torch.equal(found, function(x)), name
        reports = [entry for entry in scope.journal.degraded if "inductor" in entry.requested]
        assert reports and all(reason in entry.done for entry in reports), (name, reports)
        torch._dynamo.reset()
        with torchdevice.simulate(profile, strict=True), pytest.raises(Exception, match="inductor") as caught:
            torch.compile(function)(torch.eye(3, device="cuda"))
        assert isinstance(caught.value, FidelityError) or "GraphRefusedError" in repr(caught.value), name
    torch._dynamo.reset()


def _trained(model: torch.nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.detach().cpu() for each in (*losses, *model.parameters())]


def _compiled_training() -> None:
    """The forward and the backward are Inductor's code, whose numbers are those of its code for the CPU, to the bit."""

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    on_cpu = _trained(torch.compile(model()), x)
    torch._dynamo.reset()
    with torchdevice.simulate(count=2) as scope:
        eager = _trained(model().to("cuda:1"), x.to("cuda:1"))
        torch._dynamo.utils.counters.clear()
        compiled = _trained(torch.compile(model().to("cuda:1")), x.to("cuda:1"))
        counted = torch._dynamo.utils.counters["inductor"]
        assert counted["fxgraph_cache_hit"] + counted["fxgraph_cache_miss"] >= 2, counted
    torch._dynamo.reset()
    assert not scope.journal.degraded
    for one, other, plain in zip(compiled, on_cpu, eager, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, plain)


def _compiled_aliases_and_draws() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(1)
        made = torch.arange(4, device="cuda") + y.sum()
        return x, y.t() * 2, y.view(-1), made, torch.nn.functional.dropout(made, 0.5, True)

    compiled = torch.compile(function, fullgraph=True)
    outcomes = []
    with torchdevice.simulate():
        for call in (function, compiled, compiled):
            x, y = torch.ones(3, device="cuda"), torch.arange(6.0, device="cuda").reshape(2, 3)
            torch.cuda.manual_seed(1)
            before = x._version
            results = call(x, y)
            assert results[0] is x and x._version > before and x.tolist() == [2, 2, 2]
            assert results[2].untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            assert all(each.is_cuda for each in results)
            outcomes.append([each.cpu() for each in results])
        memory = torch.cuda.memory_allocated()
        kept = compiled(x, y)[3]
        assert torch.cuda.memory_allocated() - memory == 512 and kept.nbytes <= 512
    torch._dynamo.reset()
    for plain, one, other in zip(*outcomes, strict=True):
        assert plain.stride() == one.stride() == other.stride() and torch.equal(one, other), "a seed gives its numbers"
    for plain, one in zip(outcomes[0][:4], outcomes[1][:4], strict=True):
        assert torch.equal(plain, one)


def _compiled_code_in_a_cuda_graph() -> None:
    compiled = torch.compile(lambda x: (x * 2).sin())
    with torchdevice.simulate():
        x = torch.ones(3, device="cuda")
        compiled(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.fill_(2)
        graph.replay()
        assert torch.equal(y, (x * 2).sin())
    torch._dynamo.reset()


@pytest.mark.one_engine
@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", [_compiled_training, _compiled_aliases_and_draws, _compiled_code_in_a_cuda_graph])
def test_compiled_code(check: Callable[[], None]) -> None:
    check()


class WithConstant(torch.nn.Module):
    """Adds a constant, which is no parameter, and ones that it makes on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.constant, self.number = torch.arange(3.0, device="cuda"), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.constant + torch.ops.aten.ones.default([3], device=torch.device("simulated", 0))


class TestGraphsForInductor:
    def test_a_graph_is_copied_for_cpu_tensors(self) -> None:
        from torch._subclasses import FakeTensorMode

        with torchdevice.simulate():
            gm = torch.fx.symbolic_trace(WithConstant())
            gm.meta["kept"] = True
            with torch._C.DisableTorchFunction():
                example = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(3, device="simulated"))
                own = inductor._example(example)
                assert own.device.type == "cpu" and own.shape == (3,) and inductor._example(7) == 7
                copied = inductor._for_cpu(gm, [own])
                assert copied(torch.zeros(3)).tolist() == [1, 2, 3] and copied.meta["kept"]
                gm.constant.fill_(5)
                assert copied(torch.zeros(3)).tolist() == [6, 6, 6], "the constant has the device's memory"
                assert gm(torch.zeros(3, device="simulated")).device.type == "simulated"

    def test_what_cannot_be_compiled_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import cpp_builder

        def refuse() -> None:
            raise FileNotFoundError("g++")

        monkeypatch.setattr(cpp_builder, "get_cpp_compiler", refuse)
        with torchdevice.simulate():
            gm = torch.fx.symbolic_trace(WithConstant())
            inductor._missing_compiler.cache_clear()
            try:
                assert inductor.obstacle(gm) == "there is no C++ compiler (FileNotFoundError)"
            finally:
                inductor._missing_compiler.cache_clear()
            for node, device in zip(gm.graph.nodes, ("cuda", "cpu"), strict=False):
                node.meta["val"] = torch.ones(2, device=device)
            with torch._C.DisableTorchFunction():
                assert inductor.obstacle(gm) == "its tensors are on cpu and simulated:0"
            gm.add_module("inner", torch.fx.symbolic_trace(torch.nn.Identity()))
            assert inductor.obstacle(gm) == "the graph contains another one"


class TestTensorsForOtherProcesses:
    """What a queue of ``torch.multiprocessing`` pickles, and what the other process makes of it."""

    @pytest.mark.parametrize("requires_grad", [True, False])
    @pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
    def test_they_arrive_on_the_same_device(
        self, devices: torchdevice.Scope, kind: type[torch.Tensor], requires_grad: bool
    ) -> None:
        x = torch.arange(6.0, device="cuda:1").view(2, 3)
        sent = torch.nn.Parameter(x, requires_grad) if kind is torch.nn.Parameter else x.requires_grad_(requires_grad)
        found = pickle.loads(ForkingPickler.dumps(sent))
        assert type(found) is kind and found.device == torch.device("cuda", 1)
        assert torch.equal(found, sent) and found.requires_grad is requires_grad and found.is_leaf
        (entry,) = [each for each in devices.journal.entries if each.requested == "a tensor for another process"]
        assert (entry.count, entry.bytes) == (1, 24)

    def test_what_torch_refuses_to_send_is_refused(self, devices: torchdevice.Scope) -> None:
        for device in ("cuda", "cpu"):
            x = torch.ones(2, device=device, requires_grad=True)
            with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
                ForkingPickler.dumps(x * 2)

    def test_a_process_without_a_scope_is_told_to_enter_one(self) -> None:
        with torchdevice.simulate():
            x = torch.ones(2, device="cuda")
        sent = [ForkingPickler.dumps(x) for _ in range(2)]  # as the thread of a queue does, which is in no scope
        with pytest.raises(ScopeError, match="Start the process in a scope, or after enable"):
            pickle.loads(sent[0])
        with torchdevice.simulate():
            assert pickle.loads(sent[1]).tolist() == [1, 1]


def test_collectives_between_processes(tmp_path: Path) -> None:
    program = """
    import os, torch, torch.distributed as dist, torch.multiprocessing as mp

    def worker(rank):
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=2)
        x = torch.full((2,), float(rank), device="cuda")
        gathered = [torch.empty(2, device="cuda") for _ in range(2)]
        dist.all_gather(gathered, x)
        flat = torch.empty(4, device="cuda")
        dist.all_gather_into_tensor(flat, x)
        part = torch.empty(1, device="cuda")
        dist.reduce_scatter_tensor(part, x + 1)
        swapped = torch.empty(2, device="cuda")
        dist.all_to_all_single(swapped, x)
        dist.broadcast(x, 1)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        if rank == 0:
            dist.send(torch.tensor([7.0], device="cuda"), 1)
        else:
            received = torch.empty(1, device="cuda")
            dist.recv(received, 0)
            print([t.tolist() for t in gathered], flat.tolist(), part.tolist(), swapped.tolist(), x.tolist(),
                  received.item(), x.device, flush=True)
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(worker, nprocs=2)
    """
    result = run_program(tmp_path, program, options=["--target", "simulated:cuda:2"], MASTER_PORT=free_port())
    expected = "[[0.0, 0.0], [1.0, 1.0]] [0.0, 0.0, 1.0, 1.0] [3.0] [0.0, 1.0] [2.0, 2.0] 7.0 cuda:1"
    assert expected in result.stdout.splitlines(), (result.stdout, result.stderr[-2000:])


def test_the_data_loader_pins(devices: torchdevice.Scope) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=1)
    batches = [batch[0] for batch in loader]
    assert all(batch.is_pinned() and not batch.is_cuda for batch in batches)
    assert torch.cat([batch.cuda(non_blocking=True) for batch in batches]).tolist() == list(range(8))


def test_streams_and_events(devices: torchdevice.Scope) -> None:
    x = torch.zeros(1000, device="cuda")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()) as stream:
        for _ in range(50):
            x += 1
        end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    torch.cuda.synchronize()
    assert end.query() and start.elapsed_time(end) > 0 and x.sum().item() == 50_000
    buffer = io.BytesIO()
    torch.save(x, buffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x.record_stream(torch.cuda.Stream())


BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "factory": lambda device: torch.ones(2, device=device),
    "tensor": lambda device: torch.tensor([1.0], device=device),
    "like": lambda device: torch.ones_like(torch.ones(1, device="cuda:0"), device=device),
    "new": lambda device: torch.ones(1, device="cuda:0").new_ones(1, device=device),
    "from the CPU": lambda device: torch.ones(2).to(device),
    "from another device": lambda device: torch.ones(2, device="cuda:0").to(device),
    "module": lambda device: torch.nn.Linear(1, 1).to(device).weight,
    "generator": lambda device: torch.Generator(device),
    "storage": lambda device: torch.UntypedStorage(3, device=device),
    "context": lambda device: made_in(device),
}


def made_in(device: Any) -> torch.Tensor:
    with torch.device(device):
        return torch.ones(1)


@pytest.mark.parametrize("spell", [str, torch.device])
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("name", BY_TYPE)
def test_the_type_alone_means_the_current_device(name: str, engine: Any, spell: Callable[[str], Any]) -> None:
    """As torch's own code and programs spell it, from the type of a tensor's device."""
    with torchdevice.simulate(count=2, engine=engine, identity="target"):
        device = spell(torch.ones(1, device="cuda").device.type)
        for index in (1, 0):
            torch.cuda.set_device(index)
            assert BY_TYPE[name](device).device == torch.device("cuda", index)


# ---- what CUDA always refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mode", "wrap"])
class TestCudaRefuses:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
    def test_to_pin_its_own_memory(self, engine: str, dtype: torch.dtype) -> None:
        with torchdevice.simulate(engine=engine):
            x = torch.ones(2, dtype=dtype, device="cuda")
            expected = f"cannot pin '{x.type()}' only dense CPU tensors can be pinned"
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                x.pin_memory()
            for make in (torch.ones, torch.empty, torch.rand):
                with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
                    make(2, device="cuda", pin_memory=True)
            assert torch.ones(2, pin_memory=True).is_pinned() and x.cpu().pin_memory().is_pinned()

    def test_a_file_of_a_device_that_is_not_there(self, engine: str) -> None:
        with torchdevice.simulate(count=8, engine=engine):
            file = io.BytesIO()
            torch.save({"x": torch.arange(3.0, device="cuda:7")}, file)
        expected = (
            "Attempting to deserialize object on CUDA device 7 but torch.cuda.device_count() is 2. Please use "
            "torch.load with map_location to map your storages to an existing device."
        )
        with torchdevice.simulate(count=2, engine=engine):
            file.seek(0)
            with pytest.raises(RuntimeError, match=re.escape(expected)):
                torch.load(file)
            for place in ("cuda:1", "cpu", {"cuda:7": "cuda:1"}):
                file.seek(0)
                assert torch.load(file, map_location=place)["x"].tolist() == [0.0, 1.0, 2.0]
