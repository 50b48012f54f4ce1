"""Writes a program that runs a finding's operator on target and CPU, and compares both.

The program needs torch alone, and this package where the target is simulated. Arguments of many
elements lie beside it in a file of ``torch.save``.
"""

from __future__ import annotations

import json
import keyword
import os
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchdevice.calls.rewriters import native_device
from torchdevice.kernel.context import Context
from torchdevice.kernel.options import Options
from torchdevice.kernel.python import data_files
from torchdevice.kernel.python.logs import logger
from torchdevice.kernel.stand_ins import given_to, tensors
from torchdevice.report.discrepancies import Finding, findings_of
from torchdevice.verify.inputs import WIDE, Inputs, Place
from torchdevice.verify.operator_facts import Operator
from torchdevice.version import versions

_FOLDER = "torchdevice-verify"
"""Where programs are written if ``verify=`` names no file."""

_MOST = 100
"""How many programs a process writes."""

_INLINE = 64
"""How many elements of an argument are written into the program."""

_LARGEST = 256 << 20
"""How many bytes of arguments are written beside a program. There is none for a call with more."""

_LONGEST = 40
"""How many characters of a file's name are in that of a program, which may have 255 bytes."""

_READABLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *WIDE} - {
    torch.complex32
}


def write(context: Context, operator: Operator, inputs: Inputs, finding: Finding) -> str:
    """Write a finding's program, and return its path; nothing if it is too large or fails."""
    # Beside the file of findings, or in the working folder.
    named = context.options.verify
    folder = Path(named).with_suffix("") if isinstance(named, str) else Path(_FOLDER)
    size = sum(memory.nbytes for memory in inputs.memories) if inputs.has_values else 0
    if sum(1 for each in findings_of(context.journal) if each.script) >= _MOST or size > _LARGEST:
        return ""
    called = operator.name.partition("::")[2]
    name = f"{called}-{Path(finding.site.file).stem[:_LONGEST]}-{finding.site.line}"
    path = folder / (re.sub(r"[^\w.-]+", "-", name) + ".py")
    text, saved = _Program(context, operator, inputs, path).rendered(finding)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if saved:
            torch.save(saved, path.with_suffix(".pt"))
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        logger.warning(
            "the program that shows %s alone could not be written: %s", operator.name, error
        )
        return ""
    return os.fspath(path)


class _Memory(NamedTuple):
    """A memory as one dtype.

    Attributes:
        name: Its name in the program.
        dtype: The dtype.
        before: How many elements come before the first that is used.
        values: The elements from there on; None where they have no meaning.
        length: The number of all elements.
        on_target: Whether it is the target's.
    """

    name: str
    dtype: torch.dtype
    before: int
    values: torch.Tensor | None
    length: int
    on_target: bool


