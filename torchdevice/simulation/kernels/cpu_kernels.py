"""Runs the simulated device's operators by torch's CPU kernels, on CPU tensors in its memory.

There are four kinds of operators, by their schema: views (their CPU kernel runs on the device's
tensors themselves), factories, operators with ``out``, and operators that write to their arguments
or make new tensors, which ``pipeline.py`` runs by itself. Operators that need more are in
``handwritten_kernels.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd.graph import increment_version

from torchdevice.calls.error_texts import raise_out_of_memory
from torchdevice.calls.lacking import dtype_gaps
from torchdevice.errors import NoValueError
from torchdevice.kernel.devices.sparse_parts import parts_of
from torchdevice.kernel.stand_ins import StandIns, extent, is_written, tensors, with_bits
from torchdevice.kernel.thread_state import state
from torchdevice.simulation import device_generators as device_random
from torchdevice.simulation import machine, policy, storage_resizing
from torchdevice.simulation.allocator import storages
from torchdevice.simulation.allocator.storages import (
    fresh,
    host_waited,
    meaning,
    memory_of,
    set_storage,
)
from torchdevice.simulation.kernels import device_mismatch
from torchdevice.simulation.refusals import kernel_names
from torchdevice.torch_modules.cuda.capture_rules import not_while_capturing

Kernel = Callable[..., Any]


_Tensor = torch.Tensor


_CPU = torch.device("cpu")


_CPU_KEYS = torch._C.DispatchKeySet(DispatchKey.CPU)


NUMBERS = frozenset({bool, int, float, complex})


_mode_enabled = torch._C._is_torch_function_mode_enabled


_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


_takes_numbers = torch._C._should_allow_numbers_as_tensors
"""Whether torch itself makes a tensor of a number, for an operator of this name."""


_TENSOR = torch._C.TensorType.get()


index_of = torch.Tensor.get_device
"""The index of a tensor's device; -1 for a CPU tensor."""


dtype_of = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
"""The dtype of a tensor, whatever its class reports."""


def is_view(schema: Any) -> bool:
    """Return whether an operator with this schema returns views of its arguments."""
    has_aliases = any(each.alias_info is not None for each in schema.returns)
    return has_aliases and not any(map(is_written, schema.arguments))


def body_of(op: Any) -> Kernel | None:
    """Return a function that runs a factory or an operator with ``out``; None for others."""
    if makes_of_nothing(op):
        return _factory(op)
    resizable = frozenset(op._schema.arguments[i].name for i in outs_of(op))
    return _outgoing(op, resizable) if resizable else None


def makes_of_nothing(op: Any) -> bool:
    """Return whether an operator takes no tensors."""
    return not any(_holds_tensors(a.type) for a in op._schema.arguments)


def outs_of(op: Any) -> list[int]:
    """Return the places of the arguments that an operator may resize."""
    # `out=` is a keyword, and an `out` in a list is marked as such.
    return [
        i
        for i, a in enumerate(op._schema.arguments)
        if is_written(a) and (a.kwarg_only or a.is_out)
    ]


def view_of(op: Any) -> Kernel:
    """Return the kernel of an operator that returns a view: the CPU's, which reads no memory.

    ``call_boxed`` takes two thirds of the time of ``_op_dk``, but keeps Python's global lock while
    the kernel runs.
    """
    if op.namespace != "aten":  # a program's kernel may end, or get another one in its place
        return functools.partial(op._op_dk, DispatchKey.CPU)
    # `call_boxed` is safe here: a view computes nothing, and holds Python's lock for a moment.
    return functools.partial(torch.library.get_kernel(op, "CPU").call_boxed, _CPU_KEYS)


