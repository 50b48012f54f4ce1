"""The options of a scope: those that every scope has, and those of the features.

An option has the value that the call gives, else the value of its variable, else its default.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torchdevice.kernel import options as _kernel
from torchdevice.kernel.options import COMMON, DEVICES, EXPERTS, Declaration, declared_in, truth
from torchdevice.kernel.options import MOST_DEVICES as MOST_DEVICES
from torchdevice.kernel.options import Target as Target
from torchdevice.kernel.options import checked_count as checked_count
from torchdevice.kernel.options import choice as choice
from torchdevice.kernel.options import flag_of as flag_of
from torchdevice.kernel.options import pytest_flag_of as pytest_flag_of
from torchdevice.kernel.options import pytest_key_of as pytest_key_of
from torchdevice.kernel.options import spelled as spelled
from torchdevice.kernel.options import variable_of as variable_of
from torchdevice.kernel.python import environment
from torchdevice.kernel.python.environment import SAID, SWITCH
from torchdevice.scope import features

if TYPE_CHECKING:
    from torchdevice.simulation.options import SimulationOptions
    from torchdevice.verify.options import VerifyOptions

    class Options(SimulationOptions, VerifyOptions): ...


F = TypeVar("F", bound=Callable[..., Any])


def _records() -> list[type[_kernel.Options]]:
    """Return the records of the present features, last first, as a class lists its bases."""
    declaring = [each for each in reversed(features.present()) if each.options]
    return [each.imported(each.options).RECORD for each in declaring] or [_kernel.Options]


if not TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True)
    class Options(*_records()):
        """The options of a scope. Every value is checked."""


@functools.cache
def declarations() -> dict[str, Declaration]:
    """Return the declaration of each option, by name, in order."""
    return declared_in(Options)


_OLD_NAMES = {"count": "devices", "profile": "target"}
"""Names of arguments of :func:`torchdevice.simulate` -> the options of all other ways in."""


# ---- the ways in ---------------------------------------------------------------------------------


def chosen(
    given: Mapping[str, Any], /, variables: Mapping[str, Any] | None = None, **defaults: Any
) -> Options:
    """Return the options of a call.

    Args:
        given: The options of the call. The value None leaves an option out.
        variables: The options that variables give; None to read the variables of this process.
        **defaults: Defaults that replace those of the record.

    Raises:
        TypeError: An option does not exist, or a value has a wrong type.
        ValueError: A value is not valid for its option.
    """
    unknown = sorted(given.keys() - declarations().keys())
    if unknown:
        hint = f" Did you mean {_OLD_NAMES[unknown[0]]}=?" if unknown[0] in _OLD_NAMES else ""
        raise TypeError(
            f"{unknown[0]!r} is not an option.{hint} Use one of {', '.join(declarations())}."
        )
    said = {name: value for name, value in given.items() if value is not None}
    others = {**defaults, **(from_environment() if variables is None else variables)}
    target = said.get("target", others.get("target"))
    implied = Options.implied_by(target)
    for name, value in implied.items():
        try:
            declarations()[name].check(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{target}: {error}") from None
    if "memory" in said or "memory" in others:  # that of the program alone
        implied.pop("context", None)
    others = {**implied, **others}
    return Options(**{**others, **said}, implied=frozenset(others.keys() - said.keys()))


def from_environment(variables: Mapping[str, str | None] = os.environ) -> dict[str, Any]:
    """Return the options whose variables are set.

    Raises:
        ValueError: A variable's text is not valid for its option; the message names the variable.
    """
    if variables is os.environ:
        variables = environment.set_of(_variables(tuple(declarations())))
    return from_texts(variable_of, variables.get, "Or unset the variable.") if variables else {}


@functools.cache
def _variables(options: tuple[str, ...]) -> dict[str | bytes, str]:
    return environment.keys_of(map(variable_of, options))


def from_texts(
    key_of: Callable[[str], str], read: Callable[[str], str | None], remedy: str
) -> dict[str, Any]:
    """Return the options that are given as texts.

    Args:
        key_of: Returns the key of an option.
        read: Returns the text at a key; nothing where the option is not given.
        remedy: The last sentence of an error's message.

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


def to_environment(options: _kernel.Options) -> dict[str, str | None]:
    """Return a child process's variables for these options; None for ones that must be unset."""
    values: dict[str, str | None] = {SWITCH: "1", SAID: os.environ.get(SAID)}
    # Values that the target implies are left out, so that a child's scope on another target has
    # that one's.
    implied = Options.implied_by(options.target)
    for name, declaration in declarations().items():
        value = getattr(options, name)
        left_out = value is None or (name in implied and declaration.check(implied[name]) == value)
        values[variable_of(name)] = None if left_out else declaration.show(value)
    return values


def set_environment(
    values: Mapping[str, str | None], before: dict[str, str | None] | None = None
) -> None:
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


def groups() -> dict[str, list[str]]:
    """Return options for a command line, by heading, with the commonly needed ones first."""
    return {
        heading: [
            name for name, declaration in declarations().items() if declaration.group == heading
        ]
        for heading in (COMMON, DEVICES, EXPERTS)
    }


def add_flags(
    add: Callable[..., Any],
    flag: Callable[[str], str] = flag_of,
    names: Collection[str] | None = None,
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
        if declaration.parse is truth:
            add(flag(name), action="store_true", default=None, help=text)
        else:
            metavar = "|".join(declaration.choices) or name.upper()
            more = {} if declaration.alone is None else {"nargs": "?", "const": declaration.alone}
            add(flag(name), type=_argument(declaration), metavar=metavar, help=text, **more)


def _argument(declaration: Declaration) -> Callable[[str], Any]:
    """Return a converter for argparse, which shows only an ArgumentTypeError's message."""

    def parse(text: str) -> Any:
        try:
            return declaration.check(declaration.parse(text))
        except (ValueError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def takes_options(*, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a function with ``**options`` the signature and documentation of these options.

    Args:
        without: Options that the function does not take.
    """

    def complete(function: Any) -> Any:
        signature = inspect.signature(function)
        # The parameters that replace **options are listed.
        known = {*declarations(), "options"} - {*without}
        parameters = [each for name, each in signature.parameters.items() if name not in known]
        taken = [
            each
            for each in dataclasses.fields(Options)
            if each.metadata and each.name not in without
        ]
        for field in taken:
            kind = (
                inspect.Parameter.KEYWORD_ONLY
                if field.kw_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD
            )
            parameters.append(
                inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
            )
        parameters.sort(key=lambda parameter: parameter.kind)
        function.__signature__ = signature.replace(parameters=parameters)
        lines = [f"{field.name}: {declarations()[field.name].text}" for field in taken]
        # Python 3.13 indents docstrings less, and -OO leaves them out.
        marker, documented = re.compile(r"( *)\*\*options: See below\."), function.__doc__ or ""
        function.__doc__ = marker.sub(
            lambda found: "\n".join(found[1] + line for line in lines), documented
        )
        return function

    return complete
