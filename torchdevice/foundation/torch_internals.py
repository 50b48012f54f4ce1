"""Looks up private names of torch. The error for a missing name says which torch version lacks it."""

from __future__ import annotations

from typing import Any

import torch

from torchdevice.errors import TorchVersionError


def require(owner: Any, name: str) -> Any:
    """Return ``owner.name``, a private name of torch.

    Raises:
        TorchVersionError: The installed torch does not have the name.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        label = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", repr(owner))
        raise TorchVersionError(f"{label}.{name}", torch.__version__) from None


# Names that more than one file uses.
ExcludeDispatchKeyGuard = require(torch._C, "_ExcludeDispatchKeyGuard")
is_torch_function_all_disabled = require(torch._C, "_is_torch_function_all_disabled")
registrations_for_dispatch_key = require(torch._C, "_dispatch_get_registrations_for_dispatch_key")
