"""Messages begin with the package's name, come once a run, and only where needed."""

from __future__ import annotations

import logging
import os
import textwrap
from pathlib import Path

import pytest
from processes import run_command, run_program, run_python

import torchdevice
from torchdevice.kernel.python import logs

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(5, of="messages of processes"), pytest.mark.one_engine]

NOTICE = "torchdevice: no accelerator is in use: what the program asks of CUDA runs on the CPU\n"

WORKERS = """
    import subprocess, sys, torch, torch.multiprocessing as mp

    def worker(rank):
        torch.ones(rank + 1, device="cuda")

    if __name__ == "__main__":
        if "first" in sys.argv:
            torch.ones(1).cuda()
        mp.spawn(worker, nprocs=2)
        for method in ("fork", "forkserver"):
            process = mp.get_context(method).Process(target=worker, args=(0,))
            process.start(); process.join()
        subprocess.run([sys.executable, "-c", "import torch; torch.ones(1).cuda()"])
"""

RANKS = """
    import torch, torch.distributed as dist
    dist.init_process_group("nccl")
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.destroy_process_group()
"""

HELP = """
    import argparse, torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.ones(1, device=options.device)
"""


def own(text: str) -> str:
    """Return the lines that this package printed."""
    return "".join(line for line in text.splitlines(keepends=True) if "torchdevice" in line)


@pytest.mark.sampled(1)
def test_a_program_that_has_no_handler_of_last_resort() -> None:
    program = (
        "import logging; logging.lastResort = None; import torchdevice, torch; "
        "torchdevice.enable('cpu')"
    )
    done = run_python("-c", f"{program}; torch.ones(1).cuda()")
    assert (done.returncode, own(done.stderr)) == (0, NOTICE), done.stderr


class TestOnce:
    @pytest.mark.parametrize("arguments", [(), ("first",)])
    @pytest.mark.parametrize("way", ["run", "variable"])
    def test_in_all_kinds_of_children(
        self, way: str, arguments: tuple[str, ...], tmp_path: Path
    ) -> None:
        """Whether the first process prints it, or a child is the first with a reason to."""
        (tmp_path / "program.py").write_text(textwrap.dedent(WORKERS))
        environment = {"TORCHDEVICE_TARGET": "cpu", "TMPDIR": str(tmp_path)}
        if way == "run":
            result = run_command("run", "program.py", *arguments, cwd=tmp_path, **environment)
        else:
            result = run_python(
                "program.py", *arguments, cwd=tmp_path, TORCHDEVICE="1", **environment
            )
        assert (result.returncode, result.stderr) == (0, NOTICE)
        assert list(tmp_path.glob("torchdevice*")) == []

    def test_in_all_ranks(self, tmp_path: Path) -> None:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py"]
        (tmp_path / "program.py").write_text(textwrap.dedent(RANKS))
        result = run_command("run", "--target", "cpu", *words, cwd=tmp_path)
        assert result.returncode == 0 and own(result.stderr) == NOTICE

    def test_a_broken_activation_too(self, tmp_path: Path) -> None:
        program = """
            import subprocess, sys, torch
            subprocess.run([sys.executable, "-c", "import torch"])
        """
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        result = run_python(
            "program.py", cwd=tmp_path, TORCHDEVICE="1", TORCHDEVICE_TARGET="abacus"
        )
        assert result.stderr.count("could not be activated") == 1 and result.returncode == 0

    def test_a_process_of_its_own_scope_is_a_run_of_its_own(self, tmp_path: Path) -> None:
        program = """
            import os, subprocess, sys, torch, torchdevice
            with torchdevice.portable("cpu"):
                torch.ones(1).cuda()
            if len(sys.argv) == 1:
                subprocess.run([sys.executable, __file__, "child"])
            assert not [name for name in os.environ if name in ("TORCHDEVICE_SAID", "TORCHDEVICE_RUN_FOLDER")]
        """
        (tmp_path / "program.py").write_text(textwrap.dedent(program))
        result = run_python("program.py", cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, NOTICE * 2)


