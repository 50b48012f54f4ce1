"""The tensors that stand in for those of a call: identity, writes, and who sees them."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

import torchdevice
from torchdevice.calls.lacking.cpu_fallback import call_on_cpu
from torchdevice.kernel.stand_ins import Converted, StandIns, mapped, same_bits, tensors

pytestmark = pytest.mark.one_engine

Pair = namedtuple("Pair", "first second")


class Doubled(Converted):
    """float64 tensors in the place of those of float32."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.dtype is torch.float32 else tensor

    def back(self, result: torch.Tensor) -> torch.Tensor:
        return result.float()


class TestConverted:
    def test_a_tensor_given_twice_has_one_stand_in(self) -> None:
        x = torch.ones(2)
        assert Doubled(lambda a, b, *, c: a is b and b is c[0]).call((x, x), {"c": [x]})

    def test_results_that_are_arguments_are_the_programs(self) -> None:
        x, y = torch.ones(2), torch.ones(2, dtype=torch.int64)
        first, (second, new) = Doubled(lambda a, b: (a, [b, a + 1])).call((x, y), {})
        assert first is x and second is y and new.dtype is torch.float32 and new.tolist() == [2, 2]

    @pytest.mark.parametrize("grad", [False, True])
    def test_writes_reach_the_program_and_nothing_else_is_touched(self, grad: bool) -> None:
        x, kept = torch.zeros(2).requires_grad_(grad) * 1, torch.tensor([1.0, torch.nan])
        before = kept._version
        assert Doubled(lambda a, b: a.add_(3)).call((x, kept), {}) is x
        assert x.tolist() == [3, 3] and kept._version == before

    def test_a_write_of_equal_values_keeps_its_place_in_the_graph(self) -> None:
        weight = torch.ones(2, requires_grad=True)
        found = Doubled(torch.Tensor.mul_).call((torch.ones(2), weight), {})
        found.sum().backward()
        assert weight.grad is not None and weight.grad.tolist() == [1, 1]

    def test_an_uncounted_write_is_seen(self) -> None:
        mean, var = torch.zeros(3), torch.ones(3)
        x = torch.arange(12.0).reshape(4, 3)
        expected = torch.zeros(3), torch.ones(3)
        torch.ops.aten.native_batch_norm(
            x.double(), None, None, *(each.double() for each in expected), True, 0.1, 0.1
        )
        Doubled(torch.native_batch_norm).call((x, None, None, mean, var, True, 0.1, 0.1), {})
        assert mean.tolist() == pytest.approx([0.45, 0.55, 0.65]) and not torch.equal(
            var, torch.ones(3)
        )

    def test_an_argument_takes_the_new_shape(self) -> None:
        out = torch.empty(0)
        assert Doubled(torch.add).call(
            (torch.ones(3), 1), {"out": out}
        ) is out and out.tolist() == [2, 2, 2]

    def test_inference_tensors_have_no_count_of_writes(self) -> None:
        with torch.inference_mode():
            x = torch.zeros(2)
            Doubled(torch.Tensor.add_).call((x, 1), {})
            assert x.tolist() == [1, 1]

    def test_the_schema_says_what_is_written(self) -> None:
        out = torch.zeros(2)
        op = torch.ops.aten.add.out
        assert Doubled(op, op).call((torch.ones(2), 1), {"out": out}) is out and out.tolist() == [
            2,
            2,
        ]


class TestCallsOnTheCpu:
    def test_in_inference_mode(self) -> None:
        with torchdevice.simulate(), torch.inference_mode():
            x = torch.zeros(2, device="cuda")
            assert call_on_cpu(torch.Tensor.add_, (x, 1), {}) is x and x.tolist() == [1, 1]

    def test_a_call_that_names_the_cpu_stays_there(self) -> None:
        with torchdevice.simulate():
            x = torch.ones(2, device="cuda")
            found = call_on_cpu(torch.Tensor.to, (x, torch.device("cpu")), {})
            assert found.is_cpu and found.tolist() == [1, 1]


@pytest.mark.parametrize("shape", [(1, 2, 2), (0,)])
@pytest.mark.parametrize("name", ["bmm", "add"])
def test_an_out_argument_that_is_a_conjugate(name: str, shape: tuple[int, ...]) -> None:
    def found(device: str) -> Any:
        a = torch.tensor([[[0, 1j], [2, 3 + 1j]]], device=device)
        out = torch.zeros(shape, dtype=a.dtype, device=device).conj()
        assert getattr(torch, name)(a, a, out=out) is out
        return out.tolist(), out.conj().tolist(), out.is_conj()

    with torchdevice.simulate():
        assert found("cuda") == found("cpu")


class TestTrees:
    def test_every_kind_of_result_keeps_its_type(self) -> None:
        x = torch.tensor([3.0, 1.0])
        for value in (Pair(x, 1), torch.max(x, 0), [x, (x,)], {"a": x}, torch.Size([2]), None):
            assert type(mapped(value, lambda each: each)) is type(value)
        assert [each.tolist() for each in tensors({"a": [x], "b": Pair(1, (x,))})] == [[3, 1]] * 2

    def test_the_base_says_what_is_missing(self) -> None:
        with pytest.raises(NotImplementedError):
            StandIns(torch.add).call((torch.ones(1), 1), {})

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor([torch.nan, -0.0]),
            torch.tensor(1 + 2j).conj(),
            torch.ones(2, 3).t(),
            torch.ones(1).expand(3),
            torch.tensor([True]),
            torch.eye(2).to_sparse(),
            torch.ones(2).to(torch.float8_e5m2),
        ],
    )
    def test_bits(self, tensor: torch.Tensor) -> None:
        assert same_bits(tensor, tensor.clone())
        other = tensor.clone()
        values = (
            other._values()
            if other.is_sparse
            else other.values()
            if other.layout is not torch.strided
            else other
        )
        values.copy_(torch.zeros(()).to(values.dtype))
        assert not same_bits(tensor, other)
