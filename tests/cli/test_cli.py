"""``torchdevice run``, ``torchdevice doctor`` and ``TORCHDEVICE=1``, in processes of their own."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_command, run_fresh_python, run_program, run_torch_python

import torchdevice
from torchdevice.kernel import thread_state
from torchdevice.kernel.python import garbage_collection, logs
from torchdevice.tools import autoload

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(9, of="runs of the command line"), pytest.mark.one_engine]

MOVES = "import torch; print(torch.ones(2).cuda().sum().item(), torch.cuda.is_available())"


class TestRun:
    def test_script(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, MOVES)
        assert (result.returncode, result.stdout) == (0, "2.0 True\n"), result.stderr

    def test_traceback(self, tmp_path: Path) -> None:
        program = """
            import torch
            def inner():
                raise KeyError("boom")
            inner()
        """
        result = run_program(tmp_path, program)
        plain = run_torch_python(str(tmp_path / "program.py"))
        assert result.returncode == plain.returncode == 1
        assert result.stderr == plain.stderr

    def test_module(self, tmp_path: Path) -> None:
        package = tmp_path / "package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(
            f"import sys; {MOVES}; print(__name__, sys.argv[1:], __package__)"
        )
        result = run_command("run", "-m", "package", "--flag", cwd=tmp_path)
        assert result.stdout == "2.0 True\n__main__ ['--flag'] package\n", result.stderr

    def test_target_and_devices(self, tmp_path: Path) -> None:
        program = "import torch; print(torch.cuda.device_count())"
        assert (
            run_program(tmp_path, program, options=["--target", "cpu", "--devices", "3"]).stdout
            == "3\n"
        )
        assert run_program(tmp_path, program, options=["--devices", "0"]).returncode == 2

    @pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
    def test_a_process_that_the_program_starts_sees_as_many_devices(
        self, target: str, tmp_path: Path
    ) -> None:
        count = "print(__import__('torch').cuda.device_count(), flush=True)"
        program = (
            f"import subprocess, sys\n{count}\nsubprocess.run([sys.executable, '-c', {count!r}])"
        )
        assert (
            run_program(tmp_path, program, options=["--target", target, "--devices", "3"]).stdout
            == "3\n3\n"
        )

    def test_strict(self, tmp_path: Path) -> None:
        result = run_program(
            tmp_path, "import torch; torch.cuda.memory_allocated()", options=["--strict"]
        )
        assert result.returncode == 1 and "FidelityError" in result.stderr

    def test_report(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, MOVES, options=["--report"])
        assert "       1 x cuda:0 -> cpu [exact]" in result.stderr and result.stdout == "2.0 True\n"

    def test_children_follow(self, tmp_path: Path) -> None:
        """Spawned workers, forked workers and subprocesses run in a scope too."""
        program = """
            import subprocess, sys
            import torch, torch.multiprocessing as mp

            def worker(rank):
                print("worker", torch.ones(2, device="cuda").sum().item(), flush=True)

            if __name__ == "__main__":
                mp.spawn(worker, nprocs=1)
                for method in ("spawn", "fork", "forkserver"):
                    process = mp.get_context(method).Process(target=worker, args=(0,))
                    process.start(); process.join()
                subprocess.run([sys.executable, "-c", "import torch; print('child', torch.ones(1).cuda().item())"])
        """
        result = run_program(tmp_path, program)
        assert sorted(result.stdout.splitlines()) == ["child 1.0", *["worker 2.0"] * 4], (
            result.stderr
        )

    def test_children_get_the_same_options(self, tmp_path: Path) -> None:
        program = """
            import subprocess, sys
            code = "import torch, torchdevice as t; print(torch.cuda.device_count(), t.current().options.strict)"
            subprocess.run([sys.executable, "-c", code])
        """
        result = run_program(tmp_path, program, options=["--devices", "3", "--strict"])
        assert result.stdout == "3 True\n", result.stderr

    def test_torchrun(self, tmp_path: Path) -> None:
        program = """
            import os, torch, torch.distributed as dist
            dist.init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            x = torch.ones(1, device="cuda")
            dist.all_reduce(x)
            if dist.get_rank() == 0:
                print(x.item())
            dist.destroy_process_group()
        """
        (tmp_path / "program.py").write_text("\n".join(line[12:] for line in program.splitlines()))
        result = run_command(
            "run",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "program.py",
            cwd=tmp_path,
        )
        assert result.stdout.strip().splitlines()[-1:] == ["2.0"], result.stderr[-2000:]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                ["--identity", "program", "--target", "cpu"],
                "identity='program' needs a target whose tensors",
            ),
            (["--memory", "8GiB", "--target", "cpu"], "memory='8GiB' needs a simulated device"),
            (
                ["--target", "simulated:cuda:2", "--devices", "3"],
                "devices=3 contradicts target='simulated:cuda:2'",
            ),
            (["--target", "abacus"], "'abacus' is not a target"),
        ],
    )
    def test_contradicting_options(self, options: list[str], message: str, tmp_path: Path) -> None:
        result = run_program(tmp_path, "print('started')", options=options)
        assert (result.returncode, result.stdout) == (2, "")
        assert (
            result.stderr.startswith(f"torchdevice: {message}") and result.stderr.count("\n") == 1
        )

    def test_variables_that_contradict_a_flag_are_left_out(self, tmp_path: Path) -> None:
        """A variable is for the whole process. If it contradicts a flag, only the flag counts."""
        program = "import os; print(os.environ.get('TORCHDEVICE_IDENTITY'))"
        result = run_program(
            tmp_path, program, options=["--target", "cpu"], TORCHDEVICE_IDENTITY="program"
        )
        assert result.stdout == "None\n", result.stderr

    def test_a_variable_of_no_meaning(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, "print('started')", TORCHDEVICE_DEVICES="many")
        assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
        assert result.stderr.startswith(
            "torchdevice: TORCHDEVICE_DEVICES='many': devices='many' is not a number"
        )

    def test_a_missing_dependency(self, tmp_path: Path) -> None:
        (tmp_path / "psutil.py").write_text("raise ImportError('psutil is broken')")
        (tmp_path / "program.py").write_text("print('started')")
        result = run_fresh_python("-m", "torchdevice", "run", "program.py", cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (
            2,
            "",
            "torchdevice: psutil is broken\n",
        )

    def test_in_a_process_that_was_activated(self, tmp_path: Path) -> None:
        """Only the scope of the command is active, not one by ``TORCHDEVICE=1``."""
        program = """
            import torch
            from torchdevice.kernel.thread_state import state
            print(torch.cuda.device_count(), len(state.entries))
        """
        environment = {"TORCHDEVICE": "1", "TORCHDEVICE_DEVICES": "2", "TORCHDEVICE_LOG": "ERROR"}
        result = run_program(tmp_path, program, options=["--devices", "3"], **environment)
        assert (result.stdout, result.stderr) == ("3 1\n", "")


OWN_MODULES = (
    "import sys, torch; print(sorted(name for name in sys.modules if "
    "name.startswith('torchdevice')))"
)


class TestActivation:
    """``import torch`` with and without ``TORCHDEVICE=1``."""

    def test_by_the_environment_alone(self, tmp_path: Path) -> None:
        result = run_torch_python("-c", MOVES, cwd=tmp_path, TORCHDEVICE="1")
        assert result.stdout == "2.0 True\n", result.stderr

    @pytest.mark.parametrize("switch", ["", "0", "off"])
    def test_switched_off(self, switch: str, tmp_path: Path) -> None:
        result = run_torch_python("-c", MOVES, cwd=tmp_path, TORCHDEVICE=switch)
        assert result.returncode == 1 and (
            "compiled with CUDA" in result.stderr or "NVIDIA driver" in result.stderr
        )

    def test_nothing_is_imported_when_switched_off(self, tmp_path: Path) -> None:
        """Neither a broken installation nor an invalid variable has any effect then."""
        (tmp_path / "psutil.py").write_text("raise RuntimeError('psutil is broken')")
        result = run_torch_python(
            "-c", OWN_MODULES, cwd=tmp_path, PYTHONPATH=str(tmp_path), TORCHDEVICE_DEVICES="many"
        )
        kernel = [
            "torchdevice.kernel",
            "torchdevice.kernel.python",
            "torchdevice.kernel.python.environment",
        ]
        imported = [
            "torchdevice",
            *kernel,
            "torchdevice.tools",
            "torchdevice.tools.autoload",
            "torchdevice_autoload",
        ]
        assert (result.stdout, result.stderr) == (f"{imported}\n", "")

    @pytest.mark.parametrize(
        ("broken", "environment", "reason"),
        [
            ("raise ImportError('psutil is\\nbroken')", {}, "ImportError: psutil is broken."),
            ("raise OSError(2, 'no /proc')", {}, "FileNotFoundError: [Errno 2] no /proc."),
            ("1 / 0", {}, "ZeroDivisionError: division by zero."),
            (
                None,
                {"TORCHDEVICE_DEVICES": "many"},
                "ValueError: TORCHDEVICE_DEVICES='many': devices='many' is not a number of devices.",
            ),
            (
                None,
                {"TORCHDEVICE_TARGET": "abacus"},
                "UnknownTargetError: 'abacus' is not a target.",
            ),
            (
                None,
                {"TORCHDEVICE_TARGET": "cpu", "TORCHDEVICE_MEMORY": "1G"},
                "ValueError: memory='1GiB' needs a simulated device, and 'cpu' is not one.",
            ),
            (
                None,
                {"TORCHDEVICE_LOG": "loud"},
                "ValueError: TORCHDEVICE_LOG='loud' is not a level.",
            ),
        ],
    )
    def test_torch_is_imported_when_it_fails(
        self, broken: str | None, environment: dict[str, str], reason: str, tmp_path: Path
    ) -> None:
        if broken is not None:
            (tmp_path / "psutil.py").write_text(broken)
        program = "import torch; print(torch.ones(2).sum().item(), torch.cuda.is_available())"
        result = run_torch_python(
            "-c", program, PYTHONPATH=str(tmp_path), TORCHDEVICE="1", **environment
        )
        assert (result.returncode, result.stdout) == (0, "2.0 False\n"), result.stderr
        assert result.stderr.startswith(
            "torchdevice: TORCHDEVICE=1 asks for a scope, which could not be activated: "
        )
        assert reason in result.stderr and result.stderr.count("\n") == 1
        assert result.stderr.endswith("Unset TORCHDEVICE to run without this message.\n")

    @pytest.mark.parametrize("asked", [False, True])
    @pytest.mark.parametrize("how", ["deleted", "broken"])
    def test_torch_is_imported_without_the_package(
        self, how: str, asked: bool, tmp_path: Path
    ) -> None:
        """The metadata, with the function torch calls, outlives a deleted package folder."""
        (tmp_path / "torchdevice").mkdir()
        (tmp_path / "torchdevice" / "__init__.py").write_text("this is no Python\n")
        away = (
            "sys.modules['torchdevice'] = None"
            if how == "deleted"
            else f"sys.path.insert(0, {str(tmp_path)!r})"
        )
        program = f"import sys; {away}; import torch; print(torch.ones(2).sum().item())"
        result = run_fresh_python("-c", program, **({"TORCHDEVICE": "1"} if asked else {}))
        assert (result.returncode, result.stdout) == (0, "2.0\n"), result.stderr
        assert (
            result.stderr.count("\n") == asked
            and ("Install torchdevice-portable again" in result.stderr) is asked
        )

    @pytest.mark.parametrize(
        "name", ["_is_torch_function_all_disabled", "_AutoDispatchBelowAutograd"]
    )
    def test_a_torch_without_what_is_required(self, name: str) -> None:
        program = f"""if True:
            import os
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
            import torch
            del torch._C.{name}
            torch._import_device_backends()  # as torch's import does at its end
            print("imported")
        """
        result = run_fresh_python("-c", program, TORCHDEVICE="1")
        assert (result.returncode, result.stdout) == (0, "imported\n"), result.stderr
        assert f"has no 'torch._C.{name}'" in result.stderr and result.stderr.count("\n") == 1

    def test_stderr_is_closed(self) -> None:
        program = "import sys; sys.stderr.close(); import torch; print('imported')"
        result = run_torch_python("-c", program, TORCHDEVICE="1", TORCHDEVICE_DEVICES="many")
        assert (result.returncode, result.stdout) == (0, "imported\n")


@pytest.mark.sampled(9)
class TestActivationInThisProcess:
    """What torch's import calls, called once more."""

    @pytest.fixture(autouse=True)
    def switched_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHDEVICE", "1")

    def test_a_scope_that_is_active_is_enough(self) -> None:
        with torchdevice.portable("cpu") as scope:
            autoload.activate()
            assert torchdevice.current() is scope and len(thread_state.state.entries) == 1

    def test_backends_that_torch_would_load_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One may be the target. Errors are torch's to raise, which loads them all itself."""
        loaded: list[str] = []

        def backend(name: str, call: Callable[[], Any]) -> types.SimpleNamespace:
            return types.SimpleNamespace(name=name, load=lambda: loaded.append(name) or call)

        points = [backend(name, lambda: None) for name in ("first", "torchdevice")]
        points += [
            backend("broken", lambda: 1 / 0),
            backend("last", lambda: loaded.append("called")),
        ]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        autoload._load_backends()
        assert loaded == ["broken", "last", "called"]

    def test_what_is_said_where_nothing_of_the_package_works(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(*arguments: Any) -> Any:
            raise RuntimeError("no place\nfor notes.")

        monkeypatch.setattr(garbage_collection, "paused", broken)
        monkeypatch.setattr(logs, "claim", broken)
        autoload.activate()
        said = capsys.readouterr().err
        assert (
            "which could not be activated: RuntimeError: no place for notes. torch is imported"
            in said
        )
        assert said.count("\n") == 1


def test_version() -> None:
    assert run_command("--version").stdout.strip() == f"torchdevice {torchdevice.__version__}"
    assert run_command().returncode == 2


def test_available_device() -> None:
    available = torchdevice.TorchDevice("cpu")
    assert available.device.type == "cpu" and repr(available).startswith(
        "TorchDevice(device='cpu', name="
    )
    assert torchdevice.TorchDevice().device.type in ("cpu", "cuda", "mps", "xpu")
    for target, shown in (("t4:2", "cuda:0"), ("simulated:mps", "mps:0")):
        found = torchdevice.TorchDevice(target)
        with torchdevice.portable(target):
            assert (str(found.device), found.name) == (shown, torch.cuda.get_device_name())
