"""Fixtures of the suite: torch is as before after each test; sweeps are whole or sampled."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import re
import subprocess
import sys
import types
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Read once, and other libraries import numba too.
os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
os.environ.pop("TORCHDEVICE_TARGET", None)
# This run has read it; other projects that tests run lack its flags.
os.environ.pop("PYTEST_ADDOPTS", None)

import warnings
import zlib

import long_tests
import psutil
import pytest
import snapshot
import sweeping
import torch

import torchdevice
from torchdevice.calls.lacking import missing_operators
from torchdevice.kernel import patching, thread_state
from torchdevice.kernel.devices import runtime as runtimes
from torchdevice.native import building
from torchdevice.scope import target_selection

torch.set_num_threads(1)

TARGETS = ("cpu", "simulated:cuda")

REHEARSED = "simulated:mps"
"""The target on which a sample of the tests of :data:`REHEARSING` runs too: the runtime of MPS, on
a simulated Mac.
"""

REHEARSING = frozenset(
    f"test_{name}"
    for name in (
        "amp",
        "autograd",
        "batch_norm",
        "breakages",
        "check",
        "commands",
        "compile",
        "cpp_extension",
        "data",
        "device_arguments",
        "distributed",
        "engines",
        "errors",
        "inventory",
        "memory",
        "module_sweep",
        "op_sweep",
        "profiling",
        "scope",
        "streams",
        "torch_cuda",
        "torchscript",
        "transfer",
        "transformers",
        "written_for_xpu",
    )
)

REHEARSALS = 40
"""How many of them a sample has."""


GPU = "cuda"
"""The target of tests for programs that are written for MPS, where there is a GPU."""

OUT_OF_TREE = "npu_like"
"""The target that is a backend of its own, for which torch has one place in a process. No simulated
device is there.
"""

OUT_OF_TREE_PATH = Path(__file__).with_name("out_of_tree")
"""The folder from which ``import torch`` loads that backend where the folder is on the path."""


ALONE = pytest.mark.lacked_by(
    OUT_OF_TREE, "simulated device beside it, which the test compares with"
)
"""Marks a contract test that simulates a device too."""


def pytest_configure(config: pytest.Config) -> None:
    """Let scopes of the tests, and of processes that they start, use the chosen engine."""
    os.environ["TORCHDEVICE_ENGINE"] = config.getoption("--engine")
    # Most tests compare with the CPU; those of generators choose themselves.
    os.environ["TORCHDEVICE_RANDOM"] = "cpu"
    os.environ["TORCHDEVICE_NATIVE"] = config.getoption("--native")
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(long_tests.Recording())
    if config.getoption("--native") == "always":
        building.build()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the simulated or out-of-tree device before snapshots: torch cannot undo that."""
    if session.config.getoption("--targets") == OUT_OF_TREE:
        sys.path.insert(0, str(OUT_OF_TREE_PATH))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            (str(OUT_OF_TREE_PATH), os.environ.get("PYTHONPATH", ""))
        )
        import npu_like

        npu_like.autoload()
        return
    if session.config.getoption("--targets") == GPU:
        torch.cuda.init()  # the simulated device would take autograd from it
        return
    # Not where a test has taken the feature away.
    if importlib.util.find_spec("torchdevice.simulation"):
        with torchdevice.simulate():
            pass


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save this process's coverage: a worker may be ended before it has done so."""
    if "coverage" in sys.modules and hasattr(session.config, "workerinput"):
        measured = sys.modules["coverage"].Coverage.current()
        if measured is not None:
            measured.save()


_failed: dict[str, None] = {}
"""The tests that failed in this process or its workers, in their order."""

