"""Operators that a target lacks, or refuses inside a kernel, run on the CPU in a scope."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MetaRuntime
from places import ROOT
from processes import run_fresh_python

import torchdevice
from torchdevice.calls.lacking import missing_operators
from torchdevice.calls.lacking.cpu_fallback import CpuFallback
from torchdevice.calls.lacking.missing_operators import VARIABLE
from torchdevice.kernel import registered_kernels
from torchdevice.kernel.fidelity import Fidelity
from torchdevice.simulation.profiles import PROFILES

MISSING = (
    r"The operator 'aten::linalg_eig' is not currently implemented for the MPS device\. If you want"
)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def mps() -> Iterator[torchdevice.Scope]:
    with torchdevice.simulate("mps", identity="program") as scope:
        yield scope


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (3, 3), generator=torch.Generator().manual_seed(0))


def resized(make: Callable[..., Any], *args: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, device=like.device)
    assert make(*args, out=out) is out
    return out


def in_place_on_a_view(x: torch.Tensor) -> torch.Tensor:
    x.t()[1:].heaviside_(torch.ones((), device=x.device))
    return x


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "several results": lambda x: tuple(torch.mode(x)),
    "complex results": lambda x: torch.linalg.eigvals(x).abs().sort().values,
    "a factory": lambda x: torch.logspace(0, 1, 4, device=x.device),
    "out=, resized": lambda x: resized(torch.heaviside, x, x, like=x),
    "out= of a factory": lambda x: resized(torch.logspace, 0, 1, 4, like=x),
    "in place": lambda x: x.heaviside_(torch.zeros((), device=x.device)),
    "in place on a view": in_place_on_a_view,
    "not contiguous": lambda x: torch.mode(x.t()[:, ::2]).values,
    "an argument twice": lambda x: torch.heaviside(x, x),
    "integers": lambda x: torch.linalg.ldl_factor(x @ x.t())[1],
    "backward": lambda x: gradient(torch.matrix_exp, x),
    "backward of a reduction": lambda x: gradient(lambda x: torch.mode(x).values, x),
    "a composition": lambda x: torch.linalg.cond(x),
}


USED = {
    "several results": "mode",
    "complex results": "_linalg_eigvals",
    "a factory": "logspace",
    "out=, resized": "heaviside",
    "out= of a factory": "logspace",
    "in place": "heaviside_",
    "in place on a view": "heaviside_",
    "not contiguous": "mode",
    "an argument twice": "heaviside",
    "integers": "linalg_ldl_factor_ex",
    "backward": "linalg_matrix_exp",
    "backward of a reduction": "mode",
    "a composition": "_linalg_svd",
}
"""The operator of each case that MPS lacks, some of them until torch 2.14."""


def lacked(operator: str) -> bool:
    packet = getattr(torch.ops.aten, operator)
    return any(
        PROFILES["mps"].missing(getattr(packet, name)) is not None for name in packet.overloads()
    )


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_cpus_and_on_the_device(name: str, mps: torchdevice.Scope) -> None:
    case = CASES[name]
    expected, found = case(matrix()), case(matrix().cuda())
    one = isinstance(expected, torch.Tensor)
    for ours, theirs in zip(*(([found], [expected]) if one else (found, expected)), strict=True):
        assert ours.is_cuda and torch.equal(ours.cpu(), theirs) and ours.dtype is theirs.dtype
    counted = [entry for entry in mps.journal.entries if entry.fidelity is Fidelity.FELL_BACK]
    assert bool(counted) == lacked(USED[name])
    assert all(entry.site.file == __file__ and entry.bytes and entry.seconds for entry in counted)


def test_a_generator_of_the_device_determines_random_numbers(mps: torchdevice.Scope) -> None:
    def draw(seed: int) -> torch.Tensor:
        return torch.poisson(
            torch.full((8,), 50.0, device="cuda"),
            generator=torch.Generator("cuda").manual_seed(seed),
        )

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


def test_views_are_of_the_devices_memory(mps: torchdevice.Scope) -> None:
    with torch._C.DisableTorchFunction():
        base = matrix(2, 3).to("simulated").t()
        for op, args in (
            (torch.ops.aten.select.int, (0, 1)),
            (torch.ops.aten.slice.Tensor, (1, 1)),
        ):
            view = CpuFallback(op, "simulated", op).call((base, *args), {})
            assert torch.equal(view.cpu(), op(base.cpu(), *args))
            view.zero_()
            assert (
                not op(base.cpu(), *args).any()
                and view.untyped_storage()._cdata == base.untyped_storage()._cdata
            )


class TestWhoAsks:
    def test_a_strict_scope_raises(self) -> None:
        with (
            torchdevice.simulate("mps", strict=True),
            pytest.raises(NotImplementedError, match=MISSING),
        ):
            torch.linalg.eig(matrix().cuda())

    def test_zero_leaves_torchs_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "0")
        with torchdevice.simulate("mps"), pytest.raises(NotImplementedError, match=MISSING):
            torch.linalg.eig(matrix().cuda())

    def test_one_leaves_torchs_fallback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "1")
        monkeypatch.setattr(missing_operators, "run_on_cpu", None)
        with torchdevice.simulate("mps") as scope:
            assert torch.linalg.eig(matrix().cuda())[0].device.type == "mps"
        assert any("linalg_eig" in entry.requested for entry in scope.journal.degraded)

    def test_a_program_for_the_mac_gets_the_macs_error(self) -> None:
        with (
            torchdevice.simulate("mps", written_for="mps"),
            pytest.raises(NotImplementedError, match=MISSING),
        ):
            torch.linalg.eig(matrix().to("mps"))

    def test_the_strict_profile_never_falls_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, "1")
        with torchdevice.simulate("strict"), pytest.raises(NotImplementedError, match=MISSING):
            torch.linalg.eig(matrix().cuda())


def registered(key: str) -> list[str]:
    """Return the operators that have a kernel for a dispatch key in torch's tables."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in torch._C._dispatch_get_all_op_names() if has(name, key)]


