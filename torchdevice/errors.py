"""All exceptions and warnings of this package. Each has the reported facts as attributes.

An error whose text is one sentence about its facts and one about the remedy is a dataclass:
``_text`` names the fields that stand in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple


class TorchDeviceError(Exception):
    """Base of all exceptions here. A class with ``_text`` is a dataclass that shows its fields."""

    _text: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "_text" in vars(cls):
            dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        super().__init__(self._text.format(**values))
        # Again, because the constructor of ImportError sets its own ``name``.
        for name, value in values.items():
            setattr(self, name, value)

    def __reduce__(self) -> Any:
        """Pickle and copy the error by text and facts, not by its constructor's arguments."""
        facts = dict(vars(self))
        if is_dataclass(self):
            # ImportError has its own ``name``.
            facts |= {each.name: getattr(self, each.name) for each in fields(self)}
        return _remade, (type(self), self.args), facts


def _remade(kind: type[TorchDeviceError], args: tuple[Any, ...]) -> TorchDeviceError:
    base: Any = kind
    while base.__module__ != "builtins":
        base = base.__base__  # the one whose memory the class has, which alone may make it
    error: TorchDeviceError = base.__new__(kind, *args)
    error.args = args  # OSError leaves them to its constructor
    return error


_LISTED = 9
"""How many targets a message lists."""


class UnknownTargetError(TorchDeviceError, ValueError):
    """The requested target is not a device type of the installed torch.

    Attributes:
        target: The requested target.
        known: The names of targets.
        meant: The target that was probably meant, or None.
    """

    def __init__(self, target: object, known: tuple[str, ...], meant: str | None = None):
        self.target = target
        self.known = known
        self.meant = meant
        question = f" Did you mean {meant!r}?" if meant else ""
        if meant:
            registered = ""
        else:
            registered = (
                " A package that registers a device needs an entry point in 'torch.backends'."
            )
        if len(known) > _LISTED:
            others = f", another of the {len(known) - _LISTED} GPUs in docs/gpus.md"
        else:
            others = ""
        super().__init__(
            f"{target!r} is not a target.{question} Use one of "
            f"{', '.join(map(repr, known[:_LISTED]))}{others}, or leave it out for the best device "
            f"here.{registered}"
        )


class TargetUnavailableError(TorchDeviceError, RuntimeError):
    """The requested target is a device type that this machine or this build of torch lacks.

    Attributes:
        target: The requested target.
        remedy: What to do instead.
    """

    _text = "The target {target!r} is not available here. {remedy}"

    target: object
    remedy: str


class NativeKernelsError(TorchDeviceError, RuntimeError):
    """The kernels of simulated devices in C++ were demanded and are not there, or cannot be built.

    Attributes:
        reason: Why, and what to do.
    """

    _text = "The native kernels of simulated devices cannot be used: {reason}."

    reason: str


class ScopeError(TorchDeviceError, RuntimeError):
    """A scope was left without having been entered, or not in the reverse order of entry."""


PATCHERS = (
    "torch_npu.contrib.transfer_to_npu",
    "torchada",
    "TorchDevice",
    "mpsify",
    "ipex_to_cuda",
)
"""Modules of other packages that replace parts of torch for the whole process."""


class AnotherPatcherError(TorchDeviceError, RuntimeError):
    """The program imports a package that patches torch for the whole process, before or in a scope.

    Attributes:
        patcher: The name of that package.
    """

    _text = (
        "{patcher!r} replaces parts of torch for the whole process, so a scope could neither "
        "rewrite nor restore these parts reliably. Remove the import of {patcher!r}, or do not "
        "activate torchdevice."
    )

    patcher: str


class SecondCopyError(TorchDeviceError, RuntimeError):
    """The package was imported twice in this process, as two sets of modules."""

    _text = (
        "torchdevice was imported twice in this process, and only the first of the two copies can "
        "change torch. Use the first one, and leave its modules in sys.modules, or start a new "
        "process."
    )


class FidelityError(TorchDeviceError, RuntimeError):
    """In a scope with ``strict=True`` the program made a request that would not be exact.

    Attributes:
        requested: The request.
        done: The approximation.
    """

    _text = (
        "{requested} would not be exact here ({done}), and the scope is strict. Leave strict out "
        "to accept the difference, or change the call."
    )

    requested: str
    done: str


class NotSupportedError(TorchDeviceError, NotImplementedError, RuntimeError):
    """The program called a function of an accelerator that has no equivalent on a stand-in device.

    Attributes:
        name: The name of torch that was called.
        remedy: What to do instead.
    """

    _text = "{name} is not supported on a stand-in device. {remedy}"

    name: str
    remedy: str


_ONLY_ON_AN_ACCELERATOR = (
    "It has code for an accelerator's own compiler, which runs on that accelerator only. Use the "
    "fallback in plain PyTorch or C++ of the library that builds it, or build it without "
    "torchdevice."
)
"""The remedy of :class:`ExtensionRefusedError`."""


class ExtensionRefusedError(NotSupportedError, OSError):
    """A C++ extension for CUDA or SYCL was to be built in a scope; an OSError, as without CUDA.

    Attributes:
        extension: The name of the extension.
    """

    def __init__(self, extension: str):
        self.extension = extension
        super().__init__(f"the extension {extension!r}", _ONLY_ON_AN_ACCELERATOR)


