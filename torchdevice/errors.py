"""Every exception and warning this package raises; each keeps the facts it reports as attributes."""

from __future__ import annotations

__all__ = [
    "AnotherPatcherError",
    "BackendTakenError",
    "EngineUnavailableError",
    "FidelityError",
    "NotSupportedError",
    "PortabilityWarning",
    "ScopeError",
    "TargetUnavailableError",
    "TorchDeviceError",
    "TorchVersionError",
    "UnknownTargetError",
]


class TorchDeviceError(Exception):
    """Base of all exceptions of this package."""


class UnknownTargetError(TorchDeviceError, ValueError):
    """The requested target is no device type this torch knows.

    Attributes:
        target: The value that was given.
        known: The target names that would have been understood.
        meant: The one that was probably meant, or None.
    """

    def __init__(self, target: object, known: tuple[str, ...], meant: str | None = None):
        self.target = target
        self.known = known
        self.meant = meant
        question = f" Did you mean {meant!r}?" if meant else ""
        super().__init__(
            f"{target!r} is not a target.{question} Use one of {', '.join(map(repr, known))}, or None to choose by "
            f"availability."
        )


class TargetUnavailableError(TorchDeviceError, RuntimeError):
    """The requested target is a known device type that this machine or torch build does not have.

    Attributes:
        target: The value that was given.
        remedy: What to do instead.
    """

    def __init__(self, target: object, remedy: str):
        self.target = target
        self.remedy = remedy
        super().__init__(f"The target {target!r} is not available here. {remedy}")


class ScopeError(TorchDeviceError, RuntimeError):
    """A scope was left without having been entered, or not in the reverse order of entry."""


PATCHERS = ("torch_npu.contrib.transfer_to_npu", "torchada", "TorchDevice", "mpsify", "ipex_to_cuda")
"""Modules of other packages that replace parts of torch for the whole process."""


class AnotherPatcherError(TorchDeviceError, RuntimeError):
    """Another package has already replaced parts of torch for the whole process.

    Attributes:
        patcher: The name of that package.
    """

    def __init__(self, patcher: str):
        self.patcher = patcher
        super().__init__(
            f"{patcher!r} has replaced parts of torch in this process, so a scope could neither rewrite nor restore "
            f"them reliably. Remove the import of {patcher!r}, or do not activate torchdevice."
        )


class FidelityError(TorchDeviceError, RuntimeError):
    """Under ``strict=True``: the call would have been approximated, ignored or downgraded.

    Attributes:
        requested: What the program asked for.
        done: What would have been done instead.
    """

    def __init__(self, requested: str, done: str):
        self.requested = requested
        self.done = done
        super().__init__(
            f"{requested} cannot be had exactly here ({done}), and the scope is strict. "
            f"Use strict=False to accept that, or change the call."
        )


class NotSupportedError(TorchDeviceError, NotImplementedError, RuntimeError):
    """A CUDA facility that has no honest equivalent on the target.

    Attributes:
        name: The torch name that was called.
        remedy: What to do instead.
    """

    def __init__(self, name: str, remedy: str):
        self.name = name
        self.remedy = remedy
        super().__init__(f"{name} is not supported on a stand-in device. {remedy}")


class TorchVersionError(TorchDeviceError, ImportError):
    """A private name of torch that this package relies on is gone from the installed torch.

    Attributes:
        name: The dotted name that is missing.
        version: The installed torch version.
    """

    def __init__(self, name: str, version: str):
        self.name = name
        self.version = version
        super().__init__(
            f"torch {version} has no {name!r}, which torchdevice builds on. "
            f"Install a torchdevice release that lists torch {version} as supported."
        )


class EngineUnavailableError(TorchDeviceError, RuntimeError):
    """``engine="wrap"`` cannot reach ``torch.device`` in this Python.

    Attributes:
        reason: What is in the way.
    """

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f"engine='wrap' cannot be had here: {reason}. Use engine='mode'.")


class PortabilityWarning(UserWarning):
    """A value the program asked for was changed on its way to the target (for example float64 on MPS)."""


class BackendTakenError(TorchDeviceError, RuntimeError):
    """The simulated device needs the place that torch has for one out-of-tree backend, and it is taken.

    Attributes:
        name: The name of the backend that is registered there.
    """

    def __init__(self, name: str):
        self.name = name
        super().__init__(
            f"torch has room for one out-of-tree backend in a process, and {name!r} is registered there. Run the "
            f"program on it with target={name!r}, or simulate in a process that does not import it."
        )