def without_mode(kernel: Kernel) -> Kernel:
    """Return a kernel that runs without function modes, which autograd leaves on the stack."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Asked first, since leaving the modes costs more than the question.
        if _mode_enabled():
            with torch._C.DisableTorchFunction():
                return kernel(*args, **kwargs)
        return kernel(*args, **kwargs)

    return run


def aliased(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor in a simulated tensor's memory, with conjugate and negative bits."""
    return with_bits(memory_of(tensor), tensor)


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor itself, or one that shares memory with a simulated tensor."""
    return tensor if index_of(tensor) < 0 else aliased(tensor)


def wrapped(result: Any, index: int) -> Any:
    """Return the results of a CPU kernel, each tensor as a new tensor of device ``index``."""
    if isinstance(result, _Tensor):
        if result.layout is torch.strided:
            return fresh(result, index)
        return fresh_sparse(result, index)
    # Named tuples of torch are tuples whose class takes a sequence.
    if isinstance(result, (tuple, list)):
        return type(result)(wrapped(each, index) for each in result)
    host_waited()  # for the number
    return result


def fresh_sparse(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Return a new sparse tensor of device ``index`` in an unshared sparse CPU tensor's memory."""
    with meaning(index):
        return sparse_of([fresh(part, index) for part in parts_of(tensor)], tensor)


