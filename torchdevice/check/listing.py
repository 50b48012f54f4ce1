"""Findings as plain text: totals, then by file what must be changed, what is approximate and what is handled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from torchdevice.check.findings import Finding, Verdict

SAID = {
    Verdict.CHANGE: "must be changed",
    Verdict.APPROXIMATE: "approximate",
    Verdict.HANDLED: "handled",
}


def rendered(findings: Sequence[Finding], files: int, target: str) -> str:
    """Return the text of findings, without a line break at its end."""
    return "\n".join([*heading(findings, files, target), *_by_file(findings)])


def heading(findings: Sequence[Finding], files: int, target: str) -> list[str]:
    """Return the totals.

    Args:
        findings: What was found.
        files: How many files were read.
        target: The name of the target.
    """
    counts = Counter(finding.verdict for finding in findings)
    first = f"torchdevice: {files:,} {'file' if files == 1 else 'files'} checked for {target}"
    lines = [first, *(f"  {SAID[verdict]}: {counts[verdict]:,}" for verdict in Verdict if counts[verdict])]
    if not findings:
        lines.append("  nothing in them concerns the target")
    elif not counts[Verdict.CHANGE]:
        lines.append("  nothing must be changed")
    return lines


def place(finding: Finding) -> str:
    """Return the place of a finding in its file, as a person writes it."""
    cell = f" (cell {finding.cell})" if finding.cell else ""
    return f"{finding.line}{cell}"


def _by_file(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for path, of_file in groupby(findings, key=lambda each: each.path):
        lines += ["", path]
        for _, of_line in groupby(of_file, key=lambda each: (each.cell, each.line)):
            same = list(of_line)
            lines.append(f"  {place(same[0])}: {same[0].text}".rstrip())
            lines += [f"      {SAID[each.verdict]}: {each.remedy} [{each.rule}]" for each in same]
    return lines
