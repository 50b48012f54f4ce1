"""Dtypes in which CUDA has a kernel and the CPU none, by torch's database of operators."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from conftest import plain_torch
from sweeping import samples_of
from test_op_sweep import EXCLUDED_SIMULATED
from torch.testing._internal import common_methods_invocations as database

import torchdevice
from torchdevice.calls.lacking import dtype_gaps
from torchdevice.errors import FidelityError
from torchdevice.kernel.fidelity import Fidelity

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)

WIDER = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    **dict.fromkeys(FLOAT8, torch.float32),
}


def pairs() -> Iterator[tuple[str, Any, torch.dtype]]:
    for op in database.op_db:
        # Torch 2.10: only because an integer division by zero has no result on a CPU.
        if op.name == "__rmod__":
            continue
        for dtype in sorted({*op.dtypesIfCUDA} - {*op.dtypes}, key=str):
            yield f"{op.name} {op.variant_test_name} {str(dtype).removeprefix('torch.')}", op, dtype


PAIRS = {name: (op, dtype) for name, op, dtype in pairs()}


def converted(value: Any, device: str, dtypes: Mapping[torch.dtype, torch.dtype]) -> Any:
    def convert(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            made = each.detach().to(device, dtypes.get(each.dtype, each.dtype), copy=True)
            return made.requires_grad_(each.requires_grad)
        return dtypes.get(each, each) if isinstance(each, torch.dtype) else each

    return torch.utils._pytree.tree_map(convert, value)


def function_of(op: Any) -> Any:
    """Return an operator's function as a program finds it, which calls it by name."""
    try:
        return functools.reduce(getattr, op.name.split("."), torch)
    except AttributeError:
        return op.op


def run(
    function: Any, sample: Any, device: str, dtypes: Mapping[torch.dtype, torch.dtype]
) -> tuple[Any, Any]:
    """Return a function's results, and the gradient of its input if there is one, on the CPU."""
    given, args, kwargs = converted((sample.input, sample.args, sample.kwargs), device, dtypes)
    torch.manual_seed(0)
    made = function(given, *args, **kwargs)
    results = [
        each for each in torch.utils._pytree.tree_leaves(made) if isinstance(each, torch.Tensor)
    ]
    differentiable = [each for each in results if each.requires_grad]
    if differentiable:
        differentiable[0].backward(torch.ones_like(differentiable[0]))
    gradient = (
        given.grad.cpu() if isinstance(given, torch.Tensor) and given.grad is not None else None
    )
    return [each.detach().cpu() for each in results], gradient


def samples(op: Any, dtype: torch.dtype) -> list[Any]:
    differentiable = dtype in op.backward_dtypesIfCUDA and (
        dtype.is_floating_point or dtype.is_complex
    )
    return [
        sample
        for _, sample in zip(
            range(3), samples_of(op, dtype, requires_grad=differentiable), strict=False
        )
    ]


def lacks_nothing(op: Any, dtype: torch.dtype) -> bool:
    """Whether the CPU runs it too, so that the database is only cautious."""
    try:
        for sample in samples(op, dtype):
            run(op, sample, "cpu", {})
    except RuntimeError:
        return False
    return True


def is_left_alone(target: str, op: Any, dtype: torch.dtype) -> bool:
    """Whether ``engine="wrap"`` skips it: on CPU, short functions lacking only complex32."""
    asked = op.name.startswith("fft.") or op.name.rpartition(".")[2] in dtype_gaps.ASKED_LAST
    return (
        target == "cpu"
        and os.environ["TORCHDEVICE_ENGINE"] == "wrap"
        and dtype is torch.complex32
        and not asked
    )


