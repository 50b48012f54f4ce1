"""The options of a scope. Each is declared once, here.

A declaration determines the keyword of ``portable``, ``simulate`` and ``enable`` with its default and check, the
environment variable, also of child processes, the flags of ``torchdevice run`` and pytest, the line in
``docs/options.md``, and a part of the key by which compiled code is guarded.

An option has the value that the call gives, else the value of its variable, else its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from torchdevice.kernel.devices import device_models
from torchdevice.kernel.devices.accelerators import FAMILIES, Family
from torchdevice.kernel.python.environment import SAID, SWITCH

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([KMGT])(?:i?B)?|B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Declaration(NamedTuple):
    """The properties of an option, apart from its name, type and default.

    Attributes:
        check: Returns the value to use for a given value, or raises a ValueError or TypeError that names the value and
            a remedy. As it is declared, it also takes the name of the option, first.
        parse: Returns the value for a text of the command line or of a variable. ``check`` is applied to the result.
        show: Returns the text from which ``parse`` makes a value.
        choices: The texts that are accepted, where there are few.
        alone: What the flag means without a text; None where it must have one.
        text: What the option does, for the command line and the documentation. The docstring of the record has it.
    """

    check: Callable[..., Any]
    parse: Callable[[str], Any] = str
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()
    alone: Any = None
    text: str = ""


def _option(default: Any, check: Callable[[str, Any], Any], *, kw_only: bool = True, **more: Any) -> Any:
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"option": Declaration(check, **more)})


# ---- checks ----------------------------------------------------------------------------------------------------------


def _choice(default: str | None, *choices: str) -> Any:
    """Return the field of an option that takes few texts, and that may be left out where None is the default."""
    listed = " or ".join(filter(None, [", ".join(map(repr, choices[:-1])), repr(choices[-1])]))

    def check(name: str, value: Any) -> str | None:
        if default is None and (value is None or value is False):
            return None
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name}={value!r} is not known. Use {listed}{'' if default else ', or leave it out'}.")
        return value

    return _option(default, check, choices=choices)


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
            f"{name}={value!r} is not a number of devices. Use an int from 1 to {MOST_DEVICES}, torch's limit."
        )
    return value


def _target(name: str, value: Any) -> Any:
    # Not imported: pytest reads the options wherever the plugin is installed, and need not wait for torch.
    torch = sys.modules.get("torch")
    if not (value is None or isinstance(value, str) or (torch is not None and isinstance(value, torch.device))):
        raise TypeError(f"target={value!r} is not a device type. Use a text such as 'cpu', or a torch.device.")
    return device_models.canonical(value) if isinstance(value, str) else value


def _devices(name: str, value: Any) -> int | None:
    return None if value is None else checked_count(name, value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not a bool. Use True or False.")
    return value


def _truth(text: str) -> bool:
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
        raise ValueError(f"capability={value!r} is not a compute capability. Use a pair such as (8, 0), in a text 8.0.")
    return value[0], value[1]


def _memory(name: str, value: Any, least: int = 1 << 20) -> int | None:
    if isinstance(value, str):  # units are powers of 1024
        found = _SIZE.fullmatch(value.strip())
        if found is None:
            raise ValueError(f"{name}={value!r} is not a size. Use a number of bytes, or a text such as '8GiB'.")
        value = int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if value is not None and not is_number(value, least=min(least, 1)):
        raise ValueError(
            f"{name}={value!r} is not a number of bytes. Use an int of {min(least, 1)} or more, '8GiB', or None."
        )
    if value is not None and value < least:  # "8" that was meant as 8 GiB
        raise ValueError(f"{name}={value!r} is less than 1 MiB. Name the unit, as in '8GiB'.")
    return value


def _verify(name: str, value: Any) -> bool | str | None:
    if value is None or isinstance(value, bool):
        return value or None
    if not isinstance(value, str) or not value.endswith(".json"):
        raise ValueError(f"verify={value!r} is neither True nor the name of a file. Use True, or a text FILE.json.")
    if not os.path.isdir(os.path.dirname(os.path.abspath(value))):
        raise ValueError(f"verify={value!r} is in a folder that is not there. Make the folder, or name another file.")
    return os.path.abspath(value)


def _verify_sample(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"verify_sample={value!r} is not a fraction. Use a number above 0, and 1 for every call.")
    return float(value)


def _verify_only(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) and each.strip() for each in names):
        raise ValueError(f"verify_only={value!r} names no operators. Use a text such as 'mm,addcmul_', or a tuple.")
    return tuple(each.strip() for each in names) or None


def _literal(text: str) -> Any:
    """Return the value that a text spells in JSON. Another text is left as it is, for the check to refuse."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# ---- the record ------------------------------------------------------------------------------------------------------