def sparse_of(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor of given parts on their device, shaped and laid out as ``like``."""
    values, index = parts[-1], index_of(parts[-1])
    # By the index and not by `.device`, which the mode rewrites.
    device = _CPU if index < 0 else torch.device(policy.DEVICE_TYPE, index)
    kind = {"dtype": values.dtype, "layout": like.layout, "device": device}
    if like.layout is not torch.sparse_coo:
        return torch.ops.aten._sparse_compressed_tensor_unsafe(*parts, like.shape, **kind)
    dimensions = like.sparse_dim(), like.dense_dim()
    return _make_coo(*dimensions, like.shape, *parts, **kind, is_coalesced=like.is_coalesced())


def count_copy(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool) -> None:
    """Count a copy between devices. The host waits, unless it is non-blocking of locked memory."""
    one, other = index_of(source), index_of(destination)
    context = state.context
    if one != other:
        host = None
        if one < 0 or other < 0:
            host = source if one < 0 else destination
        is_pinned = host is not None and context is not None and context.pinned.holds(host)
        if host is not None and not (non_blocking and is_pinned):
            not_while_capturing(pageable=not is_pinned)
            if other < 0:
                host_waited()
        start, end = (
            "cpu" if index < 0 else f"{policy.DEVICE_TYPE}:{index}" for index in (one, other)
        )
        on = machine.current()
        on.copies[start, end] += 1
        on.copied_bytes[start, end] += destination.nbytes


_make_coo = functools.partial(
    torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default._op_dk, DispatchKey.SparseCPU
)


def _holds_tensors(kind: Any) -> bool:
    return kind.isSubtypeOf(_TENSOR) or (
        hasattr(kind, "getElementType") and _holds_tensors(kind.getElementType())
    )


# ---- arguments -----------------------------------------------------------------------------------


class CpuAliases(StandIns):
    """CPU tensors in the memory of a call's simulated ones, for kernels :func:`_plain` omits.

    Args:
        func: The function to call with the CPU tensors.
        op: The operator; None for a formula.
        random: Calls it with the right generator, if it draws numbers.

    Attributes:
        indices: The indices of the devices of the call's tensors.
    """

    def __init__(self, func: Any, op: Any = None, random: device_random.Drawing | None = None):
        super().__init__(func)
        self._op, self._random = op, random
        self._named: int | None = None
        self.indices: set[int] = set()

    @property
    def index(self) -> int:
        """The index of the results' device: named by the call, or that of its tensors."""
        return max(self.indices, default=-1) if self._named is None else self._named

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        index = index_of(tensor)
        self.indices.add(index)
        return tensor if index < 0 else self.alias(tensor)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor in the memory of a tensor of a device."""
        return aliased(tensor)

    def other(self, value: Any) -> Any:
        if not isinstance(value, torch.device):
            return value
        is_own = value.type == policy.DEVICE_TYPE
        self._named = (value.index or 0) if is_own else -1
        return _CPU if is_own else value

    def run(self, args: Any, kwargs: Any) -> Any:
        if self._op is not None and len(self.indices) > 1:
            device_mismatch.check(self._op, self.args, self.kwargs)
        if self._random is None:
            return self.func(*args, **kwargs)
        return self._random(self.func, self.index, list(args), kwargs)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        return result if self.index < 0 else wrapped(result, self.index)


def of_formula(formula: Callable[..., Any]) -> Kernel:
    """Return the kernel that applies a function to CPU tensors."""
    return lambda *args: CpuAliases(formula).call(args, {})


class Arguments:
    """Does as :class:`CpuAliases` in less time, for kernels that most calls take."""

    def __init__(self, op: Any):
        self.op = op
        # Operators with a kernel for such bits read them; for others torch has resolved them.
        keeps_bits = _has_kernel(op.name(), "Conjugate") or _has_kernel(op.name(), "Negative")
        self.alias = aliased if keeps_bits else memory_of
        name = op._schema.name.removeprefix("aten::")
        # Which look at the shape of their argument alone.
        if name.endswith("_like") or name.startswith("new_"):
            self.alias = storages.shape_of
        self.scalars = device_mismatch.accepts_cpu_scalars(op)
        self.names = [argument.name for argument in op._schema.arguments]
        takes_numbers = _takes_numbers(name)
        self.for_tensors = {
            i
            for i, a in enumerate(op._schema.arguments)
            if str(a.type) == "Tensor" and not takes_numbers
        }

    def take(self, args: Any, index: int = -1) -> tuple[list[Any], int, bool]:
        """Return CPU tensors as arguments, their device's index, and whether to :meth:`look_again`.

        It is where tensors may be on several devices, or where a number stands for a tensor.
        """
        alias, scalars = self.alias, self.scalars
        odd = False
        taken: list[Any] = []
        for value in args:
            if isinstance(value, _Tensor):
                where = index_of(value)
                if where < 0:
                    # A CPU tensor with dimensions is an error; without, it may be a scalar.
                    odd |= not scalars or value.dim() > 0
                else:
                    if where != index:
                        # A second device: `look_again` decides whether CUDA accepts that.
                        odd |= index >= 0
                        index = where
                    try:
                        value = alias(value)
                    except NoValueError:
                        raise NoValueError(self.op._schema.name) from None
            elif value.__class__ is list:
                # A list of numbers, such as a shape, needs no conversion; its first element tells.
                if value and value[0].__class__ not in NUMBERS:
                    value, index, within = self.take(value, index)
                    odd |= within
            elif value.__class__ in NUMBERS:
                # The dispatcher makes tensors of numbers, a kernel called directly does not.
                odd |= len(taken) in self.for_tensors
            taken.append(value)
        return taken, index, odd

    def take_named(self, kwargs: dict[str, Any], index: int) -> tuple[dict[str, Any], int, bool]:
        """Convert keyword arguments like :meth:`take`; the index is that of a given ``device``."""
        values, index, odd = self.take(kwargs.values(), index)
        named = dict(zip(kwargs, values, strict=True))
        device = named.get("device")
        if device is not None:
            is_own = device.type == policy.DEVICE_TYPE
            # Another device, such as the CPU of a copy to the host, is an index of -1.
            index, named["device"] = (device.index or 0, _CPU) if is_own else (-1, device)
        return named, index, odd

    def look_again(self, taken: list[Any], args: Any, kwargs: Any, index: int) -> bool:
        """Return whether a number replaced a tensor: torch unwraps wrapped numbers for kernels.

        Raises:
            RuntimeError: Tensors are on several devices, where CUDA requires one.
        """
        if index >= 0:
            device_mismatch.check(self.op, args, kwargs)
        return any(taken[i].__class__ in NUMBERS for i in self.for_tensors if i < len(taken))


def on_cpu_as(op: Any) -> Callable[..., Any]:
    """Return a function that runs an operator on CPU tensors: a kernel, or the dispatcher."""
    # `_op_dk` calls the kernel of a key without the dispatcher; composite operators have none.
    run = functools.partial(op._op_dk, DispatchKey.CPU) if _has_kernel(op.name(), "CPU") else op._op
    if is_batch_norm(op):
        return _normalizing([each.name for each in op._schema.arguments], run)
    return run


def is_batch_norm(op: Any) -> bool:
    """Return whether an operator, without ``out=``, is batch norm or its derivative."""
    names = {each.name for each in op._schema.arguments}
    return {"weight", "running_var"} < names and not outs_of(op)


def _normalizing(names: list[str], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs batch norm in CUDA's way: halves and parameters in float32.

    The mean and the deviation that the derivative reads stay float32.
    """
    first, last = names.index("weight"), names.index("running_var") + 1
    is_backward = names[0] == "grad_out"

    def normalize(*args: Any) -> Any:
        given = args[first:last]
        own = args[first - 1].dtype
        if own not in _ACCUMULATED and len({each.dtype for each in given if each is not None}) < 2:
            return run(*args)
        wide = _ACCUMULATED.get(own, own)
        widened = [
            each.to(wide) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in args
        ]
        results = run(*widened)
        for statistic, each in zip(given[-2:], widened[last - 2 : last], strict=True):
            if statistic is not None and each is not statistic:
                statistic.copy_(each)
        if not is_backward:
            return results[0].to(own), *results[1:]
        parameter = own if given[0] is None else given[0].dtype
        dtypes = own, parameter, parameter
        return tuple(
            None if each is None else each.to(dtype)
            for each, dtype in zip(results, dtypes, strict=True)
        )

    return normalize


_ACCUMULATED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Input -> the dtype of CUDA's sums, where it is another one."""


# ---- kinds of operators --------------------------------------------------------------------------


def again(error: Exception, op: Any, call: Kernel | None, taken: Any, named: dict[str, Any]) -> Any:
    """Return the results for a dtype that only CUDA has a kernel for; raise other errors again.

    ``call`` is None where the operator does not run by its CPU kernel.

    Raises:
        torch.OutOfMemoryError: The host, whose memory the device's is, has too little of it.
    """
    try:
        if isinstance(error, NoValueError):
            raise NoValueError(op._schema.name) from None
        # No wrapper of the "wrap" engine sees operators that name no device.
        if state.context is not None and not isinstance(error, torch.OutOfMemoryError):
            raise_out_of_memory(state.context, error)
        lacked = None if call is None else dtype_gaps.lacking(error)
        if call is None or lacked is None:
            raise kernel_names.named(op._schema.name.removeprefix("aten::"), error) from None
    finally:
        # Or its traceback would hold this frame, and this frame the error: the tensors of all
        # frames would live on.
        del error
    name = op._schema.name.removeprefix("aten::")
    return dtype_gaps.compute(state.context, lacked, call, name, taken, named)


def _factory(op: Any) -> Kernel:
    """Return the kernel of an operator without tensor arguments: ``zeros``."""
    run, random = on_cpu_as(op), device_random.kind_of(op)

    def factory(*args: Any, **kwargs: Any) -> Any:
        policy.check_scope()
        index = kwargs["device"].index or 0  # "simulated" without an index is device 0
        kwargs = {**kwargs, "device": _CPU}
        # CPU kernels would ask an accelerator for page-locked memory.
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return wrapped(
            random(run, index, list(args), kwargs) if random is not None else run(*args, **kwargs),
            index,
        )

    return factory


def _outgoing(op: Any, resizable: frozenset[str]) -> Kernel:
    """Return the kernel of an operator with ``out`` arguments."""
    arguments = Arguments(op)
    run = on_cpu_as(op)
    random = device_random.kind_of(op)
    results = Results(op)

    def outgoing(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(arguments.names, args, strict=False)), **kwargs}
        outs = {
            id(each): each for name in resizable & given.keys() for each in tensors(given[name])
        }
        return _Outs(run, op, random, arguments.alias, results, outs).call(args, kwargs)

    return outgoing


