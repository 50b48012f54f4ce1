"""Findings as text, and as SARIF 2.1.0, in which code hosts take the results of static analysis."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchdevice.check.rule_registry import RULES, Finding, Verdict
from torchdevice.kernel.python.styled_text import Line
from torchdevice.version import __version__

SAID = {
    Verdict.CHANGE: "must be changed",
    Verdict.APPROXIMATE: "approximate",
    Verdict.HANDLED: "handled",
}


_COLOURS = {Verdict.CHANGE: "bold red", Verdict.APPROXIMATE: "yellow", Verdict.HANDLED: "green"}


def rendered(
    findings: Sequence[Finding], shown: Sequence[Finding], files: int, target: str
) -> list[Line]:
    """Return the lines of findings.

    Args:
        findings: All findings, for the totals.
        shown: Those to list.
        files: How many files were read.
        target: The name of the target.
    """
    counts = Counter(finding.verdict for finding in findings)
    first = f"torchdevice: {files:,} {'file' if files == 1 else 'files'} checked for {target}"
    rest = [f"  {SAID[verdict]}: {counts[verdict]:,}" for verdict in Verdict if counts[verdict]]
    if not findings:
        rest.append("  nothing in them concerns the target")
    elif not counts[Verdict.CHANGE]:
        rest.append("  nothing must be changed")
    if len(shown) < len(findings):
        rest.append("  --all lists the others")
    return [((first, "bold"),), *rest, *_by_file(shown)]


def _by_file(findings: Sequence[Finding]) -> list[Line]:
    lines: list[Line] = []
    for path, of_file in groupby(findings, key=lambda each: each.path):
        lines += ["", ((path, "bold cyan"),)]
        for (cell, line), of_line in groupby(of_file, key=lambda each: (each.cell, each.line)):
            same = list(of_line)
            place = f"cell {cell}, line {line}" if cell else f"line {line}"
            lines += [_finding(each, place) for each in same]
            if same[0].text.strip():
                lines.append(((f"  {line:>5} | ", "cyan"), (same[0].text.strip(), "")))
    return lines


def _finding(each: Finding, place: str) -> Line:
    said = (SAID[each.verdict], _COLOURS[each.verdict])
    return (f"  {place}: ", "cyan"), said, (f": {each.remedy} ", ""), (f"[{each.rule}]", "dim")


_LEVELS = {Verdict.CHANGE: "error", Verdict.APPROXIMATE: "warning", Verdict.HANDLED: "note"}


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the document that describes findings, as plain data."""
    driver = {"name": "torchdevice", "version": __version__, "rules": list(map(_rule, RULES))}
    results = list(map(_result, findings))
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }


def _rule(name: str) -> dict[str, Any]:
    text = RULES[name].finds
    return {
        "id": name,
        "shortDescription": {"text": text.split(". ")[0]},
        "fullDescription": {"text": text},
    }


def _result(finding: Finding) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column}
    where = {"artifactLocation": {"uri": _uri(finding.path)}, "region": region}
    return {
        "ruleId": finding.rule,
        "ruleIndex": list(RULES).index(finding.rule),
        "level": _LEVELS[finding.verdict],
        "message": {"text": finding.remedy},
        "locations": [{"physicalLocation": where}],
    }


def _uri(path: str) -> str:
    """Return a path as a URI, relative to the working folder if in it, for code hosts."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    if relative.startswith(os.pardir):
        return Path(os.path.abspath(path)).as_uri()
    return quote(os.fsencode(os.path.normpath(relative).replace(os.sep, "/")))
