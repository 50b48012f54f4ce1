"""Collectives as torch's ``c10d`` operators, which dispatch modes, profilers and tracers see.

torch's own group in C++ calls the operators. Their kernels would ask that group for a backend in
C++, so a mode below all others of the thread runs the collective of a group in Python instead.
"""

from __future__ import annotations

import datetime
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.python.interrupt_safe_exit import Exit, Leaving
from torchdevice.torch_modules.distributed import flight_recorder

_stack = _python_dispatch._get_current_dispatch_mode_stack
# Functions of C++: a collective takes and puts one mode in the usual case.
_depth = torch._C._len_torch_dispatch_stack
_pop = torch._C._pop_torch_dispatch_stack
_push = torch._C._push_on_torch_dispatch_stack

_CPU = torch.device("cpu")

_Kind: Any = dist.ReduceOp.RedOpType


class _Kernel(_python_dispatch.TorchDispatchMode):
    """Runs a collective in place of the kernel of its operator.

    Args:
        group: The group.
        name: The name of its method.
        collective: Is called with the group, the operator's tensors, or lists of them, and its
            other arguments by name. It returns work.
        reduce_op: The operation, which Python cannot read from the operator's argument.
    """

    def __init__(self, group: Any, name: str, collective: Callable[..., Any], reduce_op: Any):
        super().__init__()
        self._group = group
        self._name = name
        self._collective = collective
        self._reduce_op = reduce_op
        self.works: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import Dynamo in every distributed program

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the work, preceded by changed tensors if the operator's schema returns them."""
        # Tensor classes that decompose operators come first: they may have no memory.
        if set(kinds) - {torch.Tensor}:
            return NotImplemented
        schema = func._schema
        if not schema.name.startswith("c10d::"):  # the tensor that torch makes for a barrier
            return dispatch_modes.run(func, *args, **kwargs or {})
        operator = _operators.get(schema.name) or _described(schema)
        tensors = args[: operator.tensors]
        values = operator.defaults | dict(zip(operator.defaults, args, strict=False))
        values["reduce_op"] = self._reduce_op
        values["timeout"] = datetime.timedelta(milliseconds=values.get("timeout", -1))
        opts = types.SimpleNamespace(**values)
        with torch._C.DisableTorchFunction():  # again: the handler of a mode above has enabled it
            collective = functools.partial(self._collective, self._group, *tensors, opts)
            work = flight_recorder.recorded(self._group, self._name, tensors, opts, collective)
        self.works.append(work)
        boxed = _held(work).boxed()
        return (args[0], boxed) if operator.returns_tensors else boxed


class _Described(NamedTuple):
    """What the schema of an operator shows.

    Attributes:
        defaults: The names of its arguments -> the defaults.
        tensors: How many arguments stand before the group, which are tensors or lists of them.
        returns_tensors: Whether it returns tensors before the work.
    """

    defaults: dict[str, Any]
    tensors: int
    returns_tensors: bool


_operators: dict[str, _Described] = {}
"""Name of an operator -> what its schema shows."""


def _described(schema: Any) -> _Described:
    """Return what a schema shows, and keep it."""
    defaults = {each.name: each.default_value for each in schema.arguments}
    found = _Described(defaults, [*defaults].index("process_group"), len(schema.returns) > 1)
    _operators[schema.name] = found
    return found


class _Held(dist.ProcessGroup):
    """A group whose sending returns given work."""

    work: Any

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        return self.work


def _held(work: Any) -> Any:
    """Return work for torch's C++, which may hold it longer than the program does.

    Of work of Python C++ keeps its own part alone, whose ``wait`` never ends. Where torch asks a
    group of Python for work, it holds both parts (pytorch/pytorch#146376).
    """
    if type(work) is dist.distributed_c10d.Work:
        return work
    group = _Held(0, 1)  # type: ignore[call-arg]  # the stub lacks the constructor
    group.work = work
    return dist.ProcessGroup.send(group, [], 0, 0)


def as_operator(collective: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return a method of a group, in every form of torch's method, which calls the operator.

    Args:
        collective: Is called with the group, the operator's tensors and its other arguments, see
            :class:`_Kernel`.
        name: The name of the method of torch's group, by default that of the collective.
    """

    @functools.wraps(collective)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        for each in values:
            if isinstance(each, dist.distributed_c10d.BarrierOptions):
                each.device = _CPU  # torch makes a tensor there
        # Neither a function mode nor a subclass of tensors sees a method of torch's group.
        kernel = _Kernel(self, method, collective, _reduce_op(values))
        with torch._C.DisableTorchFunction(), _Innermost(kernel):
            work = getattr(self.in_cpp, method)(*args, **kwargs)
        return kernel.works.pop() if kernel.works else work  # none where shapes only are computed

    method = name or collective.__name__
    return called


def _reduce_op(values: Sequence[Any]) -> Any:
    """Return the operation that one of the arguments of a method is, or that its options name."""
    for each in values:
        given = getattr(each, "reduceOp", each)
        # torch says of a kind of operations too that it is an operation.
        if isinstance(given, dist.ReduceOp):
            return dist.ReduceOp(given) if isinstance(given, _Kind) else given
    return dist.ReduceOp(_Kind.SUM)


class _Innermost(Leaving):
    """Keeps a mode below all of this thread's stack but those that stand for torch's compilers.

    Args:
        mode: The mode.
    """

    __exit__ = Exit(lambda innermost: innermost)

    def __init__(self, mode: _python_dispatch.TorchDispatchMode):
        self._mode = mode
        self._above: list[_python_dispatch.TorchDispatchMode] | None = None

    def __enter__(self) -> None:
        above = _stack() if _depth() else []
        # They compute shapes only, or record the operator.
        if above and any(each.is_infra_mode() for each in above):
            return
        self._above = above
        _put([self._mode, *above])

    def late(self) -> None:
        """Put the stack back."""
        if self._above is not None:
            _put(self._above)


def _put(modes: list[_python_dispatch.TorchDispatchMode]) -> None:
    """Replace this thread's stack of modes."""
    while _depth():
        _pop(None)
    for mode in modes:
        _push(mode)
