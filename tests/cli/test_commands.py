"""The command line: what each command takes, shows and refuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from processes import run_command, run_fresh_python

import torchdevice
from torchdevice.check import Target
from torchdevice.tools.cli import demo, diagnostics, doctor, main, plan, programs, run

COMMANDS = ("run", "check", "doctor", "report")

MOVES = (
    "import sys, torch; print(torch.ones(2).cuda().sum().item(), torch.cuda.is_available(), "
    "sys.argv)"
)

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(2), pytest.mark.one_engine]


@pytest.mark.parametrize(
    "command", [("check", "--rules"), ("check", "--all", "--json", __file__), ("run", "--help")]
)
def test_a_command_ends_quietly_where_nobody_reads_its_output(command: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "torchdevice", *command]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == "" and done.returncode in (0, 1)


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_an_interrupt_of_a_command_without_a_program_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    for module in (demo, doctor):
        monkeypatch.setattr(module, f"_{module.__name__.rpartition('.')[2]}", interrupted)
    assert main.main([command]) == 130
    assert capsys.readouterr().err == "torchdevice: interrupted\n"


class TestParsing:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_has_an_example(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--help"])
        shown = capsys.readouterr()
        assert (
            ended.value.code == 0
            and f"  torchdevice {command}" in shown.out.partition("example")[2]
        )
        assert shown.err == ""

    @pytest.mark.parametrize("command", [*COMMANDS, "plan", "native", "demo"])
    def test_help_fits_eighty_columns(
        self, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit):
            main.main([command, "--help"])
        shown = capsys.readouterr().out.splitlines()
        assert [line for line in shown if len(line) > 80] == [] and len(shown) > 5

    @pytest.mark.parametrize(
        ("command", "flag"), [("run", "--report"), ("run", "--verify"), ("plan", "--report")]
    )
    def test_an_optional_value_without_an_equals_sign_is_not_run(
        self, command: str, flag: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main.main([command, flag, "found.json", "train.py"])
        assert ended.value.code == 2
        assert f"'found.json' is not a program; write {flag}=found.json" in capsys.readouterr().err

    def test_native_shows_its_steps_where_one_is_missing(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main.main(["native"])
        assert "the following arguments are required: build|clean" in capsys.readouterr().err

    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_flag_that_is_none_shows_the_usage_of_the_command(
        self, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = {"run": ["x.py"], "report": ["x.json"]}.get(command, [])
        with pytest.raises(SystemExit) as ended:
            main.main([command, "--bogus", *words])
        shown = capsys.readouterr().err
        assert ended.value.code == 2 and shown.startswith(f"usage: torchdevice {command} ")
        assert f"torchdevice {command}: error: unrecognized arguments: --bogus" in shown

    @pytest.mark.parametrize(
        ("words", "meant"),
        [
            (["run", "--targett", "cpu", "x.py"], "--target"),
            (["run", "--devcies=2", "x.py"], "--devices"),
            (["docter"], "doctor"),
            (["doctor", "--jsn"], "--json"),
        ],
    )
    def test_what_was_probably_meant(
        self, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main.main(words)
        assert f"(did you mean '{meant}'?)" in capsys.readouterr().err

    def test_run_needs_a_program(self, capsys: pytest.CaptureFixture[str]) -> None:
        for words in (["run"], ["run", "--strict"], ["run", "--"]):
            with pytest.raises(SystemExit) as ended:
                main.main(words)
            assert ended.value.code == 2 and "which program?" in capsys.readouterr().err
        for flag in ("-m", "-c"):
            with pytest.raises(SystemExit) as ended:
                main.main(["run", flag])
            assert ended.value.code == 2 and f"torchdevice: {flag} needs" in capsys.readouterr().err


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "meant"),
        [
            ("gpu", "simulated:cuda"),
            ("GPU", "simulated:cuda"),
            ("metal", "mps"),
            ("cuda:3", "simulated:cuda:3"),
            ("simulated:cuda:x", "simulated:cuda"),
            ("simulated:cuds", "simulated:cuda"),
            ("simulatedcuda", "simulated:cuda"),
            ("cpu:0", "cpu"),
            ("abacus", None),
        ],
    )
    def test_what_was_probably_meant(self, target: str, meant: str | None) -> None:
        with pytest.raises(torchdevice.errors.UnknownTargetError) as raised:
            torchdevice.portable(target).__enter__()
        assert raised.value.meant == meant and (
            f"Did you mean {meant!r}?" in str(raised.value)
        ) == bool(meant)
        if meant is not None and meant != "mps":
            with torchdevice.portable(meant):
                pass


# ---- what run runs -------------------------------------------------------------------------------


def both(folder: Path, *words: str, text: str | None = None) -> list[tuple[int, str, str]]:
    """Run words under Python, and under the command."""
    found = []
    for command in ([], ["-m", "torchdevice", "run", "--quiet", "--target", "cpu"]):
        result = subprocess.run(
            [sys.executable, *command, *words],
            cwd=folder,
            input=text,
            capture_output=True,
            text=True,
            timeout=300,
        )
        found.append((result.returncode, result.stdout, result.stderr))
    return found


SEEN = """
import sys
names = sorted(name for name in globals() if name != "__annotations__")
print(names, __name__, __package__, __spec__, __loader__, sys.argv, sys.path)
print(vars(sys.modules["__main__"]) is globals())
"""


@pytest.mark.sampled(9, of="runs of the command line")
class TestRun:
    @pytest.mark.parametrize(
        "code", [SEEN, "1 / 0", "def broken(:", "import sys; sys.exit(3)", "print('é')"]
    )
    @pytest.mark.parametrize("way", ["-c", "-"])
    def test_code_and_stdin_are_as_under_python(self, way: str, code: str, tmp_path: Path) -> None:
        words = ["-c", code] if way == "-c" else ["-"]
        plain, run = both(
            tmp_path, *words, "-c", "--target", "x", "", text=None if way == "-c" else code
        )
        assert run == plain

    def test_code_in_one_word(self, tmp_path: Path) -> None:
        plain, run = both(tmp_path, "-cimport sys; print(sys.argv)", "x")
        assert run == plain == (0, "['-c', 'x']\n", "")

    def test_code_that_begins_as_a_flag(self, tmp_path: Path) -> None:
        plain, run = both(tmp_path, "-c", "-1; print(2)")
        assert run == plain == (0, "2\n", "")

    @pytest.mark.parametrize(
        "words",
        [
            ["python", "program.py", "a", "--b"],
            ["python3", "program.py", "a", "--b"],
            [sys.executable, "program.py", "a", "--b"],
            ["python", "-u", "-W", "ignore", "-X", "utf8", "program.py", "a", "--b"],
            ["--", "program.py", "a", "--b"],
        ],
    )
    def test_python_is_this_one(self, words: list[str], tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(MOVES)
        result = run_command("run", "--quiet", *words, cwd=tmp_path)
        assert result.stdout == "2.0 True ['program.py', 'a', '--b']\n", result.stderr

    def test_flags_of_python_are_in_force(self, tmp_path: Path) -> None:
        code = (
            "import sys, torch; print(sys.flags.optimize, sys.flags.dev_mode, "
            "torch.cuda.device_count())"
        )
        words = ["--devices=3", "--target=cpu", "python", "-O", "-X", "dev", "-c", code]
        result = run_command("run", "--quiet", *words, cwd=tmp_path)
        assert result.stdout == "1 True 3\n", result.stderr
        assert run_command("run", "python", "--version").stdout.startswith("Python 3.")

    def test_python_with_modules_and_stdin(self, tmp_path: Path) -> None:
        (tmp_path / "module.py").write_text(MOVES)
        assert "2.0 True" in run_command("run", "python", "-m", "module", cwd=tmp_path).stdout
        command = [sys.executable, "-m", "torchdevice", "run", "--quiet", "python"]
        result = subprocess.run(
            command, input=MOVES, capture_output=True, text=True, cwd=tmp_path, timeout=300
        )
        assert result.stdout == "2.0 True ['-']\n", result.stderr

    def test_a_file_of_that_name_comes_first(self, tmp_path: Path) -> None:
        for name in ("python", "pytest"):
            (tmp_path / name).write_text("print('mine')")
            assert run_command("run", "--quiet", name, cwd=tmp_path).stdout == "mine\n"

    def test_pytest(self, tmp_path: Path) -> None:
        (tmp_path / "test_it.py").write_text(
            "import torch\ndef test(): assert torch.cuda.is_available()"
        )
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
        result = run_command(
            "run", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path, PATH=path
        )
        assert result.returncode == 0 and "1 passed" in result.stdout, result.stdout + result.stderr

    def test_torchrun(self, tmp_path: Path) -> None:
        program = """if True:
            import torch, torch.distributed as dist
            dist.init_process_group("nccl")
            x = torch.ones(1, device="cuda")
            dist.all_reduce(x)
            print(f"{x.item()}\\n", end="")
            dist.destroy_process_group()
        """
        (tmp_path / "program.py").write_text(program)
        path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
        words = ["run", "torchrun", "--standalone", "--nproc-per-node=2", "program.py"]
        result = run_command(*words, cwd=tmp_path, PATH=path)
        assert result.stdout.split() == ["2.0", "2.0"], result.stderr[-2000:]

    @pytest.mark.skipif(os.name == "nt", reason="Windows has no shell of this kind")
    def test_other_commands_lead_their_programs(self, tmp_path: Path) -> None:
        """They start unchanged, Python programs in them follow, and their status is returned."""
        (tmp_path / "program.py").write_text(MOVES)
        script = f"{sys.executable} program.py x && exit 7"
        words = ["--quiet", "--target", "cpu", "--report=r.json", "sh", "-c", script]
        result = run_command("run", *words, cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (
            7,
            "2.0 True ['program.py', 'x']\n",
            "",
        )
        rows = json.loads((tmp_path / "r.json").read_text())["rows"]
        assert [(row["asked"], row["count"]) for row in rows] == [("cuda:0", 1)]
        assert run_command("run", "--quiet", "sh", "-c", "kill -TERM $$").returncode == 128 + 15

    def test_what_is_neither_a_file_nor_a_command(self, tmp_path: Path) -> None:
        plain, run = both(tmp_path, "nothing-of-that-name")
        assert run == plain and run[0] == 2

    def test_what_programs_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("x.py").write_text("1")
        assert programs.named(["-mpackage.x", "a"]).module == "package.x"
        assert programs.named(["python3.11", "-OO", "x.py"]).interpreter == ("-OO",)
        assert programs.named(["python", "x.py", "-O"]) == programs.named(["x.py", "-O"])
        shell = shutil.which("sh")
        if shell is not None:
            assert programs.named(["sh", "x"]).is_command and programs.named(["sh", "x"]).argv == [
                shell,
                "x",
            ]

    @pytest.mark.parametrize(
        "words",
        [
            ["--memory", "1G", "--target", "cpu", "sh", "-c", "echo started"],
            ["--target", "simulated:cuda:2", "--devices", "3", "-c", "print('started')"],
            ["--target", "abacus", "python", "-c", "print('started')"],
        ],
    )
    def test_contradictions_are_one_line(self, words: list[str]) -> None:
        result = run_command("run", *words)
        assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert result.stderr.startswith("torchdevice: ")


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_flags_of_python_start_another_one(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces this one. On Windows, this one waits for it and returns its status."""
    started: list[list[str]] = []

    def execv(path: str, words: list[str]) -> None:
        started.append(words)
        raise SystemExit(7)  # never returns

    monkeypatch.setattr(
        run, "os", types.SimpleNamespace(name=system, execv=execv, environ=os.environ)
    )
    monkeypatch.setattr(run.subprocess, "call", lambda words: started.append(words) or 7)
    words = ["run", "--target", "cpu", "python", "-O", "program.py", "--flag"]
    try:
        status = main.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 7
    again = ["-m", "torchdevice", "run", "--target", "cpu", "program.py", "--flag"]
    assert started == [[sys.executable, "-O", *again]]


