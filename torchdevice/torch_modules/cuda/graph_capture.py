"""Capture and replay of operators, the mechanism of CUDA graphs.

During a capture a dispatch mode records every operator below autograd with its arguments and
results. A replay runs the operators again, with new results in the memory of the recorded results,
which the program and later operators use. On CUDA nothing is computed during a capture, so the end
of a capture restores the tensors of the program that the operators wrote to.

A CUDA graph holds addresses, not tensors. So a capture records other tensors with the same memory,
as they are when their operator has run: ``squeeze_`` or ``resize_`` may change the program's
tensors later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchdevice.calls.host_functions import as_kernels_do
from torchdevice.calls.rewriters import native_device
from torchdevice.kernel import dispatch_modes, thread_state
from torchdevice.kernel.devices.runtime import Runtime
from torchdevice.kernel.python.interrupt_safe_exit import block
from torchdevice.kernel.stand_ins import is_written, mapped, same_bits, tensors, written
from torchdevice.torch_modules.cuda.capture_rules import CaptureOrder, not_while_capturing

_aten = torch.ops.aten


_WAITS_FOR_THE_DEVICE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operators that cannot be captured, because the host needs a value or the size of the
result.
"""


_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
"""Operators that cannot be captured where an index is a mask, because the host needs the size of
the result.
"""


_COPYING = frozenset(
    {_aten._ctc_loss, _aten._linalg_svd, _aten.bincount, _aten.linalg_matrix_exp, _aten.linalg_pinv}
)
"""Operators that copy from or to memory of the host which is not pinned."""


_READ_BY_THE_HOST = frozenset(
    {
        *(
            _aten._linalg_check_errors,
            _aten._linalg_eigh,
            _aten._to_sparse,
            _aten.linalg_eig,
            _aten.linalg_eigvals,
        ),
        *(_aten.normal.Tensor_Tensor, _aten.normal.float_Tensor),
    }
)
"""Operators that wait for the device: for errors of ``torch.linalg``, for sizes, or to check
values.
"""


_UNINITIALISED = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
    }
)


class _Step(NamedTuple):
    """One recorded operator.

    Attributes:
        op: The operator, or a function that has no result.
        args: Its arguments.
        kwargs: Its keyword arguments.
        made: Its results that are new tensors: no arguments and no views of arguments.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[torch.Tensor]

    def run(self) -> None:
        """Run the operator again, and write its results to the memory of the recorded results."""
        if self.op not in _UNINITIALISED:  # has no values to copy
            result = self.op(*self.args, **self.kwargs)
            if _is_collective(self.op):
                # It may go on, and the operator that waited for it has no step, as it is a view.
                for each in tensors(result):
                    torch.ops._c10d_functional.wait_tensor(each)
            made_now = _made_by(self.op, result) if self.made else ()
            # In place: the program and later operators hold the recorded results.
            for known, new in zip(self.made, made_now, strict=True):
                known.copy_(new)

    def kernel(
        self, host_alias: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Callable[[], Any]:
        """Return :meth:`run`, or a function that does the same by one CPU kernel, if it can.

        It can where all tensors are of ``_EASY`` dtypes, for which no device has rules of its own,
        and one is written.
        """
        is_operator = isinstance(self.op, torch._ops.OpOverload)
        if not is_operator or self.op in _UNINITIALISED or _is_collective(self.op):
            return self.run
        op = _with_out(self.op) if self.made else self.op
        given = list(tensors((self.args, self.kwargs, self.made)))
        easy = all(_is_dense(each) and each.dtype in _EASY for each in given)
        if (
            op is None
            or not easy
            or len(op._schema.returns) != 1
            or torch.Tag.nondeterministic_seeded in op.tags
        ):
            return self.run
        aliases = {id(each): host_alias(each) for each in given}
        if any(each is None for each in aliases.values()):
            return self.run
        args, kwargs, made = mapped(
            (self.args, self.kwargs, self.made), lambda each: aliases.get(id(each), each)
        )
        if made:
            kwargs = {**kwargs, "out": made[0]}
        return functools.partial(op._op, *args, **kwargs)


def _is_collective(op: Any) -> bool:
    """Return whether an operator is a functional collective."""
    return getattr(op, "namespace", None) == "_c10d_functional"


class _StepWithoutValues(_Step):
    """A recorded operator that computed no values, so a replay has nothing to compute either.

    It has no arguments, which would keep memory in use that the program has freed.
    """

    def run(self) -> None:
        """Do nothing."""

    def kernel(
        self, host_alias: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Callable[[], Any]:
        return self.run


_EASY = frozenset({torch.float32, torch.float64})

_CPU_KERNELS = ("CPU", "CompositeExplicitAutograd")
"""The keys of kernels that write to ``out``: the CPU's own, and those that copy to it, as
``relu.out`` does.
"""

_RESIZING = frozenset({"aten::mse_loss"})
"""Operators whose kernel gives ``out`` another size on its way (torch 2.15), and so another memory.
"""


@functools.cache
def _with_out(op: Any) -> Any:
    """Return an operator's overload with one ``out``, if it has one with a CPU kernel, or None."""
    if op._schema.name in _RESIZING:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    packet = op._overloadpacket
    wanted = [*_named_types(op), ("out", "Tensor")]
    for name in packet.overloads():
        each = getattr(packet, name)
        if not name.endswith("out") or _named_types(each) != wanted:
            continue
        if any(has_kernel(each.name(), key) for key in _CPU_KERNELS):
            return each
    return None


