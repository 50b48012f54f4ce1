"""The page of private names of torch, made from their list and the source.

Run with --missing, it prints the names that the installed torch lacks, and returns 1 if there are
any.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from torchdevice.kernel import torch_internals

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from private_names import PACKAGE, Reads, sources

HEADER = """# Private names of torch

torch may change a private name in any release. The package reads those below, and no others. A release of torch that
lacks one raises `TorchVersionError`, which names it and what needs it, before anything of torch is changed.
"""

SECTIONS = {
    "at import": "## Checked when the package is imported",
    "later": "## Checked when their module is imported",
    "in some releases or "
    "builds": "## In some releases or builds only\n\nThe code asks whether they are there.",
}


@functools.cache
def reads_by_file() -> dict[str, set[str]]:
    """Return the private names that each file of the package reads."""
    return {path: {name for name, _ in Reads(tree)} for path, tree in sources().items()}


def read_in(name: str) -> str:
    """Return the files that spell a name in full, or else those that spell its last part."""
    last = name.rpartition(".")[2]
    every_file = reads_by_file()
    spelled = {
        path
        for path, reads in every_file.items()
        if any(f"{each}.".startswith(f"{name}.") for each in reads)
    }
    paths = spelled | {path for path, reads in every_file.items() if f".{last}" in reads}
    # The tables of `check` list public names that programs spell.
    others = [path for path in every_file if not path.startswith("check/")]
    paths = paths or {
        path for path in others if re.search(rf"\b{last}\b", (PACKAGE / path).read_text())
    }
    return ", ".join(f"`{path}`" for path in sorted(paths))


def page() -> str:
    """Return the page."""
    lines = [HEADER]
    for when, title in SECTIONS.items():
        lines += [title, "", "| name | needed for | read in |", "|---|---|---|"]
        for affected, modules in torch_internals.NAMES[when].items():
            names = [
                f"{module}.{name}" for module, of_module in modules.items() for name in of_module
            ]
            lines += [f"| `{name}` | {affected} | {read_in(name)} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def print_missing() -> int:
    """Print the names that the installed torch lacks, and return 1 if there are any."""
    missing = [*torch_internals.missing("at import"), *torch_internals.missing("later")]
    for name, affected in missing:
        print(f"{name}: needed for {affected}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(
        print_missing()
        if "--missing" in sys.argv[1:]
        else "run docs/make_reference.py, or this with --missing"
    )
