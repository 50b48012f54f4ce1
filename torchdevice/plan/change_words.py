"""The changes that a plan can try on a program, by name. No torch is needed to read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchdevice.plan.model_words import RANK

CHANGES: Mapping[str, str] = {
    "checkpointing": "gradient checkpointing",
    "8-bit": "AdamW with states of 8 bits",
    "lora": f"LoRA of rank {RANK}",
    "qlora": f"QLoRA of rank {RANK}",
    "fsdp": "FSDP",
}
"""Name -> what a person calls it. ``qlora`` needs ``--model``."""

_OF_PROGRAM = (
    "checkpointing",
    "8-bit",
    "checkpointing+8-bit",
    "lora",
    "checkpointing+lora",
    "fsdp:2",
    "fsdp:4",
    "fsdp:8",
)

_OF_MODEL: Mapping[str, tuple[str, ...]] = {
    "full": (
        "checkpointing",
        "8-bit",
        "checkpointing+8-bit",
        "lora",
        "checkpointing+lora",
        "qlora",
    ),
    "lora": ("checkpointing", "qlora"),
    "qlora": (),
}
"""Way of training -> what is tried instead."""


class Change(NamedTuple):
    """What is changed.

    Attributes:
        names: Of :data:`CHANGES`; none for the program as it is.
        ranks: Over how many ranks FSDP divides the model; None for the program's own way.
    """

    names: tuple[str, ...] = ()
    ranks: int | None = None

    @classmethod
    def parsed(cls, text: str) -> Change:
        """Return the change that a text such as ``checkpointing+lora`` or ``fsdp:4`` means.

        Raises:
            ValueError: It means none.
        """
        names: list[str] = []
        ranks = None
        for each in text.split("+"):
            name, _, number = each.partition(":")
            if name not in CHANGES or not _has_ranks(name, number):
                listed = ", ".join(f"{name}:4" if name == "fsdp" else name for name in CHANGES)
                raise ValueError(
                    f"{each!r} is not a change. Use {listed}, or several joined by '+'."
                )
            names.append(name)
            ranks = int(number) if number else ranks
        return cls(tuple(names), ranks)

    def __str__(self) -> str:
        return "+".join(f"{name}:{self.ranks}" if name == "fsdp" else name for name in self.names)

    @property
    def title(self) -> str:
        """What a person calls the change."""
        parts = [
            f"FSDP over {self.ranks} ranks" if name == "fsdp" else CHANGES[name]
            for name in self.names
        ]
        return " and ".join(parts) or "as it is"


def _has_ranks(name: str, number: str) -> bool:
    """Return whether a number of ranks stands behind a name exactly where it must."""
    if name == "fsdp":
        return number.isdecimal() and int(number) > 1
    return not number


def tried(ranks: int | None) -> list[Change]:
    """Return what is tried of a program: as it is, and with each change.

    Args:
        ranks: Of how many ranks the program is planned; None for a program of one process.
    """
    texts = [each for each in _OF_PROGRAM if ranks is None or not each.startswith("fsdp")]
    if ranks is not None:
        texts.append(f"fsdp:{ranks}")
    return [Change(), *map(Change.parsed, texts)]


def tried_on_model(train: str) -> list[Change]:
    """Return what is tried of a way of training a model without a program."""
    return [Change(), *map(Change.parsed, _OF_MODEL[train])]


def words_of_model(words: list[str], change: Change) -> list[str]:
    """Return the words of the program that plans a changed model; ``8-bit`` is none of them."""
    found = list(words)
    for name in change.names:
        if name == "checkpointing" and "--checkpointing" not in found:
            found.append("--checkpointing")
        elif name in ("lora", "qlora"):
            found[found.index("--train") + 1] = name
    return found


def tables(plans: list[dict[str, Any]], model: str | None) -> list[tuple[str, ...]]:
    """Return the rows of the table of what was tried.

    Args:
        plans: The plans, each with its ``change``.
        model: The GPU that the program is to fit; None for none.
    """
    from torchdevice.plan import fitting, sweeping  # here, because they need the tables of GPUs

    of_model = [] if model is None else [f"fits {model}"]
    rows = [("change", f"{'needs':>11}", "the smallest GPU that fits", *of_model)]
    for each in plans:
        title = Change.parsed(each["change"]).title if each["change"] else Change().title
        if each.get("not changed"):
            rows.append((title, "", _NO_PLACE, *[""] * len(of_model)))
            continue
        fits = next((gpu["fits"] for gpu in each["fits"] if gpu["model"] == model), fitting.UNKNOWN)
        rows.append((title, *sweeping.needs(each), *[fits] * len(of_model)))
    return rows


_NO_PLACE = (
    "not tried: the program hands no model to a Trainer or an Accelerator, or makes no AdamW"
)
