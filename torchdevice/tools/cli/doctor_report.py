"""``torchdevice doctor --report``: a device's results of ``torchdevice_selftest``, to be sent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from torchdevice.tools.cli.diagnostics import Finding
from torchdevice.version import versions

TESTS = "torchdevice_selftest"

_LEFT_OUT = frozenset({"compiler", "variables", "targets", "native"})
"""Findings that name folders of the sender, or that are not about the device."""


class Result(NamedTuple):
    """The result of one test.

    Attributes:
        feature: The subject of the test, in words.
        outcome: ``"passed"``, ``"failed"`` or ``"left out"``.
        seconds: How long it took.
        said: The output of the test, and the error that ended it.
    """

    feature: str
    outcome: str
    seconds: float
    said: str


def results(target: str, tests: str = TESTS) -> list[Result]:
    """Run the tests on a target, in a process of their own.

    Raises:
        ImportError: pytest is not installed.
        OSError: The tests did not run.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ImportError("doctor --report runs tests. Install pytest first: pip install pytest")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results.xml")
        # -c: the configuration of the project in whose folder the command is typed is not asked.
        options = [
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            "-p",
            "no:cacheprovider",
            "-o",
            "junit_logging=system-out",
        ]
        command = [
            sys.executable,
            "-m",
            "pytest",
            *options,
            f"--junitxml={file}",
            "--pyargs",
            tests,
        ]
        path = os.pathsep.join(each for each in sys.path if each)
        variables = {**os.environ, "TORCHDEVICE_TARGET": target, "PYTHONPATH": path}
        variables.pop("TORCHDEVICE", None)
        done = subprocess.run(
            command, env=variables, cwd=folder, capture_output=True, text=True, check=False
        )
        cases = list(ElementTree.parse(file).iter("testcase")) if file.exists() else []
        if not cases:
            raise OSError(f"the tests on {target!r} did not run: {done.stdout}{done.stderr}")
        return list(map(_result, cases))


def _result(case: ElementTree.Element) -> Result:
    properties = {each.get("name"): each.get("value") for each in case.iter("property")}
    feature = str(
        properties.get("feature") or case.get("name", "").removeprefix("test_").replace("_", " ")
    )
    # pytest puts a heading of dashes above the output of each phase.
    said = "\n".join(
        line
        for line in (case.findtext("system-out") or "").splitlines()
        if not line.startswith("---")
    )
    failures = [*case.findall("failure"), *case.findall("error")]
    outcome = "passed"
    if failures:
        outcome = "failed"
        said = "\n".join(filter(None, [said, failures[0].get("message")]))
    elif case.find("skipped") is not None:
        outcome = "left out"
    return Result(feature, outcome, float(case.get("time", 0)), said)


def text(target: str, findings: list[Finding], found: list[Result]) -> str:
    """Return the report as Markdown."""
    return "\n".join(_lines(target, findings, found)) + "\n"


def _lines(target: str, findings: list[Finding], found: list[Result]) -> Iterator[str]:
    ran = [each for each in found if each.outcome != "left out"]
    passed = sum(each.outcome == "passed" for each in ran)
    yield f"# torchdevice on {target}: {passed} of {len(ran)} passed"
    yield ""
    yield f"- system: {system()}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in versions().items())}"
    for each in findings:
        if each.subject not in _LEFT_OUT:
            yield f"- {each.subject} ({each.status}): {each.said}"
    yield ""
    yield "| feature | result | seconds |"
    yield "|---|---|---|"
    for result in ran:
        yield f"| {result.feature} | {result.outcome} | {result.seconds:.1f} |"
    for result in ran:
        if result.said.strip():
            yield f"\n{result.feature}:\n\n```text\n{result.said.strip()}\n```"


def system() -> str:
    """Return the system and the processor."""
    parts = [platform.platform(), platform.machine()]
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        parts.append(
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        )
    return ", ".join(parts)


def where_to_send() -> str:
    """Return the sentence that asks for the report, with the issues' address if it is known."""
    listed = importlib.metadata.metadata("torchdevice-portable").get_all("Project-URL") or []
    addresses = dict(each.split(", ", 1) for each in listed)
    place = addresses.get("Issues", "the issues of torchdevice")
    return (
        f"Please send this text to {place}, also if everything passed. It names no file and no "
        "user of yours."
    )
