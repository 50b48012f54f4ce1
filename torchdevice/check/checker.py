"""Checks sources: reads them, lets the rules look at each node, and leaves out what the program says to ignore."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor

from torchdevice.check import sources
from torchdevice.check.rules import RULES, SYNTAX, Finding, Found, Rule, Verdict, View
from torchdevice.check.sources import Source, UnreadableError
from torchdevice.check.target import Target
from torchdevice.foundation import garbage_collection

_MANY = 100
"""From how many files on processes share the work; fewer take less time than the processes' beginning."""


def check_file(path: str, target: Target, rules: Collection[str] | None = None) -> list[Finding]:
    """Return what was found in a file, by line. A file that cannot be read is a finding."""
    try:
        return check_source(sources.read(path), target, rules)
    except UnreadableError as error:
        return [_unreadable(path, error.line, error)] if rules is None or SYNTAX in rules else []


def check_files(files: list[tuple[str, Collection[str]]], target: Target) -> Iterator[list[Finding]]:
    """Yield what was found in each file, in their order. Many files are shared out among processes.

    Args:
        files: Each file, and the rules to apply to it.
        target: The device that stands in.
    """
    check = functools.partial(_check, target)
    if len(files) < _MANY:
        yield from map(check, files)
    else:
        with ProcessPoolExecutor() as pool:
            yield from pool.map(check, files, chunksize=8)


def _check(target: Target, file: tuple[str, Collection[str]]) -> list[Finding]:
    with garbage_collection.paused():  # syntax trees have no circles, and it would look at each node several times
        return check_file(file[0], target, file[1])


def check_source(source: Source, target: Target, rules: Collection[str] | None = None) -> list[Finding]:
    """Return what was found in a source, by line."""
    applied = [rule for rule in RULES.values() if rules is None or rule.name in rules]
    try:
        view = View(source.parsed(), target, source.path)
    except UnreadableError as error:
        found = [_unreadable(source.path, source.place(error.line).line, error)]
        return [each for each in found if rules is None or each.rule in rules]
    ignored = source.ignored()
    findings = {
        (finding.line, finding.rule, finding.remedy): finding
        for finding in _looked(view, source, applied)
        if not _is_ignored(finding, ignored)
    }
    return sorted(findings.values(), key=lambda each: (each.cell, each.line, each.column, each.rule))


def _unreadable(path: str, line: int, error: UnreadableError) -> Finding:
    said = f"{error}."
    return Finding(path, line, SYNTAX, Verdict.CHANGE, said[:1].upper() + said[1:], first=line, last=line)


def _looked(view: View, source: Source, rules: list[Rule]) -> Iterator[Finding]:
    by_kind: dict[type[ast.AST], list[Rule]] = {}
    is_cuda, is_whole = view.target.native == "cuda", not view.target.profile_name
    for rule in (each for each in rules if not ((each.of_cuda and is_cuda) or (each.of_lacks and is_whole))):
        for kind in rule.kinds:
            by_kind.setdefault(kind, []).append(rule)
    lines = source.text.split("\n")
    for node in view.nodes:
        for rule in by_kind.get(type(node), ()):
            for found in rule.look(node, view):
                yield _finding(node, found, rule.name, view, source, lines)


def _finding(node: ast.AST, found: Found, rule: str, view: View, source: Source, lines: list[str]) -> Finding:
    line = getattr(node, "lineno", 1)
    text = lines[min(line, len(lines)) - 1]
    # ast counts bytes of UTF-8, and editors count characters.
    column = len(text.encode()[: getattr(node, "col_offset", 0)].decode(errors="ignore")) + 1
    first, last = _extent(node, view)
    return Finding(
        path=source.path,
        rule=rule,
        column=column,
        text=text.strip(),
        first=first,
        last=last,
        **vars(source.place(line)),
        **found._asdict(),
    )


def _extent(node: ast.AST, view: View) -> tuple[int, int]:
    """Return the first and the last line of a node's statement; where the statement has a body, of its header."""
    line = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or line
    statement = next((each for each in (node, *view.around(node)) if isinstance(each, ast.stmt)), None)
    if statement is None:
        return line, last
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return min(line, statement.lineno), max(last, min(body[0].lineno - 1, last))
    return min(line, statement.lineno), statement.end_lineno or last


def _is_ignored(finding: Finding, ignored: dict[int, set[str] | None]) -> bool:
    found = [rules for line, rules in ignored.items() if finding.first <= line <= finding.last]
    return any(rules is None or finding.rule in rules for rules in found)
