"""``torchdevice check``: what of a program a target does otherwise, from its source."""

from __future__ import annotations

import argparse
import gc
import json
import textwrap
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchdevice.cli.parsing import did_you_mean
from torchdevice.cli.progress import track
from torchdevice.cli.usage_errors import refusals
from torchdevice.foundation import styled_text
from torchdevice.foundation.environment import switched_off

if TYPE_CHECKING:
    from torchdevice.check import Finding
    from torchdevice.check.configuration import Configuration

_EXAMPLES = """The status is 1 if something must be changed. A comment '# torchdevice: ignore' leaves a line out, and
'# torchdevice: ignore[rule]' a rule on that line. [tool.torchdevice.check] in pyproject.toml has target, select,
ignore, exclude, per-file-ignores and baseline; what the command line says counts more.

examples:
  torchdevice check train.py
  torchdevice check --all train.py
  torchdevice check src --baseline known.json --write-baseline
  torchdevice check src notebooks --target mps
  torchdevice check . --target mps --ignore device --sarif=findings.sarif
  torchdevice check --rules"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "check",
        help="report what will differ on a target, from the source alone",
        description="Report, line by line, what will differ on the target. Your code is parsed, not run.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, notebooks, and folders of them")
    parser.add_argument("--rules", action="store_true", help="list the rules")
    parser.add_argument("--write-baseline", action="store_true", help="write what is found to the baseline")
    add_flags(parser, "cpu")
    parser.set_defaults(action=lambda options: _check(parser, options))


def add_flags(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add the flags that say what is looked for, and how it is shown."""
    said = f"default: {default}" if default else "left out, the one that would be chosen"
    parser.add_argument("--target", help=f"mps, cpu, cuda, simulated:mps and such; {said}")
    parser.set_defaults(default_target=default, write_baseline=False)
    parser.add_argument("--all", action="store_true", help="also show what runs as it is, and what is approximate")
    parser.add_argument("--baseline", metavar="FILE", help="leave out what this file says is known")
    for flag, said in (("--select", "apply only these rules"), ("--ignore", "do not apply these rules")):
        parser.add_argument(flag, action="append", default=[], metavar="RULE", help=f"{said}, separated by commas")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument(
        "--sarif",
        nargs="?",
        const=True,  # a text would be checked as a path
        metavar="FILE",
        type=_sarif_file,
        help="print SARIF 2.1.0, which code hosts take; with =FILE write it to a file",
    )


def _sarif_file(path: str) -> str:
    if not path.endswith((".sarif", ".json")):
        raise argparse.ArgumentTypeError(f"{path!r} is neither FILE.sarif nor FILE.json")
    return path


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.rules:
        return _list_rules()
    if not options.paths:
        parser.error("which files? Name a PATH: a file, a notebook or a folder")
    return check(options.paths, options)


def _list_rules() -> int:
    from torchdevice.check import RULES

    for rule in RULES.values():
        print(f"{rule.name}\n{textwrap.fill(rule.finds, 100, initial_indent='  ', subsequent_indent='  ')}")
    return 0


def check(paths: Sequence[str], options: argparse.Namespace) -> int:
    """Check sources, show what was found, and return the exit status."""
    from torchdevice.check import Target, Verdict, configuration, sources
    from torchdevice.check.checker import check_file

    with refusals(), switched_off():  # torch, where a rule needs it, is not to be in a scope
        project = configuration.of_project(Path.cwd())
        options.target = options.target or project.target or options.default_target
        target, rules = Target.named(options.target), _chosen_rules(options, project)
        files = [file for file in sources.found(paths) if not project.excludes(file)]
        # Syntax trees have no circles, and Python's collector would look at each node several times.
        gc.disable()
        try:
            findings = [
                finding
                for file in track(files, "files")
                for finding in check_file(file, target, rules - project.ignored_in(file))
            ]
        finally:
            gc.enable()
        baseline = options.baseline or (project.baseline and project.folder / project.baseline)
        if baseline and not options.write_baseline:
            findings = configuration.without_known(Path(baseline), findings)
        changes = [finding for finding in findings if finding.verdict is Verdict.CHANGE]
        if options.write_baseline:
            if not baseline:
                raise ValueError(
                    "--write-baseline names no file. Add --baseline FILE, or 'baseline' in pyproject.toml."
                )
            configuration.write_baseline(Path(baseline), changes)
            return 0
        _show(findings, findings if options.all else changes, len(files), options)
    return int(bool(changes))


def _chosen_rules(options: argparse.Namespace, project: Configuration) -> set[str]:
    """Return the names of the rules to apply: those of the command line, else those of the project.

    Raises:
        ValueError: A rule does not exist.
    """
    from torchdevice.check import RULES

    selected, ignored = (
        {name for given in on_command_line for name in given.split(",")} or {*in_project}
        for on_command_line, in_project in ((options.select, project.select), (options.ignore, project.ignore))
    )
    for name in sorted((selected | ignored | {*chain(*project.per_file_ignores.values())}) - set(RULES)):
        raise ValueError(
            f"there is no rule {name!r}{did_you_mean(name, RULES)}. 'torchdevice check --rules' lists them."
        )
    return (selected or set(RULES)) - ignored


def _show(findings: list[Finding], shown: list[Finding], files: int, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps([finding.to_dict() for finding in shown], indent=1))
    elif options.sarif:
        from torchdevice.check import sarif

        document = json.dumps(sarif.document(shown), indent=1)
        _write(document, options.sarif)
    else:
        from torchdevice.check import listing

        styled_text.show(listing.rendered(findings, shown, files, options.target))


def _write(document: str, file: str | bool) -> None:
    if not isinstance(file, str):
        print(document)
        return
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(document)
