"""The options that every scope has, and how an option is declared.

Each option is declared once: those of a feature beside the feature, in a record that derives from
:class:`Options`. ``scope/collected_options.py`` collects the records. A declaration determines the
keyword of ``portable``, ``simulate`` and ``enable`` with its default and check, the environment
variable, also of child processes, the flags of ``torchdevice run`` and pytest, the section on the
page of options, and a part of the key that guards compiled code.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from torchdevice.kernel.devices import device_properties
from torchdevice.kernel.devices.accelerators import FAMILIES, Family
from torchdevice.kernel.python.environment import SWITCH

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


COMMON = "common options"
DEVICES = "simulated devices"
EXPERTS = "for experts"
"""The headings of a command line, in order."""


class Declaration(NamedTuple):
    """The properties of an option, apart from its name, type and default.

    Attributes:
        check: Returns the value to use for a given value, or raises a ValueError or TypeError that
            names the value and a remedy. As it is declared, it also takes the name of the option,
            first.
        parse: Returns the value for a text of the command line or of a variable. ``check`` is
            applied to the result.
        show: Returns the text from which ``parse`` makes a value.
        quote: Returns a value as a message writes it.
        choices: The texts that are accepted, where there are few.
        alone: The value of the flag without a text; None where it must have one.
        group: The heading under which a command line lists the option.
        text: The effect of the option, for the command line and the documentation, from the
            docstring of the record.
    """

    check: Callable[..., Any]
    parse: Callable[[str], Any] = str
    show: Callable[[Any], str] = str
    quote: Callable[[Any], str] = repr
    choices: tuple[str, ...] = ()
    alone: Any = None
    group: str = EXPERTS
    text: str = ""


def option(
    default: Any, check: Callable[[str, Any], Any], *, kw_only: bool = True, **more: Any
) -> Any:
    """Return the field of an option, see :class:`Declaration`."""
    return dataclasses.field(
        default=default, kw_only=kw_only, metadata={"option": Declaration(check, **more)}
    )


class PerDevice(tuple[Any, ...]):
    """The values of an option for a machine whose devices differ, in order of their ordinals."""

    __slots__ = ()


def of_device(value: Any, number: int) -> Any:
    """Return the value of an option for the device with a number on its machine."""
    return value[number] if isinstance(value, PerDevice) else value


def _checked(check: Callable[[str, Any], Any], name: str, value: Any) -> Any:
    if isinstance(value, PerDevice):
        return PerDevice(check(name, each) for each in value)
    return check(name, value)


# ---- checks --------------------------------------------------------------------------------------


def choice(default: str | None, *choices: str, **more: Any) -> Any:
    """Return the field of an option with few choices, optional where the default is None."""
    listed = " or ".join(filter(None, [", ".join(map(repr, choices[:-1])), repr(choices[-1])]))

    def check(name: str, value: Any) -> str | None:
        if default is None and (value is None or value is False):
            return None
        if not isinstance(value, str) or value not in choices:
            raise ValueError(
                f"{name}={value!r} is not known. Use "
                f"{listed}{'' if default else ', or leave it out'}."
            )
        return value

    return option(default, check, choices=choices, **more)


MOST_DEVICES = 128
"""torch keeps the index of a device in eight bits with a sign, so 127 is the last one."""


def is_number(value: Any, *, least: int, most: float = math.inf) -> bool:
    """Return whether a value is an int from ``least`` to ``most``, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def checked_count(name: str, value: Any) -> int:
    """Return a number of devices.

    Raises:
        ValueError: It is none, or beyond what torch can number.
    """
    if not is_number(value, least=1, most=MOST_DEVICES):
        raise ValueError(
            f"{name}={value!r} is not a number of devices. Use an int from 1 to {MOST_DEVICES}, "
            "torch's limit."
        )
    return value


PLAIN = re.compile(rf"({'|'.join(FAMILIES)}|cpu)(:[0-9]+)?", re.IGNORECASE)
"""The name of a device of torch's own as a target. It may be in capitals."""


def checked_target(name: str, value: Any) -> Any:
    """Return a target, in lower case where it is one of torch's own.

    Raises:
        TypeError: It is neither a text nor a ``torch.device``.
    """
    # Not imported: pytest reads the options wherever the plugin is, and need not wait for torch.
    torch = sys.modules.get("torch")
    if not (
        value is None
        or isinstance(value, str)
        or (torch is not None and isinstance(value, torch.device))
    ):
        raise TypeError(
            f"target={value!r} is not a device type. Use a text such as 'cpu', or a torch.device."
        )
    if isinstance(value, str) and PLAIN.fullmatch(value.strip()):
        return value.strip().lower()
    return value


def _devices(name: str, value: Any) -> int | None:
    return None if value is None else checked_count(name, value)


