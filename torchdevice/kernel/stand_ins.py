"""A call made with other tensors in its arguments; results and writes are transferred back.

CPU tensors stand in for those of a target that lacks an operator, wide ones for those of a dtype
without a kernel, and tensors in the same memory for those of a simulated device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_LISTS = (list, tuple, dict)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or the results of a call."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _LISTS):
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, torch.Tensor):  # without a generator of its own
                yield each
            elif isinstance(each, _LISTS):
                yield from tensors(each)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return arguments or results with a function applied to all but lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        made = getattr(value, "_make", type(value))  # a named tuple takes its items one by one
        # Without a call more for each item that is no list.
        return made(
            [
                mapped(each, function) if isinstance(each, _LISTS) else function(each)
                for each in value
            ]
        )
    if isinstance(value, dict):
        return {name: mapped(each, function) for name, each in value.items()}
    return function(value)


def given_to(op: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator's call by name."""
    return dict(
        zip((argument.name for argument in op._schema.arguments), args, strict=False), **kwargs
    )


def is_written(argument: Any) -> bool:
    """Return whether an operator declares that it writes to an argument."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written(op: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors to which an operator writes, as its schema declares."""
    given = given_to(op, args, kwargs)
    for argument in filter(is_written, op._schema.arguments):
        yield from tensors(given.get(argument.name))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors' bits, or a sparse tensor's values, are equal; NaN equals NaN."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers: a view, unless a conjugate must be resolved."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.values()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.itemsize])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StandIns:
    """The tensors that stand in for those of one call: one for each, however often it is given.

    Subclasses choose the stand-in of an argument, and the program's object for a result. The
    stand-ins of this class itself share memory with the originals, so that writes need not be put
    back.

    Args:
        func: What is called.

    Attributes:
        args, kwargs: The arguments that the call is given, from :meth:`call` on.
        pairs: ``id`` of each tensor that is given -> the tensor, and its stand-in.
    """

    args: Any
    kwargs: Any

    def __init__(self, func: Any):
        self.func = func
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(self, args: Any, kwargs: Any) -> Any:
        """Make the call with stand-ins, and return the results, or the arguments behind them."""
        self.args, self.kwargs = args, kwargs
        result = self.run(*self.take((args, kwargs)))
        self.settle()
        return self.returned(result)

    def take(self, values: Any) -> Any:
        """Return arguments with the stand-ins."""
        return mapped(values, self._taken)

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self.other(value)
        known = self.pairs.get(id(value))
        if known is None:
            known = self.pairs[id(value)] = value, self.of(value)
        return known[1]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the stand-in of a tensor, which may be the tensor itself."""
        raise NotImplementedError

    def other(self, value: Any) -> Any:
        """Return the stand-in of an argument that is not a tensor."""
        return value

    def run(self, args: Any, kwargs: Any) -> Any:
        """Make the call, given the stand-ins."""
        return self.func(*args, **kwargs)

    def settle(self) -> None:
        """Copy the writes to stand-ins to the arguments."""

    def returned(self, result: Any) -> Any:
        """Return the results of the call from those of the stand-ins."""
        # Of tensors that share a stand-in the first counts, which operators in place write to.
        given = {id(own): value for value, own in reversed(self.pairs.values())}

        def back(each: Any) -> Any:
            if id(each) in given:
                return given[id(each)]
            return self.back(each) if isinstance(each, torch.Tensor) else each

        return mapped(result, back)

    def back(self, result: torch.Tensor) -> torch.Tensor:
        """Return the program's tensor for a new one."""
        return result


class Converted(StandIns):
    """Stand-ins with memory of their own. Writes to one are copied to its original.

    Args:
        func: What is called.
        op: The operator whose schema declares what the call writes to. Where it is None, the
            stand-ins are compared with their earlier state. Torch counts writes, but not those of
            ``native_batch_norm`` to its statistics, so the values of tensors that autograd does not
            watch are compared too.
    """

    def __init__(self, func: Any, op: Any = None):
        super().__init__(func)
        self._op = op
        self._before: dict[int, tuple[int, torch.Tensor | None]] = {}

    def take(self, values: Any) -> Any:
        taken = super().take(values)
        if self._op is None:
            self._before = {
                key: _state(own) for key, (given, own) in self.pairs.items() if own is not given
            }
        return taken

    def settle(self) -> None:
        if self._op is not None:
            changed = {id(each) for each in written(self._op, self.args, self.kwargs)}
        else:
            changed = {
                key
                for key, before in self._before.items()
                if _is_changed(self.pairs[key][1], *before)
            }
        for key, (given, own) in self.pairs.items():
            if key in changed and own is not given:
                self.store(given, own)

    def store(self, given: torch.Tensor, own: torch.Tensor) -> None:
        """Copy the writes to a stand-in to its argument."""
        if given.shape != own.shape:
            given.resize_(own.shape)
        given.copy_(own)


def _state(tensor: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """Return torch's count of the writes to a tensor, and a copy unless autograd watches it."""
    # Torch does not count writes to inference tensors.
    count = 0 if tensor.is_inference() else tensor._version
    return count, None if tensor.requires_grad else tensor.clone()


def _is_changed(tensor: torch.Tensor, count: int, values: torch.Tensor | None) -> bool:
    counted = not tensor.is_inference() and tensor._version != count
    return counted or (values is not None and not same_bits(tensor, values))


# ---- bits and extent of a view -------------------------------------------------------------------


conj = torch._C._VariableFunctions._conj
neg_view = torch._C._VariableFunctions._neg_view


def with_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with the conjugate and negative bits of another, or none."""
    tensor = conj(tensor) if like.is_conj() else tensor
    return neg_view(tensor) if like.is_neg() else tensor


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements there are in memory from the first to the last of a tensor's."""
    if not tensor.numel() or tensor.is_contiguous():
        return tensor.numel()
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in dimensions)


def refuse_to_pickle(self: Any, protocol: Any) -> Any:
    """Refuse to pickle or copy a stand-in, with Python's error for torch's own C object."""
    raise TypeError(f"cannot pickle {self.__class__.__name__!r} object")
