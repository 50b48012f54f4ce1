"""Accelerators that programs are written for and torch has a module for, such as ``torch.cuda``.

Another one begins here: its name in ``Family``, and a file of that name for its module, as
``mps.py`` is.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Literal, get_args

Family = Literal["cuda", "mps", "xpu"]

FAMILIES: tuple[str, ...] = get_args(Family)
"""By rank: the first that is available is the target where a program names none."""

OTHER_NAMES = {"nvidia": "cuda", "metal": "mps", "apple": "mps", "mac": "mps", "intel": "xpu"}
"""What people write instead, for the hint of an error."""

SPELLED = re.compile(rf"({'|'.join(sorted(FAMILIES))})(?::(0|[1-9][0-9]*))?")
"""A device of an accelerator as a text: the whole text, with the ordinal if there is one."""


_IN_MODULE = re.compile(rf"torch\.(?:backends\.)?({'|'.join(FAMILIES)})(?:\..+)?")


def of_module(owner: object) -> str | None:
    """Return the accelerator that a module, or a class's module, belongs to; None for others."""
    name = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", "")
    found = _IN_MODULE.fullmatch(name)
    return found[1] if found is not None else None


def conventional_modules() -> list[ModuleType]:
    """Return the families' modules that initialise a device at first use, as torch's do."""
    # Not above: options are read before torch is imported, which may activate this package.
    import torch

    modules = [getattr(torch, family) for family in FAMILIES]
    return [module for module in modules if hasattr(module, "_lazy_init")]
