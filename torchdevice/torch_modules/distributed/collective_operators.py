"""Collectives as torch's ``c10d`` operators, which dispatch modes, profilers and tracers see.

torch's own group in C++ calls the operators. Their kernels would ask that group for a backend in
C++, so a mode below all others of the thread runs the collective of a group in Python instead.
Where nothing sees operators, a collective that has run as one before is called without it.
"""

from __future__ import annotations

import datetime
import functools
import operator
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _python_dispatch

from torchdevice.kernel import dispatch_modes
from torchdevice.kernel.python.interrupt_safe_exit import Exit, Leaving
from torchdevice.torch_modules.cuda import capture_rules
from torchdevice.torch_modules.distributed import flight_recorder

_stack = _python_dispatch._get_current_dispatch_mode_stack
# Functions of C++: a collective takes and puts one mode in the usual case.
_depth = torch._C._len_torch_dispatch_stack
_pop = torch._C._pop_torch_dispatch_stack
_push = torch._C._push_on_torch_dispatch_stack

_CPU = torch.device("cpu")

_Kind: Any = dist.ReduceOp.RedOpType

_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_is_traced = torch._C._is_tracing
_transform = torch._C._functorch.peek_interpreter_stack
_registers_works = torch._C._distributed_c10d._allow_inflight_collective_as_graph_input  # type: ignore[attr-defined]
_begin_record = torch._C._autograd._record_function_with_args_enter
_end_record = torch._C._autograd._record_function_with_args_exit

_PLAIN = {torch.Tensor, torch.nn.Parameter}


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
        described = _operators.get(self._name) or _described(self._name, schema)
        tensors = args[: described.tensors]
        values = described.defaults | dict(zip(described.defaults, args, strict=False))
        values["reduce_op"] = self._reduce_op
        values["timeout"] = datetime.timedelta(milliseconds=values.get("timeout", -1))
        opts = types.SimpleNamespace(**values)
        capture = capture_rules.current_capture()
        if capture is not None:
            capture.replay_by(functools.partial(self._again, described.tensors, opts))
        with torch._C.DisableTorchFunction():  # again: the handler of a mode above has enabled it
            collective = functools.partial(self._collective, self._group, *tensors, opts)
            work = flight_recorder.recorded(self._group, self._name, tensors, opts, collective)
        self.works.append(work)
        boxed = _held(work).boxed()
        return (args[0], boxed) if described.returns_tensors else boxed

    def _again(self, count: int, opts: Any, *args: Any) -> Any:
        """Begin the collective again, as a replay of a graph does, and return its work.

        Args:
            count: How many of the arguments are tensors or lists of them.
            opts: The operator's other arguments.
            *args: The arguments of the operator.
        """
        # The graph waits for it before its next kernel anyway.
        opts = types.SimpleNamespace(**vars(opts) | {"async_op": False})
        with torch._C.DisableTorchFunction():
            return self._collective(self._group, *args[:count], opts)


class _Described(NamedTuple):
    """Facts from the schema of an operator.

    Attributes:
        name: Its name.
        defaults: The names of its arguments -> the defaults.
        tensors: How many arguments stand before the group, which are tensors or lists of them.
        returns_tensors: Whether it returns tensors before the work.
    """

    name: str
    defaults: dict[str, Any]
    tensors: int
    returns_tensors: bool


_operators: dict[str, _Described] = {}
"""Name of a group's method -> the facts from its operator's schema."""


def _described(method: str, schema: Any) -> _Described:
    """Return the facts from the schema of a method's operator, and keep them."""
    defaults = {each.name: each.default_value for each in schema.arguments}
    tensors = [*defaults].index("process_group")
    found = _Described(schema.name, defaults, tensors, len(schema.returns) > 1)
    _operators[method] = found
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
        described = _operators.get(method)
        if described is not None and not kwargs and _is_direct(self, described, args):
            with torch._C.DisableTorchFunction():
                return _run(self, described, args[:-1], args[-1])
        values = (*args, *kwargs.values())
        for each in values:
            if isinstance(each, dist.distributed_c10d.BarrierOptions):
                each.device = _CPU  # torch makes a tensor there
        # Neither a function mode nor a subclass of tensors sees a method of torch's group.
        kernel = _Kernel(self, method, collective, _reduce_op(values))
        with torch._C.DisableTorchFunction(), _Innermost(kernel):
            work = getattr(self.in_cpp, method)(*args, **kwargs)
        return kernel.works.pop() if kernel.works else work  # none where shapes only are computed

    def _run(self: Any, described: _Described, tensors: Sequence[Any], given: Any) -> Any:
        names, read = _fields(given.__class__)
        values = described.defaults | dict(zip(names, read(given), strict=True))
        opts = types.SimpleNamespace(**values)
        run = functools.partial(collective, self, *tensors, opts)
        record = _begin_record(described.name)  # for traces of the execution
        try:
            return flight_recorder.recorded(self, method, tensors, opts, run)
        finally:
            _end_record(record)

    method = name or collective.__name__
    return called


def _is_direct(group: Any, described: _Described, args: Sequence[Any]) -> bool:
    """Return whether nothing tells a call of an operator from that of its collective.

    Args:
        group: The group.
        described: The operator, which has run before.
        args: The arguments of the group's method.
    """
    # Modes, torch's transforms, its tracer and its profiler see operators, and it keeps the work of
    # operators for compiled code. The flight recorder counts the calls from torch's method on.
    if _depth() or _is_profiled() or group.recorder.size:
        return False
    if _transform() is not None or _is_traced() or _registers_works():
        return False
    is_usual_form = len(args) == described.tensors + 1 and hasattr(args[-1], "asyncOp")
    return is_usual_form and _are_plain(args[:-1])


def _are_plain(values: Sequence[Any]) -> bool:
    """Return whether values are tensors of no class that operators hand over to, or lists."""
    for each in values:
        kind = type(each)
        if kind is list:
            if not _are_plain(each):
                return False
        elif kind not in _PLAIN:
            return False
    return True


@functools.cache
def _fields(kind: type) -> tuple[list[str], Callable[[Any], tuple[Any, ...]]]:
    """Return how a class of options names an operator's arguments, and what reads them."""
    fields = [each for each in dir(kind) if not each.startswith("_")]
    # As in "rootRank" and "root_rank".
    names = [re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", each) for each in fields]
    return names, operator.attrgetter(*fields)


def _reduce_op(values: Sequence[Any]) -> Any:
    """Return the operation that one of the arguments of a method is, or that its options name."""
    for each in values:
        given = getattr(each, "reduceOp", each)
        # isinstance(RedOpType.SUM, ReduceOp) is True in torch, so a kind is converted.
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
