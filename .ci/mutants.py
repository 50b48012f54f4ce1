"""Try mutants that cosmic-ray has listed: ``mutants.py CONFIGURATION DATABASE [--seed N]``.

An interpreter for each mutant would import torch and run all tests. Here pytest collects the tests
of a source once. A forked process runs all of them, records which test runs which lines, and ends
the whole if one fails. Each mutant is another fork: one function gets its changed code, and the
tests of the changed line run, those of the first file first, until one fails. A mutant outside of
functions, or of a line that no test runs, takes an interpreter and a changed file, as
``cosmic-ray exec`` does.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import random
import re
import resource
import select
import shlex
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType

import coverage
import pytest
from cosmic_ray.config import load_config
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome, WorkItem, WorkResult

SECONDS = 600
"""A mutant whose tests take longer in all is killed."""

MEMORY = 16 << 30
"""Bytes of addresses that a mutant may take: it may allocate without end."""

# A test of more than a minute hangs, which kills the mutant: by a thread, because the package keeps
# handlers of signals waiting while it works. Captured output would hide what is printed here. Tests
# that interrupt code use the trace function of Python that coverage needs.
FLAGS = ["--timeout=60", "--timeout-method=thread", "--tb=native", "-q", "-x", "-s"]
FLAGS += ["-p", "no:cacheprovider", "-m", "not interrupts"]

LEFT_OUT = re.compile(r"_Add_(?!Sub)|_Is_Eq$|_Eq_Is$|_IsNot_NotEq$|_NotEq_IsNot$")
"""Texts and lists have no operators like `+`; identity and equality are one for most objects."""

Changed = tuple[CodeType, CodeType]
"""The code of a function, and its mutant."""


def kind(mutation: MutationSpec) -> str:
    """Return the kind of a mutation: all replacements of a sort of operators are of one kind."""
    return mutation.operator_name.partition("_")[0]


def drawn(items: Iterable[WorkItem], seed: int, share: int) -> list[WorkItem]:
    """Return one mutant of each kind at each place, but none of :data:`LEFT_OUT`.

    Args:
        items: All mutants.
        seed: Draws them.
        share: One place of so many is drawn, too.
    """
    places: dict[tuple, list[WorkItem]] = defaultdict(list)
    for item in items:
        (mutation,) = item.mutations
        if not LEFT_OUT.search(mutation.operator_name):
            places[mutation.module_path, mutation.start_pos, kind(mutation)].append(item)
    found = []
    for place, each in sorted(places.items()):
        draw = random.Random(f"{seed} {place}")
        # By name, because cosmic-ray lists them in another order each time.
        one = draw.choice(sorted(each, key=_name))
        if draw.random() * share < 1:
            found.append(one)
    return found


def _name(item: WorkItem) -> tuple[str, int]:
    (mutation,) = item.mutations
    return mutation.operator_name, mutation.occurrence


def changed(old: CodeType, new: CodeType) -> list[Changed] | None:
    """Return the outermost functions that differ; None if the body of a module or class does."""
    if _body(old) != _body(new):
        return None
    found: list[Changed] = []
    for before, after in zip(_nested(old), _nested(new), strict=True):
        if before == after:
            continue
        if before.co_flags & inspect.CO_OPTIMIZED:  # a function
            found.append((before, after))
            continue
        inside = changed(before, after)
        if inside is None:
            return None
        found += inside
    return found


def _body(code: CodeType) -> tuple:
    constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, len(_nested(code))


def _nested(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


class Functions:
    """The living functions of some files, by their code's place.

    Args:
        paths: The absolute paths of the files.
    """

    def __init__(self, paths: Iterable[str]):
        self._found: dict[tuple, list[FunctionType]] = defaultdict(list)
        known = set(paths)
        for each in gc.get_objects():
            # Not isinstance, which calls code of proxies.
            if type(each) is FunctionType and each.__code__.co_filename in known:
                self._found[self._place(each.__code__)].append(each)

    def can_change(self, pair: Changed) -> bool:
        """Return whether there are functions that can take the changed code."""
        before, after = pair
        return self._place(before) in self._found and before.co_freevars == after.co_freevars

    def change(self, pair: Changed) -> None:
        """Give the functions, and the functions that they have made, their changed code."""
        before, after = pair
        if self.can_change(pair):
            for each in self._found[self._place(before)]:
                each.__code__ = after
        for inner in zip(_nested(before), _nested(after), strict=False):
            self.change(inner)

    @staticmethod
    def _place(code: CodeType) -> tuple:
        return code.co_filename, code.co_name, code.co_firstlineno


def forked(call: Callable[[], str]) -> str | None:
    """Return what a call returns in a forked process; None if it hangs or does not return."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            os.setsid()
            for output in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            with open(writing, "w") as file:
                file.write(call())
        finally:
            os._exit(0)
    os.close(writing)
    text = b""
    end = time.monotonic() + SECONDS
    with open(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0, end - time.monotonic()))[0]:
            part = pipe.read(1 << 16)
            if not part:
                break
            text += part
    # The group, because processes that a test has started may live on.
    os.killpg(number, signal.SIGKILL)
    os.waitpid(number, 0)
    return text.decode() or None


