"""Torch's public functions have the same names, texts and identities in a scope as outside, so that
what is written down of them there is right elsewhere: pickles, graphs and the code that torch
prints of graphs.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchdevice

_LATER = "distributed fx library onnx utils.cpp_extension utils.dlpack _dynamo ao.quantization"
"""Modules of torch that ``import torch`` does not import, or not in each release."""


def _is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def _members() -> Iterator[tuple[str, Any]]:
    """Yield public members of torch's modules and tensor classes, with their places."""
    for module in list(sys.modules):
        if module.partition(".")[0] == "torch" and _is_public(module):
            yield from _of(module, sys.modules[module])
    yield from _of("torch.Tensor", torch.Tensor)


def _of(place: str, owner: Any) -> Iterator[tuple[str, Any]]:
    for name in filter(_is_public, dir(owner)):
        value = getattr(owner, name, None)
        if callable(value) and not isinstance(value, types.ModuleType):
            yield f"{place}.{name}", value


def _code(function: Any) -> str:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    return f"{graph.python_code('self').src}\n{graph}"


FACTS: dict[str, Callable[[Any], Any]] = {
    "__name__": lambda function: function.__name__,
    "__qualname__": lambda function: function.__qualname__,
    "__module__": lambda function: function.__module__,
    "__doc__": lambda function: function.__doc__,
    "signature": lambda function: isinstance(function, type) or str(inspect.signature(function)),
    "pickle": pickle.dumps,
    "code of a graph": _code,
}


PICKLED_OTHERWISE = ("torch.range", ".has_torch_function", ".Generator")
"""Pickle finds these by places in C where a scope replaces nothing: only the last one can be
pickled in a scope.
"""


def _answer(ask: Callable[[Any], Any], function: Any) -> Any:
    try:
        return ask(function)
    except Exception as error:
        return type(error)


def _seen() -> tuple[dict[str, dict[str, Any]], set[frozenset[str]]]:
    """Return the facts of each function by its place, and the places that have one object each."""
    members = dict(_members())
    facts = {
        place: {fact: _answer(ask, value) for fact, ask in FACTS.items()}
        for place, value in members.items()
    }
    by_identity = sorted(members, key=lambda place: id(members[place]))
    return facts, {
        frozenset(same)
        for _, same in itertools.groupby(by_identity, lambda place: id(members[place]))
    }


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, dict[str, Any]], set[frozenset[str]]]:
    for name in _LATER.split():
        importlib.import_module(f"torch.{name}")
    return _seen()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["mode", "wrap"])
@pytest.mark.parametrize("target", ["cpu", "simulated:cuda", "simulated:mps"])
def test_all_public_functions(target: str, engine: Any, plain: Any) -> None:
    facts, identities = plain
    assert len(facts) > 4000
    with torchdevice.portable(target, engine=engine):
        facts_inside, identities_inside = _seen()
    assert facts.keys() - facts_inside.keys() == set()
    differing = [
        (place, fact, facts[place][fact], facts_inside[place][fact])
        for place in facts
        for fact in FACTS
        if facts[place][fact] != facts_inside[place][fact]
        and not (fact == "pickle" and place.endswith(PICKLED_OTHERWISE))
    ]
    assert not differing, "\n".join(str(e)[:400] for e in differing)
    supplied = facts_inside.keys() - facts.keys()
    assert {same - supplied for same in identities_inside} - {frozenset()} == identities
    assert _seen() == plain
