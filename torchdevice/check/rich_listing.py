"""Findings in colours. This is imported only when they are shown on a terminal: it needs rich."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from torchdevice.check import listing
from torchdevice.check.findings import Finding, Verdict

_COLOURS = {Verdict.CHANGE: "bold red", Verdict.APPROXIMATE: "yellow", Verdict.HANDLED: "green"}


def rendered(findings: Sequence[Finding], files: int, target: str) -> RenderableType:
    """Return what rich prints for findings."""
    first, *rest = listing.heading(findings, files, target)
    parts: list[RenderableType] = [Text(first, style="bold"), *map(Text, rest)]
    for path, of_file in groupby(findings, key=lambda each: each.path):
        parts += [Text(), Text(path, style="bold cyan")]
        for _, of_line in groupby(of_file, key=lambda each: (each.cell, each.line)):
            same = list(of_line)
            parts.append(Text.assemble((f"  {listing.place(same[0])}: ", "cyan"), same[0].text))
            parts += map(_finding, same)
    return Group(*parts)


def _finding(finding: Finding) -> Text:
    said = (listing.SAID[finding.verdict], _COLOURS[finding.verdict])
    return Text.assemble("      ", said, f": {finding.remedy} ", (f"[{finding.rule}]", "dim"))