class _Outs(CpuAliases):
    """The same for a call with ``out`` arguments, which the CPU kernel may resize.

    The CPU kernel writes to the memory of ``out``. If it raises because that memory is too small
    for the result, it is called again with a new CPU tensor as ``out``.
    """

    def __init__(
        self,
        func: Any,
        op: Any,
        random: Any,
        alias: Any,
        results: Results,
        outs: dict[int, torch.Tensor],
    ):
        super().__init__(func, op, random)
        self._alias = alias
        self._results = results
        self._outs = outs
        self._grown: set[int] = set()

    def call(self, args: Any, kwargs: Any) -> Any:
        self.take(self._outs)  # first, because it may let the storage of the memory be another one
        try:
            return super().call(args, kwargs)
        except RuntimeError as error:
            # Torch sets the size of `out` before it resizes the memory, so a tensor that exceeds
            # its storage was too small. It gets a CPU tensor that can grow.
            small = {key for key in self._outs if not _fits(self.pairs[key][1])}
            if not small or not str(error).startswith(storages.CANNOT_GROW):
                raise
        self._grown |= small
        self.pairs.clear()
        return self.call(args, kwargs)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._grown:
            # Torch warns when it resizes an ``out`` that is not empty.
            return torch.empty(0, dtype=tensor.dtype)
        if id(tensor) in self._outs:
            return with_bits(storages.resizable_memory_of(tensor), tensor)
        return self._alias(tensor)

    def run(self, args: Any, kwargs: Any) -> Any:
        try:
            return super().run(args, kwargs)
        except RuntimeError as error:
            return again(error, self._op, self.func, list(args), kwargs)

    def settle(self) -> None:
        for given, own in map(self.pairs.__getitem__, self._outs):
            if own is not given:
                settle(given, own)

    def returned(self, result: Any) -> Any:
        return self._results.of(result, self.index, self.args, self.kwargs)