def switch(name: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool. Use True or False.")
    return value


def truth(text: str) -> bool:
    """Return the bool that a text such as "1", "off" or "yes" means."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither yes nor no. Use 1 or 0.")


def _capability(name: str, value: Any) -> tuple[int, int]:
    numbers = isinstance(value, (tuple, list)) and len(value) == 2
    if not numbers or not all(is_number(n, least=0) for n in value):
        raise ValueError(
            f"capability={value!r} is not a compute capability. Use a pair such as (8, 0), in a "
            "text 8.0."
        )
    return value[0], value[1]


def checked_size(name: str, value: Any, least: int = 1 << 20) -> int | None:
    """Return a number of bytes for a number, a text such as ``"8GiB"`` or None.

    Raises:
        ValueError: It is none, or below ``least``, which a unit that was left out explains.
    """
    if isinstance(value, str):  # units are powers of 1024
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError(
                f"{name}={value!r} is not a size. Use a number of bytes, or a text such as '8GiB'."
            )
        value = int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if value is not None and not is_number(value, least=min(least, 1)):
        raise ValueError(
            f"{name}={value!r} is not a number of bytes. Use an int of {min(least, 1)} or more, "
            "'8GiB', or None."
        )
    if value is not None and value < least:  # "8" that was meant as 8 GiB
        raise ValueError(f"{name}={value!r} is less than 1 MiB. Name the unit, as in '8GiB'.")
    return value


def literal(text: str) -> Any:
    """Return the JSON value of a text. A text that is not JSON is kept for the check to refuse."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# ---- the record ----------------------------------------------------------------------------------


class Target(NamedTuple):
    """The facts about a target that options must agree with.

    Attributes:
        simulated: Whether the target is a simulated device.
        shares_host_memory: Whether the target's tensors are CPU tensors.
        names_count: Whether the target's name contains the number of devices.
    """

    simulated: bool = False
    shares_host_memory: bool = False
    names_count: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a scope. Every value is checked.

    Attributes:
        target: The device that runs the program: cpu, mps, xpu, cuda, the name of a PrivateUse1
            backend, or a simulated device such as simulated:cuda:2. Default: the first available of
            cuda, mps, xpu, a PrivateUse1 backend and cpu; under plan, simulated:cuda.
        devices: The number of accelerators that the program sees; a higher ordinal raises CUDA's
            'invalid device ordinal'. Default: the number of the target's devices; a higher ordinal
            then means device 0, and raises the error on simulated GPUs.
        identity: The device that tensors report: target for the target itself, or program for the
            accelerator that the program is written for. Default: program on simulated devices
            except a Mac, and target elsewhere.
        strict: Raise FidelityError where the target would only approximate a request.
        float64: How to treat float64 and complex128 on a target that lacks them: float32 with a
            warning, cpu to keep such tensors on the CPU and run their operators there, or error for
            torch's own error. Default: error for a program that is written for mps on MPS, as
            without this package, and otherwise float32.
        autocast: The dtype in which autocast to float16 or bfloat16 computes on a CPU. auto is
            bfloat16 on a CPU with instructions for it, and otherwise float32, which is several
            times faster there.
        half_products: The precision in which products of float16 and bfloat16 tensors are computed
            on a CPU: float32, rounded once, or target for torch's own. auto is float32 for a dtype
            that the CPU has no instructions for.
        capability: The CUDA compute capability that torch.cuda.get_device_capability() returns.
        properties: Fields of torch.cuda.get_device_properties() and the values to return; on the
            command line a JSON object.
        written_for: The accelerator that the program is written for. Others are absent, as on a
            machine without them. any is cuda, and names and devices of the others work too, though
            none of them is reported as available.
        random: The numbers that a seed gives: cuda for those of an NVIDIA GPU, on every target: of
            the one that is simulated, or that properties describe, and otherwise of an A100. device
            for the target's own, cpu for the CPU's on a simulated device too, to compare a program
            with its run there. Default: cuda on simulated GPUs, and device elsewhere.
        engine: How a scope sees torch's calls: mode sees every call, wrap only those that can carry
            a device. auto is wrap on a simulated GPU, and for the scope of a whole process (run,
            TORCHDEVICE=1, enable()) if no module that uses torch was imported before it, and mode
            otherwise.
        native: Whether scopes on simulated devices use the kernels in C++ that 'torchdevice native
            build' compiles: auto if they are built, never, or always, which is an error if they are
            not built.
        packages: What a program finds that imports a package which exists only for CUDA, such as
            flash_attn: stand-in for the same functions on torch's own operators where the package
            is not installed, instead for these also where it is, since its kernels need a GPU, or
            absent for Python's ModuleNotFoundError.
        implied: The names of the options whose values the call did not give: those of variables and
            of files.
    """

    target: str | torch.device | None = option(None, checked_target, kw_only=False, group=COMMON)  # noqa: RUF009, as of the others
    devices: int | None = option(None, _devices, parse=literal, group=COMMON)
    identity: Literal["target", "program"] | None = choice(None, "target", "program")
    strict: bool = option(False, switch, parse=truth, show=lambda value: str(int(value)))
    float64: Literal["float32", "cpu", "error"] | None = choice(None, "float32", "cpu", "error")
    autocast: Literal["auto", "bfloat16", "float32"] = choice("auto", "auto", "bfloat16", "float32")
    half_products: Literal["auto", "float32", "target"] = choice(
        "auto", "auto", "float32", "target"
    )
    capability: tuple[int, int] = option(
        device_properties.CAPABILITY,
        _capability,
        parse=lambda text: tuple(map(literal, text.split("."))),
        show=lambda value: "{}.{}".format(*value),
        group=DEVICES,
    )
    properties: Mapping[str, Any] | None = option(
        None,
        lambda name, value: None if value is None else device_properties.checked(value),
        parse=literal,
        show=lambda value: json.dumps(value, default=str, sort_keys=True),
        group=DEVICES,
    )
    written_for: Family | Literal["any"] = choice("cuda", *FAMILIES, "any")  # noqa: RUF009, as of the others
    random: Literal["cuda", "device", "cpu"] | None = choice(None, "cuda", "device", "cpu")
    engine: Literal["auto", "mode", "wrap"] = choice("auto", "auto", "mode", "wrap")
    native: Literal["auto", "never", "always"] = choice(
        "auto", "auto", "never", "always", group=DEVICES
    )
    packages: Literal["stand-in", "instead", "absent"] = choice(
        "stand-in", "stand-in", "instead", "absent"
    )
    implied: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, kw_only=True)

    if TYPE_CHECKING:  # the options of features

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        record: Any = type(self)
        for name, declaration in declared_in(record).items():
            value = getattr(self, name)
            # A default is what its check returns for it. Most options have their defaults.
            if value is not getattr(record, name):
                object.__setattr__(self, name, declaration.check(value))

    @functools.cached_property
    def key(self) -> str:
        """Every option as text. Compiled code is guarded by it."""
        record: Any = type(self)
        return " ".join([f"{name}={getattr(self, name)}" for name in declared_in(record)])

    def quoted(self, name: str) -> str:
        """Return an option and its value as a message writes them, such as ``memory='8GiB'``."""
        record: Any = type(self)
        quote, value = declared_in(record)[name].quote, getattr(self, name)
        if isinstance(value, PerDevice):
            return f"{name}=({', '.join(map(quote, value))})"
        return f"{name}={quote(value)}"

    @staticmethod
    def implied_by(target: object) -> dict[str, Any]:
        """Return the options that a target implies."""
        return {}

    def contradictions(self, target: Target) -> dict[str, str]:
        """Return the options that contradict a target, and why."""
        found: dict[str, str] = {}
        if self.identity == "program" and target.shares_host_memory:
            found["identity"] = (
                "needs a target whose tensors can be told from CPU tensors, and those of "
                f"{self.target or 'cpu'!r} cannot. Use identity='target', or a simulated device "
                "such as target='simulated:cuda'."
            )
        if self.devices is not None and target.names_count:
            found["devices"] = (
                f"contradicts target={self.target!r}, which contains the number. Leave devices out."
            )
        return found

    def for_target(self: Record, target: Target) -> Record:
        """Return these options without those that contradict the target.

        A variable is set for the whole process and a file for a whole project, so their options are
        dropped where they contradict the target of one call. An option that the call gives raises
        instead.

        Raises:
            ValueError: An option that the call gave contradicts the target.
        """
        found = self.contradictions(target)
        for name, why in found.items():
            if name not in self.implied:
                raise ValueError(f"{self.quoted(name)} {why}")
        if found:
            return dataclasses.replace(self, **{name: getattr(type(self), name) for name in found})
        return self


Record = TypeVar("Record", bound=Options)


@functools.cache
def declared_in(record: Any) -> dict[str, Declaration]:
    """Return the declaration of each option of a record, by name, in order."""
    said: dict[str, str] = {}
    for kind in record.__mro__:
        section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        said = {
            **dict(re.findall(r"^    (\w+): (.*\n?(?: {5,}.*\n?)*)", section, re.MULTILINE)),
            **said,
        }
    found = {
        field.name: field.metadata["option"]
        for field in dataclasses.fields(record)
        if field.metadata
    }
    return {
        name: option._replace(
            check=functools.partial(_checked, option.check, name),
            text=" ".join(said.get(name, "").split()),
        )
        for name, option in found.items()
    }


# ---- the names of an option ----------------------------------------------------------------------


@functools.cache
def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return f"{SWITCH}_{name.upper()}"


def flag_of(name: str) -> str:
    """Return the flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"


def pytest_flag_of(name: str) -> str:
    """Return pytest's flag: ``--torchdevice`` for the target, else ``--torchdevice-NAME``."""
    return "--torchdevice" if name == "target" else f"--torchdevice-{name.replace('_', '-')}"


def pytest_key_of(name: str) -> str:
    """Return an option's key in pytest's configuration file: its flag, spelled as a key."""
    return pytest_flag_of(name)[2:].replace("-", "_")


def spelled(name: str, value: str | int, way: str) -> str:
    """Return how to give an option: by ``"run"``, ``"pytest"``, a ``"variable"``, or in code."""
    ways = {
        "run": f"{flag_of(name)} {value}",
        "pytest": f"{pytest_flag_of(name)}={value}",
        "variable": f"{variable_of(name)}={value}",
    }
    return ways.get(way, f"{name}={json.dumps(value)}")
