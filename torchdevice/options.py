"""The options of a scope. Each is declared once, here.

From a declaration follow: the keyword of ``portable`` and its siblings with its default and check, the environment
variable, the flag of ``torchdevice run``, the option of pytest, the line in ``docs/options.md``, what child processes
are told, and a part of the key that compiled code is guarded by.

An option is taken from the call; where the call leaves it out, from its variable; then it has its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torchdevice import device_properties
from torchdevice.switch import SAID, SWITCH

if TYPE_CHECKING:
    import torch

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Declaration(NamedTuple):
    """What an option is beside its name, type and default.

    Attributes:
        text: What it does, in one sentence for the command line and the documentation.
        check: Returns the value to use for one that was given, or raises a ValueError or TypeError that names both the
            value and the remedy.
        parse: Returns the value that a text of the command line or of a variable means; checked afterwards.
        show: Returns the text that means a value.
        choices: The texts that are understood, where there are few.
    """

    text: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()


def _option(default: Any, text: str, check: Callable[[Any], Any], **more: Any) -> Any:
    return dataclasses.field(default=default, kw_only=True, metadata={"option": Declaration(text, check, **more)})


# ---- checks ----------------------------------------------------------------------------------------------------------


def _one_of(name: str, *choices: str) -> dict[str, Any]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
            raise ValueError(f"{name}={value!r} is not known. Use {listed}.")
        return value

    return {"check": check, "choices": choices}


def is_number(value: Any, *, least: int) -> bool:
    """Say whether a value is an int of ``least`` or more; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _target(value: Any) -> Any:
    torch = sys.modules.get("torch")  # not imported for this: pytest reads the options of everybody who has the plugin
    if not (value is None or isinstance(value, str) or (torch is not None and isinstance(value, torch.device))):
        raise TypeError(f"target={value!r} is not a device type. Use a text such as 'cpu', or a torch.device.")
    return value


def _devices(value: Any) -> int | None:
    if value is not None and not is_number(value, least=1):
        raise ValueError(f"devices={value!r} is not a number of devices. Use an int of 1 or more, or None.")
    return value


def _identity(value: Any) -> str | None:
    # "cuda" is what "program" was called when programs for CUDA were the only ones.
    if value not in (None, "target", "program", "cuda"):
        raise ValueError(f"identity={value!r} is not known. Use 'target' or 'program'.")
    return "program" if value == "cuda" else value


def _strict(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"strict={value!r} is not a bool. Use True or False.")
    return value


def _truth(text: str) -> bool:
    """Return what a text such as "1", "off" or "yes" means."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither yes nor no. Use 1 or 0.")


def _capability(value: Any) -> tuple[int, int]:
    numbers = isinstance(value, (tuple, list)) and len(value) == 2
    if not numbers or not all(is_number(n, least=0) for n in value):
        raise ValueError(f"capability={value!r} is not a compute capability. Use a pair such as (8, 0).")
    return value[0], value[1]


def _parse_capability(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isdecimal() and part.isascii() for part in parts):
        raise ValueError(f"{text!r} is not a compute capability. Use two numbers such as 8.0.")
    return tuple(map(int, parts))


def _memory(value: Any) -> int | None:
    if isinstance(value, str):
        value = _bytes(value)
    if value is not None and not is_number(value, least=1):
        raise ValueError(f"memory={value!r} is not a number of bytes. Use an int of 1 or more, '8GiB', or None.")
    return value


def _bytes(text: str) -> int:
    """Return the bytes that a text such as "8589934592", "8G" or "8 GiB" means; units are powers of 1024."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"memory={text!r} is not a size. Use a number of bytes, or a text such as '8GiB'.")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def _properties(value: Any) -> dict[str, Any] | None:
    return None if value is None else device_properties.checked(value)


def _parse_properties(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f'{text!r} is not JSON. Use an object such as {{"name": "a GPU"}}.') from None


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a number. Use a number of 1 or more.")
    return int(text)


_ENGINES = _one_of("engine", "mode", "wrap")


def _engine(value: Any) -> str:
    checked: str = "mode" if value is None else _ENGINES["check"](value)
    return checked