class TorchVersionError(TorchDeviceError, ImportError):
    """The installed torch lacks a private name that this package uses.

    Attributes:
        name: The missing dotted name, or several of them with commas.
        version: The version of the installed torch.
        affected: The feature that does not work without the name.
    """

    _text = (
        "torch {version} has no {name!r}, which torchdevice needs for {affected}. Install a "
        "release of torchdevice that supports torch {version}."
    )

    name: str
    version: str
    affected: str


class TritonVersionError(TorchDeviceError, ImportError):
    """The installed Triton lacks a private name that running its kernels without a GPU needs.

    Attributes:
        name: The missing dotted name.
        version: The version of the installed Triton.
    """

    _text = (
        "triton {version} has no {name!r}, which torchdevice needs to run kernels without a GPU. "
        "Install the release of Triton that torch's own builds for CUDA require."
    )

    name: str
    version: str


class EngineUnavailableError(TorchDeviceError, RuntimeError):
    """``engine="wrap"`` cannot replace the constructor of ``torch.device`` in this Python.

    Attributes:
        reason: Why the constructor cannot be replaced.
    """

    _text = "engine='wrap' does not work here: {reason}. Use engine='mode'."

    reason: str


class PortabilityWarning(UserWarning):
    """A requested value was changed because the target lacks it, such as float64 on MPS."""


class Access(NamedTuple):
    """One use of a block of memory by a kernel.

    Attributes:
        name: The operator.
        site: The line of the program, with ``file``, ``line`` and ``function``.
        stream: The ordinal of the stream's device, and the stream's id.
        writes: Whether the kernel writes.
        number: Counts the kernels of the scope.
        start: The first byte in the block.
        end: The byte after the last.
    """

    name: str
    site: Any
    stream: tuple[int, int]
    writes: bool
    number: int
    start: int
    end: int

    def told(self, stream: str) -> str:
        """Describe the access, with its place and its stream."""
        return (
            f"{self.name} {'writes' if self.writes else 'reads'} memory on {stream} at {self.site}"
        )


class RaceError(TorchDeviceError, RuntimeError):
    """Two kernels on unordered streams use the same memory, and at least one of them writes.

    Attributes:
        earlier: The access that was submitted first.
        later: The other.
        remedy: The call that is missing.
    """

    def __init__(self, earlier: Access, later: Access, one: str, other: str, remedy: str):
        self.earlier = earlier
        self.later = later
        self.remedy = remedy
        super().__init__(
            f"{later.told(other)}, and nothing orders it after the earlier access: "
            f"{earlier.told(one)}. {remedy}"
        )


class GraphRaceError(RaceError):
    """A CUDA graph was replayed with freed memory, or has overwritten a result that is read."""

    __init__ = TorchDeviceError.__init__


class KernelRaceError(RaceError):
    """Two instances of a Triton kernel use the same memory unordered, and one of them writes."""

    __init__ = TorchDeviceError.__init__


class UninitializedReadError(TorchDeviceError, RuntimeError):
    """A Triton kernel reads unwritten memory, in a scope with ``uninitialized="error"``."""


class CopyInFlightError(TorchDeviceError, RuntimeError):
    """The host wrote to page-locked memory before a copy from it ended (``asynchronous=True``).

    Attributes:
        site: The line of the program that began the copy, with ``file``, ``line`` and ``function``.
        stream: The ordinal of the device and the id of the stream on which the copy ran.
    """

    _text = (
        "the copy to cuda:{stream[0]} that began at {site} on stream {stream[1]} was in flight "
        "while the host wrote to its source. On a GPU it may have copied the new values. Record an "
        "event after the copy and synchronize it before the memory is written again."
    )

    site: Any
    stream: tuple[int, int]


class NoValueError(TorchDeviceError, RuntimeError):
    """A call needs the values of tensors in a scope that computes none, with ``compute="meta"``.

    Attributes:
        operator: The operator that needs the values.
    """

    _text = (
        "{operator!r} needs the values of a tensor, and there are none with compute='meta'. Leave "
        "the call out where only shapes and memory are asked for, as with .item(), .cpu(), "
        "nonzero() and 'if tensor:', or leave out compute."
    )

    operator: str


class RaceWarning(UserWarning):
    """A race, in a scope with ``races="warn"``. The text is that of :class:`RaceError`."""


class DivergenceError(TorchDeviceError, RuntimeError):
    """An operator differs from the CPU, in a scope with ``verify=`` and ``strict=True``.

    Attributes:
        finding: The difference: its ``operator``, ``kind``, ``what``, ``site``, ``arguments``,
            ``error``, ``script``.
    """

    _text = "{finding}"

    finding: Any


class DivergenceWarning(UserWarning):
    """An operator differs from the CPU, in a scope with ``verify=``; it has the error's text."""


class BackendTakenError(TorchDeviceError, RuntimeError):
    """Another out-of-tree backend has torch's only place, which the simulated device needs.

    Attributes:
        name: The name of the registered backend.
    """

    _text = (
        "torch has room for one out-of-tree backend in a process, and {name!r} is registered. Run "
        "the program on that backend with target={name!r}, or simulate in a process that does not "
        "import it."
    )

    name: str


class WrongDeviceError(TorchDeviceError, RuntimeError):
    """A batch was given to a move that starts on another device.

    Attributes:
        name: The tensor, as the program would write it: ``"the batch['x'][0]"``.
        found: The device where it is.
        expected: The device where the move starts.
    """

    _text = (
        "{name} is on '{found!s}', but expected on '{expected!s}'. Move it there first, or make "
        "the move start where it is."
    )

    name: str
    found: object
    expected: object


__all__ = [
    name
    for name, kind in list(vars().items())
    if isinstance(kind, type) and issubclass(kind, Exception)
]
