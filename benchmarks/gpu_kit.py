"""Asks a GPU in fifteen minutes where the simulation is wrong: ``benchmarks.gpu_kit FOLDER``.

The questions are cut into shards, each a process of its own, and the most telling ones come first:

1. ``contracts``: the contract tests on the GPU, a file each.
2. ``corpus``: the bugs of ``tests/support/corpus.py``, their correct twins, and the facts of
   ``device_facts.py``.
3. ``draws``: 200 random calls of each operator of torch's own test database, by seeded inputs.
4. ``mps``: the tests of programs that are written for MPS.
5. ``memory``: the peaks of ten programs, beside those that ``torchdevice.plan`` predicts.

The answers of a shard are one JSON file in FOLDER, with what the shard printed beside it. A shard
that has ended is not run again, so the same command goes on where it was stopped. Nothing is
installed, except that ``--wheels`` unpacks wheels from a folder into FOLDER. ``--target h200``
rehearses the kit on a simulated H200, and ``--compare OTHER`` shows where the answers in two
folders differ.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

GPU = "cuda"
"""The target that is a real GPU."""

ANSWERS = "GPU_KIT_ANSWERS"
"""The variable with the file to which a shard appends its answers, a line each."""

CUT = "cut"
"""How a shard ended that the kit stopped because its own time was over. It runs again."""

DRAWS = 200
"""The calls of each operator."""

_SECONDS_AN_OPERATOR = 3.0
"""The processor time that an operator may take, which a busy machine does not shorten."""


class Shard(NamedTuple):
    """Questions that one process asks.

    Attributes:
        part: One of :data:`PARTS`.
        name: Unique in the part.
        words: The command, after ``python``.
        seconds: How long it may take.
    """

    part: str
    name: str
    words: list[str]
    seconds: float


# ---- the shards ----------------------------------------------------------------------------------


def _pytest(target: str, file: str) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu_kit", "--targets", target]
    return ["-m", "pytest", *options, file]


def _contracts(target: str) -> Iterator[Shard]:
    """Yield a shard for each file with tests that take a target."""
    device = target if target == GPU else f"simulated:{target}"
    takes_target = re.compile(r"def test_\w+\([^)]*\b(target|chosen|cuda|kind)\b", re.DOTALL)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if takes_target.search(path.read_text()) and path.name != "test_written_for_mps.py":
            file = path.relative_to(ROOT).as_posix()
            yield Shard("contracts", file.replace("/", "."), _pytest(device, file), 180)


def _asking(part: str, target: str, count: int, seconds: float) -> Iterator[Shard]:
    """Yield a number of shards that this file answers itself."""
    for index in range(count):
        words = [
            "-m",
            "benchmarks.gpu_kit",
            "--target",
            target,
            "--ask",
            part,
            str(index),
            str(count),
        ]
        yield Shard(part, f"{index:02d}", words, seconds)


def _mps(target: str) -> Iterator[Shard]:
    file = "tests/accelerators/test_written_for_mps.py"
    device = target if target == GPU else "simulated:cuda"
    yield Shard("mps", "written-for-mps", _pytest(device, file), 180)


PARTS: dict[str, Callable[[str], Iterable[Shard]]] = {
    "contracts": _contracts,
    "corpus": lambda target: _asking("corpus", target, 8, 240),
    "draws": lambda target: _asking("draws", target, 16, 180),
    "mps": _mps,
    "memory": lambda target: _asking("memory", target, 10, 60),
}
"""The parts, the most telling one first."""


# ---- running them --------------------------------------------------------------------------------


def run(
    shards: Iterable[Shard], folder: Path, seconds: float, workers: int, paths: Iterable[Path] = ()
) -> None:
    """Run the shards that have not ended yet, in their order, and write the answers of each.

    Args:
        shards: The shards.
        folder: Where the answers are.
        seconds: After this time no shard goes on.
        workers: How many run at once.
        paths: Folders with packages.
    """
    until = time.monotonic() + seconds
    with ThreadPoolExecutor(workers) as pool:
        for shown in pool.map(lambda shard: _ended(shard, folder, until, paths), shards):
            print(shown, flush=True)


def _ended(shard: Shard, folder: Path, until: float, paths: Iterable[Path]) -> str:
    """Run a shard, unless it has ended before or no time is left, and return a line about it."""
    file = folder / shard.part / f"{shard.name}.json"
    known = json.loads(file.read_text())["ended"] if file.exists() else CUT
    left = until - time.monotonic()
    if known != CUT or left <= 0:
        return (
            f"{shard.part} {shard.name}: {'not run, no time is left' if known == CUT else 'known'}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ended, status = _process(shard, file, min(shard.seconds, left), paths)
    if ended == "stopped" and left < shard.seconds:
        ended = CUT
    answers = _read(file.with_suffix(".jsonl"))
    found = {"part": shard.part, "name": shard.name, "ended": ended, "status": status}
    written = file.with_suffix(".new")
    written.write_text(
        json.dumps(
            {**found, "seconds": round(time.monotonic() - began, 1), "answers": answers}, indent=1
        )
    )
    os.replace(written, file)
    return f"{shard.part} {shard.name}: {ended}, {len(answers)} answers"


def _process(shard: Shard, file: Path, seconds: float, paths: Iterable[Path]) -> tuple[str, int]:
    """Run the process of a shard. Return how it ended, and its status."""
    answers = file.with_suffix(".jsonl")
    answers.unlink(missing_ok=True)
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHDEVICE")},
        ANSWERS: str(answers.resolve()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *(str(path.resolve()) for path in paths)]),
    }
    with file.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *shard.words],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the processes that it started too
            return "stopped", process.wait()
    return "failed" if status else "finished", status


def _read(file: Path) -> list[Any]:
    """Return the whole lines of a file of answers; a process may have stopped in the last one."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def answer(**found: Any) -> None:
    """Append an answer of this shard."""
    with open(os.environ[ANSWERS], "a") as file:
        file.write(json.dumps(found) + "\n")