# ---- the record ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked of a scope. Every value is checked.

    Attributes:
        from_variables: The names of the options that no call gave and that their variables did.
    """

    target: str | torch.device | None = dataclasses.field(
        default=None,
        metadata={
            "option": Declaration(
                "The device that stands in: cpu, mps, xpu, cuda, the name of a PrivateUse1 backend, or a simulated "
                "device such as simulated:cuda:2. Left out, the best there is.",
                _target,
            )
        },
    )
    devices: int | None = _option(
        None,
        "How many accelerators the program sees; an ordinal beyond them raises CUDA's 'invalid device ordinal'. Left "
        "out, as many as the target has, and higher ordinals are folded onto device 0.",
        _devices,
        parse=_parse_number,
    )
    identity: Literal["target", "program", "cuda"] | None = _option(
        None,
        "What tensors say they are on: the target, or the accelerator that the program is written for. Left out, the "
        "target; for simulate(), the program's.",
        _identity,
        choices=("target", "program"),
    )
    strict: bool = _option(
        False,
        "Raise FidelityError instead of approximating.",
        _strict,
        parse=_truth,
        show=lambda value: str(int(value)),
    )
    float64: Literal["float32", "error"] = _option(
        "float32",
        "What becomes of float64 on a target that lacks it: float32 with a warning, or torch's own error.",
        **_one_of("float64", "float32", "error"),
    )
    capability: tuple[int, int] = _option(
        (8, 0),
        "The CUDA compute capability that torch.cuda.get_device_capability() answers.",
        _capability,
        parse=_parse_capability,
        show=lambda value: "{}.{}".format(*value),
    )
    memory: int | str | None = _option(
        None,
        "Memory of each simulated device, in bytes or as a text such as 8GiB. Left out, no limit.",
        _memory,
        parse=_bytes,
    )
    properties: Mapping[str, Any] | None = _option(
        None,
        "Fields of torch.cuda.get_device_properties() that answer something else than the target's; on the command "
        "line a JSON object.",
        _properties,
        parse=_parse_properties,
        show=lambda value: json.dumps(value, default=str, sort_keys=True),
    )
    written_for: Literal["cuda", "mps", "xpu"] = _option(
        "cuda",
        "The accelerator that the program is written for, and is told is available.",
        **_one_of("written_for", "cuda", "mps", "xpu"),
    )
    engine: Literal["mode", "wrap"] | None = _option(
        None,
        "How torch's calls are seen: mode sees every call, wrap only those that can carry a device. Left out, mode.",
        _engine,
        choices=_ENGINES["choices"],
    )
    from_variables: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, declaration in declarations(type(self)).items():
            object.__setattr__(self, name, declaration.check(getattr(self, name)))

    @functools.cached_property
    def key(self) -> str:
        """What compiled code is guarded by: every option, as text."""
        return " ".join(f"{name}={getattr(self, name)}" for name in declarations(type(self)))

    def for_target(self, *, simulated: bool, shares_host_memory: bool, names_count: bool) -> Options:
        """Return these options without what contradicts the target.

        A variable is meant for the process, not for one call, so what it says is left out where it contradicts the
        target of the call. What a call says is refused.

        Args:
            simulated: Whether the target is a simulated device.
            shares_host_memory: Whether the target's tensors cannot be told from CPU tensors.
            names_count: Whether the target's name says how many devices there are.

        Raises:
            ValueError: An option that the call gave contradicts the target.
        """
        contradictions = {
            "memory": self.memory is not None
            and not simulated
            and f"memory={self.memory!r} limits simulated devices, and {self.target!r} is not one. Use a target such "
            f"as 'simulated:cuda', or leave memory out.",
            "identity": self.identity == "program"
            and shares_host_memory
            and f"identity={self.identity!r} needs a target whose tensors can be told from CPU tensors, and those of "
            f"{self.target or 'the CPU'!r} cannot. Use identity='target', or a simulated device such as "
            f"target='simulated:cuda'.",
            "devices": self.devices is not None
            and names_count
            and f"devices={self.devices!r} contradicts target={self.target!r}, which says how many devices there are. "
            f"Leave one of them out.",
        }
        left_out: dict[str, Any] = {}
        for name, message in contradictions.items():
            if message and name not in self.from_variables:
                raise ValueError(message)
            if message:
                left_out[name] = None
        return dataclasses.replace(self, **left_out) if left_out else self


_DECLARATIONS: dict[type, dict[str, Declaration]] = {}


def declarations(record: type = Options) -> dict[str, Declaration]:
    """Return the declaration of each option, by name, in order."""
    found = _DECLARATIONS.get(record)
    if found is None:
        fields = dataclasses.fields(record)
        found = {field.name: field.metadata["option"] for field in fields if "option" in field.metadata}
        _DECLARATIONS[record] = found
    return found


# ---- the ways in -----------------------------------------------------------------------------------------------------


def chosen(given: Mapping[str, Any], *, record: type = Options, **defaults: Any) -> Any:
    """Return the options of a call.

    Args:
        given: What the call says. None is the same as nothing.
        record: The class of the record.
        **defaults: What replaces an option's own default in this way in.

    Raises:
        TypeError: An option does not exist, or a value has a wrong type.
        ValueError: A value is not one of the option's.
    """
    unknown = sorted(given.keys() - declarations(record).keys())
    if unknown:
        raise TypeError(f"{unknown[0]!r} is not an option. Use one of {', '.join(declarations(record))}.")
    said = {name: value for name, value in given.items() if value is not None}
    variables = {name: value for name, value in from_environment(record).items() if name not in said}
    return record(**{**defaults, **variables, **said}, from_variables=frozenset(variables))


def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return f"{SWITCH}_{name.upper()}"


def flag_of(name: str) -> str:
    """Return the flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"


