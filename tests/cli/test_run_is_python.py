"""``torchdevice run`` is ``python``: programs behave alike, from first line to shutdown."""

from __future__ import annotations

import os
import py_compile
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import TESTS
from processes import run_fresh_python

PROBE = """
    import builtins, gc, inspect, os, signal, sys, threading

    try:
        import beside
    except ImportError:
        beside = None

    def function(argument: int): pass

    seen = {
        "names": list(globals()),
        "values": [__name__, __package__, __doc__, __file__, globals().get("__cached__")],
        "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent, __spec__.cached, __spec__.has_location],
        "loader": [type(__loader__).__name__, getattr(__loader__, "name", None), getattr(__loader__, "path", None)],
        "builtins": __builtins__ is builtins,
        "main": vars(sys.modules["__main__"]) is globals(),
        "future": function.__annotations__["argument"] is int,
        "file": function.__code__.co_filename,
        "source": inspect.getsource(function),
        "beside": beside and [beside.VALUE, beside.__file__],
        "argv": sys.argv,
        "path": sys.path,
        "flags": [repr(sys.flags), sys.warnoptions, __debug__],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "process": [os.getcwd(), repr(signal.getsignal(signal.SIGINT)), threading.current_thread().name],
        "limits": [sys.getrecursionlimit(), gc.get_threshold()],
    }
    for name, value in seen.items():
        print(name, value)
"""

STARTS = {
    "script": ["program.py"],
    "dot": ["./program.py"],
    "up": ["package/../program.py"],
    "elsewhere": ["package/inner.py"],
    "link": ["links/link.py"],
    "no_suffix": ["program"],
    "compiled": ["program.pyc"],
    "module": ["-m", "program"],
    "package": ["-m", "package"],
    "inner_module": ["-m", "package.inner"],
    "folder": ["folder"],
    "archive": ["archive.zip"],
    "archive_without_suffix": ["archive"],
}
"""Name of a way to start a program -> the arguments after ``python`` or ``torchdevice run``."""

needs_safe_path = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has -P since 3.11")

