"""The accelerators that a program may be written for, and that torch has a module for: ``torch.cuda`` and its siblings.

Another one begins here: its name in ``Family``, and a file of that name for its module, as ``mps.py`` is.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Literal, get_args

Family = Literal["cuda", "mps", "xpu"]

FAMILIES: tuple[str, ...] = get_args(Family)
"""By rank: the first that is available is the target where a program names none."""

SPELLED = re.compile(rf"({'|'.join(sorted(FAMILIES))})(?::(0|[1-9][0-9]*))?")
"""A device of an accelerator as a text: the whole text, with the ordinal if there is one."""


def conventional_modules() -> list[ModuleType]:
    """Return the families' modules that follow torch's convention: they initialise the device when it is used."""
    import torch  # not above: options are read before torch is imported, which may activate this package

    modules = [getattr(torch, family) for family in FAMILIES]
    return [module for module in modules if hasattr(module, "_lazy_init")]
