"""Ways into a scope on simulated devices, how many there are, and what is left outside of one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from processes import run_program, run_python, run_torch_python

import torchdevice
from torchdevice.errors import UnknownTargetError


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
        assert (
            str(torchdevice.portable("simulated", devices=4, identity="target")(place)()) == fourth
        )

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
            assert torch.zeros(1, device="cuda").is_mps
            assert repr(scope) == "<torchdevice.Scope target='simulated:mps'>"

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
            assert (
                torch.zeros(1, device="cuda").get_device()
                == torch.zeros(1).cuda().get_device()
                == 1
            )
        assert torch.zeros(1, device="cuda").get_device() == 0

    def test_bad_arguments(self) -> None:
        with pytest.raises(
            UnknownTargetError, match=r"'simulated:tpu' is not a target.*simulated:strict"
        ):
            torchdevice.simulate("tpu").__enter__()
        with pytest.raises(ValueError, match=r"cannot have .* devices: the profile has one"):
            torchdevice.simulate("mps", count=2).__enter__()
        with pytest.raises(ValueError, match=r"memory=0 is not a number of bytes\. Use an int"):
            torchdevice.simulate(memory=0)
        with pytest.raises(ValueError, match="needs a simulated device, and 'cpu' is not one"):
            torchdevice.portable("cpu", memory=1 << 30).__enter__()
        with pytest.raises(ValueError, match="devices=0"):
            torchdevice.simulate(count=0)


PARSED_OTHERWISE = pytest.mark.skipif(
    torch.__version__ < "2.13" and torch.version.cuda is not None,
    reason="this build's own parser raises ValueError",
)


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("visible", "count"),
        [
            *[("0", 1), ("1,3", 2), ("2,9,0", 1), ("0,1,2,3", 4), ("-1", 0), ("", 0)],
            # torch's own parser reads it so: nothing if an ordinal repeats, else leading numbers.
            *[
                ("0,0", 0),
                ("0,1,0", 0),
                (" 1 , 2 ", 2),
                ("1gpu2,2ampere", 2),
                ("+1", 1),
                ("0,x,1", 1),
            ],
            pytest.param("-", 0, marks=PARSED_OTHERWISE),
            ("GPU-0123", 0),
        ],
    )
    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
    def test_the_variable_limits_the_number_of_devices(
        self, target: str, visible: str, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchdevice.portable(target, devices=4):
            # As a program does before it uses CUDA.
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
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

    def test_the_variable_hides_no_device_where_ordinals_fold(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with torchdevice.portable("cpu"):
            assert torch.cuda.is_available() and torch.zeros(1, device="cuda").numel() == 1


class TestOutsideAScope:
    def test_nothing_is_available_and_nothing_is_made(self) -> None:
        assert not torch.cuda.is_available() and not torch.accelerator.is_available()
        assert torch.simulated.device_count() == 0  # type: ignore[attr-defined]
        for make in (
            lambda: torch.zeros(1, device="simulated"),
            lambda: torch.ones(1).to("simulated:0"),
        ):
            with pytest.raises(
                RuntimeError, match="no scope on a simulated device is active in this thread"
            ):
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

    def test_backward_is_on_the_calling_thread(self) -> None:
        seen: list[tuple[int, bool]] = []

        def look(gradient: torch.Tensor) -> None:
            seen.append((threading.get_ident(), torch._C._is_multithreading_enabled()))

        before = torch._C._is_multithreading_enabled()
        with torchdevice.simulate(count=2):
            x = torch.ones(2, device="cuda:1", requires_grad=True)
            y = x.to("cuda:0") * 2
            y.register_hook(look)
            x.register_hook(look)
            y.sum().backward()
        assert (
            seen == [(threading.get_ident(), False)] * 2
            and torch._C._is_multithreading_enabled() is before
        )

    def test_importing_registers_nothing(self, tmp_path: Path) -> None:
        program = (
            "import torch, sys, torchdevice\n"
            "with torchdevice.portable('cpu'): torch.ones(1).cuda()\n"
            "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
            "assert 'torchdevice.simulation.backend' not in sys.modules and not hasattr(torch, "
            "'simulated')\n"
            "with torchdevice.portable('simulated'): assert torch.ones(1).cuda().device.type == "
            "'cuda'\n"
            "print('as said')\n"
        )
        result = run_torch_python("-c", program, cwd=tmp_path)
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
            "for make in (lambda: copy.deepcopy(x), lambda: torch.UntypedStorage(4, "
            "device='simulated')):\n"
            "    try:\n"
            "        make()\n"
            "    except RuntimeError as error:\n"
            "        assert 'no scope on a simulated device' in str(error)\n"
            "print(torch.UntypedStorage(4).device, torch.UntypedStorage([1, 2]).tolist())\n"
        )
        result = run_python("-c", program, cwd=tmp_path)
        assert result.stdout == "cpu [1, 2]\n", result.stderr

    def test_a_real_device_loses_its_autograd_which_is_said_once(self, tmp_path: Path) -> None:
        """An H200 with torch 2.11 fails so after a scope; here torch counts a missing GPU."""
        program = (
            "import torch, torchdevice\n"
            "torch.accelerator.device_count = lambda: 1\n"
            "torch.accelerator.current_accelerator = lambda check_available=False: "
            "torch.device('cuda')\n"
            "for _ in range(2):\n"
            "    with torchdevice.simulate():\n"
            "        torch.ones(2, device='cuda')\n"
        )
        result = run_python("-c", program, cwd=tmp_path)
        assert (
            result.returncode == 0
            and result.stderr.count("backward() of tensors on cuda fails from now on") == 1
        )

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
        assert result.stdout.startswith(
            "npu | torch has room for one out-of-tree backend in a process, and 'npu'"
        ), result.stderr