# Each test starts processes, so the default run takes a sample.
pytestmark = [pytest.mark.sampled(6, of="what a program sees"), pytest.mark.one_engine]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make and return a folder with the probe as script, module, package, archive and others."""
    root = tmp_path_factory.mktemp("programs")
    for folder in ("", "package", "folder", "links"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "beside.py").write_text(f"VALUE = {folder!r}")
    probe = textwrap.dedent(PROBE)
    for name in (
        "program.py",
        "program",
        "package/__main__.py",
        "package/inner.py",
        "folder/__main__.py",
    ):
        (root / name).write_text(probe)
    (root / "package" / "__init__.py").write_text("import sys; print(sys.argv[0])")
    (root / "links" / "link.py").symlink_to("../package/inner.py")
    py_compile.compile(str(root / "program.py"), str(root / "program.pyc"))
    for name in ("archive.zip", "archive"):
        with zipfile.ZipFile(root / name, "w") as archive:
            archive.writestr("__main__.py", probe)
            archive.writestr("beside.py", "VALUE = 'archive'")
    return root


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Let programs receive SIGINT, ignored by children if a shell tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def outcomes(
    folder: Path,
    *program: str,
    flags: tuple[str, ...] = (),
    launcher: tuple[str, ...] = (str(TESTS / "support" / "console_script.py"),),
    **env: str,
) -> Iterator[tuple[int, str, str]]:
    """Run a program in Python and in the command. Yield status, stdout and stderr of each."""
    environment = {"TORCHDEVICE_LOG": "ERROR", "PYTHONDONTWRITEBYTECODE": "1", **env}
    for command in ([], [*launcher, "run", "--target", "cpu"]):
        result = run_fresh_python(*flags, *command, *program, cwd=folder, **environment)
        yield result.returncode, result.stdout, re.sub("0x[0-9a-f]+", "ADDRESS", result.stderr)


class TestStart:
    @pytest.mark.parametrize("start", STARTS)
    def test_what_the_program_sees(self, start: str, programs: Path) -> None:
        plain, run = outcomes(
            programs, *STARTS[start], "--epochs", "3", "--target", "-m", "--", "", "a b"
        )
        assert plain[0] == 0 and "\nbuiltins True\nmain True\nfuture True\n" in plain[1], plain[2]
        assert "beside None" not in plain[1]
        assert run == plain

    @pytest.mark.parametrize("start", ["script", "module", "folder"])
    def test_by_the_module(self, start: str, programs: Path) -> None:
        plain, run = outcomes(programs, *STARTS[start], launcher=("-m", "torchdevice"))
        assert run == plain and plain[0] == 0

    @pytest.mark.parametrize("start", ["script", "module", "folder"])
    @pytest.mark.parametrize(
        "flags", [("-I",), ("-O", "-Werror"), pytest.param(("-P",), marks=needs_safe_path)]
    )
    def test_flags(self, flags: tuple[str, ...], start: str, programs: Path) -> None:
        plain, run = outcomes(programs, *STARTS[start], flags=flags)
        assert run == plain and (plain[0] == 0 or flags != ("-O", "-Werror"))

    @needs_safe_path
    def test_safe_path_by_the_environment(self, programs: Path) -> None:
        plain, run = outcomes(programs, "program.py", PYTHONSAFEPATH="1")
        assert run == plain and "\nbeside None\n" in plain[1]

    @pytest.mark.parametrize(
        "arguments", [["nowhere.py"], ["-m", "nowhere"], ["-m", "package.nowhere"], ["links"]]
    )
    def test_nothing_to_run(self, arguments: list[str], programs: Path) -> None:
        plain, run = outcomes(programs, *arguments)
        assert run == plain and plain[0] in (1, 2) and plain[2].count("\n") == 1

    def test_a_module_of_the_program_hides_another_from_torch(self, tmp_path: Path) -> None:
        """The program's folder is first in ``sys.path`` before torch is imported."""
        (tmp_path / "queue.py").write_text(
            "from _queue import Empty, SimpleQueue\nLifoQueue = Queue = SimpleQueue\n"
        )
        (tmp_path / "program.py").write_text("import torch, queue; print(queue.__file__)")
        plain, run = outcomes(tmp_path, "program.py")
        assert run == plain == (0, f"{tmp_path / 'queue.py'}\n", plain[2])


