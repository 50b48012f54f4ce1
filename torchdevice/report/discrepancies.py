"""Findings of ``verify=``: operators that differ from the CPU, and how many were compared."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torchdevice.kernel.journal.callers import Site
from torchdevice.kernel.journal.journal import Journal

LEFT_OUT = {
    "unknown": "that the CPU cannot make",
    "odd": "with sparse, nested, quantized or own tensors",
    "foreign": "of other libraries",
    "unseen": "that must not be repeated",
}
"""Why calls are not compared, in the report's words."""

MOST = 1000
"""How many different findings are kept. The calls of the others are counted."""


@dataclasses.dataclass
class Finding:
    """One operator that does something else than the CPU at one line of the program.

    Attributes:
        operator: The operator with its overload, such as ``"aten::mm"`` or ``"aten::add.Tensor"``.
        kind: ``"values"``, ``"NaN"``, ``"inf"``, ``"shape"``, ``"dtype"``, ``"range"``, ``"not
            written"``, ``"not a view"``, ``"undeclared write"``.
        what: What is wrong, as a sentence without a full stop.
        site: The line of the program; in backward that of the forward operator, where it is known.
        backward: The line that called backward; None outside of backward.
        library: The line of a library that called the operator for the program's line; None without
            one.
        arguments: Each argument, as a person reads it.
        error: The largest absolute error; None where values are not what is wrong.
        allowed: The error that is allowed where the error is largest.
        script: The file of a program that calls only this operator; empty where none was written.
        count: How many calls showed it.
    """

    operator: str
    kind: str
    what: str
    site: Site
    backward: Site | None = None
    library: Site | None = None
    arguments: tuple[str, ...] = ()
    error: float | None = None
    allowed: float | None = None
    script: str = ""
    count: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Findings with the same key are reported once."""
        return self.operator, self.kind, self.site, self.backward

    def __str__(self) -> str:
        lines = [f"{self.operator}: {self.what}", *(f"  {each}" for each in self.arguments)]
        if self.backward is not None:
            lines.append(f"  in the backward that {self.backward} called")
        if self.library is not None:
            lines.append(f"  by {self.library}")
        if self.script:
            lines.append(f"  python {self.script} shows it alone")
        return "\n".join(lines)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, with equal ones of one line merged."""
    found: dict[Any, Finding] = {}
    for each in findings:
        known = found.get(each.key)
        found[each.key] = (
            each if known is None else dataclasses.replace(known, count=known.count + each.count)
        )
    return list(found.values())


class Findings:
    """The findings of one process, each once. Thread-safe; counts may lag by a few.

    Attributes:
        compared: Operator -> how many calls were compared with the CPU.
        random: The same, of calls that draw random numbers which the CPU cannot draw: of these only
            shapes, dtypes and ranges were compared.
        left_out: Why calls were not compared -> the same, of these calls.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: a forked process counts what it does itself."""
        self._found: dict[Any, Finding] = {}
        self.compared: Counter[str] = Counter()
        self.random: Counter[str] = Counter()
        self.left_out: dict[str, Counter[str]] = {why: Counter() for why in LEFT_OUT}

    def add(self, finding: Finding) -> Finding:
        """Count a finding, and return the one that is kept of it. Its count is 1 the first time."""
        known = self._found.get(finding.key)
        if known is None and len(self._found) >= MOST:
            kept = finding
        else:
            kept = self._found.setdefault(finding.key, finding)
        kept.count += 1
        return kept

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many calls of which operators were compared, and how."""
        found = {"compared": self.compared, "random": self.random, **self.left_out}
        return {name: dict(counts) for name, counts in found.items()}

    def __iter__(self) -> Iterator[Finding]:
        return iter(list(self._found.values()))

    def __len__(self) -> int:
        return len(self._found)


def findings_of(journal: Journal) -> Findings:
    """Return the findings in a journal."""
    return journal.part(Findings)