def in_front(key: str) -> set[str]:
    """Return the operators with a kernel in front of those for a dispatch key."""
    parsed, by_place = torch._C._dispatch_key_parse(key), registered_kernels._in_front
    return {name for (name, _), each in by_place.items() if parsed in each.kernels}


class TestRegistration:
    """For the simulated device's key."""

    def test_for_the_key_of_mps(self) -> None:
        """In its own process, which then has kernels in front of nearly all operators."""
        file = Path(__file__).with_name("kernels_for_mps.py")
        ran = run_fresh_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), cwd=ROOT)
        assert ran.returncode == 0 and "3 passed" in ran.stdout, ran.stdout + ran.stderr

    @pytest.mark.parametrize("value", ["0", "1"])
    def test_the_programs_own_choice_is_respected(
        self, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with torchdevice.simulate("mps", written_for="mps"), torchdevice.portable("mps") as scope:
            torch.linalg.eig(matrix().cuda())
            assert scope.journal.degraded
            monkeypatch.setenv(VARIABLE, value)
            monkeypatch.setattr(missing_operators, "run_on_cpu", None)
            refused = pytest.raises(NotImplementedError, match=MISSING)
            # The simulated Mac has torch's own fallback.
            with refused if value == "0" else contextlib.nullcontext():
                torch.linalg.eig(matrix().cuda())

    def test_what_the_target_has_is_left_alone(self) -> None:
        # Asked of torch's kernels for meta tensors: those of simulated devices come with an
        # operator's first call.
        lacking = missing_operators.lacking("Meta")
        assert (
            "aten::geqrf" in lacking
            and "aten::isfinite" not in lacking
            and "aten::add.Tensor" not in lacking
        )

    def test_kernels_in_front_run_operators(self) -> None:
        with (
            torchdevice.simulate("cuda") as scope,
            lacking(scope, "aten::linalg_eig", "aten::mode"),
        ):
            values = torch.mode(matrix().cuda()).values
            assert values.is_cuda and torch.equal(values.cpu(), torch.mode(matrix()).values)
            assert torch.linalg.eig(matrix().cuda())[0].is_cuda
            assert {entry.requested for entry in scope.journal.degraded} == {
                "aten::linalg_eig",
                "aten::mode",
            }

    def test_another_thread_gets_torchs_kernel(self) -> None:
        found: list[Any] = []
        with torchdevice.simulate("cuda") as scope, lacking(scope, "aten::linalg_eig"):
            x = matrix().cuda()
            thread = threading.Thread(
                target=lambda: found.append(torch.ops.aten.linalg_eig.default(x))
            )
            with torchdevice.kernel.thread_state.suspended():
                thread.start()
                thread.join()
            assert len(found) == 1 and not scope.journal.degraded

    def test_a_kernel_that_a_program_registers_later_comes_first(
        self, meta_target: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = torch.library.Library("registered_late", "DEF")
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x + 1, "CPU")
        monkeypatch.setattr(MetaRuntime, "corrected_key", "Meta")
        with torchdevice.portable("meta") as scope:
            x = torch.empty(2, device="meta")
            with pytest.raises(NotImplementedError, match="no data"):  # of a copy to the CPU
                torch.ops.registered_late.op(x)
            assert [entry.requested for entry in scope.journal.degraded] == ["registered_late::op"]
            library.impl("op", lambda x: x.new_empty(7), "Meta")
            assert torch.ops.registered_late.op(x).shape == (7,)


@contextlib.contextmanager
def lacking(scope: torchdevice.Scope, *names: str) -> Iterator[None]:
    """Let a scope on a simulated device run operators on the CPU."""
    key = "PrivateUse1"
    for name in (*names, *names):  # again, as after an interrupt
        registered_kernels.put_in_front(
            name, key, missing_operators.kernel_of(name, key), "operators that are lacking"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scope.runtime, "corrected_key", key)
        patch.setattr(scope.runtime, "lacks_kernel", names.__contains__)
        yield


@contextlib.contextmanager
def refusing(operator: str, error: Exception) -> Iterator[None]:
    """Let the simulated device's kernel of an operator raise an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise error

    library = torch.library.Library("aten", "IMPL")
    with torchdevice.kernel.thread_state.suspended():
        library.impl(operator, refuse, "PrivateUse1", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


NOT_SUPPORTED = [
    RuntimeError("Conv3D is not supported on MPS"),
    NotImplementedError(
        "Output channels > 65536 not supported at the MPS device. As a temporary fix, you can set "
        "..."
    ),
    TypeError("Operation 'cumsum()' does not support input type 'int64' in MPS backend"),
    RuntimeError("MPS: 3D pooling is not implemented"),
]


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linalg_solve_triangular": lambda x: torch.linalg.cholesky(
        x @ x.t() + torch.eye(3, device=x.device)
    ),
    "lu_unpack": lambda x: torch.linalg.lu_factor(x)[0],
    "_fft_c2c": lambda x: torch.fft.fft(x).abs(),
    "special_i1": lambda x: torch.i0(x),
    "polygamma": lambda x: torch.digamma(x.abs() + 1),
    "digamma": lambda x: torch.lgamma(x.abs() + 1),
    "flip": lambda x: x.cumsum(0) * x,
    "scatter_add_": lambda x: x.gather(0, torch.zeros(2, 3, dtype=torch.int64, device=x.device)),
    "index_add_": lambda x: x.index_select(0, torch.tensor([0, 0], device=x.device)),
    "_index_put_impl_": lambda x: x[torch.tensor([0, 0], device=x.device)],
    "_softmax_backward_data": lambda x: x.softmax(0) * x,
}
"""Operator -> a function whose derivative calls it, and which does not call it itself."""


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
class TestRefusedInsideAKernel:
    @pytest.mark.parametrize("error", NOT_SUPPORTED, ids=str)
    def test_the_call_is_made_on_the_cpu(self, mps: torchdevice.Scope, error: Exception) -> None:
        x = matrix(1, 1, 4, 4, 4)
        with refusing("max_pool3d_with_indices", error):
            there = x.cuda().requires_grad_()
            found = torch.nn.functional.max_pool3d(there, 2)
            assert found.is_cuda and torch.equal(
                found.detach().cpu(), torch.nn.functional.max_pool3d(x, 2)
            )
            found.sum().backward()
        assert there.grad is not None and there.grad.is_cuda and there.grad.count_nonzero() == 8
        (entry,) = mps.journal.degraded
        assert "max_pool3d" in entry.requested and entry.requested.endswith("in torch.float32")
        assert entry.fidelity is Fidelity.FELL_BACK and entry.site.file == __file__ and entry.bytes

    @pytest.mark.parametrize("target", ["simulated:mps"])
    @pytest.mark.parametrize("error", NOT_SUPPORTED, ids=str)
    def test_a_refusal_in_backward(self, error: Exception, target: str) -> None:
        """Autograd calls the operator from C++, below every torch function."""
        x = matrix(1, 1, 4, 4, 4).requires_grad_()
        torch.nn.functional.max_pool3d(x, 2).square().sum().backward()
        with (
            refusing("max_pool3d_with_indices_backward", error),
            torchdevice.portable(target) as scope,
        ):
            there = matrix(1, 1, 4, 4, 4).cuda().requires_grad_()
            torch.nn.functional.max_pool3d(there, 2).square().sum().backward()
            assert there.grad is not None and there.grad.device == there.device
            assert x.grad is not None and torch.equal(there.grad.cpu(), x.grad)
        requested = [entry.requested for entry in scope.journal.degraded]
        assert "aten::max_pool3d_with_indices_backward" in requested

    @pytest.mark.parametrize("target", ["simulated:mps"])
    @pytest.mark.parametrize("operator", FORMULAS)
    def test_an_operator_of_a_formula_in_backward(self, operator: str, target: str) -> None:
        """The operator's name does not say that it is one of ``backward``."""
        expected = gradient(FORMULAS[operator], matrix())
        with refusing(operator, NOT_SUPPORTED[0]), torchdevice.portable(target) as scope:
            found = gradient(FORMULAS[operator], matrix().cuda())
            assert found.device == torch.ones(1, device="cuda").device
            torch.testing.assert_close(found.cpu(), expected)
        assert f"aten::{operator}" in [entry.requested for entry in scope.journal.degraded]

    def test_a_cheap_operator_in_backward_raises(self, mps: torchdevice.Scope) -> None:
        """A kernel in Python would make each call of it in the whole program slower."""
        with (
            refusing("mul.Tensor", NOT_SUPPORTED[0]),
            pytest.raises(RuntimeError, match="Conv3D is not supported"),
        ):
            matrix().cuda().requires_grad_().exp().sum().backward()

    def test_outside_backward_the_whole_call_is_made_on_the_cpu(
        self, mps: torchdevice.Scope
    ) -> None:
        """So its backward runs there too."""
        with refusing("digamma", NOT_SUPPORTED[0]):
            gradient(torch.special.digamma, matrix().abs().cuda())
        (entry,) = mps.journal.degraded
        assert entry.requested.endswith("digamma in torch.float32")

    @pytest.mark.parametrize("scope", [{"strict": True}, {"written_for": "mps"}], ids=str)
    def test_in_backward_torchs_error_stays(self, scope: dict[str, Any]) -> None:
        with refusing("elu_backward", NOT_SUPPORTED[0]), torchdevice.simulate("mps", **scope):
            x = matrix().to(scope.get("written_for", "cuda")).requires_grad_()
            with pytest.raises(RuntimeError, match="Conv3D is not supported on MPS"):
                torch.nn.functional.elu(x).sum().backward()

    def test_other_errors_of_backward_are_the_programs(self) -> None:
        error = RuntimeError("The size of tensor a (2) must match the size of tensor b (3)")
        with refusing("elu_backward", error), torchdevice.simulate("mps") as scope:
            with pytest.raises(RuntimeError, match="The size of tensor a"):
                torch.nn.functional.elu(matrix().cuda().requires_grad_()).sum().backward()
        assert not scope.journal.degraded

    def test_what_the_call_writes_is_written(self, mps: torchdevice.Scope) -> None:
        mean, variance, x = torch.zeros(2), torch.ones(2), matrix(4, 2)
        there = mean.cuda(), variance.cuda()
        with refusing("native_batch_norm", RuntimeError("native_batch_norm: not supported on MPS")):
            found = torch.nn.functional.batch_norm(x.cuda(), *there, training=True)
        assert torch.equal(
            found.cpu(), torch.nn.functional.batch_norm(x, mean, variance, training=True)
        )
        assert torch.equal(there[0].cpu(), mean) and torch.equal(there[1].cpu(), variance)

    @pytest.mark.parametrize("scope", [{"strict": True}, {"written_for": "mps"}], ids=str)
    def test_torchs_error_stays(self, scope: dict[str, Any]) -> None:
        with torchdevice.simulate("mps", **scope), refusing("special_i0e", NOT_SUPPORTED[0]):
            with pytest.raises(RuntimeError, match="Conv3D is not supported on MPS"):
                torch.special.i0e(matrix().to(scope.get("written_for", "cuda")))

    def test_it_stays_where_the_program_says_so(
        self, mps: torchdevice.Scope, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, "0")
        with refusing("special_i0e", NOT_SUPPORTED[0]), pytest.raises(RuntimeError, match="Conv3D"):
            torch.special.i0e(matrix().cuda())

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError(
                "MPS backend out of memory (MPS allocated: 5.00 GB, max allowed: 6.00 GB)."
            ),
            RuntimeError("Placeholder storage has not been allocated on MPS device!"),
            RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"),
        ],
        ids=str,
    )
    def test_other_errors_are_the_programs(self, mps: torchdevice.Scope, error: Exception) -> None:
        with refusing("special_i0e", error), pytest.raises(RuntimeError):
            torch.special.i0e(matrix().cuda())
        assert not mps.journal.degraded