ENDINGS = {
    "nothing": "pass",
    "exit": "raise SystemExit",
    "exit_zero": "import sys; sys.exit(0)",
    "exit_number": "import sys; sys.exit(7)",
    "exit_none": "import sys; sys.exit(None)",
    "exit_large": "raise SystemExit(261)",
    "exit_negative": "raise SystemExit(-3)",
    "exit_true": "raise SystemExit(True)",
    "exit_text": "import sys; sys.exit('words')",
    "exit_tuple": "raise SystemExit(1, 2)",
    "exit_at_once": "import os; os._exit(9)",
    "exit_of_a_replaced_function": "import sys; sys.exit = None",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "exception": "def inner():\n    raise KeyError('boom')\ninner()",
    "exception_of_a_library": "import json\njson.loads('{')",
    "exceptions_in_a_chain": (
        "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise KeyError('boom') from error"
    ),
    "value_error": "raise ValueError('not one of this command')",
    "base_exception": "class Ended(BaseException): pass\nraise Ended('boom')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt_by_signal": (
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nwhile True: pass"
    ),
    "syntax_error_at_run_time": "exec('def broken(:')",
    "own_hook": (
        "import sys\nsys.excepthook = lambda *args: print(args[0], args[2].tb_lineno, __file__)\n1 "
        "/ 0"
    ),
    "own_hook_exits": "import sys\nsys.excepthook = lambda *args: sys.exit(5)\n1 / 0",
    "a_hook_as_before": "import atexit, sys\natexit.register(lambda: print(sys.excepthook))\n1 / 0",
    "last_traceback": """
import atexit, sys, traceback
def show():
    print(sys.last_type, sys.last_value, traceback.format_tb(sys.last_traceback))
    print(sys.last_value.__traceback__ is sys.last_traceback)
atexit.register(show)
1 / 0""",
    "exit_handlers": """
import atexit
atexit.register(print, 'first')
@atexit.register
def second():
    print(1 / 0)
class Last:
    def __del__(self): print('torn down')
kept = Last()""",
    "stdout_is_gone": "import os, sys\nprint('words'); os.close(1)",
    "stderr_is_gone": "import os\nos.close(2)\n1 / 0",
    "exit_empty_text": "raise SystemExit('')",
    "exit_float": "raise SystemExit(1.5)",
    "exit_beyond_c": "raise SystemExit(2**70)",
    "exit_not_encodable": "raise SystemExit('\\udc80')",
    "exit_without_text": "class C:\n    def __str__(self): 1 / 0\nraise SystemExit(C())",
    "exit_subclass": "class S(SystemExit): code = property(lambda self: 6)\nraise S(4)",
    "exit_in_finally": "try:\n    1 / 0\nfinally:\n    raise SystemExit(11)",
    "exit_builtin": "quit('bye')",
    "signal_kills": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "signal_aborts": "import os; os.abort()",
    "signal_of_a_pipe": "import os, signal; os.kill(os.getpid(), signal.SIGPIPE); print('alive')",
    "signal_handler_raises": """
import os, signal
def handle(*_): raise ValueError('from the handler')
signal.signal(signal.SIGTERM, handle)
os.kill(os.getpid(), signal.SIGTERM)
while True: pass""",
    "no_frames": (
        "raise ValueError(1).with_traceback(None) from SyntaxError('made', ('file.py', 3, 4, "
        "'text'))"
    ),
    "syntax_error_of_an_import": "open('broken.py', 'w').write('def f(:')\nimport broken",
    "exceptions_in_a_group": "raise ExceptionGroup('some', [ValueError(1), TypeError(2)])",
    "exceptions_in_a_circle": (
        "a, b = ValueError(1), ValueError(2)\na.__cause__, b.__cause__ = b, a\nraise a"
    ),
    "exception_without_text": "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
    "exception_with_a_suggestion": "variable = 1\nvariabel",
    "thread_raises": (
        "import threading\ndef f(): 1 / 0\nt = threading.Thread(target=f); t.start(); t.join()"
    ),
    "thread_exits": (
        "import sys, threading\nt = threading.Thread(target=lambda: sys.exit(3)); t.start(); "
        "t.join()"
    ),
    "thread_raises_after_the_end": """
import threading, time
def f():
    time.sleep(0.3); raise ValueError('of the thread')
threading.Thread(target=f).start()
raise KeyError('of the program')""",
    "thread_ends_the_process": """
import os, threading
threading.Thread(target=os._exit, args=[5]).start()
while True: pass""",
    "pool_raises": """
from concurrent.futures import ThreadPoolExecutor
ThreadPoolExecutor(1).submit(lambda: 1 / 0).result()""",
    "child_exits": (
        "import os\nchild = os.fork()\nif not child: raise SystemExit(3)\nprint(os.waitpid(child, "
        "0)[1])"
    ),
    "child_raises": (
        "import os\nchild = os.fork()\nif not child: 1 / 0\nprint(os.waitpid(child, 0)[1])"
    ),
    "exit_handler_raises": (
        "import atexit\n@atexit.register\ndef f(): 1 / 0\nraise ValueError('first')"
    ),
    "exit_handler_exits": "import atexit, sys\n@atexit.register\ndef f(): sys.exit('bye')",
    "exit_handler_interrupted": "import atexit, signal\natexit.register(signal.raise_signal, signal.SIGINT)",
    "exit_handler_ends_at_once": "import atexit, os\n@atexit.register\ndef f(): os._exit(12)",
    "globals_at_the_end": "import atexit\natexit.register(lambda: print(sorted(globals())))",
    "globals_after_an_error": (
        "import atexit\natexit.register(lambda: print(sorted(globals())))\n1 / 0"
    ),
    "globals_after_an_exit": (
        "import atexit\natexit.register(lambda: print(sorted(globals())))\nraise SystemExit(3)"
    ),
    "destructor_raises": "class A:\n    def __del__(self): 1 / 0\nA()\nkept = A()",
    "hook_raises": (
        "import sys\ndef hook(*_): raise KeyError('of the hook')\nsys.excepthook = hook\n1 / 0"
    ),
    "hook_is_none": "import sys\nsys.excepthook = None\n1 / 0",
    "hook_and_no_frames": "import sys\nsys.excepthook = lambda *seen: print(seen[:2])\nexec('(')",
    "modules_are_gone": "import sys\nsys.modules.clear()\n1 / 0",
    "main_is_gone": "import sys\ndel sys.modules['__main__']\n1 / 0",
    "warnings": "x = 1\nif x is 1: pass\nassert (x, 'always')\n",
    "coroutine_never_awaited": "async def f(): pass\nf()",
}