def _fits(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies within its storage."""
    return end_of(tensor, tensor.storage_offset()) <= tensor.untyped_storage().nbytes()


def end_of(tensor: torch.Tensor, offset: Any) -> int:
    """Return the bytes of a storage that ends with a tensor of this shape at ``offset``."""
    return (offset + extent(tensor)) * tensor.itemsize if tensor.numel() else 0


def settle(given: torch.Tensor, own: torch.Tensor) -> None:
    """Give the device's ``out`` argument the shape and values of ``own``, its CPU tensor."""
    # The kernel wrote into the memory itself; only the shape may have changed.
    if own.untyped_storage().data_ptr() == memory_of(given).untyped_storage().data_ptr():
        if own.shape != given.shape or own.stride() != given.stride():
            set_storage(
                given, given.untyped_storage(), given.storage_offset(), own.shape, own.stride()
            )
        return
    if given.shape != own.shape:
        take_shape(given, own)
    if own.numel():
        aliased(given).copy_(own)


def take_shape(given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Give a tensor of the device another's shape and strides, and its storage enough bytes."""
    storage, offset = given.untyped_storage(), given.storage_offset()
    if end_of(own, offset) > storage.nbytes():
        # Every tensor that has the storage sees the change.
        storage_resizing.resize(storage, int(end_of(own, offset)))
    return set_storage(given, storage, offset, own.shape, own.stride())


class Results:
    """Which results of an operator are its arguments, and which are new tensors.

    Attributes:
        only_new: Whether all results are new tensors.
        position: The place of the argument that is the only result; None for an operator of another
            kind.
        positions: For each result the place of the argument that it is; -1 for a new tensor.
        counts_writes: Whether writes to lists are counted here.
    """

    def __init__(self, op: Any):
        arguments = {
            _alias_set(a): (i, a.name) for i, a in enumerate(op._schema.arguments) if _alias_set(a)
        }
        self._given = [arguments.get(_alias_set(r)) for r in op._schema.returns]
        self.only_new = bool(self._given) and not any(self._given)
        self.positions = [-1 if known is None else known[0] for known in self._given]
        self.position = self.positions[0] if len(self._given) == 1 and self._given[0] else None
        written = [i for i, a in enumerate(op._schema.arguments) if is_written(a)]
        self._counted = written if op._schema.name.startswith("aten::_foreach_") else []
        self.counts_writes = bool(self._counted) and not self._given

    def of(self, result: Any, index: int, args: Any, kwargs: Any) -> Any:
        """Return a call's results: arguments where the schema requires it, else new tensors."""
        if not self._given:
            # Autograd counts writes to results only, so CUDA's kernels count these.
            for position in self._counted:
                increment_version([each for each in args[position] if not each.is_inference()])
            return None
        results = [result] if len(self._given) == 1 else result
        found = []
        for known, each in zip(self._given, results, strict=True):
            if known is None:
                found.append(wrapped(each, index))
            else:  # the argument itself, and not a new tensor of the same memory: `x.add_(1) is x`
                place, name = known
                found.append(kwargs[name] if name in kwargs else args[place])
        return found[0] if len(found) == 1 else tuple(found)


def _alias_set(value: Any) -> str | None:
    """Return an argument's or result's alias set, equal if the result is the argument.

    None stands for a value without an alias set, and for a list.
    """
    return next(iter(value.alias_info.before_set), None) if value.alias_info is not None else None
