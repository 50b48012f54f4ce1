"""Values that threads have for themselves, where a collection comes while a thread begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchdevice.kernel.python.per_thread import PerThread, readable_early
from torchdevice.kernel.thread_values import ThreadValues

pytestmark = pytest.mark.one_engine


def of_the_package(kind: type = threading.local) -> Iterator[type]:
    """Yield the package's classes of values of threads, but those of one object."""
    for each in kind.__subclasses__():
        if each.__module__.startswith("torchdevice.") and not issubclass(each, PerThread):
            yield each
        yield from of_the_package(each)


def test_all_are_readable_before_they_are_made() -> None:
    found = list(of_the_package())
    assert len(found) > 3
    for each in found:
        unmade = {name for name in vars(each()) if not hasattr(each, name)}
        assert not unmade or each is ThreadValues, f"{each.__name__}: use readable_early"


def test_threads_share_no_values() -> None:
    values = PerThread(depth=0, kind=None)
    other = PerThread(depth=5)
    values.depth = 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (values.depth, values.kind, other.depth)).result() == (
            0,
            None,
            5,
        )
    assert (values.depth, other.depth) == (3, 5) and not hasattr(other, "kind")


finalizers: list[Callable[[], None]] = []


@readable_early
class Counted(threading.local):
    def __init__(self) -> None:
        for finalizer in finalizers:
            finalizer()
        self.number = 1


def test_a_read_in_the_midst_of_the_first_one() -> None:
    seen, counted = [], Counted()
    finalizers.append(lambda: seen.append(counted.number))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: counted.number).result() == 1
    assert seen == [1]
