"""Tensors on several devices: CUDA's errors, and the calls that CUDA accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdevice


class WithBuffer(torch.nn.Module):
    """A module with a tensor that is no buffer, so that ``.cuda()`` does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def mask_on_the_cpu() -> Any:
    x = torch.randn(3, 3, device="cuda")
    return x.masked_fill(torch.ones(3, 3).tril() == 0, -1.0)


def position_ids_on_the_cpu() -> Any:
    return torch.nn.Embedding(4, 2).cuda()(torch.arange(3))


def labels_on_the_cpu() -> Any:
    return torch.nn.functional.cross_entropy(
        torch.randn(3, 5, device="cuda"), torch.tensor([0, 1, 2])
    )


def model_left_on_the_cpu() -> Any:
    return torch.nn.Linear(4, 2)(torch.randn(1, 4, device="cuda"))


def concatenated_with_the_cpu() -> Any:
    return torch.cat([torch.ones(2, device="cuda"), torch.ones(2)])


def attention_mask_on_the_cpu() -> Any:
    q = torch.randn(1, 1, 4, 8, device="cuda")
    return torch.nn.functional.scaled_dot_product_attention(q, q.cpu(), q)


TWO_DEVICES = (
    r"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
    r"cpu!"
)


WRONG_ARGUMENT = (
    r"Expected all tensors to be on the same device, but got {} is on {}, different from other "
    r"tensors on {}"
)


BY_WRAPPER = r" \(when checking argument in method wrapper_CUDA_{}\)"


INDICES = r"indices should be either on cpu or on the same device as the indexed tensor \(cpu\)"


NUMPY = r"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\)"


BUGS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a buffer that is none": (
        lambda: WithBuffer().cuda()(torch.ones(4, device="cuda")),
        RuntimeError,
        TWO_DEVICES,
    ),
    "a mask": (
        mask_on_the_cpu,
        RuntimeError,
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "position ids": (
        position_ids_on_the_cpu,
        RuntimeError,
        WRONG_ARGUMENT.format("index", "cpu", "cuda:0") + BY_WRAPPER.format("_index_select"),
    ),
    "labels": (labels_on_the_cpu, RuntimeError, WRONG_ARGUMENT.format("target", "cpu", "cuda:0")),
    "a model": (
        model_left_on_the_cpu,
        RuntimeError,
        WRONG_ARGUMENT.format("mat1", "cuda:0", "cpu") + BY_WRAPPER.format("addmm"),
    ),
    "cat": (
        concatenated_with_the_cpu,
        RuntimeError,
        WRONG_ARGUMENT.format("tensors", "cpu", "cuda:0"),
    ),
    "attention": (
        attention_mask_on_the_cpu,
        RuntimeError,
        "Expected query, key, and value to have the same device type",
    ),
    "numpy": (lambda: torch.ones(2, device="cuda").numpy(), TypeError, NUMPY),
    "an index": (lambda: torch.ones(4)[torch.ones(4, device="cuda") > 0], RuntimeError, INDICES),
    "a generator": (
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        RuntimeError,
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "in place": (
        lambda: torch.ones(2).add_(torch.ones(2, device="cuda")),
        RuntimeError,
        TWO_DEVICES,
    ),
    "where": (
        lambda: torch.where(torch.ones(2) > 0, torch.ones(2, device="cuda"), torch.zeros(2)),
        RuntimeError,
        "Expected (all tensors|condition)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_that_only_a_device_shows(name: str) -> None:
    program, error, message = BUGS[name]
    with torchdevice.portable("cpu"):
        program()
    with torchdevice.simulate(identity="program"), pytest.raises(error, match=message):
        program()


def test_weights_and_inputs_on_two_devices(devices: torchdevice.Scope) -> None:
    layer, x = torch.nn.Linear(2, 2).to("cuda:1"), torch.ones(1, 2, device="cuda:0")
    with pytest.raises(
        RuntimeError, match=r"but got mat1 is on cuda:0, different from other tensors on cuda:1"
    ):
        layer(x)
    with pytest.raises(RuntimeError, match=r"found at least two devices, cuda:0 and cuda:1!"):
        x + torch.ones(1, 2, device="cuda:1")
    assert layer(x.to("cuda:1")).get_device() == 1


def test_what_cuda_accepts_is_accepted(devices: torchdevice.Scope) -> None:
    x = torch.arange(4.0, device="cuda")
    assert (x + torch.tensor(2.0)).tolist() == [2.0, 3.0, 4.0, 5.0], "a CPU scalar"
    assert x[torch.tensor([0, 3])].tolist() == [0.0, 3.0], "CPU indices"
    assert x[torch.tensor([True, False, False, True])].tolist() == [0.0, 3.0], (
        "a CPU mask as an index"
    )
    x[torch.tensor([1])] = torch.tensor(9.0)
    assert x.tolist() == [0.0, 9.0, 2.0, 3.0] and float(x[1]) == 9.0 and int(x.argmax()) == 1


FOR_EACH: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "new tensors": torch._foreach_abs,
    "two lists": lambda given: torch._foreach_mul(given, given),
    "a scalar": lambda given: torch._foreach_add(given, 2),
    "numbers": lambda given: torch._foreach_div(given, [2.0, 4.0, 8.0]),
    "in place": lambda given: torch._foreach_zero_(given) or given,
    "two lists in place": lambda given: torch._foreach_mul_(given, given) or given,
    "a copy": lambda given: torch._foreach_copy_(given, given[::-1]) or given,
    "norms": torch._foreach_norm,
}


@pytest.mark.parametrize("call", FOR_EACH)
def test_lists_of_tensors_on_several_devices_are_computed_one_by_one(call: str) -> None:
    def given(*devices: str) -> list[torch.Tensor]:
        return [
            torch.full((2,), number - 2.5, device=device) for number, device in enumerate(devices)
        ]

    expected = FOR_EACH[call](given("cpu", "cpu", "cpu"))
    with torchdevice.simulate("a100", count=2):
        found = FOR_EACH[call](given("cuda:0", "cpu", "cuda:1"))
        assert [str(each.device) for each in found] == ["cuda:0", "cpu", "cuda:1"]
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