_slow: dict[str, None] = {}
"""The functions of tests that were slow in this process or its workers, in their order."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests failed or were slow, for :func:`pytest_unconfigure`."""
    if report.failed:
        _failed[report.nodeid] = None
    if report.duration >= long_tests.SLOW:
        _slow[long_tests.function_of(report)] = None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Name failed tests in the last line: after an internal error there is no summary."""
    if hasattr(config, "workerinput"):
        return
    if unrecorded := _slow.keys() - long_tests.recorded().keys():
        # Every run takes these, so that it grows with each of them.
        names = " ".join(sorted(unrecorded))
        print(f"\nslow, and not recorded by `--record-seconds`: {names}", flush=True)
    if _failed:
        print(f"\n{len(_failed)} failed: {' '.join(_failed)}", flush=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sweep",
        choices=("sample", "full"),
        default="sample",
        help="run a seeded sample of the large sweeps (the default) or all of them",
    )
    targets = (
        "devices on each of which every contract test runs, separated by commas; by default each "
        "test runs on one"
    )
    parser.addoption("--targets", default=None, help=targets)
    engines = ("mode", "wrap", "auto")
    parser.addoption(
        "--engine", choices=engines, default="mode", help="the engine of scopes that name none"
    )
    kernels = (
        "the kernels of simulated devices: those in Python, or those in C++, which are built first"
    )
    parser.addoption("--native", choices=("never", "always"), default="never", help=kernels)
    parser.addoption(
        "--long",
        choices=("sample", "all"),
        default="sample",
        help="run a seeded sample of the tests that take long (the default) or all of them, as "
        "complete sweeps do",
    )
    recording = "record the seconds of long tests, for an idle machine and with --long all"
    parser.addoption("--record-seconds", action="store_true", help=recording)
    parser.addoption("--sweep-seed", type=int, default=0, help="seed of the sample")
    orders = ("shuffled", "written")
    parser.addoption(
        "--order",
        choices=orders,
        default="shuffled",
        help="the order of files and of tests in a file",
    )
    # The variable is for unmodified commands; xdist's workers get no flags of PYTEST_ADDOPTS.
    given = int(os.environ.get("SHARE", "1"))
    said = "run one of so many parts of the files, drawn by the seed"
    parser.addoption(
        "--share", type=int, default=given, help=f"{said}; the variable SHARE is the default"
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Return the line of pytest's header that says what is run, and how the same is run again."""
    what = f"engine: {config.getoption('--engine')}; native kernels: {config.getoption('--native')}"
    what = f"{what}; the default run takes about five minutes on two idle cores"
    if config.getoption("--share") > 1:
        what = f"{what}; files: one part of {config.getoption('--share')}"
    if config.getoption("--sweep") == "full":
        return f"{what}; sweeps: complete"
    return (
        f"{what}; sweeps: a sample, --sweep-seed={config.getoption('--sweep-seed')} (--sweep=full "
        "runs all)"
    )


