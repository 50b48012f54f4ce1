"""Runs tests of one file and notes each result at once: ``one_test_file.py FILE NOTES [SAMPLE SEED]``.

:mod:`benchmarks.torch_tests` runs this program under ``torchdevice run``. NOTES is a file of JSON objects, one a line:
first ``{"planned": [NAMES]}``, then ``{"began": NAME}`` and ``{"ended": NAME, "outcome": ..., "text": ...}`` for each
test. Tests that the notes already have are not run again, so that the program can be started again after one that
ended its process. SAMPLE is how many of the tests made for CUDA are run, drawn by SEED; without it all tests are.
"""

from __future__ import annotations

import gc
import importlib
import json
import random
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
        if name not in self._noted:  # a failed test with a subtest, or a failing clean-up, is told of several times
            self._noted.add(name)
            self.note(ended=name, outcome=outcome, text=text)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        if self._holds_tensors:  # in the traceback of a test that failed, and the next one counts memory
            self._holds_tensors = False
            gc.collect()
        self.note(began=name_of(test))

    def stopTest(self, test: unittest.TestCase) -> None:
        self._ended(test, "passed")
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


def main(path: Path, notes: Path, *drawn: str) -> None:
    """Run those tests of a file that the notes lack."""
    sys.argv[:] = [str(path)]  # torch's tests read the command line when they are imported, and are the script itself
    sys.path.insert(0, str(path.parent))
    module = importlib.import_module(path.stem)
    tests = {name_of(test): test for test in tests_in(unittest.defaultTestLoader.loadTestsFromModule(module))}
    names = list(tests)
    if drawn:
        names = sorted(name for name in names if name.partition(".")[0].endswith("CUDA"))
        names = random.Random(int(drawn[1])).sample(names, min(int(drawn[0]), len(names)))
        names.sort()
    result = Noting(notes)
    known = notes.read_text().splitlines() if notes.exists() else []
    done = {json.loads(line).get("ended") for line in known}
    if not known:
        result.note(planned=names)
    unittest.TestSuite([tests[name] for name in names if name not in done]).run(result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
