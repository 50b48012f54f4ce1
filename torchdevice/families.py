"""The accelerators that a program may be written for, and that torch has a module for: ``torch.cuda`` and its siblings.

Another one begins here: its name in ``Family``, and a file for its module beside ``mps.py`` and ``xpu.py``, which
``installed.py`` lists.
"""

from __future__ import annotations

from typing import Literal, get_args

Family = Literal["cuda", "mps", "xpu"]

FAMILIES: tuple[str, ...] = get_args(Family)
"""By rank: the first that is available is the target where a program names none."""
