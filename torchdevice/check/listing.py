"""Findings as text: totals, then by file what must be changed, what is approximate and what is handled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from torchdevice.check.rule_registry import Finding, Verdict
from torchdevice.foundation.styled_text import Line

SAID = {
    Verdict.CHANGE: "must be changed",
    Verdict.APPROXIMATE: "approximate",
    Verdict.HANDLED: "handled",
}


_COLOURS = {Verdict.CHANGE: "bold red", Verdict.APPROXIMATE: "yellow", Verdict.HANDLED: "green"}


def rendered(findings: Sequence[Finding], shown: Sequence[Finding], files: int, target: str) -> list[Line]:
    """Return the lines of findings.

    Args:
        findings: What was found, of which the totals are shown.
        shown: What of it is listed.
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
        rest.append("  --all lists what need not be changed")
    return [((first, "bold"),), *rest, *_by_file(shown)]


def _by_file(findings: Sequence[Finding]) -> list[Line]:
    lines: list[Line] = []
    for path, of_file in groupby(findings, key=lambda each: each.path):
        lines += ["", ((path, "bold cyan"),)]
        for (cell, line), of_line in groupby(of_file, key=lambda each: (each.cell, each.line)):
            same = list(of_line)
            place = f"  {line} (cell {cell}):" if cell else f"  {line}:"
            lines.append(((place, "cyan"), (f" {same[0].text}".rstrip(), "")))
            lines += map(_finding, same)
    return lines


def _finding(each: Finding) -> Line:
    said = (SAID[each.verdict], _COLOURS[each.verdict])
    return ("      ", ""), said, (f": {each.remedy} ", ""), (f"[{each.rule}]", "dim")
