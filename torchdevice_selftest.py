"""The core of the contract tests on one's own device: ``pytest -rA --pyargs torchdevice_selftest``.

Each feature has a small program written for CUDA, which runs in a scope of its own. Numbers are
compared with those of the CPU. ``TORCHDEVICE_TARGET`` names the device; left out, it is the one
that a scope would choose. On a Mac, experiments print what torch's tables leave open. docs/mps.md
says which decision waits for each.
"""

from __future__ import annotations

import io
import os
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import torchdevice
from torchdevice.calls.lacking.missing_operators import VARIABLE
from torchdevice.version import versions

pytestmark = pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(
        found.detach().cpu(), expected.detach().cpu(), rtol=tolerance, atol=tolerance
    )


class TestFeatures:
    """A test says in its docstring what docs/matrix.md calls it."""

    @pytest.fixture(autouse=True)
    def scope(
        self, torchdevice_scope: torchdevice.Scope, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Run a test in a scope, and record how many of its calls the device could not make."""
        before = _calls_on_the_cpu(torchdevice_scope)
        yield
        on_cpu = _calls_on_the_cpu(torchdevice_scope) - before
        feature = request.function.__doc__.rstrip(".")
        request.node.user_properties += [
            ("feature", feature[0].lower() + feature[1:]),
            ("on_cpu", on_cpu),
        ]
        if on_cpu:
            print(f"{on_cpu} calls on the CPU")

    def test_available(self) -> None:
        """torch.cuda is available."""
        print(platform.platform(), versions(), f"build {torch.version.git_version}")
        print(f"torch.cuda is {torch.cuda.get_device_name()}")
        assert torch.cuda.is_available() and torch.cuda.device_count() >= 1, (
            "no device is available"
        )
        assert (
            torch.cuda.get_device_name() and torch.cuda.get_device_properties(0).total_memory > 0
        ), "no properties"

    def test_arguments(self) -> None:
        """Device arguments."""
        kinds = {
            torch.ones(2, device="cuda").device.type,
            torch.ones(2).cuda().device.type,
            torch.ones(2).to(0).device.type,
            torch.nn.Linear(2, 2).to("cuda:0").weight.device.type,
            torch.zeros_like(torch.ones(2, device=torch.device("cuda"))).device.type,
        }
        assert len(kinds) == 1, f"tensors are on {sorted(kinds)}"

    def test_operators(self) -> None:
        """Operators."""
        x = _numbers(4, 6)
        for function in (
            torch.exp,
            torch.tanh,
            functional.gelu,
            lambda x: x @ x.t(),
            lambda x: x.softmax(-1),
            torch.cumsum,
        ):
            arguments = (1,) if function is torch.cumsum else ()
            _same(function(x.cuda(), *arguments), function(x, *arguments))

    def test_views(self) -> None:
        """Views and in-place writes."""
        x, there = _numbers(4, 6), _numbers(4, 6).cuda()
        for each in (x, there):
            each.t()[1:3].mul_(2)
            each[::2, 1] = 7.0
        _same(there, x)

    def test_strided_writes(self) -> None:
        """Writes to tensors that are not contiguous."""
        ones = torch.ones(3, 2)
        x, there = _numbers(2, 3).t(), _numbers(2, 3).cuda().t()
        _same(there.addcmul_(ones.cuda(), ones.cuda()), x.addcmul_(ones, ones))
        _same(there.addcdiv_(ones.cuda(), ones.cuda()), x.addcdiv_(ones, ones))

    def test_backward(self) -> None:
        """Backward."""
        x, there = _numbers(4, 4).requires_grad_(), _numbers(4, 4).cuda().requires_grad_()
        for each in (x, there):
            functional.layer_norm(each @ each, (4,)).square().sum().backward()
        assert x.grad is not None and there.grad is not None, "there is no gradient"
        _same(there.grad, x.grad, 1e-3)  # type: ignore[arg-type]

    def test_convolution(self) -> None:
        """Convolution and pooling."""
        x, weight = _numbers(2, 3, 8, 8), _numbers(4, 3, 3, 3)
        _same(
            functional.max_pool2d(functional.conv2d(x.cuda(), weight.cuda()), 2),
            functional.max_pool2d(functional.conv2d(x, weight), 2),
            1e-3,
        )

    def test_attention(self) -> None:
        """Attention."""
        q, k, v = _numbers(3, 2, 4, 6, 8)
        attend = functional.scaled_dot_product_attention
        _same(
            attend(q.cuda(), k.cuda(), v.cuda(), is_causal=True),
            attend(q, k, v, is_causal=True),
            1e-3,
        )
        strided = [each.transpose(1, 2) for each in (q, k, v)]
        _same(attend(*(each.cuda() for each in strided)), attend(*strided), 1e-3)

    def test_linear_algebra(self) -> None:
        """Linear algebra."""
        x = _numbers(4, 4)
        _same(torch.linalg.solve(x.cuda(), x[0].cuda()), torch.linalg.solve(x, x[0]), 1e-3)
        _same(torch.linalg.svdvals(x.cuda()), torch.linalg.svdvals(x), 1e-3)
        _same(torch.linalg.pinv(x.cuda()), torch.linalg.pinv(x), 1e-2)
        assert int(torch.linalg.matrix_rank(x.cuda())) == 4, "matrix_rank is wrong"

    def test_training(self) -> None:
        """Training."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
        ).cuda()
        optimizer, x = torch.optim.Adam(model.parameters(), 0.05), _numbers(16, 4).cuda()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"

    def test_autocast(self) -> None:
        """Autocast and gradient scaling."""
        model, x = torch.nn.Linear(4, 1).cuda(), _numbers(8, 4).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
        before = model.weight.detach().clone()
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not torch.equal(before.cpu(), model.weight.detach().cpu()), (
            "the weights did not change"
        )

    def test_bfloat16(self) -> None:
        """Bfloat16."""
        if torch.cuda.is_bf16_supported():
            x = _numbers(4, 4)
            _same((x.cuda().bfloat16() @ x.cuda().bfloat16()).float(), x @ x, 0.1)

    def test_events(self) -> None:
        """Streams and events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        torch.cuda.current_stream().synchronize()
        end.record()
        torch.cuda.synchronize()
        assert end.query() and start.elapsed_time(end) >= 0, "an event is not done"

    def test_memory(self) -> None:
        """Memory figures and peaks."""
        size = 64 << 20
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        grown = torch.cuda.memory_allocated() - before
        del kept
        assert grown >= size * 0.9, f"{size} bytes were allocated, and the figure grew by {grown}"
        assert torch.cuda.max_memory_allocated() - before >= size * 0.9, "the peak was missed"
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total, f"{free} of {total} bytes are free"

    def test_out_of_memory(self) -> None:
        """Out of memory is CUDA's error."""
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 60, dtype=torch.uint8, device="cuda")

    def test_random(self) -> None:
        """Random numbers."""

        def drawn() -> torch.Tensor:
            torch.manual_seed(3)
            return torch.rand(4, device="cuda").cpu()

        assert torch.equal(drawn(), drawn()), "one seed gave two sequences"
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda").cpu()
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(4, device="cuda").cpu()), (
            "a restored state gave other numbers"
        )
        generators = [torch.Generator("cuda").manual_seed(1) for _ in range(2)]
        one, other = (torch.rand(4, device="cuda", generator=each).cpu() for each in generators)
        assert torch.equal(one, other), "equal generators gave other numbers"

    def test_checkpoint(self) -> None:
        """Checkpoints of activations."""
        seen: list[torch.Tensor] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            seen.append(functional.dropout(x))
            return seen[-1] * x

        x = torch.ones(64, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
        assert torch.equal(seen[0].detach().cpu(), seen[1].detach().cpu()), (
            "dropout was recomputed with other numbers"
        )

    def test_float64(self) -> None:
        """Float64."""
        found = torch.ones(3, dtype=torch.float64).cuda() * 2
        assert found.is_floating_point() and found.tolist() == [2.0] * 3, (
            "a float64 tensor lost its values"
        )
        assert torch.ones(3, device="cuda").double().sum().item() == 3.0, "double() lost the values"

    def test_complex(self) -> None:
        """Complex numbers and FFT."""
        x = _numbers(8)
        _same(torch.fft.irfft(torch.fft.rfft(x.cuda())), x)

    def test_copies(self) -> None:
        """Copies, pinned and asynchronous."""
        x = _numbers(1 << 16)
        there = x.pin_memory().to("cuda", non_blocking=True)
        back = there.to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, x), "the copy differs"

    def test_files(self) -> None:
        """Saved files."""
        file = io.BytesIO()
        x = _numbers(3).cuda()
        torch.save({"x": x}, file)
        for location in ("cuda", "cpu", None):
            file.seek(0)
            _same(torch.load(file, map_location=location)["x"], x)

    def test_threads(self) -> None:
        """Threads."""
        kinds: list[str] = []
        thread = threading.Thread(
            target=lambda: kinds.append(torch.ones(1, device="cuda").device.type)
        )
        thread.start()
        thread.join()
        assert kinds == [torch.ones(1, device="cuda").device.type], "a thread was outside the scope"

    def test_accelerator(self) -> None:
        """Torch.accelerator."""
        assert torch.accelerator.is_available() and torch.accelerator.device_count() >= 1, (
            "there is no accelerator"
        )
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()


