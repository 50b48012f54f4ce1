"""``torchdevice run`` and its kin, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_command, run_program, run_python

import torchdevice

MOVES = "import torch; print(torch.ones(2).cuda().sum().item(), torch.cuda.is_available())"


class TestRun:
    def test_script(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, MOVES)
        assert (result.returncode, result.stdout) == (0, "2.0 True\n"), result.stderr

    def test_what_the_script_sees(self, tmp_path: Path) -> None:
        (tmp_path / "beside.py").write_text("VALUE = 3")
        program = """
            import sys, __main__, beside
            print(sys.argv[1:], __name__, __file__ == sys.argv[0], sys.path[0] == __file__.rsplit("/", 1)[0])
            def function(): pass
            print(beside.VALUE, __main__.function is function, __spec__ is None)
        """
        result = run_program(tmp_path, program, "--epochs", "3", "-x", "--target")
        plain = run_python(str(tmp_path / "program.py"), "--epochs", "3", "-x", "--target")
        assert result.stdout == plain.stdout == "['--epochs', '3', '-x', '--target'] __main__ True True\n3 True True\n"

    @pytest.mark.parametrize(
        "ending", ["raise SystemExit(7)", "import sys; sys.exit('words')", "import os; os._exit(9)", "raise SystemExit"]
    )
    def test_exit_code(self, ending: str, tmp_path: Path) -> None:
        result = run_program(tmp_path, ending)
        plain = run_python(str(tmp_path / "program.py"))
        assert result.returncode == plain.returncode
        assert "words" not in ending or "words" in result.stderr

    def test_traceback(self, tmp_path: Path) -> None:
        program = """
            import torch
            def inner():
                raise KeyError("boom")
            inner()
        """
        result = run_program(tmp_path, program)
        plain = run_python(str(tmp_path / "program.py"))
        assert result.returncode == plain.returncode == 1
        lines = [line for line in result.stderr.splitlines() if not line.startswith("no accelerator")]
        assert lines == plain.stderr.splitlines()

    def test_syntax_error(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, "def broken(:\n")
        assert result.returncode == 1 and "SyntaxError" in result.stderr

    def test_module(self, tmp_path: Path) -> None:
        package = tmp_path / "package"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "__main__.py").write_text(f"import sys; {MOVES}; print(__name__, sys.argv[1:], __package__)")
        result = run_command("run", "-m", "package", "--flag", cwd=tmp_path)
        assert result.stdout == "2.0 True\n__main__ ['--flag'] package\n", result.stderr

    def test_missing_script(self, tmp_path: Path) -> None:
        result = run_command("run", "nowhere.py", cwd=tmp_path)
        assert result.returncode == 2 and "can't open file" in result.stderr

    def test_target_and_devices(self, tmp_path: Path) -> None:
        program = "import torch; print(torch.cuda.device_count())"
        assert run_program(tmp_path, program, options=["--target", "cpu", "--devices", "3"]).stdout == "3\n"
        result = run_program(tmp_path, program, options=["--target", "abacus"])
        assert result.returncode == 2 and "'abacus' is not a target" in result.stderr
        assert run_program(tmp_path, program, options=["--devices", "0"]).returncode == 2

    def test_strict(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, "import torch; torch.cuda.memory_allocated()", options=["--strict"])
        assert result.returncode == 1 and "FidelityError" in result.stderr

    def test_report(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, MOVES, options=["--report"])
        assert "1 x cuda:0 -> cpu [exact]" in result.stderr and result.stdout == "2.0 True\n"

    def test_children_follow(self, tmp_path: Path) -> None:
        """Spawned and forked workers, subprocesses: each is a CUDA program too."""
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
        assert sorted(result.stdout.splitlines()) == ["child 1.0", *["worker 2.0"] * 4], result.stderr

    def test_children_get_the_same_options(self, tmp_path: Path) -> None:
        program = """
            import subprocess, sys
            code = "import torch, torchdevice as t; print(torch.cuda.device_count(), t.current().options.strict)"
            subprocess.run([sys.executable, "-c", code])
        """
        result = run_program(tmp_path, program, options=["--devices", "3", "--strict"])
        assert result.stdout == "3 True\n", result.stderr

    def test_bad_environment(self, tmp_path: Path) -> None:
        result = run_python("-c", MOVES, cwd=tmp_path, TORCHDEVICE="1", TORCHDEVICE_DEVICES="many")
        assert result.returncode == 1  # torch itself is imported, and has no CUDA
        assert "TORCHDEVICE_DEVICES='many': 'many' is not a number" in result.stderr

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
            "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py", cwd=tmp_path
        )
        assert result.stdout.strip().splitlines()[-1:] == ["2.0"], result.stderr[-2000:]

    def test_by_the_environment_alone(self, tmp_path: Path) -> None:
        result = run_python("-c", MOVES, cwd=tmp_path, TORCHDEVICE="1")
        assert result.stdout == "2.0 True\n", result.stderr
        result = run_python("-c", MOVES, cwd=tmp_path, TORCHDEVICE="0")
        assert result.returncode == 1

    def test_without_a_scope_the_program_fails_as_ever(self, tmp_path: Path) -> None:
        result = run_python("-c", MOVES, cwd=tmp_path)
        assert result.returncode == 1 and ("compiled with CUDA" in result.stderr or "NVIDIA driver" in result.stderr)


def test_doctor_and_version() -> None:
    doctor = run_command("doctor")
    assert "would stand in: TorchDevice(" in doctor.stdout and "cpu: available" in doctor.stdout
    assert run_command("--version").stdout.strip() == f"torchdevice {torchdevice.__version__}"
    assert run_command().returncode == 2


def test_available_device() -> None:
    available = torchdevice.TorchDevice("cpu")
    assert available.device.type == "cpu" and repr(available).startswith("TorchDevice(device='cpu', name=")
    assert torchdevice.TorchDevice().device.type in ("cpu", "cuda", "mps", "xpu")
