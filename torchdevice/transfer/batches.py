"""What a batch is made of, however it is nested, and how it is put together again from moved parts.

A leaf is what is moved by itself: a tensor, a module, and whatever is no container known here. A batch is never
changed: its containers are made anew, of the same types and with what else they hold.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence


class Parts(NamedTuple):
    """A container taken apart.

    Attributes:
        names: How the program would write each child after the container: ``"['x']"``, ``"[0]"``, ``".x"``.
        children: The children.
        rebuild: Makes a container like it of other children.
    """

    names: Iterable[str]
    children: Iterable[Any]
    rebuild: Callable[[list[Any]], Any]


def parts(batch: Any) -> Parts | None:
    """Take a container apart; None for a leaf."""
    if isinstance(batch, (torch.Tensor, torch.nn.Module, str, bytes)):
        return None
    if isinstance(batch, PackedSequence):
        return _packed(batch)
    if isinstance(batch, Mapping):
        return Parts(map("[{!r}]".format, batch), batch.values(), lambda values: _mapping(batch, values))
    if isinstance(batch, tuple):
        # _make skips a __new__ of the program's own, which may take other arguments than the fields.
        make = getattr(type(batch), "_make", type(batch))
        return Parts(_numbers(), batch, make)
    if isinstance(batch, (list, UserList, deque)):
        return Parts(_numbers(), batch, lambda values: _with_items(batch, enumerate(values)))
    if isinstance(batch, (set, frozenset)):
        return Parts(_numbers(), batch, type(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return _record(batch)
    return None


def leaves(batch: Any, name: str = "the batch") -> Iterator[tuple[str, Any]]:
    """Yield each leaf with how the program would write it."""
    found = parts(batch)
    if found is None:
        yield name, batch
        return
    for suffix, child in zip(found.names, found.children, strict=False):
        yield from leaves(child, name + suffix)


def mapped(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch like this one with ``function`` of each leaf in the leaf's place."""
    found = parts(batch)
    if found is None:
        return function(batch)
    return found.rebuild([mapped(child, function) for child in found.children])


def _numbers() -> Iterator[str]:
    return map("[{}]".format, itertools.count())


def _with_items(batch: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """Return a copy with other items. A copy, because a subclass holds more: a default factory, attributes."""
    new = copy.copy(batch)
    for key, value in items:
        new[key] = value
    return new


def _mapping(batch: Mapping[Any, Any], values: list[Any]) -> Any:
    items = dict(zip(batch, values, strict=True))
    return _with_items(batch, items.items()) if isinstance(batch, MutableMapping) else type(batch)(items)  # type: ignore[call-arg]


def _packed(batch: PackedSequence) -> Parts:
    """Torch keeps the batch sizes on the CPU, wherever the data is."""
    names = ("data", "sorted_indices", "unsorted_indices")

    def rebuild(values: list[Any]) -> PackedSequence:
        data, in_order, back = values
        return type(batch)(data, batch.batch_sizes, in_order, back)

    return Parts([f".{name}" for name in names], [getattr(batch, name) for name in names], rebuild)


def _record(batch: Any) -> Parts:
    names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]

    def rebuild(values: list[Any]) -> Any:
        new = copy.copy(batch)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # a frozen dataclass refuses the ordinary way
        return new

    return Parts([f".{name}" for name in names], [getattr(batch, name) for name in names], rebuild)