class _Program:
    def __init__(self, context: Context, operator: Operator, inputs: Inputs, path: Path):
        self._context = context
        self._operator = operator
        self._inputs = inputs
        self._path = path
        self._wide = context.runtime.shares_host_memory
        self._simulated = context.runtime.supplied.draws_on_cpu and not self._wide
        self._memories: dict[tuple[int, torch.dtype], _Memory] = {}
        for place in inputs.places.values():
            at = place.memory, place.dtype
            if at not in self._memories:
                self._memories[at] = self._memory(place, f"m{len(self._memories)}")
        self._names: dict[int, str] = {}
        for name, value in given_to(operator.op, inputs.args, inputs.kwargs).items():
            for number, tensor in enumerate(tensors(value)):
                named = f"{name}_{number}" if isinstance(value, (list, tuple)) else name
                self._names.setdefault(
                    id(tensor), f"{named}_" if keyword.iskeyword(named) else named
                )

    def _memory(self, place: Place, name: str) -> _Memory:
        elements = self._inputs.elements(place).view(-1)
        values = elements.clone() if self._inputs.has_values else None
        on_target = native_device(place.like).type == self._context.device_type
        return _Memory(
            name, place.dtype, place.before, values, place.before + elements.numel(), on_target
        )

    def rendered(self, finding: Finding) -> tuple[str, dict[str, torch.Tensor]]:
        """Return the text of the program, and the tensors that it loads."""
        saved: dict[str, torch.Tensor] = {}
        inline: list[torch.Tensor] = []
        for memory in self._memories.values():
            if memory.values is None:
                continue
            if _is_inline(memory):
                inline.append(memory.values)
            else:
                saved[memory.name] = memory.values
        places = self._inputs.places.items()
        device, family = self._context.device_type, self._context.program
        target = self._context.runtime.target
        against = "in float64" if self._wide else "the CPU"
        title = textwrap.fill(f"{finding.operator} on {target}: {finding.what}.", 100)
        text = data_files.filled(
            __file__,
            "program.py.jinja",
            title=_in_docstring(title),
            versions=", ".join(f"{name} {version}" for name, version in versions().items()),
            site=_in_docstring(str(finding.site)),
            is_finite=all(bool(values.isfinite().all()) for values in inline),
            is_simulated=self._simulated,
            wide=WIDE if self._wide else {},
            operator=self._operator,
            memories=[(each, _values(each, saved)) for each in self._memories.values()],
            has_saved=bool(saved),
            tensors=[
                (self._names[key], self._memories[at.memory, at.dtype], at) for key, at in places
            ],
            call=self._call(),
            target=_literal(target),
            device=f"{family}:{self._inputs.index_on(device)}" if self._simulated else device,
            family=family,
            is_default=family == Options().written_for,
            same=_literal(f"{finding.operator} gives the same on {target} and {against}"),
        )
        return text, saved

    def _call(self) -> str:
        namespace, _, name = self._operator.name.partition("::")
        base, _, overload = name.partition(".")
        args = [self._spelled(each) for each in self._inputs.args]
        named = {
            key: self._spelled(each)
            for key, each in self._inputs.kwargs.items()
            if key != "generator"
        }
        args += [f"{key}={value}" for key, value in named.items() if not keyword.iskeyword(key)]
        args += [
            f"**{{{key!r}: {value}}}" for key, value in named.items() if keyword.iskeyword(key)
        ]
        return f"torch.ops.{namespace}.{base}.{overload or 'default'}({', '.join(args)})"

    def _spelled(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._names[id(value)]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._spelled, value)) + "]"
        if isinstance(value, torch.device):
            return "device" if value.type == self._context.device_type else '"cpu"'
        if isinstance(value, torch.dtype) and self._wide and value in WIDE:
            return f"{WIDE[value]} if wide else {value}"
        if isinstance(value, float):
            if value != value or value in (float("inf"), -float("inf")):
                return f'float("{value}")'
            return repr(value)
        return repr(value)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _literal(text: str) -> str:
    """Return a text as a Python literal: JSON's, with characters written as they are."""
    return _encodable(json.dumps(text, ensure_ascii=False))


def _in_docstring(text: str) -> str:
    # Python 3.13 does not compile a docstring with a character that UTF-8 cannot encode, also where
    # it is escaped.
    return "\n".join(_literal(line)[1:-1] for line in _encodable(text).split("\n"))


def _is_inline(memory: _Memory) -> bool:
    values = memory.values
    if values is None or values.numel() > _INLINE or values.dtype not in _READABLE:
        return False
    return not values.is_complex() or bool(values.isfinite().all())


def _values(memory: _Memory, saved: Any) -> str:
    """Return the expression for the elements of a memory."""
    if memory.values is None:
        return f"torch.arange({memory.length}).to({memory.dtype})"
    if memory.name in saved:
        text = f'saved["{memory.name}"]'
    else:
        numbers = textwrap.fill(
            ", ".join(_number(each, memory.dtype) for each in memory.values.tolist()), 100
        )
        lines = f"\n{textwrap.indent(numbers, '    ')}\n" if "\n" in numbers else numbers
        text = f"torch.tensor([{lines}], dtype={memory.dtype})"
    if memory.before:
        text = f"torch.cat([torch.zeros({memory.before}, dtype={memory.dtype}), {text}])"
    return text


def _number(value: Any, dtype: torch.dtype) -> str:
    """Return a number with as many digits as its dtype needs."""
    # Nine digits tell any two numbers in float32 apart; repr gives those of float64.
    if dtype.is_floating_point and dtype != torch.float64:
        return format(value, ".9g")
    return repr(value)
