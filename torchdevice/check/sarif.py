"""Findings as SARIF 2.1.0, the form in which code hosts take the results of static analysis."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchdevice.check.rule_registry import RULES, Finding, Verdict
from torchdevice.version import __version__

_LEVELS = {Verdict.CHANGE: "error", Verdict.APPROXIMATE: "warning", Verdict.HANDLED: "note"}


def document(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the document that describes findings, as plain data."""
    driver = {"name": "torchdevice", "version": __version__, "rules": list(map(_rule, RULES))}
    results = list(map(_result, findings))
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    text = RULES[name].finds
    return {"id": name, "shortDescription": {"text": text.split(". ")[0]}, "fullDescription": {"text": text}}


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
    """Return a path as a URI: relative to the working folder where it is in it, as code hosts want it."""
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    if relative.startswith(os.pardir):
        return Path(os.path.abspath(path)).as_uri()
    return quote(os.fsencode(os.path.normpath(relative).replace(os.sep, "/")))
