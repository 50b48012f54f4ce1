"""How a scope decorates functions, generators and coroutines.

A generator or coroutine is suspended between its steps, and other code runs meanwhile. So the scope is entered for each
step and left at each suspension. (``contextlib.ContextDecorator`` would leave the scope before the first step.)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def decorated(scope: AbstractContextManager[Any], function: F) -> F:
    """Return a function that runs ``function``, or every step of it, inside ``scope``.

    Args:
        scope: A context manager that can be entered again and again.
        function: A function, method, generator function, coroutine function, asynchronous generator function or an
            callable object; also a ``staticmethod`` or ``classmethod`` object.

    Raises:
        TypeError: ``function`` cannot be called, or is a class.
    """
    if isinstance(function, (staticmethod, classmethod)):
        # The plain function is decorated, and the descriptor made again, since neither kind of object can be called.
        return type(function)(decorated(scope, function.__func__))  # type: ignore[return-value]
    if inspect.isclass(function):
        raise TypeError(f"{function!r} cannot be decorated: it is a class. Decorate its methods, or use 'with'.")
    if not callable(function):
        raise TypeError(f"{function!r} cannot be decorated: it is not callable. Decorate a function, or use 'with'.")
    return functools.wraps(function)(_wrapper(scope, function))  # type: ignore[return-value]


def _wrapper(scope: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    # A callable object is what its `__call__` is: a coroutine function, a generator function.
    is_object = not (inspect.isroutine(function) or isinstance(function, functools.partial))
    runs: Any = type(function).__call__ if is_object else function

    if inspect.isasyncgenfunction(runs):

        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            steps = _AsyncSteps(scope, function(*args, **kwargs))
            try:
                # The first step takes None.
                item = await steps.asend(None)
                while True:
                    try:
                        sent = yield item
                    except BaseException as error:  # also GeneratorExit, which a generator may handle
                        item = await steps.athrow(error)
                    else:
                        item = await steps.asend(sent)
            # The generator's end ends this one too.
            except StopAsyncIteration:
                return

        return async_generator

    if inspect.iscoroutinefunction(runs):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(scope, function(*args, **kwargs))

        return coroutine

    if inspect.isgeneratorfunction(runs):
        return _generator_function(scope, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            result = function(*args, **kwargs)
        # An ordinary function may return a generator or coroutine, none of whose steps has run yet.
        if inspect.isgenerator(result):
            return _stepwise(scope, result)
        return _awaited(scope, result) if inspect.iscoroutine(result) else result

    return call


async def _awaited(scope: AbstractContextManager[Any], awaitable: Awaitable[Any]) -> Any:
    return await _Steps(scope, awaitable)


def _generator_function(scope: AbstractContextManager[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a generator function that runs each step of the generator of ``function`` inside ``scope``.

    It passes on what is sent or thrown in, GeneratorExit included, and returns the generator's result.
    """

    def generator(*args: Any, **kwargs: Any) -> Any:
        steps = _Stepping(scope, function(*args, **kwargs))
        try:
            item = steps.send(None)
            while True:
                try:
                    sent = yield item
                except BaseException as error:
                    item = steps.throw(error)
                else:
                    item = steps.send(sent)
        except StopIteration as stop:
            # A generator's return value is the value of `StopIteration`.
            return stop.value

    return generator


def _stepwise(scope: AbstractContextManager[Any], inner: Any) -> Any:
    """Return a generator that runs each step of another one inside ``scope``."""
    # The generator exists already; its function takes no arguments.
    return _generator_function(scope, lambda: inner)()


class _Stepping:
    """A generator, each step of which runs inside a scope."""

    def __init__(self, scope: AbstractContextManager[Any], inner: Generator[Any, Any, Any]):
        self._scope, self._inner = scope, inner

    def send(self, value: Any) -> Any:
        with self._scope:
            return self._inner.send(value)

    def throw(self, error: BaseException) -> Any:
        with self._scope:
            return self._inner.throw(error)


class _Steps:
    """An awaitable whose steps run inside a scope."""

    def __init__(self, scope: AbstractContextManager[Any], awaitable: Awaitable[Any]):
        self._scope, self._awaitable = scope, awaitable

    def __await__(self) -> Generator[Any, Any, Any]:
        iterator = self._awaitable.__await__()
        return _stepwise(self._scope, iterator)


class _AsyncSteps:
    """An asynchronous generator whose steps run inside a scope."""

    def __init__(self, scope: AbstractContextManager[Any], inner: AsyncGenerator[Any, Any]):
        self._scope, self._inner = scope, inner

    async def asend(self, value: Any) -> Any:
        return await _Steps(self._scope, self._inner.asend(value))

    async def athrow(self, error: BaseException) -> Any:
        return await _Steps(self._scope, self._inner.athrow(error))
