"""The available device, for programs that just want one."""

from __future__ import annotations

import torch

from torchdevice import _target


class TorchDevice:
    """The device that would stand in for an accelerator here.

    Args:
        target: As for :func:`torchdevice.portable`; None takes the best there is.

    Attributes:
        device: The ``torch.device``.
        name: A name for people.

    Raises:
        UnknownTargetError: ``target`` is no device type.
        TargetUnavailableError: It is not available here.
    """

    def __init__(self, target: str | torch.device | None = None):
        runtime = _target.resolve(target)
        self.device = runtime.device(0)
        self.name = runtime.name(0)

    def __repr__(self) -> str:
        return f"TorchDevice(device={str(self.device)!r}, name={self.name!r})"