def pytest_flag_of(name: str) -> str:
    """Return the flag of an option for pytest: the target's is that of the plugin itself."""
    return "--torchdevice" if name == "target" else f"--torchdevice-{name.replace('_', '-')}"


def from_environment(record: type = Options) -> dict[str, Any]:
    """Return the options whose variables are set.

    Raises:
        ValueError: A variable's text does not mean a value; the message names the variable.
    """
    found = {}
    for name, declaration in declarations(record).items():
        text = os.environ.get(variable_of(name))
        if text:
            try:
                found[name] = declaration.check(declaration.parse(text))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{variable_of(name)}={text!r}: {error} Or unset the variable.") from None
    return found


def to_environment(options: Any) -> dict[str, str | None]:
    """Return the variables that give a child process the same options; None where one must not be set."""
    values: dict[str, str | None] = {SWITCH: "1", SAID: os.environ.get(SAID)}
    for name, declaration in declarations(type(options)).items():
        value = getattr(options, name)
        values[variable_of(name)] = None if value is None else declaration.show(value)
    return values


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables, or delete those that are None. Return what they were, in the same form."""
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def add_flags(add: Callable[..., Any], flag: Callable[[str], str] = flag_of, record: type = Options) -> None:
    """Add a flag for each option to a command line.

    Args:
        add: ``add_argument`` of a parser of argparse, or ``addoption`` of one of pytest's.
        flag: Returns the flag of an option.
        record: The class of the record.
    """
    for name, declaration in declarations(record).items():
        text = f"{declaration.text} (variable: {variable_of(name)})".replace("%", "%%")
        if declaration.parse is _truth:
            add(flag(name), action="store_true", default=None, help=text)
        else:
            metavar = "|".join(declaration.choices) or name.upper()
            add(flag(name), type=_argument(declaration), metavar=metavar, help=text)


def _argument(declaration: Declaration) -> Callable[[str], Any]:
    """Return what argparse calls for a text. It shows the message of this error alone."""

    def parse(text: str) -> Any:
        try:
            return declaration.check(declaration.parse(text))
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def takes_options(
    *, leading: Iterable[inspect.Parameter] = (), without: tuple[str, ...] = (), record: type = Options
) -> Callable[[Any], Any]:
    """Give a function that takes ``**options`` the signature and the documentation of the options it takes.

    Args:
        leading: Parameters that come before the options.
        without: Options that the function does not take.
        record: The class of the record.
    """

    def complete(function: Any) -> Any:
        parameters = list(leading)
        lines = []
        for field in dataclasses.fields(record):
            if "option" not in field.metadata or field.name in without:
                continue
            kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=field.type))
            lines.append(f"        {field.name}: {field.metadata['option'].text}")
        parameters.sort(key=lambda parameter: parameter.kind)
        returns = inspect.signature(function).return_annotation
        function.__signature__ = inspect.Signature(parameters, return_annotation=returns)
        function.__doc__ = (function.__doc__ or "").replace("        **options: See below.", "\n".join(lines))
        return function

    return complete


def table(record: type = Options) -> str:
    """Return the options as rows of a Markdown table."""
    rows = ["| option | flag of `run` | variable | pytest | default | what it does |", "|---|---|---|---|---|---|"]
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    for name, declaration in declarations(record).items():
        cells = [name, flag_of(name), variable_of(name), pytest_flag_of(name), repr(defaults[name])]
        rows.append("| " + " | ".join(f"`{cell}`" for cell in cells) + f" | {declaration.text} |")
    return "\n".join(rows) + "\n"