NOT_COMPILED = {
    "syntax": b"def broken(:\n",
    "unclosed": b"x = (1,\n",
    "unclosed_text": b"x = '''abc\n",
    "return_outside": b"print(1)\nreturn 3\n",
    "future": b"from __future__ import nope\n",
    "same_argument": b"def f(a, a): pass\n",
    "indentation": b"if True:\nprint(1)\n",
    "indented_less": b"if True:\n        x = 1\n    y = 2\n",
    "tabs": b"if True:\n        x = 1\n\ty = 2\n",
    "not_utf8": b"x = 1\ny = '\xe9'\n",
    "unknown_encoding": b"# -*- coding: nope -*-\nx = 1\n",
    "two_encodings": b"\xef\xbb\xbf# -*- coding: latin-1 -*-\nx = 1\n",
    "warning_before": b"assert (1, 'always')\nreturn 3\n",
    # Older Pythons read a file up to its first null byte.
    **(
        {"null_byte": b"x = 1\n\0\n", "null_byte_at_once": b"\0"}
        if sys.version_info >= (3, 11, 4)
        else {}
    ),
    "too_many_parentheses": b"(" * 300 + b")" * 300,
    "nested_too_deeply": b"x = " + b"-" * 100_000 + b"1\n",
    "bytecode_of_another_python": b"\0\0\r\n" + b"\0" * 12,
}
"""Programs that Python refuses before it runs the first line."""


