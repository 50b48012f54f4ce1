"""Faults planted in the simulated device: wrong results seen on real devices."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchdevice.calls.lacking.missing_operators import overload_of
from torchdevice.simulation.allocator.storages import fresh, memory_of
from torchdevice.simulation.kernels import handwritten_kernels
from torchdevice.simulation.kernels.cpu_kernels import Kernel, index_of
from torchdevice.simulation.kernels.pipeline import kernel_of


@contextlib.contextmanager
def planted(name: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Replace the kernel of an operator of the simulated device.

    Args:
        name: The operator with its overload, such as ``"add.Tensor"``.
        fault: Called with the right kernel and the arguments of each call.
    """
    special = handwritten_kernels.SPECIAL
    right: Kernel = special[name] if name in special else kernel_of(overload_of(name))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return fault(right, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():  # torch says once in a process that there was a kernel
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "PrivateUse1", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextlib.contextmanager
def planted_in_cpu(name: str, kernel: Callable[..., Any]) -> Iterator[None]:
    """Replace the kernel of an operator of the CPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


class Fault(NamedTuple):
    """A fault and a program that shows it.

    Attributes:
        name: What is wrong.
        operator: The operator with its overload.
        kernel: The wrong kernel: called with the right one and the arguments of a call.
        program: Has the line that calls the operator, marked ``# here``.
        kind: The kind of the finding.
    """

    name: str
    operator: str
    kernel: Callable[..., Any]
    program: Callable[[], Any]
    kind: str


FAULTS: list[Fault] = []


def fault(
    name: str, operator: str, program: Callable[[], Any], kind: str = "values"
) -> Callable[[Any], Any]:
    """Return a decorator that adds a wrong kernel to ``FAULTS``."""

    def add(kernel: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(name, operator, kernel, program, kind))
        return kernel

    return add


def at(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor in the memory of one of the device."""
    return memory_of(tensor)


def new(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a new tensor of the device of another, in the memory of a CPU tensor."""
    return fresh(tensor, index_of(like))


def rand(*shape: int, **options: Any) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", **options)


def multiply_transposed() -> None:
    x = rand(4, 6)
    x @ rand(5, 6).t()  # here


@fault("wrong strides read", "mm", multiply_transposed)
def _mm(right: Any, a: Any, b: Any) -> Any:
    return right(a, new(at(b).as_strided(b.shape, (b.shape[1], 1), b.storage_offset()).clone(), b))


def add_in_place() -> None:
    x = rand(4)
    x += 1  # here


@fault("dropped in-place write", "add_.Tensor", add_in_place, "not written")
def _add_(right: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def fill_a_buffer_again() -> None:
    buffer, x = torch.zeros(4), torch.ones(4, device="cuda")
    for _ in range(2):
        x.copy_(buffer.add_(1))  # here


_first: dict[str, torch.Tensor] = {}


@fault("stale copy", "copy_", fill_a_buffer_again, "not written")
def _copy_(right: Any, self: Any, source: Any, non_blocking: bool = False) -> Any:
    first = _first.setdefault("source", source.clone()) if index_of(source) < 0 else source
    return right(self, first, non_blocking)


def scale_columns() -> None:
    x = rand(3, 3)
    x * rand(3)  # here


@fault("wrong broadcast", "mul.Tensor", scale_columns)
def _mul(right: Any, a: Any, b: Any) -> Any:
    return new(at(a) * at(b).unsqueeze(-1), a) if a.dim() == 2 and b.dim() == 1 else right(a, b)


def sum_all() -> None:
    x = rand(64, 64)
    x.sum()  # here


@fault("half-precision accumulation", "sum", sum_all)
def _sum(right: Any, x: Any, **kwargs: Any) -> Any:
    return new(at(x).half().sum().float(), x)


def sum_rows() -> None:
    x = rand(5, 7)
    x.sum(dim=1)  # here


@fault("off by one in a reduction", "sum.dim_IntList", sum_rows)
def _sum_dim(right: Any, x: Any, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    return right(new(at(x)[:, :-1].clone(), x), dim, keepdim, **kwargs)


def softmax_of_rows() -> None:
    x = rand(4, 4)
    torch.softmax(x, -1)  # here


@fault("wrong dimension", "_softmax", softmax_of_rows)
def _softmax(right: Any, x: Any, dim: int, half: bool) -> Any:
    return right(x, 0, half)


def subtract() -> None:
    x = rand(4)
    x - rand(4)  # here


@fault("swapped operands", "sub.Tensor", subtract)
def _sub(right: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    return right(b, a, **kwargs)


def exponential() -> None:
    x = rand(9)
    x.exp()  # here


@fault("missing last element", "exp", exponential)
def _exp(right: Any, x: Any) -> Any:
    result = right(x)
    at(result)[-1] = 0
    return result


def to_whole_numbers() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, 3.25], device="cuda")
    x.round()  # here


@fault("wrong rounding", "round", to_whole_numbers)
def _round(right: Any, x: Any) -> Any:
    return new((at(x) + 0.5).floor(), x)


def overflow() -> None:
    x = torch.tensor([1.0, 100.0], device="cuda")
    x.exp()  # here


@fault("NaN for inf", "exp", overflow, "NaN")
def _exp_nan(right: Any, x: Any) -> Any:
    return new(at(right(x)).masked_fill(at(x) > 88, float("nan")), x)


def divide_by_small_numbers() -> None:
    x = torch.tensor([1e-30, 1.0], device="cuda")
    x.rsqrt()  # here


@fault("inf for a number", "rsqrt", divide_by_small_numbers, "inf")
def _rsqrt(right: Any, x: Any) -> Any:
    return new(at(right(x)).masked_fill(at(x) < 1e-20, float("inf")), x)


def update_a_transposed_weight() -> None:
    weight = rand(3, 4).t()
    weight.addcmul_(rand(4, 3), rand(4, 3))  # here


@fault("non-contiguous output ignored", "addcmul_", update_a_transposed_weight, "not written")
def _addcmul_(right: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.is_contiguous():
        right(new(at(self).contiguous(), self), *args, **kwargs)
        return self
    return right(self, *args, **kwargs)


def write_to_every_second_column() -> None:
    x, whole = rand(3, 2), rand(3, 4)
    torch.mul(x, 2, out=whole[:, ::2])  # here


@fault("strides of out= ignored", "mul.out", write_to_every_second_column)
def _mul_out(right: Any, a: Any, b: Any, *, out: Any) -> Any:
    line = at(out).as_strided((out.numel(),), (1,), at(out).storage_offset())
    line.copy_((at(a) * (at(b) if isinstance(b, torch.Tensor) else b)).reshape(-1))
    return out


def negate_a_slice() -> None:
    x = rand(8)
    -x[4:]  # here


@fault("storage offset ignored", "neg", negate_a_slice)
def _neg(right: Any, x: Any) -> Any:
    return new(-at(x).as_strided(x.shape, x.stride(), 0), x)


def add_half_and_float() -> None:
    x = rand(4, dtype=torch.float16)
    x + rand(4)  # here


@fault("wrong dtype promotion", "add.Tensor", add_half_and_float, "dtype")
def _add(right: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    result = right(a, b, **kwargs)
    return new(at(result).to(a.dtype), a)


def train_a_layer() -> None:
    x = rand(4, 6).requires_grad_()
    y = torch.nn.functional.layer_norm(x, (6,))  # here
    y.square().sum().backward()


@fault("gradient scaled wrongly", "native_layer_norm_backward", train_a_layer)
def _layer_norm_backward(right: Any, *args: Any) -> Any:
    results = right(*args)
    at(results[0]).mul_(2)
    return results


def look_up() -> None:
    x = rand(5, 3)
    x.index_select(0, torch.tensor([0, 3], device="cuda"))  # here


@fault("wrong index", "index_select", look_up)
def _index_select(right: Any, x: Any, dim: int, index: Any) -> Any:
    return right(x, dim, new(at(index) + 1, index))


def largest() -> None:
    x = rand(16)
    x.argmax()  # here


@fault("wrong position", "argmax", largest)
def _argmax(right: Any, x: Any, *args: Any) -> Any:
    return new(at(right(x, *args)) - 1, x)


def make_zeros() -> None:
    torch.zeros(8, device="cuda")  # here


@fault("uninitialised tail", "zeros", make_zeros, "NaN")
def _zeros(right: Any, *args: Any, **kwargs: Any) -> Any:
    result = right(*args, **kwargs)
    at(result)[-2:].view(torch.uint8).fill_(0xFF)
    return result


def add_to_a_row() -> None:
    x = rand(3, 4)
    x[0].add_(1)  # here


@fault("in-place on a view not written through", "select.int", add_to_a_row, "not a view")
def _select(right: Any, x: Any, dim: int, index: int) -> Any:
    return new(at(x).select(dim, index).clone(), x)


def look_at_a_part() -> None:
    x = rand(8)
    x.as_strided((4,), (2,), 1)  # here


@fault("view with a wrong offset", "as_strided", look_at_a_part, "shape")
def _as_strided(right: Any, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return right(x, size, stride, 0)


def rectify() -> None:
    x = rand(6) - 0.5
    x.relu()  # here


@fault("undeclared write to an input", "relu", rectify, "undeclared write")
def _relu(right: Any, x: Any) -> Any:
    result = right(x)
    at(x).clamp_(min=0)
    return result


def pad() -> None:
    x = rand(2, 3)
    torch.nn.functional.pad(x, (2, 0))  # here


@fault("wrong padding", "constant_pad_nd", pad)
def _pad(right: Any, x: Any, padding: Any, value: Any = 0) -> Any:
    return right(x, padding[::-1], value)


def many_tokens() -> None:
    x = torch.tensor([2**40 + 1, 3], device="cuda")
    x.abs()  # here


@fault("whole numbers by way of float32", "abs", many_tokens)
def _abs(right: Any, x: Any) -> Any:
    return new(at(x).float().abs().to(x.dtype), x)


def drop() -> None:
    x = rand(100)
    torch.nn.functional.dropout(x, 0.1)  # here


@fault("wrong probability", "native_dropout", drop)
def _native_dropout(right: Any, x: Any, p: float, train: Any) -> Any:
    return right(x, 0.5, train)


def step_many() -> None:
    parameters = [rand(3), rand(4)]
    torch._foreach_add_(parameters, 1.0)  # here


@fault("the last of a list is left out", "_foreach_add_.Scalar", step_many, "not written")
def _foreach_add_(right: Any, tensors: Any, scalar: Any) -> Any:
    right(tensors[:-1], scalar)


def clamp_nan() -> None:
    x = torch.tensor([float("nan"), 2.0], device="cuda")
    x.clamp(min=0)  # here


@fault("NaN is lost", "clamp", clamp_nan)
def _clamp(right: Any, x: Any, *args: Any) -> Any:
    return new(at(right(x, *args)).nan_to_num(0), x)


def read_a_number() -> None:
    x = torch.tensor(3.0, device="cuda")
    x.item()  # here


@fault("a number is read too early", "_local_scalar_dense", read_a_number)
def _item(right: Any, x: Any) -> Any:
    return right(x) - 1


def join() -> None:
    x = rand(3, 1)
    torch.cat([x, x], 1)  # here


@fault("wrong shape", "cat", join, "shape")
def _cat(right: Any, tensors: Any, dim: int = 0) -> Any:
    return right(tensors, 0)