def _named_types(op: Any) -> list[tuple[str, str]]:
    """Return the name and the type of each argument of an operator."""
    return [(each.name, str(each.type)) for each in op._schema.arguments]


def _waits(func: Any, args: Any, kwargs: Any, indices: list[torch.Tensor]) -> bool:
    """Return whether the host waits for a value on the device."""
    has_mask = any(each.dtype in (torch.bool, torch.uint8) for each in indices)
    if has_mask or func in _READ_BY_THE_HOST or func.overloadpacket in _READ_BY_THE_HOST:
        return True
    # With its size `repeat_interleave` needs no value.
    if func in _INDEXING or kwargs.get("output_size") is not None:
        return False
    if func is _aten.equal.default and args[0].is_set_to(args[1]):
        return False
    return bool(_WAITS_FOR_THE_DEVICE.intersection(func.tags))


class Capture(TorchDispatchMode):
    """A capture, in progress while the mode is entered.

    Args:
        runtime: The device whose work is captured.
        generators: The generators of the graph's random numbers: the device's default generator and
            those that the program registered.

    Attributes:
        failed: Whether the program called an operator that cannot be captured.
        memory: The blocks that are allocated during the capture, as an observer of memory adds
            them.
        order: The streams that take part. Set by the code that enters the mode.
        steps: The operators that were recorded.
    """

    order: CaptureOrder
    memory: list[Any]

    def __init__(self, runtime: Runtime, generators: Sequence[torch.Generator]):
        super().__init__()
        self._runtime = runtime
        # None on the CPU, where the program's work on the host cannot be told from the work that
        # CUDA would capture.
        self._device_type = None if runtime.shares_host_memory else runtime.device_type
        self._kernels: list[Callable[[], Any]] = []
        self.failed = False
        self.memory = []
        # At the beginning, so that the end of the capture can restore them.
        self._random_states = [(generator, generator.get_state()) for generator in generators]
        self.steps: list[_Step] = []
        self._made: set[int] = set()
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The last tensor that was made of a number, and the number.
        self._number: tuple[Any, Any] = None, None
        self._replayed_by: Callable[..., Any] | None = None
        self._has_begun = False
        self._begun: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.order.captures():
            return dispatch_modes.run(
                func, *args, **kwargs
            )  # on a stream that takes no part, at once
        func, args = self._filled(func, args)
        self._refuse_waiting(func, args, kwargs)
        self._refuse_generator(args, kwargs)
        # `squeeze_` and its like change the tensor object alone, which a replay must not do again.
        if torch.Tag.inplace_view in func.tags:
            return dispatch_modes.run(func, *args, **kwargs)
        for tensor in written(func, args, kwargs):
            storage = tensor.untyped_storage()._cdata
            if storage not in self._made:  # copied before an operator first writes to it
                self._made.add(storage)
                elements = tensor.untyped_storage().nbytes() // tensor.itemsize
                whole = tensor.detach().as_strided((elements,), (1,), 0)
                self._before.append((whole, self._runtime.supplied.copy_outside(whole)))
        self._replayed_by = None
        with self._undeclared_writes(func, args, kwargs):
            result = dispatch_modes.run(func, *args, **kwargs)
        if self._replayed_by is None:
            self._record(func, args, kwargs, result)
        else:
            self._keep(self._replayed_by, args, kwargs, [], [*tensors(args)])
            self._has_begun = True
        if func is _aten.scalar_tensor.default:
            self._number = result, args[0]
        return result

    def _filled(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Return ``masked_fill_`` for ``x[mask] = number``, and any other call as it is.

        So CUDA does it where the number is the host's, without asking the device how many places
        there are (``canDispatchToMaskedFill`` of aten/src/ATen/native/TensorAdvancedIndexing.cpp).
        """
        # With a fourth argument it may accumulate.
        if func is not _aten.index_put_.default or len(args) != 3:
            return func, args
        written, (*before, mask), value = args
        number = None
        if value is self._number[0]:
            number = self._number[1]
        elif value.get_device() < 0 <= written.get_device() and value.numel() == 1:
            # A number of the host's.
            number = value.item()
        if (
            number is None
            or any(each is not None for each in before)
            or mask.dtype is not torch.bool
        ):
            return func, args
        all_of_inner = (..., *(None,) * (written.dim() - len(before) - mask.dim()))
        return _aten.masked_fill_.Scalar, (written, mask[all_of_inner], number)

    def _refuse_waiting(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise CUDA's error for an operator at which the host waits, such as ``item()``'s."""
        types = (native_device(each).type for each in tensors(args))
        if self._device_type is None or self._device_type not in types:
            return
        indices = list(tensors(args[1])) if func in _INDEXING else []
        if self._copies(func, args, kwargs, indices):
            not_while_capturing(pageable=True)
        if _waits(func, args, kwargs, indices):
            not_while_capturing()

    def _copies(self, func: Any, args: Any, kwargs: Any, indices: list[torch.Tensor]) -> bool:
        """Return whether an operator copies between the device and pageable memory of the host."""
        if func.overloadpacket in _COPYING:
            return True
        if any(native_device(each).type != self._device_type for each in indices):
            return True
        if func is _aten.histc.default:
            return not any(args[2:])  # it looks for the bounds
        device = kwargs.get("device")
        if func is not _aten._to_copy.default or device is None:
            return False
        return device.type != self._device_type and not kwargs.get("non_blocking")

    def _refuse_generator(self, args: Any, kwargs: Any) -> None:
        """Raise CUDA's error for an operator that draws from a generator unknown to the graph."""
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is None or self._device_type is None:
            return
        devices = [device] if device is not None else map(native_device, tensors(args))
        known = any(each._cdata == generator._cdata for each, _ in self._random_states)  # type: ignore[attr-defined]
        if not known and any(each.type == self._device_type for each in devices):
            raise RuntimeError(
                "Attempt to increase offset for a CUDA generator not in capture mode."
            )

    @block
    def _undeclared_writes(self, func: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """Keep copies of the program's tensors to which an operator writes without declaring it.

        ``native_batch_norm`` does this, and operators of the program may. Such a write is found by
        comparing values, because kernels of an out-of-tree device do not increment a tensor's
        version counter.
        """
        # An operator all of whose results are arguments or views declares its writes.
        if all(declared.alias_info is not None for declared in func._schema.returns):
            yield
            return
        theirs = [tensor for tensor in tensors((args, kwargs)) if self._may_be_written(tensor)]
        before = [
            (tensor.detach(), self._runtime.supplied.copy_outside(tensor)) for tensor in theirs
        ]
        yield
        with thread_state.suspended():  # it is not the program that reads the values
            self._before.extend(
                (tensor, held)
                for tensor, held in before
                # The operator may have left an argument without values.
                if self._runtime.supplied.has_values(tensor) and not same_bits(tensor, held)
            )

    def _may_be_written(self, tensor: torch.Tensor) -> bool:
        if not _is_dense(tensor) or tensor.is_quantized or tensor.is_meta or not tensor.numel():
            return False
        if not self._runtime.supplied.has_values(tensor):
            return False
        # An expanded tensor has elements in common, and torch refuses to write to it.
        expanded = any(
            size > 1 and not stride
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return not expanded and tensor.untyped_storage()._cdata not in self._made

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = _made_by(func, result)
        self._made.update(
            tensor.untyped_storage()._cdata for tensor in made if tensor.layout is torch.strided
        )
        # A view need not be made again: its memory is written by a recorded operator.
        if not made and not any(map(is_written, func._schema.arguments)):
            return
        self._keep(func, args, kwargs, made, [*made, *written(func, args, kwargs)])

    def _keep(
        self, op: Any, args: Any, kwargs: Any, made: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Keep a step for replays, whose operator or function writes to the results."""
        # Not between two collectives: a rank that sends has to receive before the other rank has
        # received.
        if self._replayed_by is None:
            self.wait_for_begun()
        if self._computes_values(results):
            self.steps.append(_Step(op, *mapped((args, kwargs, made), self._recorded)))
        else:
            self.steps.append(_StepWithoutValues(op, (), {}, []))

    def replay_by(self, begin: Callable[..., Any]) -> None:
        """Let replays call a function in place of the operator that runs now, a collective.

        Args:
            begin: Takes the operator's arguments, and returns work that ends before the graph's
                next kernel begins.
        """
        self._replayed_by = functools.partial(self._begin, begin)

    def _begin(self, begin: Callable[..., Any], *args: Any) -> None:
        self._begun.append(begin(*args))

    def wait_for_begun(self) -> None:
        """Let replays wait, at this place, for the collectives that they have begun."""
        if self._has_begun:
            self.steps.append(_Step(self._wait, (), {}, []))
        self._has_begun = False

    def _wait(self) -> None:
        while self._begun:
            self._begun.pop(0).wait()

    def _computes_values(self, results: list[torch.Tensor]) -> bool:
        """Return whether any of the results has values, or there is none."""
        has_values = self._runtime.supplied.has_values
        return not results or any(not _is_dense(each) or has_values(each) for each in results)

    def _recorded(self, value: Any) -> Any:
        """Return the value a step keeps: for a tensor, another of fixed size in its memory."""
        if type(value) in _PLAIN and not value.is_nested:
            return self._runtime.supplied.same_memory(value)
        if isinstance(value, torch._C.Generator):
            return self._runtime.supplied.numbers_of(value)
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that has no result, as each replay does at this place."""
        self.wait_for_begun()
        function(*args)
        self.steps.append(_Step(function, args, {}, []))

    def inputs(self) -> set[int]:
        """Return the addresses of the memory that the graph uses and that it did not allocate."""
        used = _addresses([(step.args, step.kwargs) for step in self.steps], self._device_type)
        return used - _addresses([step.made for step in self.steps], self._device_type)

    def put_back(self) -> None:
        """Restore the program's tensors and generators to their states before the capture."""
        for generator, state in self._random_states:
            generator.set_state(state)
        with as_kernels_do():
            # In reverse, so that the oldest copy is written last.
            for tensor, before in reversed(self._before):
                # FSDP frees parameters' memory by their storages' sizes, also in a capture.
                if tensor.untyped_storage().nbytes():
                    tensor.copy_(before)
        self._before.clear()

    def check_memory(self) -> None:
        """Refuse the graph if the program has freed its memory and the device has no other."""
        given = tensors([(step.args, step.kwargs) for step in self.steps])
        if any(
            each.numel() and not each.untyped_storage().nbytes()
            for each in given
            if _is_dense(each)
        ):
            remedy = "Run the program without CUDA graphs, or on a simulated device."
            thread_state.refuse(
                "torch.cuda.graph over memory that is freed by storage.resize_(0)", remedy
            )

    def replay(self) -> None:
        """Run the operators again and write their results to the memory of the recorded results."""
        context = thread_state.state.context
        # Recorders must see the kernels of a replay too.
        policy = None if context is None else context.policy
        asks = (
            context is None
            or (policy is not None and policy.asks)
            or getattr(context.options, "verify", None)
        )
        self._begun.clear()  # of a replay that has failed
        with as_kernels_do():
            if not (asks or self._kernels):
                self._kernels = [
                    step.kernel(self._runtime.supplied.host_alias) for step in self.steps
                ]
            for run in [step.run for step in self.steps] if asks else self._kernels:
                run()


def _addresses(values: Any, device_type: str | None) -> set[int]:
    dense = (each for each in tensors(values) if each.layout is torch.strided)
    return {
        each.untyped_storage().data_ptr()
        for each in dense
        if native_device(each).type == device_type
    }


def _made_by(op: Any, result: Any) -> list[torch.Tensor]:
    """Return an operator's new tensors among its results: no arguments and no views of them."""
    returns = op._schema.returns
    # An operator with one result returns it bare; with none it returns None.
    results = (result,) if len(returns) == 1 else result or ()
    new = [
        each for declared, each in zip(returns, results, strict=True) if declared.alias_info is None
    ]
    return list(tensors(new))


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
