"""Tests of stood-in packages, unmodified: ``python -m benchmarks.package_tests SOURCES [--write]``.

SOURCES is a folder with the unpacked source archives of the packages, one folder for each of
:data:`SUITES`. A sample of the cases of each test runs under ``torchdevice run``, drawn by
``--seed``. ``--write`` records the counts in package_tests.json, which docs/packages.md shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_suffix(".json")


class Suite(NamedTuple):
    """A file of tests.

    Attributes:
        package: The distribution, which is also the name of its folder.
        version: The release whose tests these are.
        file: The file, in the folder of tests.
        sample: How many cases of each test are drawn.
        folder: The folder of tests.
    """

    package: str
    version: str
    file: str
    sample: int = 20
    folder: str = "tests"


SUITES = (
    Suite("flash-attention", "2.8.3", "test_rotary.py", 6),
    Suite("flash-attention", "2.8.3", "ops/test_dropout_layer_norm.py", 6),
    *(
        Suite("xformers", "0.0.32.post2", f"test_{name}.py", 3)
        for name in ("mem_eff_attention", "rmsnorm", "unbind")
    ),
    Suite("apex", "0.1", "L0/run_fused_layer_norm/test_fused_layer_norm.py", 12),
    Suite("apex", "0.1", "L0/run_optimizers/test_adam.py"),
    Suite("apex", "0.1", "L0/run_optimizers/test_fused_optimizer.py"),
    Suite("apex", "0.1", "L0/run_optimizers/test_fused_novograd.py"),
    *(
        Suite("mmcv", "2.2.0", f"test_ops/test_{name}.py")  # with mmcv-lite installed
        for name in (
            "roi_align",
            "nms",
            "bbox",
            "deform_conv",
            "modulated_deform_conv",
            "focal_loss",
            "ms_deformable_attn",
        )
    ),
    Suite("pytorch_scatter", "2.1.2", "test_scatter.py", 30, "test"),
    Suite("pytorch_scatter", "2.1.2", "test_segment.py", 30, "test"),
    Suite("pytorch_scatter", "2.1.2", "test_zero_tensors.py", 30, "test"),
    Suite("pytorch_scatter", "2.1.2", "test_broadcasting.py", 30, "test"),
    Suite("pytorch_scatter", "2.1.2", "test_gather.py", 30, "test"),
    Suite("pytorch_sparse", "0.6.18", "test_coalesce.py", 30, "test"),
    Suite("pytorch_sparse", "0.6.18", "test_transpose.py", 30, "test"),
    Suite("pytorch_sparse", "0.6.18", "test_spmm.py", 30, "test"),
    Suite("causal-conv1d", "1.5.2", "test_causal_conv1d.py", 12),
    Suite("mamba", "2.2.5", "ops/test_selective_scan.py"),
    Suite("mamba", "2.2.5", "ops/triton/test_selective_state_update.py"),
    Suite("mamba", "2.2.5", "ops/triton/test_layernorm_gated.py", 6),
)


def run(suite: Suite, sources: Path, target: str, seed: int, limit: int) -> dict[str, Any]:
    """Run a sample of a file of tests on a target, and return the counts of cases.

    Args:
        suite: The file.
        sources: The folder with the packages' sources.
        target: The target.
        seed: Of the sample.
        limit: Seconds for each case.
    """
    source = sources / suite.package
    tests = source / suite.folder / suite.file
    is_package = (source / suite.folder / "__init__.py").exists()
    with tempfile.TemporaryDirectory() as folder:
        if is_package:
            # pytest would put the package's own folder on the path.
            shutil.copytree(source / suite.folder, Path(folder, suite.folder))
            tests = Path(folder, suite.folder, suite.file)
        report = Path(folder, "report.xml")
        options = (
            "-p",
            "benchmarks.package_references",
            "-p",
            "no:cacheprovider",
            "-q",
            f"--timeout={limit}",
        )
        words = (
            "-m",
            "torchdevice",
            "run",
            "--target",
            target,
            "-m",
            "pytest",
            *options,
            f"--junitxml={report}",
        )
        environment = {"PACKAGE_SOURCE": source, "SAMPLE_SEED": seed, "SAMPLE": suite.sample}
        if is_package:
            environment["PACKAGE_WHOLE"] = 1
        # From a folder without the package, which would be imported in place of the stand-in.
        subprocess.run(
            [sys.executable, *words, tests],
            cwd=folder,
            env={
                **os.environ,
                # Test files import one another by name.
                "PYTHONPATH": os.pathsep.join(
                    (str(RESULTS.parents[1]), str(tests.parent), os.environ.get("PYTHONPATH", ""))
                ),
                **{k: str(v) for k, v in environment.items()},
            },
            check=False,
        )
        (counts,) = xml.etree.ElementTree.parse(report).getroot()
    failed = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
    skipped = int(counts.get("skipped", 0))
    passed = int(counts.get("tests", 0)) - failed - skipped
    row = {"target": target, "seed": seed, "date": f"{datetime.date.today()}"}
    return {**suite._asdict(), **row, "passed": passed, "failed": failed, "skipped": skipped}


def record(rows: Sequence[dict[str, Any]]) -> None:
    """Write counts to package_tests.json, in place of those of the same file and target."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    latest = {(row["package"], row["file"], row["target"]): row for row in [*known, *rows]}
    names = [(suite.package, suite.file) for suite in SUITES]
    kept = sorted(
        latest.values(), key=lambda row: (names.index((row["package"], row["file"])), row["target"])
    )
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests, and return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.package_tests", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("sources", type=Path, help="a folder with the packages' sources")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="only files whose path contains one"
    )
    parser.add_argument(
        "--target", nargs="+", default=["simulated:a100", "cpu"], help="the targets"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--limit", type=int, default=120, help="seconds for a case (default: 120)")
    parser.add_argument("--write", action="store_true", help="record the counts")
    options = parser.parse_args(argv)
    chosen = [
        each
        for each in SUITES
        if any(name in f"{each.package}/{each.file}" for name in options.only)
    ]
    rows = []
    for target in options.target:
        for suite in chosen:
            rows.append(run(suite, options.sources.resolve(), target, options.seed, options.limit))
            if options.write:  # after each file, because an interrupt must not lose an hour's work
                record(rows[-1:])
    print(json.dumps(rows, indent=2))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
