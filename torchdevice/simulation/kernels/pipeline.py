"""The one way of a call through the kernel of an operator on simulated devices.

A call is refused, or the devices are alive, recorders look at it, its tensors are placed on the
CPU, the result is computed there and wrapped. The body of a handwritten kernel stands for the last
three steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey

from torchdevice.calls.lacking.missing_operators import overload_of, schema_of
from torchdevice.kernel.devices.runtime import HALF
from torchdevice.kernel.thread_state import state
from torchdevice.simulation import device_generators as device_random
from torchdevice.simulation import policy, serving
from torchdevice.simulation.allocator.storages import fresh
from torchdevice.simulation.kernels import cpu_kernels, cuda_values, half_products, rounded_once
from torchdevice.simulation.refusals import device_refusals
from torchdevice.simulation.refusals.refusal_rules import Refusals, checks

_mode_enabled = torch._C._is_torch_function_mode_enabled

_Tensor, _STRIDED = torch.Tensor, torch.strided


def refusals_of(op: Any) -> Refusals:
    """Return CUDA's and MPS's refusals of an operator, for dense tensors."""
    return checks((*device_refusals.rules_of_mps(op), *device_refusals.rules_of_cuda(op)))


def none_of(op: Any) -> Refusals:
    """Return no refusals."""
    return ()


class Pipeline:
    """The kernel of an operator.

    Args:
        op: The operator, or its name in ATen, which is looked up when it is called first: few of
            the many ever are.
        body: A handwritten kernel, whose operator every device has, or the class of the CPU tensors
            that the operator runs on; None for the operator's CPU kernel.
        refusals: Returns the refusals of an operator.
    """

    def __init__(
        self, op: Any, body: Any = None, refusals: Callable[[Any], Refusals] = refusals_of
    ):
        self._op = op
        self._body = body
        self._refusals_of = refusals
        self._may_lack = op if body is None else None
        # The first call sets the other attributes.
        self._refusals: Refusals = (self._make,)

    def _make(self, args: Any, kwargs: Any) -> None:
        """Make what the calls need, and refuse the first call where it must be."""
        op = self._op = _looked_up(self._op)
        self._may_lack = self._may_lack and op
        self._random: device_random.Drawing | None = None
        body = self._body  # read once: another thread may replace it
        self._body = (
            _running_on(body, op) if isinstance(body, type) else body or cpu_kernels.body_of(op)
        )
        self._has_lists = op._schema.name.startswith("aten::_foreach_")
        if self._body is None:
            arguments, self._results = cpu_kernels.Arguments(op), cpu_kernels.Results(op)
            self._take, self._take_named = arguments.take, arguments.take_named
            self._look_again, self._compute = arguments.look_again, cpu_kernels.on_cpu_as(op)
            # The function behind the packet, which is a frame less. The dispatcher wraps numbers.
            self._compute_numbers = op._overloadpacket._op
            if half_products.takes(op):
                self._compute = half_products.in_float32(op, self._compute)
            elif rounded_once.takes(op):
                self._compute = rounded_once.in_float32(op, self._compute)
                self._compute_numbers = rounded_once.in_float32(op, self._compute_numbers)
            elif rounded_once.takes_numbers(op):
                self._compute = rounded_once.with_whole_numbers(op, self._compute)
                self._compute_numbers = rounded_once.with_whole_numbers(op, self._compute_numbers)
            self._random = device_random.kind_of(op)
        if self._refusals_of is refusals_of and op.namespace == "aten":
            self._offer_to_cpp(op)
        # Last, because other threads may call the operator meanwhile.
        self._refusals = self._refusals_of(op)
        for refuse in self._refusals:
            refuse(args, kwargs)

    def _offer_to_cpp(self, op: Any) -> None:
        """Offer C++ an operator of which a call's dtypes tell whether CUDA may refuse it.

        C++ serves no machine of another kind, and no call while the program asks for deterministic
        algorithms.
        """
        rules = [
            rule
            for rule in device_refusals.rules_of_cuda(op)
            if rule.holds is policy.stands_for_cuda
        ]
        refused = [rule.only for rule in rules if rule.only is not None]
        if len(refused) == len(rules) and serving.can_serve(op, self._may_lack is None):
            # A rule without dtypes is one about several dtypes.
            by_python = half_products.slow_dtypes(op) if half_products.takes(op) else frozenset()
            if rounded_once.takes(op) or cpu_kernels.is_batch_norm(op):
                by_python = HALF
            serving.offer(
                op,
                by_python.union(*refused),
                mixes=all(refused),
                rounds_numbers=not rounded_once.takes_numbers(op),
            )

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator."""
        # One function with many branches: in three functions, `x + 1` took 14 frames instead of 11,
        # each about 55 ns. Autograd calls kernels with modes on the stack. Asked first, since
        # leaving them costs more than the question.
        if _mode_enabled():
            with torch._C.DisableTorchFunction():
                return self.run(*args, **kwargs)
        for refuse in self._refusals:
            refuse(args, kwargs)
        context = state.context
        rules = None if context is None else context.policy
        # One attribute decides for programs that ask for no checks.
        if rules is not None and rules.asks and rules.falls_back(self._may_lack, args, kwargs):
            return rules.run(self._op, self.run, args, kwargs)
        body = self._body
        if body is not None:
            return self._by_hand(body, args, kwargs)
        taken, index, odd = self._take(args)
        named = kwargs
        if kwargs:
            named, index, within = self._take_named(kwargs, index)
            odd |= within
        # Tensors on several devices are computed one by one, as by CUDA.
        if odd and self._has_lists:
            return self._op._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        there = None if context is None else context.devices.machine
        on = None if there is None else there.memory.get(index)
        if on is not None and on.ended:  # so that the kernel may use the memory of what has ended
            on.release_ended()
        call = (
            self._compute_numbers
            if odd and self._look_again(taken, args, kwargs, index)
            else self._compute
        )
        random = self._random
        try:
            result = call(*taken, **named) if random is None else random(call, index, taken, named)
        except (IndexError, RuntimeError) as error:
            device_refusals.check_assertion(self._op, args, error)
            result = cpu_kernels.again(error, self._op, call, taken, named)
        results = self._results
        if not results.only_new:
            return (
                args[results.position]
                if results.position is not None
                else results.of(result, index, args, kwargs)
            )
        if index < 0:  # a device of another type was given
            return result
        if result.__class__ is _Tensor and result.layout is _STRIDED:
            return fresh(result, index)
        return cpu_kernels.wrapped(result, index)

    def _by_hand(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a handwritten kernel, which makes tensors of the device itself."""
        try:
            return body(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            device_refusals.check_assertion(self._op, args, error)
            return cpu_kernels.again(error, self._op, None, args, kwargs)


def _looked_up(op: Any) -> Any:
    return overload_of(op) if isinstance(op, str) else op


def _running_on(aliases: type[cpu_kernels.CpuAliases], op: Any) -> cpu_kernels.Kernel:
    random = device_random.kind_of(op)
    return lambda *args, **kwargs: aliases(op, op, random).call(args, kwargs)


def kernel_of(op: Any) -> cpu_kernels.Kernel:
    """Return the kernel of an operator, or of a name in ATen, without a handwritten one.

    That of a view needs no pipeline: nothing is read.
    """
    schema = schema_of(f"aten::{op}") if isinstance(op, str) else op._schema
    if not cpu_kernels.is_view(schema):
        return cuda_values.dividing(schema, Pipeline(op).run)
    op = _looked_up(op)
    if op.namespace == "aten":
        serving.offer(op)
    return cpu_kernels.view_of(op)


def fallback(make: Callable[[Any], cpu_kernels.Kernel]) -> cpu_kernels.Kernel:
    """Return the kernel of a dispatch key for the operators that have no kernel of their own there.

    Args:
        make: Returns the kernel of an operator.
    """
    # By `id`, because the hash of an operator is a function in Python. The operator keeps the `id`.
    kernels: dict[int, tuple[cpu_kernels.Kernel, Any]] = {}

    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        found = kernels.get(id(op))
        if found is None:
            found = kernels[id(op)] = make(op), op
        return found[0](*args, **kwargs)

    return run