@pytest.mark.parametrize("safe", [False, True])
def test_the_first_folder_of_the_path(safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's replaces the command's. Python adds none in its safe mode."""
    expected = [
        (programs.Program(["a.py"], path="/x/a.py", source=b""), os.path.realpath("/x")),
        (programs.Program(["-c"], source=""), ""),
        (programs.Program(["-m"], module="a"), os.getcwd()),
    ]
    for program, first in expected:
        path = ["rest"] if safe else ["the command's", "rest"]
        python = types.SimpleNamespace(
            flags=types.SimpleNamespace(isolated=0, safe_path=safe), path=path
        )
        monkeypatch.setattr(run, "sys", python)
        run._set_first_path(program)
        assert python.path == (["rest"] if safe else [first, "rest"])
    run._set_first_path(programs.Program(["folder"], path="/x/folder"))  # which is run itself
    assert python.path[0] == "/x/folder"


def test_a_command_decides_what_an_interrupt_does(monkeypatch: pytest.MonkeyPatch) -> None:
    events = iter([KeyboardInterrupt(), KeyboardInterrupt(), -15])

    def wait() -> int:
        event = next(events)
        if isinstance(event, KeyboardInterrupt):
            raise event
        return event

    monkeypatch.setattr(run.subprocess, "Popen", lambda words: types.SimpleNamespace(wait=wait))
    monkeypatch.setattr(run._options, "set_environment", lambda variables: None)
    monkeypatch.setattr(run, "_begin_run", lambda options, scope: None)
    monkeypatch.setattr(programs.shutil, "which", lambda name, path=None: __file__)
    assert main.main(["run", "--target", "cpu", "a-command"]) == 128 + 15
    assert list(events) == []


def test_the_report_of_ranks_is_titled_by_their_program(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(
        run, "show_report", lambda file, report: shown.append(str(report).splitlines()[0])
    )
    with torchdevice.portable("cpu") as scope:
        torch.ones(1, device="cuda")
    options = argparse.Namespace(
        ranks=2, rest=["folder/train_ddp.py", "--epochs", "3"], plan=None, report=True
    )
    run._show(options, None, scope.report())
    assert shown == ["torchdevice: report of train_ddp.py --epochs 3, run on cpu in place of cuda"]


@pytest.mark.parametrize("command", ["run", "plan"])
def test_the_help_begins_with_the_flags_that_most_people_need(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    text = capsys.readouterr().out
    headings = re.findall(r"^(\w.*):$", text.partition("\n\n")[2], re.MULTILINE)
    common = re.findall(
        r"^  (--[\w-]+)", text.partition("common options:")[2].partition(":\n  --")[0], re.MULTILINE
    )
    assert (headings[0], headings[-2:]) == ("common options", ["for experts", "examples"])
    assert [flag for flag in common if flag != "--ranks"] == [
        "--target",
        "--devices",
        "--memory",
        "--report",
        "--quiet",
    ]


def test_no_flag_of_the_help_is_below_a_heading_that_does_not_exist() -> None:
    for texts in (plan._TEXTS, run._TEXTS):
        listed = [argument for arguments in texts.headings.values() for argument in arguments]
        assert {*listed} <= texts.arguments.keys() and len({*listed}) == len(listed)


# ---- doctor --------------------------------------------------------------------------------------


def findings(**environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    result = run_command("doctor", "--json", **environment)
    data = json.loads(result.stdout)
    subjects: dict[str, list[dict[str, str]]] = {}
    for finding in data["findings"]:
        subjects.setdefault(finding["subject"], []).append(finding)
    assert data["ok"] == (result.returncode == 0)
    return result.returncode, subjects


@pytest.mark.sampled(4, of="commands")
class TestDoctor:
    def test_it_says_what_would_stand_in_and_why(self) -> None:
        result = run_command("doctor", "--target", "cpu")
        assert "cpu would stand in: " in result.stdout and "(asked for)" in result.stdout
        for subject in (
            "torch",
            "memory",
            "bfloat16",
            "float16",
            "compiler",
            "patchers",
            "packages",
            "variables",
        ):
            assert f" {subject} " in result.stdout
        assert result.stderr == ""
        # The width of a terminal decides where lines break.
        words = run_command("doctor", TORCHDEVICE_TARGET="cpu").stdout.split()
        assert "(set by TORCHDEVICE_TARGET)" in " ".join(words)

    def test_it_lists_the_targets(self) -> None:
        data = json.loads(run_command("doctor", "--json", TORCHDEVICE="1").stdout)
        assert {"cpu", "cuda", "mps", "simulated:mps", "simulated:t4"} <= set(data["targets"])
        assert [Target.named(each).name for each in data["targets"]] == data["targets"]
        (said,) = [each["said"] for each in data["findings"] if each["subject"] == "targets"]
        devices, models = (
            said.removeprefix("--target takes ").partition(" (")[0].split(", or one of ")
        )
        named = {
            *devices.split(", "),
            *(f"simulated:{each}" for each in models.split(" such as ")[1].split(", ")),
        }
        assert named < {*data["targets"]} and len(said) < 200, "a person reads a few of the models"

    def test_data_and_variables(self) -> None:
        code, subjects = findings(
            TORCHDEVICE_DEVICES="many", TORCHDEVICE_TRAGET="cpu", TORCHDEVICE_LOG="loud"
        )
        said = [(each["status"], each["said"], each["remedy"]) for each in subjects["variables"]]
        assert code == 1
        assert said[0] == (
            "warning",
            "TORCHDEVICE_TRAGET is not a variable of torchdevice",
            "did you mean TORCHDEVICE_TARGET?",
        )
        assert [status for status, *_ in said] == ["warning", "problem", "problem", "ok"]
        assert "TORCHDEVICE_DEVICES='many'" in said[1][1] and "TORCHDEVICE_LOG='loud'" in said[2][1]

    def test_a_target_that_cannot_be_had(self) -> None:
        result = run_command("doctor", "--target", "gpu")
        assert (
            result.returncode == 1
            and "problem  device" in result.stdout
            and "Did you mean" in result.stdout
        )

    def test_an_activated_process_is_looked_at_without_its_scope(self) -> None:
        assert (
            "cpu would stand in"
            in run_command("doctor", TORCHDEVICE="1", TORCHDEVICE_TARGET="cpu").stdout
        )

    def test_it_takes_about_as_long_as_importing_torch(self) -> None:
        """By processor time, which is independent of other work; examinations are a small part."""
        program = """if True:
            import time
            start = time.process_time()
            import torch
            imported = time.process_time()
            from torchdevice.tools.cli import diagnostics
            diagnostics.examine(None)
            print((time.process_time() - imported) / (imported - start))
        """
        ratios = [float(run_fresh_python("-c", program).stdout) for _ in range(3)]
        assert min(ratios) < 0.6, ratios


@pytest.mark.sampled(8)
class TestExaminations:
    """What ``torchdevice doctor`` finds on other machines than this one."""

    @pytest.mark.parametrize(
        ("package", "files", "said"),
        [
            (
                "torchada",
                {"torchada/__init__.py": ""},
                ("patchers", "warning", "torchada replaces parts of torch"),
            ),
            (
                "torchvision",
                {
                    "torchvision/__init__.py": "1 / 0",
                    "torchvision/version.py": "cuda: Optional[str] = '99.9'\n",
                },
                ("packages", "problem", "torchvision is for CUDA 99.9, and torch "),
            ),
            (
                "torchaudio",
                {
                    "torchaudio/__init__.py": "1 / 0",
                    "torchaudio/version.py": "__version__ = '2.13.0+cu999'\n",
                },
                ("packages", "problem", "torchaudio is for CUDA 99.9, and torch "),
            ),
            (
                "torchdevice",
                {
                    "torchdevice-1.0.dist-info/METADATA": (
                        "Metadata-Version: 2.1\nName: torchdevice\nVersion: 1.0\n"
                    )
                },
                (
                    "packages",
                    "problem",
                    "another project of that name, torchdevice 1.0, is installed in its place",
                ),
            ),
        ],
    )
    def test_packages_that_are_in_the_way(
        self,
        package: str,
        files: dict[str, str],
        said: tuple[str, str, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        found = [*diagnostics._patchers(), *diagnostics._packages()]
        assert any(each[:2] == said[:2] and each.said.startswith(said[2]) for each in found), found
        assert all(each.remedy for each in found if each.status != "ok")

    def test_packages_that_are_not_in_the_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One of torch's build, one of unknown build, and modules that code has put there."""
        monkeypatch.setattr(torch.version, "cuda", "99.9")
        for name, text in {
            "torchvision": "__version__ = '1+cu999'\ncuda = '99.9'\n",
            "torchaudio": None,
        }.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("1 / 0")
            if text is not None:
                (tmp_path / name / "version.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "torchada", types.ModuleType("torchada"))
        assert {each.status for each in [*diagnostics._patchers(), *diagnostics._packages()]} == {
            "ok"
        }

    @pytest.mark.parametrize(
        ("version", "cuda", "hip", "status", "said"),
        [
            ("2.9.1+cpu", None, None, "problem", "torch 2.9.1+cpu is too old"),
            (
                "2.13.0+cu130",
                "13.0",
                None,
                "ok",
                "a build for CUDA 13.0, without a GPU, which it does not need",
            ),
            ("2.13.0+rocm7", None, "7.0", "ok", "a build for ROCm 7.0"),
            ("2.13.0+cpu", None, None, "ok", "a build without accelerators"),
        ],
    )
    def test_builds(
        self,
        version: str,
        cuda: str | None,
        hip: str | None,
        status: str,
        said: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        for name, value in {"cuda": cuda, "hip": hip, "xpu": None}.items():
            monkeypatch.setattr(torch.version, name, value, raising=False)
        (found,) = diagnostics._build()
        assert (found.status, found.said) == (status, said)

    def test_the_device_and_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TORCHDEVICE_TARGET", raising=False)
        (found,) = diagnostics._device(None)
        assert (
            found.status == "ok"
            and " would stand in: " in found.said
            and "(the best there is" in found.said
        )
        (found,) = diagnostics._device("t4")
        assert found.said.startswith("simulated:t4 would stand in: Tesla T4")
        (found,) = diagnostics._device("simulated:cuda")
        assert (
            found.said.startswith("simulated:cuda")
            and found.said.endswith("(asked for)")
            and not found.remedy
        )
        monkeypatch.setenv("TORCHDEVICE_TARGET", "cpu")
        (found,) = diagnostics._device(None)
        assert (
            found.said.endswith("(set by TORCHDEVICE_TARGET)") and "simulated:cuda" in found.remedy
        )
        (found,) = diagnostics._device("gpu")
        assert found.status == "problem" and "Did you mean" in found.said

    def test_torch_does_not_find_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
        assert diagnostics._activation()[0].status == "ok"
        monkeypatch.setattr(diagnostics.importlib.metadata, "entry_points", lambda **group: [])
        (found,) = diagnostics._activation()
        assert found.status == "problem" and "install the package with pip" in found.remedy

    def test_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("TORCHDEVICE")]:
            monkeypatch.delenv(name)
        for name in diagnostics._OTHERS:
            monkeypatch.delenv(name, raising=False)
        assert [each.said for each in diagnostics._variables()] == ["none is set"]
        monkeypatch.setenv(f"TORCHDEVICE_{'X' * 60}", "1")
        monkeypatch.setenv("TORCHDEVICE_DEVICES", "2")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        unknown, known = diagnostics._variables()
        assert (unknown.status, unknown.remedy) == (
            "warning",
            "torchdevice run --help lists the options",
        )
        assert known.said == "in force: TORCHDEVICE_DEVICES=2, CUDA_VISIBLE_DEVICES=0"
        monkeypatch.setenv("TORCHDEVICE_DEVICES", "many")
        assert [each.status for each in diagnostics._variables()] == ["warning", "problem", "ok"]

    @pytest.mark.usefixtures("no_collections")
    def test_what_is_lacking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
        (compiler,) = diagnostics._compiler()
        assert compiler.status == "warning" and "g++" in compiler.remedy
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert diagnostics._compiler()[0].said.startswith("there is no no-such-compiler, so")
        little = types.SimpleNamespace(available=1 << 30, total=2 << 30)
        monkeypatch.setattr(diagnostics.psutil, "virtual_memory", lambda: little)
        assert diagnostics._memory()[0].status == "warning"
        monkeypatch.setattr(
            diagnostics, "_multiplication", lambda dtype: 1.0 if dtype is None else 210.0
        )
        assert [each.status for each in diagnostics._speed()] == ["warning", "warning"]
        assert diagnostics._speed()[1].said.endswith(
            "autocast to float16 makes a matrix product 210 times slower"
        )
        monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
        assert diagnostics._activation()[0].status == "warning"

    def test_products_are_measured_in_one_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Several threads wait for each other on a busy machine, in some dtypes only."""
        seen: list[int] = []

        def repeat(statement: Callable[[], Any], number: int, repeat: int) -> list[float]:
            statement()
            seen.append(torch.get_num_threads())
            return [0.0, 2.0, 1.0, 3.0]  # the first one warms up, and does not count

        monkeypatch.setattr(diagnostics.timeit, "repeat", repeat)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            assert diagnostics._multiplication(None) == 1.0
            assert seen == [1] and torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)

    def test_times_are_those_of_a_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Autocast to float16 computes in bfloat16 on a CPU target that has instructions for it."""
        seen = []

        def multiplied(dtype: torch.dtype | None) -> float:
            with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
                seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
            return 1.0

        monkeypatch.setattr(diagnostics, "_multiplication", multiplied)
        monkeypatch.setenv("TORCHDEVICE_AUTOCAST", "bfloat16")
        assert all("1.0 times" in each.said for each in diagnostics._speed())
        assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]

    @pytest.mark.parametrize("width", [20, 80, 200])
    def test_no_word_is_cut_in_two(
        self, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Two runs may measure different things.
        monkeypatch.setattr(diagnostics, "_multiplication", lambda dtype: 1.0)
        shown = []
        for columns in (str(width), "500"):
            monkeypatch.setenv("COLUMNS", columns)
            main.main(["doctor", "--target", "mps"])
            shown.append(capsys.readouterr().out)
        narrow, whole = shown
        still = {"GiB", "times"}  # figures of the moment stand beside these
        assert [word for word in whole.split() if word.isalpha() and word not in still] == [
            word for word in narrow.split() if word.isalpha() and word not in still
        ]
        assert all(len(line) <= max(width, 100) for line in narrow.splitlines())


# ---- the other commands --------------------------------------------------------------------------


@pytest.mark.sampled(8, of="long programs")
def test_report(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            f"import torch\ntorch.ones(1, device='cuda')  # {name}"
        )
        run_command(
            "run", "--quiet", "--target", "cpu", f"--report={name}.json", f"{name}.py", cwd=tmp_path
        )
    shown = run_command("report", "one.json", "two.json", cwd=tmp_path)
    assert (
        "# one" in shown.stdout
        and "# two" in shown.stdout
        and "ran elsewhere: 2 calls at 2 lines" in shown.stdout
    )
    assert run_command("report", "one.json", "--html", "one.html", cwd=tmp_path).stdout == ""
    assert (tmp_path / "one.html").read_text().startswith("<!doctype html>")
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xe9")
    (tmp_path / "list.json").write_text("[1]")
    refusals = dict.fromkeys(
        ("other.json", "deep.json", "bytes.json", "list.json"),
        "is not a report of torchdevice. Name a file that",
    )
    refusals["none.json"] = "No such file or directory: 'none.json'"
    for name, said in refusals.items():
        refused = run_command("report", name, cwd=tmp_path)
        assert (
            refused.returncode == 2 and said in refused.stderr and refused.stderr.count("\n") == 1
        )
        assert refused.stderr.startswith("torchdevice: ")


@pytest.mark.parametrize("command", ["check --rules", "doctor"])
def test_a_reader_that_has_gone_is_no_error(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [sys.executable, "-m", "torchdevice", *command.split()]
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
