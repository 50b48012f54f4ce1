"""The magic commands, in a session of IPython, and enable() in cells that run again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import run_python

import torchdevice

pytest.importorskip("IPython", reason="install with the [test] extra")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A session with the commands."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.delenv("TORCHDEVICE_ENGINE", raising=False)
    # IPython warns where the active environment is not that of the interpreter.
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    shell = InteractiveShell.instance()
    shell.run_cell("%load_ext torchdevice").raise_error()
    yield shell
    shell.run_cell("%unload_ext torchdevice").raise_error()
    InteractiveShell.clear_instance()


def run(session: Any, cell: str) -> Any:
    """Run a cell, and return the value of its last line."""
    result = session.run_cell(cell)
    result.raise_error()
    return result.result


_AT_START = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells}:
    shell.run_cell(cell).raise_error()
import torchdevice
print(torchdevice.current())
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "first", ["import torch", "import torchdevice", "from torchdevice import errors", ""]
)
@pytest.mark.parametrize(
    ("then", "scope"),
    [((), "<torchdevice.Scope target='simulated:cuda:1'>"), (("%torchdevice off",), "None")],
)
def test_a_session_in_the_scope_of_the_variable(
    first: str, then: tuple[str, ...], scope: str
) -> None:
    program = _AT_START.format(cells=[first, "%load_ext torchdevice", *then])
    ran = run_python("-c", program, TORCHDEVICE="1", TORCHDEVICE_TARGET="simulated:cuda")
    assert ran.stdout.splitlines()[-1] == scope and "could not be activated" not in ran.stderr


class TestForTheSession:
    @pytest.mark.usefixtures("no_collections")
    def test_it_lasts_until_off(self, session: Any) -> None:
        scope = run(session, "%torchdevice simulated:cuda:2 --memory 1GiB")
        assert scope is torchdevice.current() and scope.options.memory == 1 << 30
        assert run(session, "import torch; torch.cuda.device_count()") == 2
        assert run(session, "torch.ones(1).cuda().is_cuda")
        run(session, "%torchdevice off")
        assert torchdevice.current() is None and not torch.cuda.is_available()
        run(session, "%torchdevice off")

    def test_a_cell_that_runs_again_changes_nothing(self, session: Any) -> None:
        first = run(session, "%torchdevice cpu --strict")
        assert run(session, "%torchdevice cpu --strict") is first
        run(session, "%torchdevice off")
        assert torchdevice.current() is None

    def test_the_last_one_counts(self, session: Any) -> None:
        run(session, "%torchdevice cpu")
        run(session, "%torchdevice --target simulated:cuda")
        assert run(
            session,
            "torchdevice_target = __import__('torchdevice').current().runtime.target; "
            "torchdevice_target",
        )
        assert torchdevice.current().runtime.target == "simulated:cuda:1"
        run(session, "%torchdevice off")
        assert torchdevice.current() is None

    def test_processes_follow(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        program = "import torch; print(torch.ones(1).cuda().item())"
        run(session, "%torchdevice cpu")
        said = run(
            session,
            f'import subprocess, sys; subprocess.check_output([sys.executable, "-c", "{program}"])',
        )
        assert said == b"1.0\n"

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("vax", "'vax' is not a target"),
            ("cpu --memory much", "memory='much' is not a size"),
            ("cpu --bogus", "unrecognized arguments: --bogus. %torchdevice --help lists"),
            ("cpu 'x", "No closing quotation"),
            ("cpu --target mps", "'cpu' and 'mps' are both given"),
        ],
    )
    def test_a_wrong_line_is_one_line_of_error_and_changes_nothing(
        self, line: str, message: str, session: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scope = run(session, "%torchdevice cpu")
        capsys.readouterr()
        with pytest.raises(Exception, match=message):
            run(session, f"%torchdevice {line}")
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert torchdevice.current() is scope

    def test_on_is_the_best_device(self, session: Any) -> None:
        assert run(session, "%torchdevice on").options.target is None
        run(session, "%torchdevice off")

    @pytest.mark.usefixtures("no_collections")
    @pytest.mark.parametrize(
        "again",
        ["%torchdevice cpu", "%torchdevice on", "torchdevice.enable('cpu', propagate=True)"],
    )
    def test_it_keeps_no_option_of_the_one_before(self, session: Any, again: str) -> None:
        run(session, "%torchdevice simulated:cuda:2 --memory 1GiB --strict --float64 error")
        run(session, again)
        options = torchdevice.current().options
        assert (options.memory, options.strict, options.float64) == (None, False, None)
        assert torchdevice.current().runtime.target == "cpu"
        run(session, "%torchdevice off")

    def test_variables_of_the_user_stay(
        self, session: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHDEVICE_STRICT", "1")
        monkeypatch.setenv("TORCHDEVICE_TARGET", "simulated:cuda")
        for line in ("cpu --float64 error", "on", "cpu --float64 error"):
            run(session, f"%torchdevice {line}")
            assert torchdevice.current().options.strict
            assert torchdevice.current().runtime.target == (
                "simulated:cuda:1" if line == "on" else "cpu"
            )
        run(session, "%torchdevice off")
        assert os.environ["TORCHDEVICE_TARGET"] == "simulated:cuda"

    def test_what_it_answers_and_its_status(
        self, session: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(session, "%torchdevice status")
        assert (
            capsys.readouterr().out
            == "torchdevice: no scope is active. %torchdevice on begins one.\n"
        )
        said = (
            "torchdevice: CUDA is simulated:cuda:2 in this session, with 2 devices. `%torchdevice "
            "off` ends it."
        )
        run(session, "%torchdevice simulated:cuda:2 --memory 1GiB")
        assert said in capsys.readouterr().out
        run(session, "%torchdevice status")
        first, *options = capsys.readouterr().out.splitlines()
        assert first == said and {"  identity='program'", "  memory='1GiB'"} <= {*options}
        run(session, "%torchdevice t4")
        assert "CUDA is simulated:t4 in this session, with 1 device." in capsys.readouterr().out
        run(session, "%torchdevice off")

    def test_after_a_device_assert(self, session: Any, capsys: pytest.CaptureFixture[str]) -> None:
        run(session, "%torchdevice simulated:cuda")
        lose = (
            "import torch; torch.ones(2, device='cuda')[torch.tensor([5], device='cuda')]; "
            "torch.cuda.synchronize()"
        )
        assert session.run_cell(lose).error_in_exec is not None
        assert "Run `%torchdevice` again, and create your tensors again." in capsys.readouterr().out
        run(session, "%torchdevice status")
        assert "The device is lost, as on a GPU." in capsys.readouterr().out
        run(session, "%torchdevice simulated:cuda")
        run(session, "%torchdevice status")
        assert "lost" not in capsys.readouterr().out
        assert run(session, "torch.ones(2, device='cuda').sum().item()") == 2
        run(session, "%torchdevice off")

    def test_an_interrupted_cell_shows_the_programs_lines(
        self, session: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        run(session, "%torchdevice cpu")
        assert session.run_cell(
            "import torch, signal; torch.ones(2).apply_(lambda x: signal.raise_signal(2))"
        )
        assert "KeyboardInterrupt" in capsys.readouterr().out
        run(session, "%torchdevice off")
        signal.signal(signal.SIGINT, before)

    def test_help(self, session: Any, capsys: pytest.CaptureFixture[str]) -> None:
        run(session, "%torchdevice --help")
        said = capsys.readouterr().out
        assert (
            said.startswith("usage: %torchdevice TARGET")
            and "%%torchdevice TARGET" in said
            and "--memory" in said
            and torchdevice.current() is None
        )

    def test_the_package_has_its_name(self, session: Any) -> None:
        assert run(session, "torchdevice") is torchdevice

    @pytest.mark.parametrize(
        "cell", ["%%torchdevice simulated:cuda\n{}", "%torchdevice simulated:cuda\n{}"]
    )
    def test_an_error_has_the_frames_of_the_cell(
        self, session: Any, cell: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        program = "import torch\ndef f():\n    return torch.ones(2).cuda() + torch.ones(2)\nf()"
        with pytest.raises(RuntimeError, match="same device"):
            run(session, cell.format(program))
        shown = capsys.readouterr().out
        shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert (
            "in f()" in shown
            and "same device" in shown
            and os.path.dirname(torchdevice.__file__) not in shown
        )
        run(session, "%torchdevice off")
        assert not session.custom_exceptions


class TestForACell:
    def test_only_the_cell_is_in_the_scope(self, session: Any) -> None:
        cell = "%%torchdevice simulated:cuda\nimport torch\nx = torch.ones(2).cuda()\nx.is_cuda\n"
        assert run(session, cell) is True
        assert torchdevice.current() is None and tuple(session.user_ns["x"].shape) == (2,)

    def test_an_error_leaves_it(self, session: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            run(session, "%%torchdevice cpu\n1 / 0")
        assert torchdevice.current() is None

    def test_statements_have_no_value(self, session: Any) -> None:
        assert run(session, "%%torchdevice cpu\nx = 1\n") is None and session.user_ns["x"] == 1


class TestEnable:
    def test_once_for_a_cell_that_runs_again(self, session: Any) -> None:
        cell = "import torchdevice\nscope = torchdevice.enable('cpu')"
        run(session, cell)
        first = torchdevice.current()
        run(session, cell)
        assert torchdevice.current() is first
        run(session, "torchdevice.disable()")
        assert torchdevice.current() is None

    def test_the_last_call_counts(self, session: Any) -> None:
        run(
            session,
            "import torchdevice\ntorchdevice.enable('cpu')\ntorchdevice.enable('cpu', strict=True)",
        )
        assert torchdevice.current().options.strict
        run(session, "torchdevice.disable()")
        assert torchdevice.current() is None

    def test_inside_a_block_it_is_a_scope_of_its_own(self, session: Any) -> None:
        with torchdevice.portable("cpu") as outer:
            run(session, "import torchdevice\ntorchdevice.enable('cpu')")
            run(session, "torchdevice.disable()")
            assert torchdevice.current() is outer

    def test_a_cell_finds_what_an_interrupt_of_the_last_has_lost(self, session: Any) -> None:
        run(session, "import torch, torchdevice\ntorchdevice.enable('cpu', engine='mode')")
        run(session, "getattr(torch._C, '_pop_torch_function_stack')() and None")
        assert run(session, "torch.ones(2, device='cuda').sum().item()") == 2
        run(session, "torchdevice.disable()")
        assert not session.events.callbacks["pre_run_cell"]
