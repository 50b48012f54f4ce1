"""One call of an operator: its inputs, and its effects compared with the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchdevice.calls.rewriters import native_device
from torchdevice.kernel.context import Context
from torchdevice.kernel.stand_ins import same_bits, tensors
from torchdevice.report.discrepancies import Finding, findings_of
from torchdevice.verify import reference, tolerances
from torchdevice.verify.inputs import WIDE, Copies, Inputs, Place, is_plain, on_cpu
from torchdevice.verify.lines import Lines
from torchdevice.verify.operator_facts import Operator
from torchdevice.verify.tolerances import Difference


class _Compared(NamedTuple):
    """A tensor that is compared.

    Attributes:
        name: Its name in findings.
        actual: The tensor.
        number: Which part of the result it is; None for an argument to which the operator is to
            write.
    """

    name: str
    actual: Any
    number: int | None = None

    def expected(self, result: Any, copies: Copies) -> Any:
        """Return the reference, of a call's results and copies."""
        if self.number is None:
            return copies.take(self.actual)
        return list(_leaves(result))[self.number]


class Call:
    """A call that is compared. Made by :meth:`of`, before the operator runs.

    Attributes:
        operator: The operator.
        inputs: Its arguments.
        is_by_range: Whether only shapes, dtypes and ranges are compared, because the CPU cannot
            draw the same numbers.
    """

    def __init__(
        self,
        context: Context,
        operator: Operator,
        lines: Lines,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
    ):
        self.operator = operator
        self._context = context
        self._lines = lines
        self._args, self._kwargs = args, kwargs
        self._given: dict[str, Any] = dict(zip(operator.names, args, strict=False), **kwargs)
        self._alias = context.runtime.supplied.host_alias
        self._wide = context.runtime.shares_host_memory
        self._draws = operator.draws(args, kwargs)
        # The CPU can draw the target's numbers, but not in float64, which takes more random bits.
        can_replay = context.runtime.supplied.draws_on_cpu and not self._wide
        self._state: torch.Tensor | None = None
        self.inputs = Inputs(args, kwargs, given, self._alias, values=not operator.is_view)
        if self._draws and can_replay:
            generator = kwargs.get("generator")
            if generator is None:
                generator = context.runtime.default_generator(
                    self.inputs.index_on(context.device_type)
                )
            self._state = context.runtime.supplied.random_state(generator)
        self.is_by_range = self._draws and self._state is None

    @classmethod
    def of(
        cls, context: Context, operator: Operator, lines: Lines, args: Any, kwargs: Any
    ) -> Call | None:
        """Return the call; None where there is nothing to compare it with."""
        given = list(tensors((args, kwargs)))
        kinds = {each.device.type for each in given}  # the native ones: no function mode sees this
        if (device := kwargs.get("device")) is not None:
            kinds.add(device.type)
        if context.device_type not in kinds:
            return None
        if context.runtime.shares_host_memory:
            dtypes = {*(each.dtype for each in given), kwargs.get("dtype")}
            if len(kinds) > 1 or dtypes.isdisjoint(WIDE):
                return None
        if not all(is_plain(each) for each in given):
            findings_of(context.journal).left_out["odd"][operator.name] += 1
            return None
        return cls(context, operator, lines, args, kwargs, given)

    # ---- after the call --------------------------------------------------------------------------

    def findings(self, result: Any) -> list[Finding]:
        """Return the operator's differences from the CPU."""
        counts = findings_of(self._context.journal)
        # A kernel that writes to nothing may have the copies themselves.
        writes = bool(self.operator.written) or not self.operator.declares
        if self._wide:
            copies = self.inputs.wide(lambda values: values)
        else:
            copies = self.inputs.copies(again=writes)
        try:
            expected = self._reference(copies)
        except Exception:  # the CPU lacks the operator, or the dtype
            counts.left_out["unknown"][self.operator.name] += 1
            return []
        by_range = self.is_by_range
        (counts.random if by_range else counts.compared)[self.operator.name] += 1
        if by_range:
            differences = self._by_range(result, expected, copies)
        else:
            differences = self._by_value(result, expected, copies)
        return [self._finding(name, difference) for name, difference in differences]

    def _reference(self, copies: Copies) -> Any:
        if not self.operator.is_random:
            return reference.run(self.operator.op, copies)
        with torch.random.fork_rng(devices=[], device_type="cpu"):
            if self._state is not None:
                torch.default_generator.set_state(self._state)
            return reference.run(self.operator.op, copies)

    def _by_range(
        self, result: Any, expected: Any, copies: Copies
    ) -> Iterator[tuple[str, Difference]]:
        for each in self._compared(result):
            drawn = each.expected(expected, copies)
            found = tolerances.of_properties(each.actual, drawn, wide=self._wide)
            if found is None and self.operator.has_values:
                found = tolerances.outside(
                    self.operator, self._given, on_cpu(each.actual, self._alias), drawn
                )
            if found is not None:
                yield each.name, found

    def _by_value(
        self, result: Any, expected: Any, copies: Copies
    ) -> Iterator[tuple[str, Difference]]:
        if self.operator.is_view:
            yield from self._of_views(result, expected, copies)
            return
        if not isinstance(result, torch.Tensor) or not isinstance(expected, torch.Tensor):
            several = len(list(_leaves(result))), len(list(_leaves(expected)))
            if several[0] != several[1]:
                yield (
                    "the result",
                    Difference("shape", f"has {several[0]} parts instead of {several[1]}"),
                )
                return
        for each in self._compared(result):
            found = self._difference(each, each.expected(expected, copies))
            if found is not None:
                yield each.name, found
        # Undeclared writes of a CPU kernel happen in float64 too.
        if self.operator.has_values and not (self._wide and self.operator.declares):
            yield from self._undeclared(copies)

    def _compared(self, result: Any) -> Iterator[_Compared]:
        """Yield the results that are new, and the arguments to which the operator writes."""
        number = 0
        for name, value, made in self.operator.results(result):
            for position, leaf in enumerate(_leaves(value)):
                if made:
                    part = f"{name}[{position}]" if isinstance(value, (list, tuple)) else name
                    yield _Compared(part, leaf, number)
                number += 1
        for name in self.operator.written:
            for tensor in tensors(self._given.get(name)):
                yield _Compared(f"the argument {name!r}", tensor)

    def _difference(self, compared: _Compared, expected: Any) -> Difference | None:
        actual = compared.actual
        if not isinstance(actual, torch.Tensor):
            return _of_numbers(actual, expected)
        if not isinstance(expected, torch.Tensor) or not (is_plain(actual) and is_plain(expected)):
            return None
        found = tolerances.of_properties(actual, expected, wide=self._wide)
        if found is not None or not self.operator.has_values:
            return found
        return self._of_values(compared, expected)

    def _of_values(self, compared: _Compared, expected: torch.Tensor) -> Difference | None:
        actual = compared.actual
        values = on_cpu(actual, self._alias)
        found = tolerances.of_values(values, expected)
        if found is None:
            return None
        if self.operator.chooses and values.dtype is torch.int64:
            return self._of_choices(values, expected, found)
        # The roundings in a kernel may be the reason.
        beyond = self._beyond_rounding(compared, values, found) if self._rounds(values) else found
        is_argument = compared.number is None
        if beyond is not None and is_argument and self._is_unchanged(actual):
            return _not_written(beyond)
        return beyond

    def _rounds(self, values: torch.Tensor) -> bool:
        """Return whether the operator computes with roundings that may add up in these results."""
        if self.operator.rounds_only or self._draws:
            return False
        return self._wide or values.dtype is not torch.bool

    def _of_choices(
        self, indices: torch.Tensor, expected: torch.Tensor, found: Difference
    ) -> Difference | None:
        """Return a difference of indices, unless they choose equal elements, each once."""
        place = self.inputs.places[id(self._given["self"])]
        elements = place.of(self.inputs.memories[place.memory])
        dim = self._given.get("dim", -1)
        keepdim = indices.dim() == elements.dim()
        if dim is None or (
            "dim" not in self._given and self.operator.name.endswith(("argmax", "argmin"))
        ):
            elements = elements.flatten()
            indices = indices.view(-1)
            expected = expected.view(-1)
            dim = 0
            keepdim = True
        if not elements.dim():
            return found
        indices, expected = (
            each if keepdim else each.unsqueeze(dim) for each in (indices, expected)
        )
        ordered = indices.sort(dim).values
        if bool(
            (indices < 0).any()
            or (indices >= elements.size(dim)).any()
            or (ordered.diff(dim=dim) == 0).any()
        ):
            return found
        chosen, right = elements.gather(dim, indices), elements.gather(dim, expected)
        return None if tolerances.of_values(chosen, right) is None else found

    def _beyond_rounding(
        self, compared: _Compared, values: torch.Tensor, found: Difference
    ) -> Difference | None:
        """Return a difference if it is larger than roundings can make it."""
        moved = reference.moved(self.operator.op, self.inputs, compared.expected)
        if moved is None or any(each.shape != values.shape for each in (*moved[0], moved[1])):
            return found
        terms = None
        if not self.operator.is_pointwise:
            terms = tolerances.terms_of(list(tensors((self._args, self._kwargs))), values)
        return tolerances.of_values(values, moved[1], tolerances.sensitivity(*moved, terms))

    def _is_unchanged(self, tensor: torch.Tensor) -> bool:
        place = self.inputs.places[id(tensor)]
        if not place.is_of(tensor):
            return False
        now, before = place.now(self._alias), place.line(self.inputs.memories[place.memory])
        # Bits are compared where there is NaN, which takes longer.
        return tolerances.surely_agree(now, before) or same_bits(now, before)

    def _undeclared(self, copies: Copies) -> Iterator[tuple[str, Difference]]:
        """Yield arguments that only the operator or only the CPU changed, against the schema."""
        places = self.inputs.places
        written = {
            places[id(each)].memory
            for name in self.operator.written
            for each in tensors(self._given.get(name))
        }
        for place in places.values():
            tensor = place.like
            # The second question has the answer yes for all but faults.
            if place.memory in written or (self.operator.declares and self._is_unchanged(tensor)):
                continue
            expected = copies.take(tensor)
            found = tolerances.of_values(on_cpu(tensor, self._alias), expected)
            if found is None:
                continue
            before = place.of(self.inputs.memories[place.memory])
            cpu_wrote = tolerances.of_values(before, expected) is not None
            difference = self._of_undeclared(tensor, found, cpu_wrote)
            if difference is not None:
                yield f"the argument {self._name_of(tensor)!r}", difference

    def _of_undeclared(
        self, tensor: torch.Tensor, found: Difference, cpu_wrote: bool
    ) -> Difference | None:
        """Return the fault of an undeclared write to an argument that differs from the CPU's."""
        if self._is_unchanged(tensor):
            # A conjugate or negative view's reference has no such bits, which nobody writes to.
            is_view = tensor.is_conj() or tensor.is_neg()
            return _not_written(found) if cpu_wrote and not is_view else None
        if cpu_wrote:
            return found
        what = f"was changed, although the operator does not declare to write to it; {found.what}"
        return found._replace(kind="undeclared write", what=what)

    def _name_of(self, tensor: torch.Tensor) -> str:
        return next(
            name
            for name, value in self._given.items()
            if any(each is tensor for each in tensors(value))
        )

    def _of_views(
        self, result: Any, expected: Any, copies: Copies
    ) -> Iterator[tuple[str, Difference]]:
        memories = _memories((self._args, self._kwargs))
        copied = _memories((copies.args, copies.kwargs))
        for actual, other in zip(tensors(result), tensors(expected), strict=False):
            place, expected_place = Place(actual), Place(other)
            if not place.is_of(other):
                yield "the result", Difference("shape", f"has {place} instead of {expected_place}")
            elif _memories(actual) - memories and not _memories(other) - copied:
                yield (
                    "the result",
                    Difference("not a view", "has memory of its own, and the CPU's is a view"),
                )

    def _finding(self, name: str, difference: Difference) -> Finding:
        arguments = tuple(f"{each}: {self._spelled(value)}" for each, value in self._given.items())
        return Finding(
            operator=self.operator.name,
            kind=self._origin(difference),
            what=tolerances.named(difference, name),
            arguments=arguments,
            error=difference.error,
            allowed=difference.allowed,
            **self._lines.here()._asdict(),
        )

    def _origin(self, difference: Difference) -> str:
        """Return the kind of a finding: NaN and inf that were in the inputs do not begin here."""
        if difference.kind not in ("NaN", "inf"):
            return difference.kind
        numbers = [
            place.of(self.inputs.memories[place.memory]) for place in self.inputs.places.values()
        ]
        finite = all(
            bool(each.isfinite().all()) for each in numbers if each.dtype.is_floating_point
        )
        return difference.kind if finite else "values"

    def _spelled(self, value: Any) -> str:
        """Return an argument as a person reads it; a tensor as it was before the call."""
        is_list = isinstance(value, (list, tuple))
        if is_list and any(isinstance(each, torch.Tensor) for each in value):
            return "[" + "; ".join(map(self._spelled, value)) + "]"
        if not isinstance(value, torch.Tensor):
            return repr(value)
        return f"{self.inputs.places[id(value)]}, on {native_device(value)}"


def _not_written(found: Difference) -> Difference:
    return found._replace(kind="not written", what=f"is as it was before the call; {found.what}")


def _of_numbers(actual: Any, expected: Any) -> Difference | None:
    are_nan = actual != actual and expected != expected  # NaN differs from itself
    if are_nan or actual == expected:
        return None
    return Difference("values", f"is {actual!r} instead of {expected!r}")


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the parts of a result that are no lists."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif value is not None:
        yield value


def _memories(value: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors(value) if each.numel()}
