"""``torchdevice check``: what will differ on a target, from a program's source."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdevice.kernel.python import styled_text
from torchdevice.kernel.python.environment import switched_off
from torchdevice.tools.cli.parsing import CommandTexts, add_command, did_you_mean, refusals
from torchdevice.tools.cli.report import output_file

if TYPE_CHECKING:
    from torchdevice.check import Finding, Target, Verdict
    from torchdevice.check.configuration import Configuration


_TEXTS = CommandTexts(
    description="Report, line by line, what will differ on a target. Your code is parsed, not run.",
    epilog=(
        "The status is 1 if something must be changed. The comment '# torchdevice: ignore' "
        "suppresses all findings\n"
        "of a line, and '# torchdevice: ignore[rule]' those of one rule. [tool.torchdevice.check] "
        "in pyproject.toml takes\n"
        "target, select, ignore, exclude, per-file-ignores and baseline; the command line "
        "overrides "
        "it.\n"
        "\n"
        "examples:\n"
        "  torchdevice check train.py\n"
        "  torchdevice check --all train.py\n"
        "  torchdevice check src --baseline known.json --write-baseline\n"
        "  torchdevice check src notebooks --target mps\n"
        "  torchdevice check . --target mps --ignore device --sarif=findings.sarif\n"
        "  torchdevice check --rules"
    ),
    arguments={
        "paths": {"nargs": "*", "metavar": "PATH", "help": "files, notebooks, and folders of them"},
        "--rules": {"action": "store_true", "help": "list the rules"},
        "--write-baseline": {"action": "store_true", "help": "write the findings to the baseline"},
        "--target": {"help": "mps, cpu, cuda, simulated:mps and such; default: cpu"},
        "--all": {
            "action": "store_true",
            "help": "also show what runs as it is, and what is approximate",
        },
        "--baseline": {"metavar": "FILE", "help": "leave out the findings that this file lists"},
        "--select": {
            "action": "append",
            "default": [],
            "metavar": "RULE",
            "help": "apply only these rules, separated by commas",
        },
        "--ignore": {
            "action": "append",
            "default": [],
            "metavar": "RULE",
            "help": "do not apply these rules, separated by commas",
        },
        "--json": {"action": "store_true", "help": "print data"},
        "--sarif": {
            "nargs": "?",
            "const": True,
            "metavar": "FILE",
            "help": "print SARIF 2.1.0, which code hosts take; with =FILE write it to a file",
        },
    },
)


def add(commands: Any) -> None:
    """Add the command to a command line."""
    add_command(commands, "check", _check, _TEXTS, sarif=output_file(".sarif", ".json"))


def _check(options: argparse.Namespace) -> int:
    if options.rules:
        _list_rules()
        return 0
    if not options.paths:
        options.parser.error("which files? Name a PATH: a file, a notebook or a folder")
    from torchdevice.check import Target, Verdict, check_files, checker, configuration

    with refusals(), switched_off():  # torch, where a rule needs it, is not to be in a scope
        project = configuration.of_project(Path.cwd())
        options.target = options.target or project.target or "cpu"
        target, rules = Target.named(options.target), _chosen_rules(options, project)
        sources = checker.found(options.paths)
        files = [file for file in sources.paths if not project.excludes(file)]
        _report_links([link for link in sources.outside if not project.excludes(link)])
        found = check_files([(file, rules - project.ignored_in(file)) for file in files], target)
        findings = [*chain.from_iterable(styled_text.counted(found, len(files), "files checked"))]
        baseline = options.baseline or (project.baseline and project.folder / project.baseline)
        if options.write_baseline:
            if not baseline:
                raise ValueError(
                    "--write-baseline names no file. Add --baseline FILE, or set it in "
                    "pyproject.toml."
                )
            configuration.write_baseline(Path(baseline), _listed(findings, target, options))
            return 0
        if baseline:
            findings = configuration.without_known(Path(baseline), findings)
        shown = _listed(findings, target, options)
        _show(findings, shown, len(files), target.name, options)
    return int(bool(_with_verdict(findings, Verdict.CHANGE)))


def _list_rules() -> None:
    from torchdevice.check import RULES

    for rule in RULES.values():
        print(rule.name)
        print(textwrap.fill(rule.finds, 100, initial_indent="  ", subsequent_indent="  "))


def _listed(findings: list[Finding], target: Target, options: argparse.Namespace) -> list[Finding]:
    """Return the findings that are listed: without ``--all``, those that a person asks about."""
    from torchdevice.check import Verdict
    from torchdevice.check.target import MAC

    if options.all:
        return findings
    # On a Mac most programs run as they are, so approximations matter to its owner.
    if target.column == MAC.column:
        return _with_verdict(findings, Verdict.CHANGE, Verdict.APPROXIMATE)
    return _with_verdict(findings, Verdict.CHANGE)


def _with_verdict(findings: list[Finding], *verdicts: Verdict) -> list[Finding]:
    return [finding for finding in findings if finding.verdict in verdicts]


def _report_links(outside: list[str]) -> None:
    for link in outside:
        said = (
            f"{link!r} leads out of what is checked, to {os.path.realpath(link)!r}. Name that, "
            "too, to check it."
        )
        print(f"torchdevice: not checked: {said}", file=sys.stderr)


def _names(given: Iterable[str]) -> set[str]:
    """Return the names in the values of a flag, each of which may list several."""
    return {name for each in given for name in each.split(",")}


def _chosen_rules(options: argparse.Namespace, project: Configuration) -> set[str]:
    """Return the names of the rules to apply: those of the command line, else those of the project.

    Raises:
        ValueError: A rule does not exist.
    """
    from torchdevice.check import RULES

    selected = _names(options.select) or {*project.select}
    ignored = _names(options.ignore) or {*project.ignore}
    ignored_in_files = {*chain(*project.per_file_ignores.values())}
    for name in sorted((selected | ignored | ignored_in_files) - set(RULES)):
        meant = did_you_mean(name, RULES)
        raise ValueError(
            f"there is no rule {name!r}{meant}. 'torchdevice check --rules' lists them."
        )
    return (selected or set(RULES)) - ignored


def _show(
    findings: list[Finding],
    shown: list[Finding],
    files: int,
    target: str,
    options: argparse.Namespace,
) -> None:
    from torchdevice.check import formats

    if options.json:
        print(json.dumps([finding.to_dict() for finding in shown], indent=1))
    elif options.sarif:
        document = json.dumps(formats.document(shown), indent=1)
        if isinstance(options.sarif, str):
            Path(options.sarif).write_text(document, encoding="utf-8")
        else:
            print(document)
    else:
        styled_text.show(formats.rendered(findings, shown, files, target))