_OF_SIMULATED = ("memory", "context", "races", "uninitialized", "asynchronous", "compute")
"""Options that need simulated devices."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a scope. Every value is checked.

    Attributes:
        target: The device that runs the program: cpu, mps, xpu, cuda, the name of a PrivateUse1 backend, or a simulated
            device such as simulated:cuda:2. Default: the first available of cuda, mps, xpu, a PrivateUse1 backend and
            cpu; under plan, simulated:cuda.
        devices: The number of accelerators that the program sees; a higher ordinal raises CUDA's 'invalid device
            ordinal'. Default: the number of the target's devices, and a higher ordinal means device 0.
        identity: The device that tensors report: target for the target itself, or program for the accelerator that the
            program is written for. Default: program on simulated devices except a Mac, and target elsewhere.
        strict: Raise FidelityError where the target would only approximate a request.
        float64: How to treat float64 and complex128 on a target that lacks them: float32 with a warning, cpu to keep
            such tensors on the CPU and run their operators there, or error for torch's own error. Default: error for a
            program that is written for mps on MPS, as without this package, and otherwise float32.
        autocast: The dtype in which autocast to float16 or bfloat16 computes on a CPU. auto is bfloat16 on a CPU with
            instructions for it, and otherwise float32, which is several times faster there.
        half_products: The precision in which products of float16 and bfloat16 tensors are computed on a CPU: float32,
            rounded once, or target for torch's own. auto is float32 for a dtype that the CPU has no instructions for.
        capability: The CUDA compute capability that torch.cuda.get_device_capability() returns.
        memory: Memory of each simulated device, in bytes or as a text such as 8GiB. Default: no limit.
        context: Memory that CUDA and its libraries take from each simulated device, in bytes or as a text such as
            512MiB. Default: 512MiB for a model with a name (simulated:t4) whose memory is not set, and otherwise none.
        properties: Fields of torch.cuda.get_device_properties() and the values to return; on the command line a JSON
            object.
        written_for: The accelerator that the program is written for. Others are absent, as on a machine without them.
            any is cuda, and names and devices of the others work too, though none of them is reported as available.
        races: Look for kernels on different streams of a simulated device that use the same memory without anything
            ordering them: error raises, and warn warns. Default: do not look.
        uninitialized: error: raise where a Triton kernel reads memory of a simulated device to which nothing has been
            written since torch.empty returned it. Default: do not look.
        asynchronous: On simulated devices, let copies with non_blocking=True from and to page-locked memory continue
            after the call, until the program waits for them.
        random: The numbers that a seed gives: cuda for those of an NVIDIA GPU, on every target: of the one that is
            simulated, or that properties describe, and otherwise of an A100. device for the target's own, cpu for the
            CPU's on a simulated device too, to compare a program with its run there. Default: cuda on simulated GPUs,
            and device elsewhere.
        platform: On a simulated Mac, the computer that Python's platform.system(), machine(), mac_ver() and uname()
            describe to a program: target for a Mac, host for this one.
        compute: meta: tensors of simulated devices have shapes and memory but no values, which is enough to plan a
            program that is too large for this machine. Default: compute values.
        values: assume: where a program without values (compute='meta') reads one, a number is 0, a condition is False,
            and a result whose size depends on values has the size for ones; the report lists each such line. Default:
            an error.
        verify: Compute every operator of the target on the CPU too (on a CPU target in float64), and report those that
            differ beyond the tolerances of torch.testing. The findings are written to FILE.json.
        verify_sample: The fraction of the calls of each operator that verify checks: 0.1 for every tenth, and the
            first.
        verify_only: The operators that verify checks, such as mm,addcmul_. Default: all of torch's.
        engine: How a scope sees torch's calls: mode sees every call, wrap only those that can carry a device. auto is
            wrap for the scope of a whole process (run, TORCHDEVICE=1, enable()) if no module that uses torch was
            imported before it, and mode otherwise.
        native: Whether scopes use the C++ that 'torchdevice native build' compiles, which is the kernels of simulated
            devices, and with engine='wrap' calls that name a device: auto if it is built, never, or always, which on
            simulated devices is an error if it is not built.
        packages: What a program finds that imports a package which exists only for CUDA, such as flash_attn, and is not
            installed: stand-in for the same functions on torch's own operators, or absent for Python's
            ModuleNotFoundError.
        implied: The names of the options whose values the call did not give: those of variables and of files.
    """

    target: str | torch.device | None = _option(None, _target, kw_only=False)  # noqa: RUF009, as of the others
    devices: int | None = _option(None, _devices, parse=_literal)
    identity: Literal["target", "program"] | None = _choice(None, "target", "program")
    strict: bool = _option(False, _switch, parse=_truth, show=lambda value: str(int(value)))
    float64: Literal["float32", "cpu", "error"] | None = _choice(None, "float32", "cpu", "error")
    autocast: Literal["auto", "bfloat16", "float32"] = _choice("auto", "auto", "bfloat16", "float32")
    half_products: Literal["auto", "float32", "target"] = _choice("auto", "auto", "float32", "target")
    capability: tuple[int, int] = _option(
        device_models.CAPABILITY,
        _capability,
        parse=lambda text: tuple(map(_literal, text.split("."))),
        show=lambda value: "{}.{}".format(*value),
    )
    memory: int | str | None = _option(None, _memory)
    context: int | str | None = _option(None, functools.partial(_memory, least=0))
    properties: Mapping[str, Any] | None = _option(
        None,
        lambda name, value: None if value is None else device_models.checked(value),
        parse=_literal,
        show=lambda value: json.dumps(value, default=str, sort_keys=True),
    )
    written_for: Family | Literal["any"] = _choice("cuda", *FAMILIES, "any")  # noqa: RUF009, as of the others
    races: Literal["error", "warn"] | None = _choice(None, "error", "warn")
    uninitialized: Literal["error"] | None = _choice(None, "error")
    asynchronous: bool = _option(False, _switch, parse=_truth, show=lambda value: str(int(value)))
    random: Literal["cuda", "device", "cpu"] | None = _choice(None, "cuda", "device", "cpu")
    platform: Literal["target", "host"] = _choice("target", "target", "host")
    compute: Literal["meta"] | None = _choice(None, "meta")
    values: Literal["assume"] | None = _choice(None, "assume")
    verify: bool | str | None = _option(
        None,
        _verify,
        parse=lambda text: text if text.endswith(".json") else _truth(text),
        show=lambda value: "1" if value is True else value,
        choices=("FILE.json",),
        alone=True,
    )
    verify_sample: float = _option(1.0, _verify_sample, parse=_literal)
    verify_only: str | tuple[str, ...] | None = _option(None, _verify_only, show=lambda value: ",".join(value or ()))
    engine: Literal["auto", "mode", "wrap"] = _choice("auto", "auto", "mode", "wrap")
    native: Literal["auto", "never", "always"] = _choice("auto", "auto", "never", "always")
    packages: Literal["stand-in", "absent"] = _choice("stand-in", "stand-in", "absent")
    implied: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, declaration in declarations().items():
            object.__setattr__(self, name, declaration.check(getattr(self, name)))

    @functools.cached_property
    def key(self) -> str:
        """Every option as text. Compiled code is guarded by it."""
        return " ".join([f"{name}={getattr(self, name)}" for name in declarations()])

    def for_target(self, *, simulated: bool, shares_host_memory: bool, names_count: bool) -> Options:
        """Return these options without those that contradict the target.

        A variable is set for the whole process and a file for a whole project, so their options are dropped where they
        contradict the target of one call. An option that the call gives raises instead.

        Args:
            simulated: Whether the target is a simulated device.
            shares_host_memory: Whether the target's tensors are CPU tensors.
            names_count: Whether the target's name contains the number of devices.

        Raises:
            ValueError: An option that the call gave contradicts the target.
        """
        found: dict[str, str] = {}
        chosen = "no target was given" if self.target is None else f"{self.target!r} is not one"
        for name in _OF_SIMULATED:
            if getattr(self, name) and not simulated:
                found[name] = (
                    f"needs a simulated device, and {chosen}. Use a target such as 'simulated:cuda', "
                    f"or leave {name} out."
                )
        for name in ("asynchronous", "verify"):
            if getattr(self, name) and simulated and self.compute == "meta":
                found[name] = "is about values, and there are none with compute='meta'. Leave one of the two out."
        if self.values is not None and self.compute is None:
            found["values"] = "is about tensors without values. Use it with compute='meta', or leave it out."
        if self.identity == "program" and shares_host_memory:
            found["identity"] = (
                f"needs a target whose tensors can be told from CPU tensors, and those of {self.target or 'cpu'!r} "
                f"cannot. Use identity='target', or a simulated device such as target='simulated:cuda'."
            )
        if self.devices is not None and names_count:
            found["devices"] = f"contradicts target={self.target!r}, which contains the number. Leave devices out."
        for name, why in found.items():
            if name not in self.implied:
                raise ValueError(f"{name}={getattr(self, name)!r} {why}")
        return dataclasses.replace(self, **{name: getattr(Options, name) for name in found}) if found else self


