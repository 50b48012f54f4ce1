"""Errors keep text and facts between processes. Stand-ins for C objects refuse, as those do."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from processes import run_python

import torchdevice
from torchdevice import errors
from torchdevice.check.checker import UnreadableError
from torchdevice.errors import Access, TorchDeviceError
from torchdevice.kernel.journal.callers import Site
from torchdevice.kernel.python.foreign_files import RefusedFileError
from torchdevice.report.discrepancies import Finding

# Which has a class of its own.
importlib.import_module("torchdevice.torch_modules.compile.unstacked_mode")

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {each}": lambda x, each=each: pickle.loads(pickle.dumps(x, each))
        for each in range(6)
    },
}

_SITE = Site("a.py", 1, "f")
_ACCESS = Access("aten::add", _SITE, (0, 1), True, 1, 0, 4)

FACTS: dict[str, Any] = {
    "finding": Finding("aten::mm", "values", "it differs", _SITE),
    "site": _SITE, "stream": (0, 1), "found": torch.device("cpu"), "expected": torch.device("cpu", 1),
    "target": object, "earlier": _ACCESS, "later": _ACCESS, "known": ("cpu", "mps"),
}  # fmt: skip


def kinds(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from kinds(each)


KINDS = sorted(
    {each for each in kinds(TorchDeviceError) if each.__module__.startswith("torchdevice.")},
    key=lambda kind: kind.__name__,
)


def example(kind: type) -> Any:
    """Return an error of a class, as the package makes it."""
    if kind.__init__ is TorchDeviceError.__init__ or not hasattr(kind.__init__, "__code__"):
        return kind("a text")
    if not dataclasses.is_dataclass(kind) and "args" in kind.__init__.__code__.co_varnames[:1]:
        return kind("a text")
    code = kind.__init__.__code__
    names = code.co_varnames[1 : code.co_argcount]
    return kind(*(FACTS.get(name, name) for name in names))


def facts(error: Any) -> dict[str, Any]:
    found = dict(vars(error))
    if dataclasses.is_dataclass(error):
        found |= {each.name: getattr(error, each.name) for each in dataclasses.fields(error)}
    return found


def test_all_classes_are_looked_at() -> None:
    public = {
        name for name in errors.__all__ if issubclass(getattr(errors, name), TorchDeviceError)
    }
    assert public - {"TorchDeviceError"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_every_error_is_copied_whole(kind: type, way: str) -> None:
    error = example(kind)
    found = WAYS[way](error)
    assert type(found) is kind and str(found) == str(error) and found.args == error.args
    assert facts(found) == facts(error)


@pytest.mark.parametrize(
    "error", [UnreadableError("no Python", 7), RefusedFileError(0, "it is no regular file")]
)
def test_errors_of_files(error: Any) -> None:
    for way in WAYS.values():
        found = way(error)
        assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def _strict() -> None:
    with torchdevice.portable("cpu", strict=True):
        torch.cuda.utilization()


def _not_supported() -> None:
    with torchdevice.portable("cpu"):
        torch.cuda.MemPool()


@pytest.mark.one_engine
def test_an_error_of_a_worker_reaches_the_program() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for task in (_strict, _not_supported):
            with pytest.raises(TorchDeviceError) as caught:
                pool.submit(task).result()
            assert facts(caught.value)


@pytest.mark.parametrize("target", ["cpu", "simulated:cuda"])
def test_streams_events_and_graphs_refuse_in_their_own_words(target: str) -> None:
    with torchdevice.portable(target):
        made = [
            torch.cuda.Stream(),
            torch.cuda.Event(),
            torch.Stream("cuda"),
            torch.Event("cuda"),
            torch.cuda.CUDAGraph(),
        ]
        made += [torch.cuda.MemPool()] if target != "cpu" else []
        for each in made:
            for way in ("copy", "deepcopy", "pickle 0", "pickle 2", "pickle 4"):
                with pytest.raises(
                    TypeError, match=f"^cannot pickle '{each.__class__.__name__}' object$"
                ):
                    WAYS[way](each)


@pytest.mark.one_engine
def test_an_error_can_be_read_where_no_scope_is() -> None:
    """A process that only looks at results has torch, and has entered no scope."""
    data = pickle.dumps(errors.FidelityError("torch.cuda.x", "a number"))
    done = run_python("-c", f"import pickle; print(repr(pickle.loads({data!r}).requested))")
    assert done.stdout == "'torch.cuda.x'\n", done.stderr
