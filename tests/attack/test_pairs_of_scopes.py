"""A thread computes in a scope while another changes scopes: no crash, and the same answers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from places import ROOT, benchmark
from processes import run_python

PAIRED = benchmark("pairs_of_scopes")
PAIRS = list(itertools.product(PAIRED.SCOPES, [kind for kind in PAIRED.SCOPES if kind != "none"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_thread_computes_while_another_enters_and_leaves(
    one: str, other: str, sweep: tuple[bool, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a process of its own, which a kernel that is no more ends by a signal."""
    if PAIRED.NATIVE in (one, other):
        request.getfixturevalue("native_kernels")
    seconds = "10" if sweep[0] else "1"
    words = ("-m", "benchmarks.pairs_of_scopes", one, other, "--seconds", seconds)
    ran = run_python(*words, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert f"{one} beside {other}" in ran.stdout
