"""Checks sources: reads them, applies the rules to each node, drops what the program ignores.

Sources are files, folders and notebooks. Nothing is run or imported.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import re
import tokenize
import warnings
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from torchdevice.check.rule_registry import RULES, SYNTAX, Finding, Found, Rule, Verdict, View
from torchdevice.check.target import Target
from torchdevice.kernel.python import foreign_files, garbage_collection

NOTEBOOK = ".ipynb"
_SUFFIXES = (".py", ".pyw", NOTEBOOK)

_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages"})
"""Folders that hold no source of the program. Those whose name begins with a dot, and virtual
environments, neither.
"""


class UnreadableError(ValueError):
    """A file that is no source of Python.

    Attributes:
        line: Where the error is, from 1.
    """

    def __init__(self, said: str, line: int = 1):
        super().__init__(said)
        self.line = line


class Place(NamedTuple):
    """Where a line of a source stands.

    Attributes:
        line: Number of the line in the file, from 1.
        cell: Number of the code cell in a notebook, from 1; 0 elsewhere.
    """

    line: int
    cell: int = 0


class Source(NamedTuple):
    """A source as text.

    Attributes:
        path: The path of the file, as it was given or found.
        text: The code; of a notebook, that of all code cells.
        places: Where each line of the code stands.
    """

    path: str
    text: str
    places: list[Place]

    def place(self, line: int) -> Place:
        """Return where a line of the code stands."""
        return self.places[min(max(line, 1), len(self.places)) - 1]

    def parsed(self) -> ast.Module:
        """Return the syntax tree.

        Raises:
            UnreadableError: This is not the syntax of Python 3.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in the program's strings
                return ast.parse(self.text)
        except SyntaxError as error:
            raise UnreadableError(
                f"the file cannot be parsed as Python 3: {error.msg}", error.lineno or 1
            ) from None
        except (ValueError, RecursionError, MemoryError) as error:
            # Bytes of zero, and source that is nested too deep.
            raise UnreadableError(
                f"the file cannot be parsed: {error or 'it is nested too deep'}"
            ) from None

    def ignored(self) -> dict[int, set[str] | None]:
        """Return lines with a comment ``# torchdevice: ignore``, and its rules; None is all."""
        found: dict[int, set[str] | None] = {}
        if _IGNORE.search(self.text) is None:
            return found
        # Magic words of a notebook's last cell.
        with contextlib.suppress(tokenize.TokenError, SyntaxError):
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                    found[token.start[0]] = (
                        None if match[1] is None else {*map(str.strip, match[1].split(","))}
                    )
        return found


_IGNORE = re.compile(r"#\s*torchdevice:\s*ignore(?:\[([^\]]*)\])?")


# ---- files ---------------------------------------------------------------------------------------


class Files(NamedTuple):
    """The sources that paths name.

    Attributes:
        paths: The files, each once.
        outside: The links in folders that lead out of everything that was named. They are not
            followed.
    """

    paths: list[str]
    outside: list[str]


def found(paths: Iterable[str]) -> Files:
    """Return the files that paths name: files themselves, and the sources in folders.

    Links within the paths are followed, each folder once, so that links in a circle end.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: There is no source in them.
    """
    paths = list(paths)
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"there is no file or folder {path!r}.")
    roots = tuple(map(os.path.realpath, paths))
    files: dict[str, str] = {}
    outside: list[str] = []
    for path in paths:
        inside = sorted(_in_folder(path, roots, outside)) if os.path.isdir(path) else [path]
        for file in inside:
            files.setdefault(os.path.realpath(file), file)
    if not files:
        raise ValueError(
            f"no Python file and no notebook is in {', '.join(map(repr, paths))}. Name one, or a "
            "folder."
        )
    return Files(list(files.values()), outside)