def _calls_on_the_cpu(scope: torchdevice.Scope) -> int:
    return sum(
        entry.count for entry in scope.journal.degraded if entry.fidelity.value == "fell back"
    )


def _renormalized(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(
        torch.zeros(1, dtype=torch.long, device=x.device), x, max_norm=1.0
    )


LACKING: dict[str, Callable[[torch.Tensor], Any]] = {
    "linalg_svd": torch.linalg.svd,
    "embedding_renorm_": _renormalized,
    "linalg_eig": torch.linalg.eig,
    "linalg_eigh": lambda x: torch.linalg.eigh(x @ x.t()),
    "linalg_qr": torch.linalg.qr,
    "linalg_lu_solve": lambda x: torch.linalg.lu_solve(
        x, torch.arange(1, 5, dtype=torch.int32, device=x.device), x
    ),
    "mode": torch.mode,
}
"""Operators of which torch's tables do not say for sure whether MPS has them."""


def _grad_of_solve(device: str) -> torch.Tensor:
    x = (_numbers(4, 4) + 4 * torch.eye(4)).to(device).requires_grad_()
    torch.linalg.solve(x, torch.ones(4, device=device)).sum().backward()
    assert x.grad is not None
    return x.grad


def _in_place(name: str) -> Callable[[str], torch.Tensor]:
    def call(device: str) -> torch.Tensor:
        x, ones = _numbers(2, 3).to(device).t(), torch.ones(3, 2, device=device)
        return getattr(x, name)(ones, ones)

    return call


def _strided_linear(device: str) -> torch.Tensor:
    x, weight = _numbers(6, 4).to(device).t(), _numbers(5, 6).to(device)
    return torch.nn.functional.linear(x, weight)


def _mixed_layer_norm(device: str) -> torch.Tensor:
    x, weight = _numbers(3, 4).to(device).half(), torch.full((4,), 1.5).to(device)
    return torch.nn.functional.layer_norm(x, (4,), weight)


def _strided_attention(device: str) -> torch.Tensor:
    q, k, v = (
        each.transpose(-1, -2).to(device).transpose(-1, -2) for each in _numbers(3, 1, 2, 4, 8)
    )
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


GUARDED: dict[str, Callable[[str], torch.Tensor]] = {
    "addcmul_": _in_place("addcmul_"),
    "addcdiv_": _in_place("addcdiv_"),
    "_scaled_dot_product_attention_math_for_mps": _strided_attention,
    "linear": _strided_linear,
    "native_layer_norm": _mixed_layer_norm,
    "_linalg_solve_ex": _grad_of_solve,
}
"""Operator with a guard -> a call that the fault, where it is present, makes wrong. In the words of
known_faults.
"""


_MPS = "mps"


def has(name: str) -> bool:
    """Return whether MPS has an operator of :data:`LACKING`. Others run on the CPU in a scope."""
    try:
        LACKING[name](_numbers(4, 4).to(_MPS))
    except NotImplementedError:
        with torchdevice.portable(_MPS):
            LACKING[name](_numbers(4, 4).to("cuda"))
        return False
    return True


def is_present(name: str) -> bool:
    """Return whether an operator of :data:`GUARDED` gives its wrong result on MPS."""
    found, expected = GUARDED[name](_MPS).detach().cpu(), GUARDED[name]("cpu").detach()
    return not torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


class TestWhatWaitsForAMac:
    """Experiments outside scopes, on MPS as torch has it. A fallback is looked for in a scope."""

    @pytest.fixture(autouse=True)
    def mps(self) -> None:
        """Skip the experiments where there is nothing to decide."""
        if not torch.backends.mps.is_available():
            pytest.skip("this machine has no MPS")

    @pytest.mark.skipif(
        VARIABLE in os.environ, reason=f"{VARIABLE} is set, so torch runs the operator on the CPU"
    )
    @pytest.mark.parametrize("name", LACKING)
    def test_whether_mps_has(self, name: str) -> None:
        """Print whether MPS has an operator. In a scope it runs in any case."""
        print(
            f"does MPS have {name}? {'yes' if has(name) else 'no; in a scope it runs on the CPU'}"
        )

    @pytest.mark.parametrize("name", GUARDED)
    def test_whether_a_fault_is_present(self, name: str) -> None:
        """Print whether MPS gives the wrong result that a guard prevents."""
        print(f"is the wrong result of {name} present here? {'yes' if is_present(name) else 'no'}")

    def test_how_a_device_is_spelled(self) -> None:
        """Print whether a tensor's device has an index."""
        device = torch.ones(1, device=_MPS).device
        print(f"does a device's index matter in x.device? {device}")
        assert device.type == _MPS
