"""How a scope decorates: functions, and the ones that run in steps.

A generator or coroutine is suspended between its steps, and what runs meanwhile is not the decorated code. So the scope
is entered for each step and left at each suspension (``contextlib.ContextDecorator`` would leave it before the first).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def decorated(scope: AbstractContextManager[Any], function: F) -> F:
    """Return ``function`` with every step of it run inside ``scope``.

    Args:
        scope: A context manager that can be entered again and again.
        function: A function, method, generator function, coroutine function or asynchronous generator function; also
            a ``staticmethod`` or ``classmethod`` object.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorated(scope, function.__func__))  # type: ignore[return-value]
    if not callable(function):
        raise TypeError(f"{function!r} cannot be decorated: it is not callable. Decorate a function, or use 'with'.")
    wrapper = _wrapper(scope, function)
    return functools.wraps(function)(wrapper)  # type: ignore[return-value]


def _wrapper(scope: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):

        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            steps = _AsyncSteps(scope, function(*args, **kwargs))
            try:
                sent = None
                item = await steps.asend(None)
                while True:
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        item = await steps.athrow(error)
                    else:
                        item = await steps.asend(sent)
            except StopAsyncIteration:
                return
            finally:
                await steps.aclose()

        return async_generator

    if inspect.iscoroutinefunction(function):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(scope, function(*args, **kwargs))

        return coroutine

    if inspect.isgeneratorfunction(function):

        def generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _stepwise(scope, function(*args, **kwargs)))

        return generator

    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            return function(*args, **kwargs)

    return call


def _stepwise(scope: AbstractContextManager[Any], inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Run a generator one step at a time, each inside ``scope``; passes sent values, errors and the result through."""
    step, value = inner.send, None
    try:
        while True:
            try:
                with scope:
                    item = step(value)
            except StopIteration as stop:
                return stop.value
            try:
                value, step = (yield item), inner.send
            except GeneratorExit:
                raise
            except BaseException as error:
                value, step = error, inner.throw  # type: ignore[assignment]
    finally:
        with scope:
            inner.close()


class _Steps:
    """An awaitable whose steps run inside a scope."""

    def __init__(self, scope: AbstractContextManager[Any], awaitable: Awaitable[Any]):
        self._scope, self._awaitable = scope, awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        iterator = self._awaitable.__await__()
        return _stepwise(self._scope, iterator)  # type: ignore[arg-type]


class _AsyncSteps:
    """An asynchronous generator whose steps run inside a scope."""

    def __init__(self, scope: AbstractContextManager[Any], inner: AsyncGenerator[Any, Any]):
        self._scope, self._inner = scope, inner

    async def asend(self, value: Any) -> Any:
        return await _Steps(self._scope, self._inner.asend(value))

    async def athrow(self, error: BaseException) -> Any:
        return await _Steps(self._scope, self._inner.athrow(error))

    async def aclose(self) -> None:
        await _Steps(self._scope, self._inner.aclose())
