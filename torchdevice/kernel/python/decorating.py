"""How a scope decorates functions, generators and coroutines.

A generator or coroutine is suspended between its steps, and other code runs meanwhile. So the scope
is entered for each step and left at each suspension. (``contextlib.ContextDecorator`` would leave
the scope before the first step.)
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def decorated(scope: AbstractContextManager[Any], function: F) -> F:
    """Return a function that runs ``function``, or every step of it, inside ``scope``.

    Args:
        scope: A context manager that can be entered again and again.
        function: A function, method, generator function, coroutine function, asynchronous generator
            function or an callable object; also a ``staticmethod`` or ``classmethod`` object.

    Raises:
        TypeError: ``function`` cannot be called, or is a class.
    """
    if isinstance(function, (staticmethod, classmethod)):
        # The plain function is decorated, and the descriptor made again, since neither kind of
        # object can be called.
        return type(function)(decorated(scope, function.__func__))  # type: ignore[return-value]
    if inspect.isclass(function):
        raise TypeError(
            f"{function!r} cannot be decorated: it is a class. Decorate its methods, or use 'with'."
        )
    if not callable(function):
        raise TypeError(
            f"{function!r} cannot be decorated: it is not callable. Decorate a function, or use "
            "'with'."
        )
    return functools.wraps(function)(_wrapper(scope, function))  # type: ignore[return-value]


def _wrapper(
    scope: AbstractContextManager[Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    # A callable object is what its `__call__` is: a coroutine function, a generator function.
    is_object = not (inspect.isroutine(function) or isinstance(function, functools.partial))
    runs: Any = type(function).__call__ if is_object else function

    if inspect.isasyncgenfunction(runs):

        async def async_generator(*args: Any, **kwargs: Any) -> Any:
            steps = function(*args, **kwargs)
            step = steps.asend(None)  # the first step takes None
            try:
                while True:
                    item = await _steps(scope, step)
                    del step  # it may hold an error, whose traceback holds this frame
                    try:
                        step = steps.asend((yield item))
                    except BaseException as error:
                        # Also GeneratorExit, which a generator may handle.
                        step = steps.athrow(error)
            # The generator's end ends this one too.
            except StopAsyncIteration:
                return

        return async_generator

    if inspect.iscoroutinefunction(runs):

        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _steps(scope, function(*args, **kwargs))

        return coroutine

    if inspect.isgeneratorfunction(runs):
        return _stepwise(scope, function)

    def call(*args: Any, **kwargs: Any) -> Any:
        with scope:
            result = function(*args, **kwargs)
        # An ordinary function may return a generator or coroutine, none of whose steps has run yet.
        if isinstance(result, types.GeneratorType):
            return _stepwise(scope, lambda: result)()
        return _awaited(scope, result) if isinstance(result, types.CoroutineType) else result

    return call


async def _awaited(scope: AbstractContextManager[Any], awaitable: Awaitable[Any]) -> Any:
    return await _steps(scope, awaitable)


def _stepwise(
    scope: AbstractContextManager[Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a generator function that runs each step of ``function``'s generator in ``scope``.

    It passes on what is sent or thrown in, GeneratorExit included, and returns the generator's
    result.
    """

    # Not by ``yield from``, which closes the inner generator where GeneratorExit is thrown in.
    def generator(*args: Any, **kwargs: Any) -> Any:
        steps = function(*args, **kwargs)
        step = functools.partial(steps.send, None)
        try:
            while True:
                with scope:
                    item = step()
                del step  # it may hold an error, whose traceback holds this frame
                try:
                    step = functools.partial(steps.send, (yield item))
                except BaseException as error:  # also GeneratorExit, which a generator may handle
                    step = functools.partial(steps.throw, error)
        except StopIteration as stop:
            # A generator's return value is the value of `StopIteration`.
            return stop.value

    return generator


def _steps(scope: AbstractContextManager[Any], awaitable: Awaitable[Any]) -> Any:
    """Return an awaitable whose steps run inside a scope."""
    return types.coroutine(_stepwise(scope, awaitable.__await__))()