@pytest.mark.sampled(30)
@pytest.mark.lacked_by("simulated:mps", "dtypes of CUDA's kernels")
@pytest.mark.parametrize("name", PAIRS)
def test_what_only_cuda_has(cuda: torchdevice.Scope, target: str, name: str) -> None:
    op, dtype = PAIRS[name]
    with plain_torch():
        given = samples(op, dtype)
        if lacks_nothing(op, dtype):
            return
    if target != "cpu" and op.name.startswith("torch.ops.aten._"):
        # A simulated GPU has these attention kernels itself; test_fused_attention.py compares them.
        return
    for sample in given:
        if op.name in dtype_gaps.LEFT_OUT or is_left_alone(target, op, dtype):
            with pytest.raises(RuntimeError):
                run(function_of(op), sample, "cuda", {})
            continue
        if target != "cpu" and op.name in EXCLUDED_SIMULATED:
            continue
        found, gradient = run(function_of(op), sample, "cuda", {})
        if op.name.endswith("rrelu"):  # draws numbers, in each dtype its own
            assert found[0].dtype is dtype
            continue
        with plain_torch():
            expected, wide_gradient = run(
                PLAINLY.get(op.name, op), sample, "cpu", WIDER_FOR.get(op.name, WIDER)
            )
        assert len(found) == len(expected)
        for each, wide in zip(found, expected, strict=True):
            each, wide = each.to_dense(), wide.to(each.dtype).to_dense()
            if dtype in FLOAT8:  # assert_close compares these bit by bit only
                each, wide = each.float(), wide.float()
            torch.testing.assert_close(each, wide, equal_nan=True, rtol=5e-3, atol=5e-3)
        assert (gradient is None) is (wide_gradient is None)
        if gradient is not None:
            gradient, wide_gradient = gradient.to_dense(), wide_gradient.to_dense()
            both = gradient.isfinite() & wide_gradient.isfinite()
            assert gradient.dtype is dtype
            torch.testing.assert_close(
                gradient[both], wide_gradient[both].to(dtype), rtol=3e-2, atol=3e-2
            )


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.zeros_like(x), x)


PLAINLY = {
    "nansum": lambda x, dim=None, keepdim=False, **options: torch.sum(
        without_nan(x), dim, keepdim, **options
    ),
    "nanmean": lambda x, dim=None, keepdim=False, **options: (
        torch.sum(without_nan(x), dim, keepdim, **options) / torch.sum(~x.isnan(), dim, keepdim)
    ),
}
"""The same by other operators, where no dtype will do."""

WIDER_FOR = {
    "histc": dict.fromkeys(
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), torch.float64
    )
}


