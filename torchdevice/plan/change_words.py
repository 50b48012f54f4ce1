"""The changes that a plan can try on a program, by name. No torch is needed to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchdevice.plan.model_words import RANK

CHANGES: Mapping[str, str] = {
    "checkpointing": "gradient checkpointing",
    "8-bit": "AdamW with states of 8 bits",
    "lora": f"LoRA of rank {RANK}",
    "qlora": f"QLoRA of rank {RANK}",
    "fsdp": "FSDP",
}
"""Name -> the name for people. ``qlora`` needs ``--model``."""

_DIVIDED = ("fsdp:2", "fsdp:4", "fsdp:8")

_OF_PROGRAM = (
    "checkpointing",
    "8-bit",
    "checkpointing+8-bit",
    "lora",
    "checkpointing+lora",
    *_DIVIDED,
)

_OF_MODEL: Mapping[str, tuple[str, ...]] = {
    "full": (
        "checkpointing",
        "8-bit",
        "checkpointing+8-bit",
        "lora",
        "checkpointing+lora",
        "qlora",
        *_DIVIDED,
    ),
    "lora": ("checkpointing", "qlora", *_DIVIDED),
    "qlora": (),
}
"""Way of training -> the ways to try instead."""


class Change(NamedTuple):
    """The parts to change.

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

    def only(self, name: str) -> Change:
        """Return the part of the change that has a name."""
        return Change((name,), self.ranks if name == "fsdp" else None)

    @property
    def title(self) -> str:
        """The change in a person's words."""
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
    """Return the changes to try on a program, with none first.

    Args:
        ranks: Of how many ranks the program is planned; None for a program of one process.
    """
    return _parsed(_OF_PROGRAM, ranks)


def tried_on_model(train: str, ranks: int | None, strategy: str | None) -> list[Change]:
    """Return the changes to try on a way of training a model without a program.

    Args:
        train: The way.
        ranks: See :func:`tried`.
        strategy: How ranks share the work: ``"ddp"`` or ``"fsdp"``; None for one process.
    """
    texts: Sequence[str] = _OF_MODEL[train]
    if strategy == "fsdp":  # which is there already, and divides no weights in four bits
        texts = [each for each in texts if each not in (*_DIVIDED, "qlora")]
    return _parsed(texts, ranks)


def _parsed(texts: Sequence[str], ranks: int | None) -> list[Change]:
    """Return no change, and changes; of FSDP only that over so many ranks, if they are known."""
    if ranks is not None and not set(_DIVIDED).isdisjoint(texts):
        texts = [*(each for each in texts if each not in _DIVIDED), f"fsdp:{ranks}"]
    return [Change(), *map(Change.parsed, texts)]


def words_of_model(words: list[str], change: Change) -> list[str]:
    """Return the words of the program that plans a changed model; ``8-bit`` is none of them."""
    found = list(words)
    for name in change.names:
        if name == "checkpointing" and "--checkpointing" not in found:
            found.append("--checkpointing")
        elif name in ("lora", "qlora"):
            found[found.index("--train") + 1] = name
        elif name == "fsdp":
            if "--strategy" not in found:
                found += ["--strategy", ""]
            found[found.index("--strategy") + 1] = "fsdp"
    return found


NO_PLACE = "the program hands no model to a Trainer or an Accelerator, or makes no AdamW"
"""Why a change was not made."""