class TestNone:
    def test_for_help(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, HELP, "--help", options=["--target", "cpu"])
        assert (result.returncode, result.stderr) == (0, "") and "--device DEVICE" in result.stdout
        assert run_program(tmp_path, HELP, options=["--target", "cpu"]).stderr == NOTICE

    def test_for_a_syntax_error(self, tmp_path: Path) -> None:
        result = run_program(tmp_path, "def broken(:")
        assert result.returncode == 1 and own(result.stderr) == ""

    def test_for_a_program_that_asks_for_nothing(self, tmp_path: Path) -> None:
        program = (
            "import torch; print(torch.ones(1).item(), torch.cuda.is_available(), "
            "torch.cuda.device_count())"
        )
        assert run_program(tmp_path, program, options=["--target", "cpu"]).stderr == ""

    @pytest.mark.parametrize(
        ("options", "environment"),
        [
            (["--quiet"], {}),
            (["--quiet"], {"TORCHDEVICE_LOG": "INFO"}),
            ([], {"TORCHDEVICE_LOG": "ERROR"}),
        ],
    )
    def test_where_they_are_not_wanted(
        self, options: list[str], environment: dict[str, str], tmp_path: Path
    ) -> None:
        """From no process, neither in the log nor as a Python warning."""
        program = """
            import subprocess, sys, torch
            torch.ones(1, dtype=torch.float64, device="cuda")
            torch.cuda.utilization()
            subprocess.run([sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"])
        """
        for target in ("cpu", "simulated:mps"):
            words = [*options, "--target", target, "--report=r.html"]
            result = run_program(tmp_path, program, options=words, **environment)
            assert (result.returncode, result.stdout, result.stderr) == (0, "", "") and (
                tmp_path / "r.html"
            ).exists()


class TestSettings:
    BAD = [
        (
            {"TORCHDEVICE_LOG": "loud"},
            "TORCHDEVICE_LOG='loud' is not a level. Use DEBUG, INFO, WARNING or ERROR.",
        ),
        (
            {"TORCHDEVICE_LOG_FILE": "away/log"},
            "TORCHDEVICE_LOG_FILE='away/log' cannot be written: No such file or",
        ),
        (
            {"TORCHDEVICE_LOG_FILE": "."},
            "TORCHDEVICE_LOG_FILE='.' cannot be written: Is a directory. Name a file",
        ),
    ]

    @pytest.mark.parametrize(("environment", "message"), BAD)
    def test_a_bad_one_is_one_line(
        self, environment: dict[str, str], message: str, tmp_path: Path
    ) -> None:
        result = run_program(tmp_path, "print('started')", **environment)
        assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1
        assert result.stderr.startswith(f"torchdevice: {message}")
        activated = run_python(
            "-c", "import torch; print('imported')", cwd=tmp_path, TORCHDEVICE="1", **environment
        )
        assert (activated.returncode, activated.stdout) == (0, "imported\n")
        assert message in activated.stderr and activated.stderr.count("\n") == 1

    @pytest.mark.parametrize(("environment", "message"), BAD)
    def test_a_bad_one_is_an_error_of_a_scope(
        self,
        environment: dict[str, str],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message.partition("Is a")[0]):
            torchdevice.portable("cpu").__enter__()

    def test_a_program_that_configures_logging_gets_them(self, tmp_path: Path) -> None:
        program = """
            import logging, torch
            logging.basicConfig(format="%(name)s|%(levelname)s|%(message)s")
            torch.ones(1).cuda()
        """
        result = run_program(tmp_path, program, options=["--target", "cpu"])
        assert result.stderr == NOTICE.replace("torchdevice: ", "torchdevice|WARNING|")

    def test_stderr_is_the_one_of_the_moment(self, capsys: pytest.CaptureFixture[str]) -> None:
        handler = logs._Stderr()
        handler.setFormatter(logs._FORMAT)
        handler.emit(logging.LogRecord("torchdevice", logging.WARNING, "", 0, "words", (), None))
        assert capsys.readouterr().err == "torchdevice: words\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_on_a_terminal(environment: dict[str, str], coloured: bool, tmp_path: Path) -> None:
    import pty
    import subprocess
    import sys

    (tmp_path / "program.py").write_text("import torch; torch.ones(1).cuda()")
    command = [
        sys.executable,
        "-m",
        "torchdevice",
        "run",
        "--target",
        "cpu",
        "--report",
        "program.py",
    ]
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command,
        stderr=follower,
        cwd=tmp_path,
        env={**inherited, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(follower)
        shown = b""
        try:
            while part := os.read(leader, 65536):
                shown += part
        except OSError:  # Linux says so that the other end was closed
            pass
        assert process.wait() == 0
    os.close(leader)
    assert b"cuda:0" in shown and (b"\x1b[36m" in shown) == coloured