class TestForms:
    """The same by every way of calling: method, in place, ``out``, operator, function in Python."""

    def test_of_bool(self, cuda: torchdevice.Scope) -> None:
        x = torch.tensor([True, False], device="cuda")
        out = torch.empty(0, dtype=torch.bool, device="cuda")
        for found in (
            x.abs(),
            torch.abs(x),
            torch.absolute(x),
            torch.ops.aten.abs(x),
            torch.ops.aten.abs.default(x),
        ):
            assert (
                found.dtype is torch.bool
                and found.tolist() == [True, False]
                and found.device == x.device
            )
        assert torch.abs(x, out=out) is out and out.tolist() == [True, False]
        assert x.abs_() is x and x.tolist() == [True, False]
        assert torch.nn.functional.softsign(x).tolist() == [0.5, 0.0]
        assert torch.ones(2, 2, dtype=torch.bool, device="cuda").trace().item() == 2

    def test_of_half(self, cuda: torchdevice.Scope) -> None:
        x = torch.randn(1, 1, 4, 4, 4, device="cuda").half().requires_grad_()
        pooled = torch.nn.AvgPool3d(2)(x)
        pooled.sum().backward()
        assert (
            pooled.dtype is torch.float16 and x.grad is not None and x.grad.dtype is torch.float16
        )
        assert torch.equal(x.grad, torch.full_like(x, 1 / 8))
        negative = torch.full((3,), -2.0, dtype=torch.float16, device="cuda")
        assert torch.nn.functional.rrelu(negative, 0.5, 0.5, True, True) is negative
        assert negative.tolist() == [-1.0] * 3
        image = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16, device="cuda")
        smaller = torch.nn.functional.interpolate(
            image, scale_factor=0.5, mode="bilinear", antialias=True
        )
        assert smaller.dtype is torch.bfloat16 and smaller.tolist() == [[[[1.0] * 2] * 2]]

    def test_of_integers(self, cuda: torchdevice.Scope) -> None:
        large = torch.tensor([0, 2**53 + 1, 2**54], device="cuda")
        assert torch.histc(large, bins=2).tolist() == [1, 2], "computed in integers"
        assert torch.histc(torch.full((3,), 4, device="cuda"), bins=3).tolist() == [0, 3, 0]
        assert torch.histc(torch.arange(10, device="cuda"), bins=2, min=2, max=5).tolist() == [2, 2]

    @pytest.mark.lacked_by("simulated:mps", "dtypes of CUDA's kernels")
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_of_a_product_with_a_dtype_of_its_own(
        self, cuda: torchdevice.Scope, dtype: torch.dtype
    ) -> None:
        one, other, added = (torch.randn(2, 3, 3, device="cuda").to(dtype) for _ in range(3))
        expected, wide = one.float() @ other.float(), added.float()
        named: dict[str, Any] = {"out_dtype": torch.float32}
        torch.testing.assert_close(torch.mm(one[0], other[0], torch.float32), expected[0])
        torch.testing.assert_close(torch.bmm(one, other, **named), expected)
        torch.testing.assert_close(
            torch.addmm(wide[0], one[0], other[0], **named, beta=2), 2 * wide[0] + expected[0]
        )
        torch.testing.assert_close(
            torch.baddbmm(wide, one, other, **named, alpha=0.5), wide + expected / 2
        )
        into = wide[0].clone()
        assert torch.addmm(into, one[0], other[0], **named, out=into) is into
        torch.testing.assert_close(into, wide[0] + expected[0])

    def test_what_cuda_lacks_too_is_refused(self, cuda: torchdevice.Scope) -> None:
        x = torch.ones(2, dtype=torch.int64, device="cuda")
        with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
            x.logcumsumexp(0)

    def test_a_tensor_of_the_cpu_beside_a_simulated_gpu_has_the_cpus_kernels(self) -> None:
        with torchdevice.simulate("h100"):
            assert torch.tensor([True], device="cuda").abs().item() is True
            with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
                torch.tensor([True]).abs()

    def test_what_is_not_exact_is_reported(self, target: str) -> None:
        with torchdevice.portable(target) as scope:
            torch.fft.fft(torch.ones(4, dtype=torch.float16, device="cuda"))
            torch.ones(1, dtype=torch.bool, device="cuda").abs()
        assert [entry.fidelity for entry in scope.journal.degraded] == [Fidelity.APPROXIMATE]
        with torchdevice.portable(target, strict=True):
            with pytest.raises(FidelityError, match="cuFFT"):
                torch.fft.fft(torch.ones(4, dtype=torch.float16, device="cuda"))
            torch.ones(1, dtype=torch.bool, device="cuda").abs()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("name", ["fft", "rfft", "hfft", "ihfft"])
    def test_the_dtype_of_a_fourier_transform_is_cudas(
        self, cuda: torchdevice.Scope, name: str, dtype: torch.dtype
    ) -> None:
        """torch's meta device has CUDA's dtypes. Up to 2.14 it refuses bfloat16, as CUDA does."""
        function = getattr(torch.fft, name)
        with plain_torch():
            x = torch.ones(4, dtype=dtype, device="meta")
            try:
                expected = function(x).dtype
            except (RuntimeError, NotImplementedError):
                expected = None
        given = torch.ones(4, dtype=dtype, device="cuda", requires_grad=True)
        if expected is None:
            with pytest.raises(RuntimeError, match="Unsupported dtype"):
                function(given)
            return
        found = function(given)
        found.abs().sum().backward()
        assert found.dtype is expected and given.grad is not None and given.grad.dtype is dtype

    def test_backward_is_not_run_twice(self) -> None:
        seen = []
        with torchdevice.portable("cpu"):
            x = torch.full((2,), 0.5, dtype=torch.complex32, device="cuda", requires_grad=True)
            y = x.sgn()
            y.register_hook(seen.append)
            with pytest.raises(NotImplementedError, match="div_cpu"):
                y.real.sum().backward()
        assert len(seen) == 1


def test_each_reason_is_still_true() -> None:
    names = {op.name for op in database.op_db}
    assert names >= dtype_gaps.LEFT_OUT.keys()