ATTACKS = 30
"""How many functions of ``tests/attack`` a run takes by day, with one case each: they take seconds.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect tests without garbage collections, which take a tenth of the time and find little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that name engines: ``--engine`` does not change them. Mark attacks as sweeps."""
    if "engine" in sweeping.parameters(item):
        item.add_marker("one_engine")
    if item.path.parent.name == "attack" and item.get_closest_marker("sampled") is None:
        item.add_marker(pytest.mark.sampled(ATTACKS, of="attacks"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a sample of the sweeps does not contain, unless the sweeps are complete."""
    addressed = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if addressed:  # which differ from worker to worker
        raise pytest.UsageError(f"{addressed[0]!r} has an address. Give its parameter an id.")
    # pytest has put the tests in an order of its fixtures, which depends on the hashes of texts.
    # Each worker must come to the same order.
    items.sort(key=_place)
    if config.getoption("--targets") == OUT_OF_TREE:
        _keep(
            config,
            items,
            [item for item in items if sweeping.parameters(item).get("target") == OUT_OF_TREE],
        )
    seed, share = config.getoption("--sweep-seed"), config.getoption("--share")
    if config.getoption("--sweep") != "full":
        on_targets = items if config.getoption("--targets") else _on_their_targets(items, seed)
        _keep(config, items, sweeping.sample(on_targets, seed))
        if config.getoption("--long") == "sample":
            _keep(config, items, long_tests.affordable(items, seed, long_tests.recorded()))
    # A part of what the whole run draws: a sample of a part would have other cases.
    _keep(
        config,
        items,
        [item for item in items if (zlib.crc32(item.path.name.encode()) + seed) % share == 0],
    )
    if config.getoption("--order") == "shuffled":
        items[:] = _shuffled(items, seed)
    with_kernels = [item for item in items if "native_kernels" in getattr(item, "fixturenames", ())]
    if hasattr(config, "workerinput") and with_kernels:
        # The compiler takes a minute beside the tests. Each worker that came to them earlier would
        # wait for it.
        others = set(items).difference(with_kernels)
        items[:] = [*(item for item in items if item in others), *with_kernels]
        _build_kernels_beside(config)


def _place(item: pytest.Item) -> tuple[str, int, str]:
    """Return the file of a test, its line and its name with the case, by which tests sort."""
    return item.nodeid.partition("::")[0], item.location[1] or 0, item.nodeid


def _build_kernels_beside(config: pytest.Config) -> None:
    """Let the first of several workers compile the native kernels in a process beside the tests."""
    is_first_worker = config.workerinput["workerid"] == "gw0"  # type: ignore[attr-defined]
    if is_first_worker and sys.platform != "win32" and not building.path().is_file():
        build = subprocess.Popen(
            [sys.executable, "-m", "torchdevice", "native", "build"], stdout=subprocess.DEVNULL
        )
        config.add_cleanup(build.wait)


def _shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return tests with files, classes and functions per file in an order drawn by the seed.

    The cases of one function, and the tests of one class, stay together: they share fixtures that
    take seconds.
    """
    groups: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        file, _, name = item.nodeid.partition("::")
        groups.setdefault(file, {}).setdefault(re.split(r"::|\[", name)[0], []).append(item)
    draw = random.Random(seed)
    files = draw.sample(list(groups.values()), len(groups))
    return [
        item
        for functions in files
        for each in draw.sample(list(functions.values()), len(functions))
        for item in each
    ]


def _keep(config: pytest.Config, items: list[pytest.Item], kept: Iterable[pytest.Item]) -> None:
    """Run these of the tests, in their order, and let pytest count the others."""
    wanted = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def _on_their_targets(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return the tests: each on one of its targets, and a few on the rehearsed one too."""
    rehearsed = {item for item in items if sweeping.parameters(item).get("target") == REHEARSED}
    few = rehearsed.intersection(sweeping.few_of("target", REHEARSED, items, seed, REHEARSALS))
    kept = few.union(
        sweeping.on_one_target([item for item in items if item not in rehearsed], seed)
    )
    return [item for item in items if item in kept]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing is compiled before or after the test; torch's compilation warnings are allowed."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def sweep(request: pytest.FixtureRequest) -> tuple[bool, int]:
    """Whether sweeps are complete, and the seed of the sample."""
    return request.config.getoption("--sweep") == "full", request.config.getoption("--sweep-seed")


@pytest.fixture(scope="session")
def native_kernels() -> Path:
    """The file of the native kernels, which are built before the first test that takes them."""
    if sys.platform == "win32":
        pytest.skip("the command that builds the native kernels is not for Windows's compiler")
    return building.build()


class LongLived:
    """Objects of modules and caches, exempt from collections: each took most of a second.

    It is looked at again when 100 modules were imported, and after 500 tests.
    """

    def __init__(self) -> None:
        self._modules = self._tests = 0

    def set_apart(self) -> None:
        """Exempt living objects from collections, as many may have come since the last time."""
        self._tests += 1
        if len(sys.modules) > self._modules + 100 or self._tests > 500:
            self._modules, self._tests = len(sys.modules), 0
            gc.collect()
            gc.freeze()


_long_lived = LongLived()


@pytest.fixture(autouse=True)
def collections_pass_over_what_is_long_lived() -> None:
    """Keep garbage collections short."""
    _long_lived.set_apart()


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Keep tensors of earlier cycles in place while a test compares figures of memory."""
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


LEFT_AT_MOST = 2 << 30
"""How many bytes a test may leave in the address space, as for libraries that it loads."""


@pytest.fixture(autouse=True)
def no_large_memory_is_left() -> Iterator[None]:
    """Check that a test's large tensors end with it: Linux forks no process that maps too much."""
    process = psutil.Process()
    before = process.memory_info().vms
    yield
    if process.memory_info().vms - before > LEFT_AT_MOST:
        gc.collect()
        left = process.memory_info().vms - before
        assert left <= LEFT_AT_MOST, f"the test has left {left >> 20} MiB of memory"


@pytest.fixture(autouse=True)
def torch_is_restored() -> Iterator[None]:
    """Check that all of torch is as before a test. Restore random state and precision."""
    # torch's tests, once imported, forbid programs to set flags of torch.backends by assignment.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    state, precisions = torch.get_rng_state(), snapshot.precisions()
    multithreading = torch._C._is_multithreading_enabled()
    before, of_thread = snapshot.take(), snapshot.of_thread()
    yield
    left = list(thread_state.state.entries)
    for entry in reversed(left):  # so that the next test starts without it
        entry.owner.__exit__(None, None, None)
    assert not left, "a scope is still active after the test"
    changed = snapshot.differences(before, snapshot.take())
    if changed:
        gc.collect()  # a generator or a thread that nobody holds any more may have been in a scope
        changed = snapshot.differences(before, snapshot.take())
    assert changed == []
    assert snapshot.of_thread() == of_thread, "the test has left its thread in another state"
    kept = torch._C._is_multithreading_enabled()
    _ = torch._C._set_multithreading_enabled(multithreading)
    assert kept is multithreading, "autograd's multithreading is not as it was before the test"
    torch.set_rng_state(state)
    snapshot.restore_precisions(precisions)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Call a test that interrupts code in a generator, which has handled exceptions of its own.

    An error that a trace function raises at the end of an ``except`` clause leaves the clause's
    exception handled, so that every later error of the thread would have it as its context.
    """
    function = pyfuncitem.obj

    def alone(*args: Any, **kwargs: Any) -> Any:
        (result,) = (function(*args, **kwargs) for _ in range(1))
        return result

    if pyfuncitem.get_closest_marker("interrupts"):
        pyfuncitem.obj = alone
    try:
        return (yield)
    finally:
        pyfuncitem.obj = function


@pytest.fixture(autouse=True)
def the_fallback_of_mps_is_as_before() -> Iterator[None]:
    """Restore torch's variable, which accelerate sets for the process if it finds MPS."""
    before = os.environ.get(missing_operators.VARIABLE)
    yield
    if before is None:
        os.environ.pop(missing_operators.VARIABLE, None)
    else:
        os.environ[missing_operators.VARIABLE] = before


@pytest.fixture(autouse=True)
def accelerate_is_fresh() -> Iterator[None]:
    """Let accelerate forget the device of a test, which it keeps for the life of the process."""
    yield
    states = sys.modules.get("accelerate.state")
    if states is not None:
        states.AcceleratorState._reset_state(True)
        states.PartialState._reset_state()
        states.GradientState._reset_state()


@pytest.fixture(autouse=True)
def users_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test without an engine use the users' one, also in processes it starts."""
    # Not by monkeypatch, which would then be undone after the scopes of other fixtures have ended.
    before = os.environ["TORCHDEVICE_ENGINE"]
    if request.node.get_closest_marker("one_engine"):
        os.environ["TORCHDEVICE_ENGINE"] = "auto"
    yield
    os.environ["TORCHDEVICE_ENGINE"] = before


@pytest.fixture(autouse=True)
def tensors_say_where_they_are(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let contract tests on several targets see the target's device, unless options differ."""
    if "target" not in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDEVICE_IDENTITY", "target")
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes ``target`` on every target of ``--targets``."""
    chosen = any(
        "target" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")
    )
    if "target" in metafunc.fixturenames and not chosen:
        given = metafunc.config.getoption("--targets")
        rehearsed = (REHEARSED,) if metafunc.module.__name__ in REHEARSING else ()
        lacked = dict(mark.args for mark in metafunc.definition.iter_markers("lacked_by"))
        if given:
            targets = [_unless_lacked(each, lacked.get(each)) for each in given.split(",")]
        else:
            targets = [each for each in (*TARGETS, *rehearsed) if each not in lacked]
        metafunc.parametrize("target", targets, scope="session")


def _unless_lacked(target: str, what: str | None) -> Any:
    return (
        target
        if what is None
        else pytest.param(target, marks=pytest.mark.skip(f"{target} has no {what}"))
    )


@pytest.fixture
def chosen(target: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the target the default of scopes and processes of the test, and return it."""
    monkeypatch.setenv("TORCHDEVICE_TARGET", target)
    return target


@pytest.fixture
def cuda(chosen: str) -> Iterator[torchdevice.Scope]:
    """Run the test in a scope for a CUDA program, and return the scope."""
    with torchdevice.portable() as scope:
        yield scope


@pytest.fixture
def kind(target: str) -> str:
    """The device type of the target's tensors."""
    return "mps" if target == REHEARSED else target.partition(":")[0]


@pytest.fixture
def float64(kind: str) -> torch.dtype:
    """The dtype in which the target holds what a program asks for in float64."""
    return torch.float32 if kind == "mps" else torch.float64


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Suspend the active scope and all function modes."""
    with thread_state.suspended(), torch._C.DisableTorchFunction():
        yield


def failing_half_way(
    installation: patching.Installation, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let an installation fail at its beginning, middle and end, and in joined attributes."""
    patches = installation._patches
    assert patches is not None, "nothing has been installed yet"

    class Failing:
        def install(self) -> None:
            raise RuntimeError("half-way")

        def remove(self) -> None:
            """Do nothing: a patch that was never installed must be removable."""

    for position in (0, len(patches) // 2, len(patches)):
        monkeypatch.setattr(
            installation, "_patches", [*patches[:position], Failing(), *patches[position:]]
        )
        yield
    monkeypatch.setattr(installation, "_patches", patches)
    run = max(
        (patch for patch in patches if isinstance(patch, patching.Together)),
        key=lambda run: len(run.places),
    )
    broken = patching.Replaced(
        types.SimpleNamespace(name=1), "name", lambda original: Failing().install()
    )
    middle = len(run.places) // 2
    monkeypatch.setattr(run, "places", [*run.places[:middle], broken, *run.places[middle:]])
    yield


@pytest.fixture
def no_cuda_build() -> bool:
    """Whether torch was built without CUDA; ``torch.version.cuda`` differs in a scope."""
    with plain_torch():
        return torch.version.cuda is None


class MetaRuntime(runtimes.Runtime):
    """A target whose tensors are never CPU tensors: torch's meta device, without values."""

    device_type = "meta"
    unsupported_dtypes = frozenset({torch.float64, torch.complex128})
    blocking_copies_only = True

    def is_available(self) -> bool:
        return True

    def device(self, index: int) -> torch.device:
        return torch.device("meta")

    def default_generator(self, index: int) -> torch.Generator:
        return torch.default_generator

    def memory(self, index: int) -> torchdevice.Memory:
        return torchdevice.Memory(0, 0, 0, 0)

    def reset_peak_memory(self, index: int) -> None:
        pass


@pytest.fixture
def meta_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``"meta"`` be a target."""
    runtime = MetaRuntime()
    known, find = target_selection.target_names, target_selection.runtime
    monkeypatch.setattr(target_selection, "target_names", lambda: (*known(), "meta"))
    monkeypatch.setattr(
        target_selection, "runtime", lambda kind: runtime if kind == "meta" else find(kind)
    )


@pytest.fixture
def distinct(meta_target: None) -> Iterator[torchdevice.Scope]:
    """Run the test on a target beside the CPU, without float64 and asynchronous copies."""
    with torchdevice.portable("meta") as scope:
        yield scope


@pytest.fixture
def devices() -> Iterator[torchdevice.Scope]:
    """Two simulated CUDA devices whose tensors say cuda."""
    with torchdevice.simulate(count=2) as scope:
        yield scope
