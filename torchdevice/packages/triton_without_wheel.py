"""``triton`` where it has no wheel (macOS, Windows): importable, and launching a kernel raises.

Programs import Triton and define kernels at their top, and many never launch one without a GPU.
Triton's own package, where it is installed, runs its kernels in NumPy (``triton_kernels/``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torchdevice.kernel.fidelity import Fidelity
from torchdevice.kernel.thread_state import refuse
from torchdevice.packages.registry import has, refuses, stands_in

_INSTEAD = (
    "Triton has no wheel for this system. Use a path without the kernel, or run on Linux, where it "
    "runs in NumPy."
)


class Kernel:
    """A kernel of Triton. It can be named, wrapped and given a grid, and not launched.

    Attributes:
        fn: The function that the program has written.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise: nothing runs the kernel here."""
        refuse(f"the Triton kernel {self.fn.__name__!r}", _INSTEAD)

    __call__ = run


@stands_in(
    "triton.jit triton.runtime.jit.jit", Fidelity.UNSUPPORTED, "a kernel that is launched raises"
)
def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a kernel, or a decorator that makes one."""
    return Kernel if fn is None else Kernel(fn)


@stands_in("triton.autotune", Fidelity.UNSUPPORTED, "a kernel that is launched raises")
def autotune(configs: Any, key: Any, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that leaves a kernel as it is."""
    return lambda kernel: kernel


@stands_in("triton.heuristics", Fidelity.UNSUPPORTED, "a kernel that is launched raises")
def heuristics(values: Any) -> Callable[[Any], Any]:
    """Return a decorator that leaves a kernel as it is."""
    return lambda kernel: kernel


@stands_in("triton.Config")
class Config:
    """One choice of an autotuned kernel's constants.

    Args:
        kwargs: The constants by name.
        num_warps: How many warps an instance has.
        num_stages: How many steps of a loop overlap.
        **options: Further options of the compiler.
    """

    def __init__(
        self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **options: Any
    ) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages
        self.options = options


@stands_in("triton.cdiv")
def cdiv(x: int, y: int) -> int:
    """Return x divided by y, rounded up."""
    return -(-x // y)


@stands_in("triton.next_power_of_2")
def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is n or more."""
    return 1 << max(0, n - 1).bit_length()


refuses("triton.compile triton.testing.do_bench triton.testing.perf_report", _INSTEAD)


class Word:
    """A name of ``triton.language``, for annotations and for kernels' text, which never runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Word:
        if name.startswith("__"):
            raise AttributeError(name)
        return Word(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"{self._name}()", _INSTEAD)

    def __repr__(self) -> str:
        return self._name


class constexpr:
    """A constant of a kernel, with the value in ``value``."""

    def __init__(self, value: Any) -> None:
        self.value = value


constexpr.__module__ = "triton.language"
has("triton.language.constexpr", constexpr)
has("triton.runtime.jit.JITFunction", Kernel)


def _word(name: str) -> Word:
    """Return the word of a kernel for any name that its text may use."""
    return Word(f"triton.language.{name}")


has("triton.language.__getattr__", _word)
