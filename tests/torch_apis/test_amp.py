"""Automatic mixed precision: every spelling of autocast, and a GradScaler that works."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conftest import ALONE

import torchdevice
from torchdevice.errors import FidelityError
from torchdevice.kernel.devices import cpu
from torchdevice.kernel.devices.cpu import computes_in_bfloat16

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]


def product() -> torch.dtype:
    x = torch.ones(4, 4, device="cuda")
    return (x @ x).dtype


@pytest.fixture
def float16(kind: str) -> torch.dtype:
    """The dtype in which autocast to float16 computes on the target."""
    if kind != "cpu":
        return torch.float16
    return torch.bfloat16 if computes_in_bfloat16() else torch.float32


@pytest.fixture
def bfloat16(kind: str) -> torch.dtype:
    """The dtype in which autocast to bfloat16 computes on the target."""
    return torch.bfloat16 if kind != "cpu" or computes_in_bfloat16() else torch.float32


@pytest.mark.parametrize(
    "spelling", [lambda: torch.autocast("cuda", dtype=torch.float16), torch.cuda.amp.autocast]
)
def test_a_region_casts_the_weights_of_its_beginning(
    cuda: torchdevice.Scope, spelling: Any
) -> None:
    """Whatever is cached of the casts of weights ends with the region."""
    weight, x = torch.nn.Parameter(torch.ones(4, 4, device="cuda")), torch.ones(2, 4, device="cuda")
    for expected in (4, 8, 16):
        with spelling():
            assert float((x @ weight).detach()[0, 0]) == expected
        with torch.no_grad():
            weight *= 2


class TestAutocast:
    @pytest.mark.parametrize(
        "context",
        [
            lambda: torch.autocast("cuda", dtype=torch.bfloat16),
            lambda: torch.amp.autocast("cuda", dtype=torch.bfloat16),
            lambda: torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16),
            lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16),
            lambda: torch.autocast("cuda"),
            lambda: torch.cuda.amp.autocast(),
            lambda: torch.autocast("cuda", dtype=torch.float16),
            lambda: torch.autocast(torch.device("cuda").type, dtype=torch.float16),
        ],
    )
    def test_spellings(self, context: object, float16: torch.dtype, bfloat16: torch.dtype) -> None:
        with context() as entered:  # type: ignore[operator]
            assert product() is (float16 if entered.fast_dtype is torch.float16 else bfloat16)
        assert product() is torch.float32

    def test_queries_answer_what_was_asked_for(self, kind: str) -> None:
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is torch.float16
            assert torch.is_autocast_enabled(kind)
        assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled(kind)

    def test_disabled_inside_enabled(self, bfloat16: torch.dtype) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                assert product() is torch.float32
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    assert product() is bfloat16
            assert product() is bfloat16

    def test_decorator(self, float16: torch.dtype, bfloat16: torch.dtype) -> None:
        @torch.autocast("cuda", dtype=torch.bfloat16)
        def decorated() -> torch.dtype:
            return product()

        @torch.cuda.amp.autocast()
        def older() -> torch.dtype:
            return product()

        assert decorated() is bfloat16 and older() is float16

    def test_custom_forward_and_backward(self) -> None:
        seen: list[torch.dtype] = []

        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
                seen.append(product())
                return x * 2

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        x = torch.ones(2, device="cuda", requires_grad=True)
        with torch.autocast("cuda"):
            Double.apply(x).sum().backward()
        assert seen == [torch.float32] and x.grad is not None and x.grad.tolist() == [2.0, 2.0]

    def test_float16_is_reported_and_strict_refuses_it_on_a_cpu(self) -> None:
        with torchdevice.portable("cpu") as scope, torch.autocast("cuda", dtype=torch.float16):
            pass
        done = {entry.done for entry in scope.journal.degraded if "float16" in entry.requested}
        assert done == {"torch.bfloat16" if computes_in_bfloat16() else "torch.float32"}
        with torchdevice.portable("cpu", strict=True, autocast="bfloat16"):
            with (
                pytest.raises(FidelityError, match="float16"),
                torch.autocast("cuda", dtype=torch.float16),
            ):
                pass
            assert not torch.is_autocast_enabled("cuda"), "a refused autocast left its state behind"
            with torch.autocast("cuda", dtype=torch.bfloat16):
                assert product() is torch.bfloat16

    def test_no_warning(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.autocast("cuda"):
                product()
            torch.amp.GradScaler("cuda")

    @ALONE
    @pytest.mark.parametrize("option", ["auto", "bfloat16", "float32"])
    @pytest.mark.parametrize("has_instructions", [True, False])
    def test_what_float16_is_on_a_cpu(
        self, monkeypatch: pytest.MonkeyPatch, option: Any, has_instructions: bool
    ) -> None:
        monkeypatch.setattr(cpu, "computes_in_bfloat16", lambda: has_instructions)
        name = option if option != "auto" else "bfloat16" if has_instructions else "float32"

        @torch.compile(backend="aot_eager", fullgraph=True)
        def compiled(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return x @ x

        with (
            torchdevice.portable("cpu", autocast=option),
            torch.autocast("cuda", dtype=torch.float16),
        ):
            assert product() is getattr(torch, name)
            assert compiled(torch.ones(2, 2, device="cuda")).dtype is getattr(torch, name)
            assert torch.get_autocast_dtype("cuda") is torch.float16
        with torchdevice.simulate(autocast=option), torch.autocast("cuda", dtype=torch.float16):
            assert product() is torch.float16

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, None]
    )
    @pytest.mark.parametrize("how", ["eager", "compiled by eager", "compiled by aot_eager"])
    def test_any_dtype_is_taken_without_a_warning(
        self,
        float16: torch.dtype,
        bfloat16: torch.dtype,
        float64: torch.dtype,
        dtype: Any,
        how: str,
    ) -> None:
        """CUDA casts to whatever it is told: also half precision to float32."""
        torch._dynamo.reset()  # it compiles the code of one function a few times only

        def multiplied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=dtype):
                return x @ y

        function = (
            multiplied
            if how == "eager"
            else torch.compile(multiplied, backend=how.split()[-1], fullgraph=True)
        )
        x, y = torch.ones(2, 2, device="cuda", dtype=torch.float16), torch.ones(2, 2, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = function(x, y)
        held = {
            None: float16,
            torch.float16: float16,
            torch.bfloat16: bfloat16,
            torch.float64: float64,
        }
        expected = held.get(dtype, dtype)
        assert found.dtype is expected and found.tolist() == [[2.0] * 2] * 2

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpoint_recomputes_in_float32_where_that_was_chosen(
        self, reentrant: bool
    ) -> None:
        seen: list[torch.dtype] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            seen.append((x @ x.half().float()).dtype)
            seen.append((x.half() @ x.half()).dtype)
            return x @ x

        with torchdevice.portable("cpu", autocast="float32"), warnings.catch_warnings():
            warnings.simplefilter("error")
            x = torch.ones(4, 4, device="cuda", requires_grad=True)
            with (
                torch.autocast("cuda", dtype=torch.float16),
                torch.utils.checkpoint.set_checkpoint_early_stop(False),
            ):
                y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            y.sum().backward()
        assert seen == [torch.float32] * 4

    def test_warnings_that_torch_gives_are_given_at_the_programs_line(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.autocast("cpu", dtype=torch.float64):  # off, says torch
                assert product() is torch.float32
            torch.cuda.amp.autocast()
            torch.cuda.amp.GradScaler()
        assert len(caught) == 3 and {each.filename for each in caught} == {__file__}

    def test_entered_in_a_scope_and_left_after_it(self, target: str) -> None:
        context = torch.autocast("cuda", dtype=torch.bfloat16)
        scope = torchdevice.portable(target)
        with scope:
            context.__enter__()
        context.__exit__(None, None, None)
        assert not torch.is_autocast_enabled("cpu")


class TestGradScaler:
    @pytest.mark.parametrize(
        "make", [lambda: torch.cuda.amp.GradScaler(), lambda: torch.amp.GradScaler("cuda")]
    )
    def test_scales_unscales_skips_and_updates(self, make: object) -> None:
        scaler = make()  # type: ignore[operator]
        assert scaler.is_enabled() and scaler.get_scale() == 65536.0
        weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        loss = scaler.scale((weight * 3).sum())
        assert loss.item() == 6 * 65536.0
        loss.backward()
        assert weight.grad is not None and weight.grad.tolist() == [3 * 65536.0] * 2
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [3.0, 3.0]
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [-0.5, -0.5]

        optimizer.zero_grad()
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [-0.5, -0.5], "a step with infinite gradients must be skipped"
        assert scaler.get_scale() == 32768.0

    def test_its_comparison_with_mps_is_not_reported(self, cuda: torchdevice.Scope) -> None:
        weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
        assert not [entry for entry in cuda.journal.entries if "mps" in entry.requested]

    def test_state_is_saved_and_loaded(self) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1)
        weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 16.0
        other = torch.amp.GradScaler("cuda")
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == 16.0


def test_a_task_that_float16_on_the_cpu_turns_into_nan_trains() -> None:
    """Scores of a few hundred overflow exp in half precision; CUDA computes it in float32."""
    torch.manual_seed(0)
    keys = torch.nn.Linear(16, 16).cuda()
    x = torch.randn(32, 16, device="cuda") * 10
    optimizer = torch.optim.Adam(keys.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(20):  # GradScaler skips the first steps while it finds the scale
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            features = torch.exp(keys(x))  # FAVOR-style positive features
            loss = torch.log(features.sum() + 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert all(torch.isfinite(torch.tensor(losses))) and losses[-1] < losses[0]