class Mutants:
    """A pytest plugin that tries mutants in place of a run of the collected tests.

    Args:
        database: The path of the file that takes the results.
        items: The mutants of some sources.
        files: The files of their tests.
    """

    def __init__(self, database: str, items: Sequence[WorkItem], files: Sequence[str]):
        self.database, self.items, self.files = database, items, files
        self.failed = ""
        self.tests: list[pytest.Item] = []
        self.lines: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a test that fails."""
        if report.failed:
            self.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record a run of all tests, and try each mutant with its own."""
        paths = sorted({str(item.mutations[0].module_path) for item in self.items})
        recorded = forked(lambda: self.record(session.items, paths))
        if recorded is None:
            raise SystemExit("The run without a mutant did not end.")
        seconds, self.lines, failed = json.loads(recorded)
        self.tests = sorted(
            session.items, key=lambda test: (self.files.index(_file(test)), seconds[test.nodeid])
        )
        functions = Functions(map(os.path.abspath, paths))
        gc.freeze()
        # Once more in the order in which mutants run them.
        failed = failed or forked(lambda: self.attempt(self.tests, functions, []))
        if failed != "none":
            raise SystemExit(f"Without a mutant, this fails: {failed}")
        print(f"{len(seconds)} tests pass, in {sum(seconds.values()):.0f} s", flush=True)
        with use_db(self.database, WorkDB.Mode.open) as database:
            for item in self.items:
                result = self.judge(item, functions)
                database.set_result(item.job_id, result)
                print(_line(item, result), flush=True)
        return True

    def record(self, tests: Sequence[pytest.Item], paths: Sequence[str]) -> str:
        """Return as JSON the tests' seconds, the tests of each line, and the last that failed."""
        measured = coverage.Coverage(data_file=None, config_file=False, include=paths)
        seconds = {}
        measured.start()
        for test, following in _pairs(tests):
            measured.switch_context(test.nodeid)
            began = time.perf_counter()
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            seconds[test.nodeid] = time.perf_counter() - began
        measured.stop()
        data = measured.get_data()
        lines = {path: data.contexts_by_lineno(os.path.abspath(path)) for path in paths}
        return json.dumps([seconds, lines, self.failed])

    def judge(self, item: WorkItem, functions: Functions) -> WorkResult:
        """Return how a mutant fares."""
        (mutation,) = item.mutations
        source = mutation.module_path.read_text()
        operator = get_operator(mutation.operator_name)(**mutation.operator_args)
        mutant = mutate_code(source, operator, mutation.occurrence)
        try:
            pairs = changed(_compiled(source, mutation), _compiled(mutant, mutation))
        except SyntaxError:
            return WorkResult(WorkerOutcome.SKIPPED, "no Python")
        tests = self.choose(mutation)
        # A line that no test runs may have run when the module was imported.
        if pairs is None or not tests or not all(map(functions.can_change, pairs)):
            command = [sys.executable, "-m", "pytest", *FLAGS, *self.files]
            return mutate_and_test(item.mutations, shlex.join(command), SECONDS)
        failed = forked(lambda: self.attempt(tests, functions, pairs))
        outcome = TestOutcome.SURVIVED if failed == "none" else TestOutcome.KILLED
        output = f"{len(tests)} tests; failed: {failed or 'it hung, or ended the process'}"
        return WorkResult(WorkerOutcome.NORMAL, output, outcome)

    def choose(self, mutation: MutationSpec) -> list[pytest.Item]:
        """Return the tests that run a mutation's line."""
        line = str(mutation.start_pos[0])
        names = set(self.lines[str(mutation.module_path)].get(line, ()))
        return [test for test in self.tests if test.nodeid in names]

    def attempt(
        self, tests: Sequence[pytest.Item], functions: Functions, pairs: Iterable[Changed]
    ) -> str:
        """Change functions, and return the name of the first test that fails, or "none"."""
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for pair in pairs:
            functions.change(pair)
        for test, following in _pairs(tests):
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if self.failed:
                return self.failed
        return "none"


def _compiled(source: str, mutation: MutationSpec) -> CodeType:
    with warnings.catch_warnings(action="ignore"):
        return compile(source, os.path.abspath(mutation.module_path), "exec")


def _file(test: pytest.Item) -> str:
    return test.nodeid.partition("::")[0]


def _pairs(tests: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    return zip(tests, [*tests[1:], None], strict=True)


def _line(item: WorkItem, result: WorkResult) -> str:
    (mutation,) = item.mutations
    output = (result.output or "").strip().rpartition("\n")[2]
    place = f"{mutation.module_path}:{mutation.start_pos[0]}"
    return f"{place} {mutation.operator_name} {result.test_outcome}: {output}"


def pending(path: str, seed: int, share: int) -> list[WorkItem]:
    """Return the drawn mutants that have no result yet, and note the others as skipped."""
    with use_db(path, WorkDB.Mode.open) as database:
        items, without = database.work_items, {item.job_id for item in database.pending_work_items}
        # Those of the other places remain for a run of a larger share.
        skipped = without - {item.job_id for item in drawn(items, seed, 1)}
        result = WorkResult(WorkerOutcome.SKIPPED, "not drawn")
        database.set_multiple_results(skipped, result)
    return [item for item in drawn(items, seed, share) if item.job_id in without]


def main() -> None:
    """Try the drawn mutants that have no result yet, one set of tests after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("configuration")
    parser.add_argument("database")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=int, default=1, help="try one place of so many")
    given = parser.parse_args()
    tests = load_config(given.configuration)["tests"]
    mutants: dict[str, list[WorkItem]] = {source: [] for source in tests}
    for item in pending(given.database, given.seed, given.share):
        path = str(item.mutations[0].module_path)
        mutants[next(source for source in tests if path.startswith(source))].append(item)
    failed = False
    for source, some in mutants.items():
        files = tests[source]
        if not some:
            continue
        # A process of its own, because pytest runs once in one.
        child = os.fork()
        if child == 0:
            os._exit(pytest.main([*FLAGS, *files], [Mutants(given.database, some, files)]))
        _, status = os.waitpid(child, 0)
        failed = failed or status != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
