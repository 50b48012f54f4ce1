"""The rules: what each looks for in a source. A rule is a function of a node that yields what it found."""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchdevice.check.source_view import View


class Verdict(enum.Enum):
    """What a line means for a target, the most important first."""

    CHANGE = "change"
    """The program must be changed, or raises an error."""
    APPROXIMATE = "approximate"
    """The program runs. It may compute or read other numbers, or take another branch."""
    HANDLED = "handled"
    """The program runs as it is, with the same meaning."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something at a line of a source that concerns a target.

    Attributes:
        path: The file.
        line: Line number in the file, from 1.
        rule: The name of the rule that found it.
        verdict: What it means.
        remedy: What is done about it or what to do, in one sentence.
        column: Column of the first character, from 1.
        text: The source of the line.
        cell: Number of the code cell of a notebook, from 1; 0 elsewhere.
        first: Number of the first line of the statement.
        last: Number of the last line of the statement, or of its header where it has a body.
        leaves_trace: Whether a report of the program's run shows it when the line runs.
    """

    path: str
    line: int
    rule: str
    verdict: Verdict
    remedy: str
    column: int = 1
    text: str = ""
    cell: int = 0
    first: int = 0
    last: int = 0
    leaves_trace: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints of the finding."""
        names = ("path", "line", "rule", "verdict", "remedy", "column", "text")
        return {**{name: getattr(self, name) for name in names}, "verdict": self.verdict.value}


class Found(NamedTuple):
    """What a rule found at a node.

    Attributes:
        verdict: What it means.
        remedy: What is done about it or what to do, in one sentence.
        leaves_trace: Whether a report of the program's run shows it when the line runs.
    """

    verdict: Verdict
    remedy: str
    leaves_trace: bool = True


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: What ``--select`` and comments call it.
        finds: What it looks for and what becomes of it, in a few sentences.
        kinds: The kinds of nodes that it looks at.
        look: Yields what it finds at a node.
        of_cuda: Whether it looks for what needs CUDA, so that nothing is found for CUDA itself.
        of_lacks: Whether it looks for what the target's profile lacks, so that nothing is found without one.
    """

    name: str
    finds: str
    kinds: tuple[type[ast.AST], ...]
    look: Callable[[ast.AST, View], Iterator[Found]]
    of_cuda: bool
    of_lacks: bool


RULES: dict[str, Rule] = {}


def rule(
    name: str, *kinds: type[ast.AST], of_cuda: bool = False, of_lacks: bool = False
) -> Callable[[Callable[..., Iterator[Found]]], Callable[..., Iterator[Found]]]:
    """Register a function as a rule for some kinds of nodes. Its docstring says what the rule finds."""

    def register(look: Callable[..., Iterator[Found]]) -> Callable[..., Iterator[Found]]:
        RULES[name] = Rule(name, " ".join((look.__doc__ or "").split()), kinds, look, of_cuda, of_lacks)
        return look

    return register


SYNTAX = "syntax"
"""The rule of files that cannot be checked."""


@rule(SYNTAX)
def _syntax(node: ast.AST, view: View) -> Iterator[Found]:
    """A file that is no Python 3: a syntax error, bytes that are no text, a notebook that is no JSON."""
    yield from ()