def _in_folder(path: str, roots: Sequence[str], outside: list[str]) -> Iterator[str]:
    """Yield the sources in a folder. Links that lead out of all roots are put into ``outside``."""
    seen: set[str] = set()
    for folder, inner, files in os.walk(path, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = [name for name in inner if name not in _LEFT_OUT and not name.startswith(".")]
        files = [name for name in files if name.endswith(_SUFFIXES) and not name.startswith(".")]
        for names in (inner, files):
            leaving = [name for name in names if _leads_out(os.path.join(folder, name), roots)]
            outside += [os.path.join(folder, name) for name in leaving]
            names[:] = [name for name in names if name not in leaving]
        inner[:] = [name for name in inner if not _is_environment(os.path.join(folder, name))]
        yield from filter(_is_source, (os.path.join(folder, name) for name in files))


def _is_environment(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _is_source(path: str) -> bool:
    """Return whether a path is no pipe or device. A link that leads nowhere is unreadable later."""
    return os.path.isfile(path) or os.path.islink(path)


def _leads_out(path: str, roots: Sequence[str]) -> bool:
    """Return whether a path is a link that leads out of all of some folders."""
    if not os.path.islink(path):
        return False
    real = os.path.realpath(path)
    return not any(real == root or real.startswith(os.path.join(root, "")) for root in roots)


_LARGEST = {NOTEBOOK: 64 << 20}
"""Suffix -> the greatest size of a file in bytes. Outputs make notebooks large."""

_LARGEST_PROGRAM = 8 << 20


def read(path: str) -> Source:
    """Return the source in a file.

    Raises:
        UnreadableError: The file cannot be read, is no regular one or too large, or holds no text,
            or is no notebook.
    """
    try:
        data = foreign_files.read(path, _LARGEST.get(os.path.splitext(path)[1], _LARGEST_PROGRAM))
    except OSError as error:
        raise UnreadableError(f"the file cannot be read: {error.strerror}") from None
    return _notebook(path, data) if path.endswith(NOTEBOOK) else program(path, data)


def program(path: str, data: bytes) -> Source:
    """Return the source of a program.

    Raises:
        UnreadableError: The bytes are no text in the encoding that they declare, which is UTF-8
            without a declaration.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding, newline=None).read()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"the file is not text in {error.encoding}", line) from None
    except (SyntaxError, LookupError) as error:
        raise UnreadableError(f"the file is not text: {error}") from None
    return Source(path, text, [Place(line) for line in range(1, text.count("\n") + 2)])


# ---- notebooks -----------------------------------------------------------------------------------


class _At(str):
    """A string of a JSON file, with the line that it begins at."""

    line: int


class _Decoder(json.JSONDecoder):
    """Reads JSON with the line of each string: editors and code hosts show a file's lines."""

    def __init__(self, text: str):
        super().__init__()
        self._starts = [match.end() for match in re.finditer("\n", text)]
        self.parse_string = self._string
        # The scanner in C takes its own function for strings.
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _string(self, text: str, end: int, strict: bool = True) -> tuple[str, int]:
        value, after = json.decoder.scanstring(text, end, strict)  # type: ignore[attr-defined]
        found = _At(value)
        # ``end`` is behind the quote that begins the string.
        found.line = bisect_right(self._starts, end - 1) + 1
        return found, after


def _notebook(path: str, data: bytes) -> Source:
    try:
        text = data.decode("utf-8-sig")
        content = _Decoder(text).decode(text)
        sheets = content.get("worksheets", [content])  # in the third version of the format
        found = [
            cell for sheet in sheets for cell in sheet["cells"] if cell.get("cell_type") == "code"
        ]
        cells = [_lines(cell.get("source", cell.get("input", []))) for cell in found]
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise UnreadableError(f"the file is no notebook: {error}") from None
    lines = [
        (code, Place(line, number))
        for number, cell in enumerate(cells, 1)
        for line, code in _python(cell)
    ]
    return Source(
        path, "\n".join(code for code, _ in lines), [place for _, place in lines] or [Place(1)]
    )


def _lines(source: _At | list[_At]) -> list[tuple[int, str]]:
    parts: list[_At] = [source] if isinstance(source, _At) else source
    found: list[tuple[int, str]] = []
    unfinished = False
    for part in parts:
        for line in re.findall(r"[^\n]*\n|[^\n]+", part):
            number, before = found.pop() if unfinished else (part.line, "")
            found.append((number, before + line.removesuffix("\n")))
            unfinished = not line.endswith("\n")
    return found


def _python(cell: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a cell, with ``pass`` instead of IPython's own syntax."""
    other = bool(cell) and re.match(r"%%(?!time|capture|prun)", cell[0][1]) is not None
    for line, code in cell:
        magic = re.match(r"(\s*)(?:[%!?]|[\w.]+\?\??\s*$|[\w, ]+=\s*[%!])", code)
        if other:
            yield line, ""
        elif magic:
            yield line, f"{magic[1]}pass"
        else:
            yield line, code


_MANY = 100
"""From how many files on processes share the work; fewer take less time than the processes'
beginning.
"""


def check_file(path: str, target: Target, rules: Collection[str] | None = None) -> list[Finding]:
    """Return the findings in a file, by line. A file that cannot be read is a finding."""
    try:
        return check_source(read(path), target, rules)
    except UnreadableError as error:
        return [_unreadable(path, error.line, error)] if rules is None or SYNTAX in rules else []


def check_files(
    files: list[tuple[str, Collection[str]]], target: Target
) -> Iterator[list[Finding]]:
    """Yield the findings of each file, in order. Many files are shared out among processes.

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
    # Syntax trees have no circles, and it would look at each node several times.
    with garbage_collection.paused():
        return check_file(file[0], target, file[1])


def check_source(
    source: Source, target: Target, rules: Collection[str] | None = None
) -> list[Finding]:
    """Return the findings in a source, by line."""
    applied = [rule for rule in RULES.values() if rules is None or rule.name in rules]
    try:
        view = View(source.parsed(), target, source.path)
    except UnreadableError as error:
        found = [_unreadable(source.path, source.place(error.line).line, error)]
        return [each for each in found if rules is None or each.rule in rules]
    ignored = source.ignored()
    kept = (each for each in _looked(view, source, applied) if not _is_ignored(each, ignored))
    findings = {(each.line, each.rule, each.remedy): each for each in kept}
    return sorted(
        findings.values(), key=lambda each: (each.cell, each.line, each.column, each.rule)
    )


def _unreadable(path: str, line: int, error: UnreadableError) -> Finding:
    said = f"{error}."
    return Finding(
        path, line, SYNTAX, Verdict.CHANGE, said[:1].upper() + said[1:], first=line, last=line
    )


def _looked(view: View, source: Source, rules: list[Rule]) -> Iterator[Finding]:
    by_kind: dict[type[ast.AST], list[Rule]] = {}
    is_cuda, is_whole = view.target.native == "cuda", not view.target.profile_name
    for rule in (
        each for each in rules if not ((each.of_cuda and is_cuda) or (each.of_lacks and is_whole))
    ):
        for kind in rule.kinds:
            by_kind.setdefault(kind, []).append(rule)
    lines = source.text.split("\n")
    for node in view.nodes:
        for rule in by_kind.get(type(node), ()):
            for found in rule.look(node, view):
                yield _finding(node, found, rule.name, view, source, lines)


def _finding(
    node: ast.AST, found: Found, rule: str, view: View, source: Source, lines: list[str]
) -> Finding:
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
        **source.place(line)._asdict(),
        **found._asdict(),
    )


def _extent(node: ast.AST, view: View) -> tuple[int, int]:
    """Return a statement's first and last line; of one with a body, those of its header."""
    line = getattr(node, "lineno", 1)
    last = getattr(node, "end_lineno", None) or line
    statement = next(
        (each for each in (node, *view.around(node)) if isinstance(each, ast.stmt)), None
    )
    if statement is None:
        return line, last
    return min(line, statement.lineno), last if hasattr(
        statement, "body"
    ) else statement.end_lineno or last


def _is_ignored(finding: Finding, ignored: dict[int, set[str] | None]) -> bool:
    found = [rules for line, rules in ignored.items() if finding.first <= line <= finding.last]
    return any(rules is None or finding.rule in rules for rules in found)
