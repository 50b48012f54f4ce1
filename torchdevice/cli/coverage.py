"""``torchdevice coverage``: how faithful a name of torch is on a target."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from torchdevice.cli import columns
from torchdevice.cli.parsing import did_you_mean
from torchdevice.cli.usage_errors import refusals

_EXAMPLES = """examples:
  torchdevice coverage
  torchdevice coverage torch.cuda.memory
  torchdevice coverage MemPool --target mps
  torchdevice coverage --fidelity unsupported"""


def add(commands: Any) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "coverage",
        help="say how faithful the names of torch.cuda and its like are",
        description="Say how faithful the public names of torch.cuda, torch.mps and their neighbours are on a target.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("name", nargs="?", help="a name or a part of names; left out, each module in a line")
    parser.add_argument("--target", choices=("cpu", "mps", "simulated"), default="cpu", help="default: cpu")
    kinds = ("exact", "declared", "approximate", "inert", "unsupported")
    parser.add_argument("--fidelity", choices=kinds, help="only names of that fidelity")
    parser.add_argument("--json", action="store_true", help="print data")
    parser.set_defaults(action=_coverage)


def _coverage(options: argparse.Namespace) -> int:
    with refusals():
        from torchdevice.check.public_names import PUBLIC_NAMES
    rows = []
    for name, declared in sorted(PUBLIC_NAMES.items()):
        fidelity, note = declared.on.get(options.target, (declared.fidelity, ""))
        matches = options.name is None or options.name.lower() in name.lower()
        if matches and options.fidelity in (None, fidelity.value):
            rows.append({"name": name, "fidelity": fidelity.value, "note": note or declared.note})
    if options.json:
        print(json.dumps(rows, indent=1))
    elif options.name is None and options.fidelity is None:
        _print_modules(rows)
    else:
        columns.show([(row["name"], row["fidelity"], row["note"]) for row in rows])
    if not rows and options.name is not None:
        meant = did_you_mean(options.name.rpartition(".")[2], {name.rpartition(".")[2] for name in PUBLIC_NAMES})
        with refusals():
            raise ValueError(f"no name has {options.name!r} in it{meant}.")
    return 0


def _print_modules(rows: list[dict[str, Any]]) -> None:
    modules: dict[str, Counter[str]] = {}
    for row in rows:
        modules.setdefault(row["name"].rpartition(".")[0], Counter())[row["fidelity"]] += 1
    counted = ((module, kinds.most_common()) for module, kinds in modules.items())
    columns.show([(module, ", ".join(f"{count} {kind}" for kind, count in kinds)) for module, kinds in counted])