class TestEnd:
    @pytest.mark.parametrize("ending", ENDINGS)
    def test_ending_of_a_script(self, ending: str, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(ENDINGS[ending])
        plain, run = outcomes(tmp_path, "program.py")
        assert run == plain

    @pytest.mark.parametrize("ending", ENDINGS)
    @pytest.mark.parametrize("start", ["module", "package", "folder", "archive", "-c"])
    def test_ending_of_a_program_that_is_no_script(
        self, start: str, ending: str, tmp_path: Path
    ) -> None:
        source = ENDINGS[ending]
        written(tmp_path, source.encode())
        plain, run = outcomes(tmp_path, *(("-c", source) if start == "-c" else STARTS[start]))
        assert run == plain

    def test_interrupt_ends_the_process_by_the_signal(self, tmp_path: Path) -> None:
        (tmp_path / "program.py").write_text(ENDINGS["interrupt_by_signal"])
        plain, run = outcomes(tmp_path, "program.py")
        assert run[0] == plain[0] < 0 and run[2].count("KeyboardInterrupt") == 1

    @pytest.mark.parametrize(
        "ending", ["", "raise SystemExit(4)", "1 / 0", "raise KeyboardInterrupt"]
    )
    def test_the_scope_lasts_to_the_end_of_the_process(self, ending: str, tmp_path: Path) -> None:
        program = """
            import atexit, torch
            class Last:
                def __del__(self):
                    print("torn down", torch.ones(2, device="cuda").sum().item(), torch.cuda.is_available())
            atexit.register(lambda: print("at exit", torch.ones(1).cuda().item(), torch.cuda.device_count()))
            kept, circular = Last(), Last()
            circular.itself = circular
        """
        (tmp_path / "program.py").write_text(textwrap.dedent(program) + ending)
        run = list(outcomes(tmp_path, "program.py"))[1]
        environment = {"TORCHDEVICE": "1", "TORCHDEVICE_TARGET": "cpu", "TORCHDEVICE_LOG": "ERROR"}
        activated = run_fresh_python("program.py", cwd=tmp_path, **environment)
        assert run == (activated.returncode, activated.stdout, activated.stderr)
        assert run[1] == "at exit 1.0 1\n" + "torn down 2.0 True\n" * 2

    def test_the_report_counts_what_exit_handlers_do(self, tmp_path: Path) -> None:
        program = "import atexit, torch\natexit.register(lambda: torch.ones(1).cuda())\n1 / 0"
        (tmp_path / "program.py").write_text(program)
        result = run_fresh_python(
            "-m", "torchdevice", "run", "--target", "cpu", "--report", "program.py", cwd=tmp_path
        )
        assert result.returncode == 1 and result.stderr.index(
            "ZeroDivisionError"
        ) < result.stderr.index("1 x cuda")


def written(folder: Path, source: bytes) -> None:
    """Write a program as script, package, folder and archive."""
    for name in ("package", "folder"):
        (folder / name).mkdir()
        (folder / name / "__main__.py").write_bytes(source)
    (folder / "package" / "__init__.py").touch()
    for name in ("program.py", "program.pyc"):
        (folder / name).write_bytes(source)
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", source)


class TestNotCompiled:
    @pytest.mark.sampled(len(NOT_COMPILED))
    @pytest.mark.parametrize("kind", NOT_COMPILED)
    def test_a_script(self, kind: str, tmp_path: Path) -> None:
        """Python says it, in the words that it has for a file, and torch is not imported before."""
        written(tmp_path, NOT_COMPILED[kind])
        script = "program.pyc" if kind == "bytecode_of_another_python" else "program.py"
        for flags in ((), ("-O", "-X", "importtime")):
            plain, run = outcomes(tmp_path, script, flags=flags)
            assert plain[0] == 1 and "torch._C" not in run[2]
            if not flags:
                assert run == plain

    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("kind", NOT_COMPILED)
    def test_a_program_from_stdin(self, kind: str, tmp_path: Path) -> None:
        found = []
        for command in (["-"], ["-m", "torchdevice", "run", "--target", "cpu", "-", "argument"]):
            done = subprocess.run(
                [sys.executable, *command],
                input=NOT_COMPILED[kind],
                cwd=tmp_path,
                capture_output=True,
                timeout=300,
                check=False,
            )
            found.append((done.returncode, done.stdout, done.stderr))
        assert found[0] == found[1] and found[0][0] == 1

    @pytest.mark.parametrize("kind", NOT_COMPILED)
    @pytest.mark.parametrize("start", ["module", "package", "folder", "archive", "-c"])
    def test_a_program_that_is_no_script(self, start: str, kind: str, tmp_path: Path) -> None:
        source = NOT_COMPILED[kind]
        if start == "-c":
            source = (
                source.replace(b"\0", b"\1")
                .replace(b"\xe9", b"\xc3\xa9")
                .removeprefix(b"\xef\xbb\xbf")
            )
        written(tmp_path, source)
        plain, run = outcomes(
            tmp_path, *(("-c", source.decode()) if start == "-c" else STARTS[start])
        )
        assert run == plain


class TestWorkers:
    @pytest.mark.parametrize("start", ["script", "link", "module", "inner_module"])
    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_functions_and_classes_of_main_pickle(
        self, method: str, start: str, tmp_path: Path
    ) -> None:
        program = """
            import sys
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            class Value:
                def __init__(self, number): self.number = number

            def work(value):
                return Value(value.number + 1), sys.argv, __name__, sys.path

            if __name__ == "__main__":
                with ProcessPoolExecutor(1, mp_context=get_context(sys.argv[1])) as pool:
                    value, *rest = pool.submit(work, Value(1)).result()
                print(type(value) is Value, value.number, rest)
        """
        for folder in ("package", "links"):
            (tmp_path / folder).mkdir()
        for name in ("program.py", "package/inner.py"):
            (tmp_path / name).write_text(textwrap.dedent(program))
        (tmp_path / "links" / "link.py").symlink_to(os.path.join("..", "package", "inner.py"))
        # Multiprocessing calls __main__ also __mp_main__, and sets that name when it is imported.
        (tmp_path / "command.py").write_text(
            "import multiprocessing, sys\nfrom torchdevice.tools.cli.main import "
            "main\nsys.exit(main())\n"
        )
        for launcher in (("-m", "torchdevice"), ("command.py",)):
            plain, run = outcomes(tmp_path, *STARTS[start], method, launcher=launcher)
            assert run == plain and plain[1].startswith("True 2 "), run[2]
