"""Runs a file's tests, noting results at once: ``one_test_file.py FILE NOTES [SAMPLE SEED FROM]``.

:mod:`benchmarks.torch_tests` runs this program under ``torchdevice run``. NOTES is a file of JSON
objects, one a line: first ``{"planned": [NAMES]}``, then ``{"began": NAME}`` and ``{"ended": NAME,
"outcome": ..., "text": ...}`` for each test. Tests that the notes already have are not run again,
so that the program can be started again after one that ended its process. SAMPLE is how many of the
tests are run, drawn by SEED, of those made for CUDA if FROM is "cuda". Without it all tests are. A
file that cannot be imported is noted as a test called "the file".

The ranks of a distributed test are forked from this process, which has imported torch and the file
already; they would import both again if they were started anew.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import json
import multiprocessing
import random
import re
import sys
import traceback
import types
import unittest
from collections.abc import Iterator
from multiprocessing.context import BaseContext, ForkContext
from pathlib import Path
from typing import Any

import torch

from torchdevice.kernel.thread_state import settle, state

MOVED: dict[str, str] = json.loads(Path(__file__).with_name("torch_tests.json").read_text())[
    "moved"
]
"""Where newer torch has what tests of older releases import: beginnings of modules' names, and
``module:name``.
"""


def find_what_has_moved() -> None:
    """Import under its older name what the installed torch has under another."""
    for old, new in MOVED.items():
        module, _, name = old.partition(":")
        if not name:
            sys.meta_path.append(Moved(old, new))
        elif not hasattr(importlib.import_module(module), name):
            setattr(sys.modules[module], name, getattr(sys.modules[module], new))


class Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules whose names begin otherwise in the installed torch."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self.old):
            return None
        return importlib.machinery.ModuleSpec(
            name, self, origin=name.replace(self.old, self.new, 1)
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return importlib.import_module(str(spec.origin))

    def exec_module(self, module: Any) -> None:
        """Do nothing: the module has run under its newer name."""


class Gone(types.ModuleType):
    """Stands for a module or name that torch lacks, so that other tests of the file can run.

    A test that uses it fails with its name. While the file is imported, it is a decorator that
    changes nothing.
    """

    in_a_test = False
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Gone:
        if name.startswith("__"):
            raise AttributeError(name)
        return Gone(f"{self.__name__}.{name}")

    def __call__(self, *given: Any, **_: Any) -> Any:
        if Gone.in_a_test:
            raise ImportError(f"{self.__name__} is gone from the installed torch")
        return given[0] if len(given) == 1 and callable(given[0]) else self

    def __radd__(self, other: Any) -> Any:
        return other

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


def imported(name: str) -> types.ModuleType:
    """Import a file of tests, with stand-ins for those names of torch that are gone."""
    while True:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = re.match("cannot import name '(.*?)'", str(error))
            if not (error.name or "").startswith("torch.") or (
                error.name in sys.modules and not missing
            ):
                raise
            if missing:
                setattr(
                    sys.modules[str(error.name)], missing[1], Gone(f"{error.name}.{missing[1]}")
                )
            else:
                sys.modules[str(error.name)] = Gone(str(error.name))


class Noting(unittest.TestResult):
    """A result that appends each outcome to a file."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes
        self._noted: set[str] = set()
        self._holds_tensors = False

    def note(self, **what: Any) -> None:
        """Append one line to the file."""
        with self.notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def _ended(self, test: Any, outcome: str, text: str = "") -> None:
        name = name_of(test)
        # A failed test with a subtest, or a failing clean-up, is told of several times.
        if name not in self._noted:
            self._noted.add(name)
            self.note(ended=name, outcome=outcome, text=text)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        # In the traceback of a test that failed, and the next one counts memory.
        if self._holds_tensors:
            self._holds_tensors = False
            gc.collect()
        ranks = has_ranks(test)
        torch.multiprocessing.get_context = (
            get_context_of_ranks if ranks else multiprocessing.get_context
        )
        torch.multiprocessing.Process = Rank if ranks else multiprocessing.Process
        self.note(began=name_of(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        self._ended(test, "passed")
        kind: Any = type(test)
        if getattr(kind, "poison_pill", False):  # torch would skip the other tests of the class
            for rank in kind.processes:
                rank.kill()
            kind.poison_pill = kind._processes_spawned = False
        super().stopTest(test)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._holds_tensors = True
        self._ended(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._ended(test, "skipped", reason)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._ended(test, "failed", "unexpected success")


def name_of(test: Any) -> str:
    """Return ``Class.method``; for the set-up of a class ``Class``."""
    whole = test.id()
    if whole.startswith(("setUpClass", "tearDownClass")):
        return str(whole.partition("(")[2].rstrip(")").rpartition(".")[2])
    return ".".join(whole.rsplit(".", 2)[-2:])


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield the tests of nested suites."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from tests_in(each)
        else:
            yield each


class Rank(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined, misc]
    """A rank of a distributed test, forked though the test asks for a new process.

    A simulated GPU refuses to work in a forked process, as CUDA does, if the first process has used
    one. Decorators do that as a file is imported. So ranks begin as processes that have used none.
    No tensor is lost: these tests run before those that use a GPU in this process.
    """

    def run(self) -> None:
        # Where a test does not ask for it: tests of releases before this argument do not take it.
        self._kwargs = {
            name: value for name, value in self._kwargs.items() if name != "fake_pg" or value
        }
        context = state.context
        context.driver.forget()
        state.answers = False  # makes `settle` answer anew
        settle()
        super().run()


class Forking(ForkContext):
    """The context that torch's tests with ranks get for "spawn"."""

    Process = Rank


def get_context_of_ranks(method: str | None = None) -> BaseContext:
    """Stand for ``torch.multiprocessing.get_context`` in the test of ranks."""
    return Forking() if method == "spawn" else multiprocessing.get_context(method)


def has_ranks(test: unittest.TestCase) -> bool:
    """Whether torch starts processes for each test, or for all tests, of the class."""
    return any(
        kind.__name__ in ("MultiProcessTestCase", "MultiProcContinuousTest")
        for kind in type(test).__mro__
    )


def drawn_from(names: list[str], size: str, seed: str, kind: str) -> list[str]:
    """Return a sample of the names."""
    names = sorted(
        name for name in names if kind != "cuda" or name.partition(".")[0].endswith("CUDA")
    )
    return sorted(random.Random(int(seed)).sample(names, min(int(size), len(names))))


def main(path: Path, notes: Path, *drawn: str) -> None:
    """Run those tests of a file that the notes lack."""
    # Torch's tests read the command line when they are imported, and are the script itself.
    sys.argv[:] = [str(path)]
    sys.path.insert(0, str(path.parent))
    result = Noting(notes)
    known = notes.read_text().splitlines() if notes.exists() else []
    done = {json.loads(line).get("ended") for line in known}
    try:
        find_what_has_moved()
        module = imported(path.stem)
    except Exception:
        result.note(planned=["the file"])
        result.note(ended="the file", outcome="not imported", text=traceback.format_exc())
        return
    tests = {
        name_of(test): test
        for test in tests_in(unittest.defaultTestLoader.loadTestsFromModule(module))
    }
    names = drawn_from(list(tests), *drawn) if drawn else list(tests)
    if not known:
        result.note(planned=names)
    wanted = [tests[name] for name in names if name not in done]
    # They are forked, from a process without tensors.
    wanted.sort(key=lambda test: not has_ranks(test))
    Gone.in_a_test = True
    unittest.TestSuite(wanted).run(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
