"""The rule for names of ``torch.cuda`` and its like: their fidelity, from the table that docs/coverage.md shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchdevice.check.rules import Found, Verdict, View, rule
from torchdevice.devices.accelerators import FAMILIES

_MODULES = (*(f"torch.{family}." for family in FAMILIES), "torch.backends.", "torch.version.")

_VERDICTS = {"exact": Verdict.HANDLED, "declared": Verdict.HANDLED, "unsupported": Verdict.CHANGE}


@rule("torch-name", ast.Attribute, ast.Name)
def _torch_name(node: ast.Attribute | ast.Name, view: View) -> Iterator[Found]:
    """A name of `torch.cuda`, `torch.mps`, `torch.xpu`, `torch.backends` or `torch.version`, with the fidelity that
    [coverage](coverage.md) declares for it: exact and declared names are handled, approximate and inert ones are
    approximate, and those that raise must be changed."""
    parent = view.parent(node)
    is_written = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    if is_written or not view.uses_torch or isinstance(parent, ast.Attribute):
        return
    name = view.dotted(node) or ""
    found = view.target.fidelity(name) if name.startswith(_MODULES) else None
    if found is None:
        return
    known, fidelity, note = found
    verdict = _VERDICTS.get(fidelity.value, Verdict.APPROXIMATE)
    note = note.split(". ")[0].rstrip(".").replace("`", "'")
    if verdict is Verdict.CHANGE:
        yield Found(
            verdict, f"Leave {known} out, which raises NotSupportedError: no stand-in does what it says ({note})."
        )
    else:
        said = f"{known} is {fidelity.value} on {view.target.name}: it {_third_person(note)}."
        yield Found(verdict, said, leaves_trace=fidelity.changes_numbers)


_BEFORE = {"torch's": "is ", "No": "has ", **dict.fromkeys(("MPS's", "Figures", "Memory", "A", "The"), "gives ")}
"""What makes a sentence of a note whose first word is no verb."""


def _third_person(note: str) -> str:
    """Return a note of the table, which begins with a verb as docstrings do, as what a name does."""
    first, _, rest = note.removeprefix("It ").partition(" ")
    said = first if first == "MPS's" else first.lower()
    if first in _BEFORE or first.endswith("s"):
        return f"{_BEFORE.get(first, '')}{said} {rest}"
    others = re.sub(r"\b(or|and) (set|return|ignore|free|select|reduce|run)\b", r"\1 \2s", rest)
    return f"{re.sub('y$', 'ie', said)}s {others}"