@functools.cache
def declarations() -> dict[str, Declaration]:
    """Return the declaration of each option, by name, in order."""
    section = inspect.cleandoc(Options.__doc__ or "").partition("Attributes:\n")[2]
    said = dict(re.findall(r"^    (\w+): (.*\n?(?: {5,}.*\n?)*)", section, re.MULTILINE))
    found = {field.name: field.metadata["option"] for field in dataclasses.fields(Options) if field.metadata}
    return {
        name: option._replace(check=functools.partial(option.check, name), text=" ".join(said.get(name, "").split()))
        for name, option in found.items()
    }


_OLD_NAMES = {"count": "devices", "profile": "target"}
"""Names of arguments of :func:`torchdevice.simulate` -> the options of all other ways in."""


# ---- the ways in -----------------------------------------------------------------------------------------------------


def chosen(given: Mapping[str, Any], /, variables: Mapping[str, str | None] = os.environ, **defaults: Any) -> Options:
    """Return the options of a call.

    Args:
        given: The options of the call. The value None leaves an option out.
        variables: Where the options' variables are read.
        **defaults: Defaults that replace those of the record.

    Raises:
        TypeError: An option does not exist, or a value has a wrong type.
        ValueError: A value is not valid for its option.
    """
    unknown = sorted(given.keys() - declarations().keys())
    if unknown:
        hint = f" Did you mean {_OLD_NAMES[unknown[0]]}=?" if unknown[0] in _OLD_NAMES else ""
        raise TypeError(f"{unknown[0]!r} is not an option.{hint} Use one of {', '.join(declarations())}.")
    said = {name: value for name, value in given.items() if value is not None}
    others = {**defaults, **from_environment(variables)}
    target = said.get("target", others.get("target"))
    implied = device_models.options_of(target)
    for name, value in implied.items():
        try:
            declarations()[name].check(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{target}: {error}") from None
    if "memory" in said or "memory" in others:  # that of the program alone
        implied.pop("context", None)
    others = {**implied, **others}
    return Options(**{**others, **said}, implied=frozenset(others.keys() - said.keys()))


def variable_of(name: str) -> str:
    """Return the environment variable of an option."""
    return f"{SWITCH}_{name.upper()}"


def flag_of(name: str) -> str:
    """Return the flag of an option on the command line."""
    return f"--{name.replace('_', '-')}"


def pytest_flag_of(name: str) -> str:
    """Return pytest's flag of an option: ``--torchdevice`` for the target, ``--torchdevice-NAME`` for the others."""
    return "--torchdevice" if name == "target" else f"--torchdevice-{name.replace('_', '-')}"


def pytest_key_of(name: str) -> str:
    """Return the key of an option in a configuration file of pytest: its flag, spelled as pytest's keys are."""
    return pytest_flag_of(name)[2:].replace("-", "_")


def spelled(name: str, value: str | int, way: str) -> str:
    """Return how an option is given by a way into a scope: ``"run"``, ``"pytest"``, ``"variable"``, else in code."""
    ways = {
        "run": f"{flag_of(name)} {value}",
        "pytest": f"{pytest_flag_of(name)}={value}",
        "variable": f"{variable_of(name)}={value}",
    }
    return ways.get(way, f"{name}={json.dumps(value)}")


def from_environment(variables: Mapping[str, str | None] = os.environ) -> dict[str, Any]:
    """Return the options whose variables are set.

    Raises:
        ValueError: A variable's text is not valid for its option; the message names the variable.
    """
    return from_texts(variable_of, variables.get, "Or unset the variable.")


def from_texts(key_of: Callable[[str], str], read: Callable[[str], str | None], remedy: str) -> dict[str, Any]:
    """Return the options that are given as texts.

    Args:
        key_of: Returns the key of an option.
        read: Returns the text at a key; nothing where the option is not given.
        remedy: What the message of an error says last.

    Raises:
        ValueError: A text is not valid for its option; the message names the key.
    """
    found = {}
    for name, declaration in declarations().items():
        text = read(key_of(name))
        if text:
            try:
                found[name] = declaration.check(declaration.parse(text))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{key_of(name)}={text!r}: {error} {remedy}") from None
    return found


def to_environment(options: Options) -> dict[str, str | None]:
    """Return the variables that give a child process these options; None means that a variable must not be set."""
    values: dict[str, str | None] = {SWITCH: "1", SAID: os.environ.get(SAID)}
    # What the target implies is left to it, so that a child's scope on another target has the figures of that one.
    implied = device_models.options_of(options.target)
    for name, declaration in declarations().items():
        value = getattr(options, name)
        left_out = value is None or (name in implied and declaration.check(implied[name]) == value)
        values[variable_of(name)] = None if left_out else declaration.show(value)
    return values


def set_environment(values: Mapping[str, str | None], before: dict[str, str | None] | None = None) -> None:
    """Set variables, and delete those whose value is None.

    Args:
        values: The value of each variable.
        before: Gets the previous values, in that form, before anything changes.
    """
    if before is not None:
        before.update((name, os.environ.get(name)) for name in values)
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_COMMON = ("target", "devices", "memory")

_ABOUT_SIMULATED = (*_OF_SIMULATED, "properties", "capability", "platform", "values", "native")


def groups() -> dict[str, list[str]]:
    """Return the options as a command line lists them: heading -> names, those that most people need first."""
    others = [name for name in declarations() if name not in (*_COMMON, *_ABOUT_SIMULATED)]
    simulated = [name for name in declarations() if name in _ABOUT_SIMULATED and name not in _COMMON]
    return {"common options": [*_COMMON], "simulated devices": simulated, "for experts": others}


def add_flags(
    add: Callable[..., Any], flag: Callable[[str], str] = flag_of, names: Collection[str] | None = None
) -> None:
    """Add a flag for each option to a command line.

    Args:
        add: ``add_argument`` of an argparse parser, or ``addoption`` of a pytest parser.
        flag: Returns the flag of an option.
        names: The options; None for all.
    """
    for name, declaration in declarations().items():
        if names is not None and name not in names:
            continue
        text = f"{declaration.text} (variable: {variable_of(name)})".replace("%", "%%")
        if declaration.parse is _truth:
            add(flag(name), action="store_true", default=None, help=text)
        else:
            metavar = "|".join(declaration.choices) or name.upper()
            more = {} if declaration.alone is None else {"nargs": "?", "const": declaration.alone}
            add(flag(name), type=_argument(declaration), metavar=metavar, help=text, **more)


def _argument(declaration: Declaration) -> Callable[[str], Any]:
    """Return a function that argparse calls for a text. argparse shows the message of an ArgumentTypeError only."""

    def parse(text: str) -> Any:
        try:
            return declaration.check(declaration.parse(text))
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def takes_options(*, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a function that takes ``**options`` the signature and the documentation of these options.

    Args:
        without: Options that the function does not take.
    """

    def complete(function: Any) -> Any:
        signature = inspect.signature(function)
        known = {*declarations(), "options"} - {*without}  # what takes the place of **options is listed
        parameters = [each for name, each in signature.parameters.items() if name not in known]
        taken = [each for each in dataclasses.fields(Options) if each.metadata and each.name not in without]
        for field in taken:
            kind = inspect.Parameter.KEYWORD_ONLY if field.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=field.type))
        parameters.sort(key=lambda parameter: parameter.kind)
        function.__signature__ = signature.replace(parameters=parameters)
        lines = [f"{field.name}: {declarations()[field.name].text}" for field in taken]
        # Python 3.13 indents docstrings less, and -OO leaves them out.
        marker, documented = re.compile(r"( *)\*\*options: See below\."), function.__doc__ or ""
        function.__doc__ = marker.sub(lambda found: "\n".join(found[1] + line for line in lines), documented)
        return function

    return complete