def unpack(wheels: Path, folder: Path) -> Path:
    """Unpack wheels without what they depend on, once, and return the folder to import from."""
    into = folder / "packages"
    for wheel in sorted(wheels.glob("*.whl")):
        mark = into / f"{wheel.name}.unpacked"
        if not mark.exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            mark.touch()
    return into


# ---- as a plugin of pytest -----------------------------------------------------------------------


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep the tests that run on the target."""
    target = config.getoption("--targets")
    kept = [
        item
        for item in items
        if getattr(item, "callspec", None) and target in item.callspec.params.values()
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
        answer(test=report.nodeid, when=report.when, outcome=report.outcome, text=text)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Let a file without tests for the target end well."""
    if exitstatus == 5:
        session.exitstatus = 0


# ---- what this file asks itself ------------------------------------------------------------------


def _scope(target: str, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the scope of a simulated device; a GPU needs none."""
    import torchdevice

    return contextlib.nullcontext() if target == GPU else torchdevice.simulate(target, **options)


def _ask_corpus(target: str, index: int, count: int) -> None:
    from benchmarks import conformance

    device = GPU if target == GPU else "simulated"
    for case in conformance.CASES[index::count]:
        if conformance.fits(case, device):
            outcomes = [
                conformance.apart(conformance.outcome, case.name, correct, device)
                for correct in (False, True)
            ]
            answer(case=case.name, expected=case.error, bug=outcomes[0], twin=outcomes[1])
    for name in sorted(conformance.FACTS)[index::count]:
        answer(fact=name, found=conformance.apart(conformance.fact, name, device))


def _ask_draws(target: str, index: int, count: int) -> None:
    """Call operators with inputs seeded by their names, so that all devices get the same ones."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    with _scope(target):
        torch.ones(1, device=GPU)
        for op in op_db[index::count]:
            name = f"{op.name}.{op.variant_test_name}".rstrip(".")
            until = time.process_time() + _SECONDS_AN_OPERATOR
            found: list[Any] = []
            for number, (dtype, sample) in enumerate(_draws(op, name)):
                if time.process_time() > until:
                    break
                torch.manual_seed(number)
                found.append([str(dtype), _outcome(op, sample)])
            answer(operator=name, draws=found)


def _draws(op: Any, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield up to :data:`DRAWS` inputs of an operator in random order, on the CPU."""
    import torch

    drawn = random.Random(name)
    dtypes = sorted(op.dtypes | op.dtypesIfCUDA, key=str)
    for turn in range(DRAWS):
        dtype = drawn.choice(dtypes)
        torch.manual_seed(turn)
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue  # inputs of this dtype cannot be made on a CPU
        if samples:
            yield dtype, drawn.choice(samples)


def _outcome(op: Any, sample: Any) -> Any:
    """Return what a program sees of a call on the GPU, short enough for a file."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    given = tree_map(
        lambda each: each.to(GPU) if isinstance(each, torch.Tensor) else each,
        (sample.input, sample.args, sample.kwargs),
    )
    options = {key: GPU if key == "device" else value for key, value in given[2].items()}
    try:
        result = op.op(given[0], *given[1], **options)
        torch.cuda.synchronize()
        return [_seen(each) for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[:1]}"


def _seen(tensor: Any) -> list[Any]:
    """Return the dtype, shape, strides, device and the mean of a tensor."""
    import torch

    plain = tensor.detach().cpu()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.dequantize() if plain.is_quantized else plain
    wide = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    finite = torch.nan_to_num(wide.double(), 0, 0, 0)
    mean = float(f"{finite.abs().mean().item():.6g}") if finite.numel() else 0
    strides = list(tensor.stride()) if tensor.layout is torch.strided else None
    return [str(tensor.dtype), list(tensor.shape), strides, tensor.device.type, mean]


def _ask_memory(target: str, index: int, count: int) -> None:
    """Measure the peak of a program on the device, and predict it."""
    import torch

    import torchdevice

    for name, program in list(_programs().items())[index::count]:
        with _scope(target, compute="meta"):
            torch.zeros(1, device=GPU)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            program()
            torch.cuda.synchronize()
            peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            gpu = torch.cuda.get_device_name()
        (planned,) = torchdevice.plan(program, target="h200")["devices"]
        predicted = {kind: size for kind, size in planned.items() if isinstance(size, int)}
        answer(program=name, gpu=gpu, allocated=peaks[0], reserved=peaks[1], predicted=predicted)


def _programs() -> dict[str, Callable[[], None]]:
    """Return ten programs that train or infer on one GPU."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint_sequential

    made = functools.partial(torch.randn, device=GPU)

    def trained(
        model: nn.Module,
        *shape: int,
        optimizer: Any = torch.optim.AdamW,
        dtype: Any = None,
        steps: int = 3,
    ) -> None:
        model = model.to(GPU)
        chosen = optimizer(model.parameters(), lr=1e-3)
        for _ in range(steps):
            with torch.autocast(GPU, dtype or torch.float16, enabled=dtype is not None):
                loss = model(made(*shape)).float().square().mean()
            loss.backward()
            chosen.step()
            chosen.zero_grad()

    def layer(width: int = 512) -> nn.Module:
        return nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)

    def dense() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)))

    def convolutions() -> nn.Sequential:
        widths = zip((3, 64, 128, 256), (64, 128, 256, 256), strict=True)
        return nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, 2, 1), nn.BatchNorm2d(other), nn.ReLU())
                for one, other in widths
            )
        )

    def inferred(dtype: Any) -> None:
        model = nn.Sequential(*(layer() for _ in range(4))).to(GPU, dtype).eval()
        with torch.inference_mode():
            model(made(8, 512, 512, dtype=dtype))

    def recomputed() -> None:
        model = dense().to(GPU)
        checkpoint_sequential(
            model, 4, made(4096, 2048, requires_grad=True), use_reentrant=False
        ).sum().backward()

    def attended() -> None:
        query, key, value = (
            made(4, 16, 2048, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ).sum().backward()

    def embedded() -> None:
        table = nn.Embedding(50_000, 256, sparse=True).to(GPU)
        table(torch.randint(50_000, (64, 512), device=GPU)).square().mean().backward()

    def momentum(parameters: Any, lr: float) -> Any:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    return {
        "dense layers, AdamW": lambda: trained(dense(), 4096, 2048),
        "dense layers, SGD with momentum": lambda: trained(dense(), 4096, 2048, optimizer=momentum),
        "convolutions with batch norm": lambda: trained(convolutions(), 32, 3, 224, 224),
        "convolutions in float16 autocast": lambda: trained(
            convolutions(), 32, 3, 224, 224, dtype=torch.float16
        ),
        "transformer layers": lambda: trained(
            nn.Sequential(*(layer() for _ in range(4))), 8, 512, 512
        ),
        "transformer layers in bfloat16 autocast": lambda: trained(
            nn.Sequential(*(layer() for _ in range(4))), 8, 512, 512, dtype=torch.bfloat16
        ),
        "transformer layers, inference in float16": lambda: inferred(torch.float16),
        "recomputed activations": recomputed,
        "causal attention in bfloat16": attended,
        "a sparse embedding": embedded,
    }


ASKED: dict[str, Callable[[str, int, int], None]] = {
    "corpus": _ask_corpus,
    "draws": _ask_draws,
    "memory": _ask_memory,
}
"""Part -> what answers a shard of it: called with the target, the number of the shard and how many
there are.
"""


# ---- reading the answers -------------------------------------------------------------------------


def answers_in(folder: Path) -> dict[tuple[str, str], Any]:
    """Return all answers in a folder by part and question."""
    found: dict[tuple[str, str], Any] = {}
    for file in sorted(folder.glob("*/*.json")):
        shard = json.loads(file.read_text())
        for each in shard["answers"]:
            question = next(str(each[key]) for key in _QUESTIONS if key in each)
            found[shard["part"], re.sub(r"simulated:\w+|cuda", "TARGET", question)] = each
    return found


_QUESTIONS = ("test", "case", "fact", "operator", "program")


def summary(folder: Path) -> str:
    """Return how many answers of each part there are, and which tests failed."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for (part, _), each in answers_in(folder).items():
        counts[part, each.get("outcome", "answered")] += 1
    shards = [json.loads(file.read_text()) for file in sorted(folder.glob("*/*.json"))]
    odd = [
        f"{each['part']} {each['name']}: {each['ended']}"
        for each in shards
        if each["ended"] in (CUT, "stopped")
    ]
    return "\n".join(
        [*(f"{part}: {count} {outcome}" for (part, outcome), count in sorted(counts.items())), *odd]
    )


def differences(one: Path, other: Path) -> list[str]:
    """Return where two folders have other answers to the same question."""
    ours, theirs = answers_in(one), answers_in(other)
    found: list[str] = []
    for part, question in sorted(ours.keys() & theirs.keys()):
        first, second = ours[part, question], theirs[part, question]
        if part == "draws":
            pairs = zip(first["draws"], second["draws"], strict=False)
            odd = [f"  {each}\n  {beside}" for each, beside in pairs if not _alike(each, beside)]
            found += [f"draws {question}: {len(odd)} differ, such as\n{odd[0]}"] if odd else []
        elif _told(first) != _told(second):
            found.append(f"{part} {question}:\n  {_told(first)}\n  {_told(second)}")
    return found


def _told(found: dict[str, Any]) -> Any:
    """Return what two devices should agree on: neither the GPU nor a failed test's words."""
    return {key: value for key, value in found.items() if key not in ("test", "text", "gpu")}


def _alike(one: Any, other: Any) -> bool:
    """Return whether two parts of an answer are equal, up to another order of additions."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-3)
    return bool(one == other)


def main(argv: list[str] | None = None) -> int:
    """Run the kit, or one shard of it."""
    options = _parser().parse_args(argv)
    if options.ask:
        part, index, count = options.ask
        ASKED[part](options.target, int(index), int(count))
        return 0
    if options.folder is None:
        print("name a folder for the answers", file=sys.stderr)
        return 2
    if options.compare:
        print("\n".join(differences(options.folder, options.compare)) or "no answer differs")
        return 0
    packages = [unpack(options.wheels, options.folder)] if options.wheels else []
    shards = (
        shard
        for part in options.parts
        for shard in PARTS[part](options.target)
        if options.only in shard.name
    )
    run(shards, options.folder, 60 * options.minutes, options.workers, packages)
    print(summary(options.folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the answers are, or will be")
    parser.add_argument(
        "--target", default=GPU, help="cuda (the default), or a simulated model such as h200"
    )
    parser.add_argument(
        "--minutes", type=float, default=14, help="after these minutes it ends (default: 14)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        help="how many shards run at once",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts"
    )
    parser.add_argument("--only", default="", help="only shards whose name contains this")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels to unpack")
    parser.add_argument(
        "--compare",
        type=Path,
        help="another folder, whose answers are compared with the first one's",
    )
    parser.add_argument(
        "--ask", nargs=3, metavar=("PART", "NUMBER", "COUNT"), help=argparse.SUPPRESS
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
