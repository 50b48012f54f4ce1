"""The one way to a private name of torch. A name that is gone is reported with the version of torch."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.errors import TorchVersionError


def require(owner: Any, name: str) -> Any:
    """Return ``owner.name``, a private name of torch.

    Raises:
        TorchVersionError: The installed torch no longer has it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        label = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise TorchVersionError(f"{label}.{name}", torch.__version__) from None
