"""A project's own settings: ``[tool.torchdevice.check]`` in pyproject.toml, and a baseline."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchdevice.check.rule_registry import Finding
from torchdevice.kernel.python import data_files, foreign_files

_TABLE = "[tool.torchdevice.check]"

_LARGEST = 32 << 20
"""The greatest size of a project's files in bytes."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The table of a project, with the names of its keys.

    Attributes:
        folder: Where ``pyproject.toml`` is. Patterns and the baseline are relative to it.
        target: The device that stands in.
        select: The rules to apply; all where it is empty.
        ignore: The rules not to apply.
        exclude: Patterns of files and folders that are not checked.
        per_file_ignores: Pattern of files -> the rules not to apply in them.
        baseline: The file with the findings that are known.
    """

    folder: Path
    target: str | None = None
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()
    exclude: Sequence[str] = ()
    per_file_ignores: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    baseline: str | None = None

    def excludes(self, path: str) -> bool:
        """Return whether a pattern excludes a file, or a folder that it is in."""
        name = self._name(path)
        parts = [name, *map(str, Path(name).parents)]
        return any(_matches(part, pattern) for pattern in self.exclude for part in parts)

    def ignored_in(self, path: str) -> set[str]:
        """Return the rules that are not to be applied in a file."""
        name = self._name(path)
        found = [
            rules for pattern, rules in self.per_file_ignores.items() if _matches(name, pattern)
        ]
        return {rule for rules in found for rule in rules}

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self.folder).replace(os.sep, "/")


def _matches(name: str, pattern: str) -> bool:
    pattern = pattern.rstrip("/")
    return fnmatch.fnmatchcase(name, pattern) or (
        "/" not in pattern and fnmatch.fnmatchcase(Path(name).name, pattern)
    )


def of_project(folder: Path) -> Configuration:
    """Read the nearest ``pyproject.toml`` at or above a folder.

    Raises:
        ValueError: The table has an unknown key, or a value of a wrong kind.
    """
    file = next(
        (
            each
            for each in (at / "pyproject.toml" for at in (folder, *folder.parents))
            if each.is_file()
        ),
        None,
    )
    if file is None:
        return Configuration(folder)
    try:
        text = foreign_files.read(file, _LARGEST).decode("utf-8")
        table = data_files.toml(text).get("tool", {}).get("torchdevice", {}).get("check", {})
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be read: {error.strerror}. Correct it.") from None
    except ValueError as error:
        raise ValueError(f"{str(file)!r} cannot be parsed: {error}. Correct it.") from None
    # All but ``folder``.
    keys = {each.name.replace("_", "-"): each for each in dataclasses.fields(Configuration)[1:]}
    for key, value in table.items():
        if key not in keys:
            raise ValueError(
                f"{file} has {key!r} in {_TABLE}, which is not known. Use keys among "
                f"{', '.join(keys)}."
            )
        wanted = _WANTED.get(key, "a list of texts")
        if _kind(value) != wanted:
            raise ValueError(
                f"{file} has {key} = {value!r} in {_TABLE}, which is not {wanted}. Write {wanted}."
            )
    return Configuration(file.parent, **{keys[key].name: value for key, value in table.items()})


_WANTED = {
    "target": "a text",
    "baseline": "a text",
    "per-file-ignores": "a table of lists of texts",
}
"""The kinds of values, for keys that take no list."""


def _kind(value: Any) -> str:
    """Return the kind of a value, in words; empty for a kind that no key takes."""
    if isinstance(value, list):
        return "a list of texts" if all(isinstance(each, str) for each in value) else ""
    if isinstance(value, dict):
        if all(_kind(each) == "a list of texts" for each in value.values()):
            return "a table of lists of texts"
        return ""
    return "a text" if isinstance(value, str) else ""


# ---- the baseline --------------------------------------------------------------------------------


def write_baseline(file: Path, findings: Iterable[Finding]) -> None:
    """Write the now known findings, without line numbers, which change by edits elsewhere."""
    counts = Counter(_key(file, finding) for finding in findings)
    rows = [
        {"path": path, "rule": rule, "text": text, "count": count}
        for (path, rule, text), count in counts.items()
    ]
    file.write_text(
        json.dumps(sorted(rows, key=lambda row: list(map(str, row.values()))), indent=1) + "\n",
        "utf-8",
    )


def without_known(file: Path, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that a baseline does not have, or has fewer times.

    Raises:
        ValueError: The file is no baseline.
    """
    try:
        rows = json.loads(foreign_files.read(file, _LARGEST))
        known = Counter({(row["path"], row["rule"], row["text"]): row["count"] for row in rows})
    except OSError as error:
        raise ValueError(
            f"{str(file)!r} cannot be read: {error.strerror}. Name a baseline."
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{str(file)!r} is no baseline: {error}. Write it with --write-baseline."
        ) from None
    new = []
    for finding in findings:
        key = _key(file, finding)
        known[key] -= 1
        if known[key] < 0:
            new.append(finding)
    return new


def _key(file: Path, finding: Finding) -> tuple[str, str, str]:
    return (
        os.path.relpath(finding.path, file.parent).replace(os.sep, "/"),
        finding.rule,
        finding.text,
    )
