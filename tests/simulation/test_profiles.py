"""What the profiles `mps` and `strict` lack."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import sweeping
import torch
from torch.testing._internal.common_methods_invocations import op_db

import torchdevice
from torchdevice.errors import FidelityError, PortabilityWarning
from torchdevice.simulation import machine


class TestMps:
    def test_float64_becomes_float32_or_is_refused(self) -> None:
        with torchdevice.simulate("mps"):
            with pytest.warns(PortabilityWarning, match="has no torch.float64"):
                x = torch.zeros(2, dtype=torch.float64, device="cuda")
            assert x.dtype is torch.float32
            with pytest.warns(PortabilityWarning, match="has no torch.float64"):
                assert (
                    torch.from_numpy(torch.zeros(2).double().numpy()).cuda().dtype is torch.float32
                )
        with (
            torchdevice.simulate("mps", float64="error"),
            pytest.raises(TypeError, match="MPS Tensor to float64 dtype"),
        ):
            torch.zeros(2, dtype=torch.float64, device="cuda")
        with (
            torchdevice.simulate("mps", float64="error"),
            pytest.raises(TypeError, match="convert ComplexDouble to the MPS"),
        ):
            torch.ones(1, device="cuda", dtype=torch.complex64).to(torch.complex128)

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    @pytest.mark.parametrize(
        "make",
        [
            lambda x: x.double(),
            lambda x: x.to(torch.float64),
            lambda x: x.to(dtype=torch.float64),
            lambda x: x.cpu().double().to("cuda"),
            lambda x: x.cpu().double().to("cuda", None, True),
            lambda x: x.cpu().double().to("cuda", non_blocking=True),
            lambda x: x.cpu().double().cuda(),
            lambda x: torch.nn.Parameter(x.cpu().double()).to("cuda"),
            lambda x: torch.nn.Linear(1, 1).double().to("cuda").weight,
            lambda x: torch.nn.Linear(1, 1).cuda().double().weight,
            lambda x: torch.zeros_like(x, dtype=torch.float64),
            lambda x: torch.rand_like(x, dtype=torch.float64),
            lambda x: x.new_zeros(2, dtype=torch.float64),
            lambda x: x.new_tensor([1.0], dtype=torch.float64),
            lambda x: torch.tensor(1.0, dtype=torch.float64, device="cuda"),
            lambda x: torch.as_tensor(numpy.ones(2), device="cuda"),
            lambda x: torch.from_numpy(numpy.ones(2)).cuda(),
            lambda x: torch.linspace(0, 1, 3, dtype=torch.float64, device="cuda"),
        ],
    )
    def test_float64_becomes_float32_by_every_road(
        self, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        with torchdevice.simulate("mps"):
            made = make(torch.ones(2, device="cuda"))
            assert made.dtype is torch.float32 and made.is_mps

    @pytest.mark.filterwarnings("ignore::torchdevice.errors.PortabilityWarning")
    def test_float64_on_the_default_device_becomes_float32(self) -> None:
        with torchdevice.simulate("mps"), torch.device("cuda"):
            assert torch.zeros(2, dtype=torch.float64).dtype is torch.float32

    def test_tensors_print_without_float64(self) -> None:
        with torchdevice.simulate("mps"):
            assert (
                repr(torch.tensor([1.5, 2.25], device="cuda"))
                == "tensor([1.5000, 2.2500], device='mps:0')"
            )

    def test_a_missing_operator_runs_on_the_cpu_where_asked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        with torchdevice.simulate("mps") as scope:
            x = torch.randn(3, 3, device="cuda")
            assert torch.linalg.eig(x)[0].shape == (3,)
            assert machine.current().fallbacks["aten::linalg_eig"] >= 1
            assert any("linalg_eig" in entry.requested for entry in scope.journal.degraded)

    def test_a_missing_operator_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        message = (
            r"The operator 'aten::linalg_eig' is not currently implemented for the MPS device\. If "
            r"you want this op to "
            r"be considered for addition please comment on "
            r"https://github\.com/pytorch/pytorch/issues/141287"
        )
        x = torch.randn(3, 3)
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
        with torchdevice.simulate("mps"), pytest.raises(NotImplementedError, match=message):
            torch.linalg.eig(x.cuda())
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
        with torchdevice.simulate("strict"), pytest.raises(NotImplementedError, match=message):
            torch.linalg.eig(x.cuda())

    def test_one_device_onto_which_the_others_fold(self) -> None:
        with torchdevice.simulate("mps") as scope:
            assert torch.cuda.device_count() == 1
            assert torch.zeros(1, device="cuda:1").get_device() == 0
            assert any("cuda:1" in entry.requested for entry in scope.journal.degraded)

    def test_files_say_mps(self, tmp_path: Path) -> None:
        with torchdevice.simulate("mps"):
            torch.save(torch.ones(2, device="cuda"), tmp_path / "x.pt")
            assert torch.load(tmp_path / "x.pt").device.type == "mps"
        assert b"mps:0" in (tmp_path / "x.pt").read_bytes()

    def test_a_transformer_trains(self) -> None:
        torch.manual_seed(0)
        with torchdevice.simulate("mps", strict=True):
            model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            x = torch.randn(4, 5, 16, device="cuda")
            losses = []
            for _ in range(10):
                optimizer.zero_grad()
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[-1] < losses[0]

    @pytest.mark.one_engine
    @pytest.mark.filterwarnings("ignore")
    def test_refused_operators_are_those_that_torchs_own_tests_list(
        self, sweep: tuple[bool, int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """common_mps.py's ``UNIMPLEMENTED_XFAILLIST`` lists operators without an MPS kernel."""
        expected = _unimplemented_on_mps()
        agreed, others = 0, []
        for op in sweeping.choose(
            [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")], sweep, 60
        ):
            refused = _is_refused(op)
            if refused is None:
                continue
            if refused == (op.name + op.variant_test_name in expected):
                agreed += 1
            else:
                others.append(f"{'refused' if refused else 'runs'}: {op.formatted_name}")
        with capsys.disabled():
            print(
                f"\nmps profile: {agreed} of {agreed + len(others)} operators as torch's tests "
                "expect; not these:"
            )
            print("  " + ", ".join(sorted(others)))
        assert (
            agreed > (600 if sweep[0] else 45)
            and len(others) < (0.07 if sweep[0] else 0.15) * agreed
        )


def _unimplemented_on_mps() -> set[str]:
    path = Path(torch.__file__).parent / "testing/_internal/common_mps.py"
    found = re.search(
        r"UNIMPLEMENTED_XFAILLIST: [^=]+ = (\{.*?\n        \})", path.read_text(), re.S
    )
    assert found is not None
    table = ast.parse(found[1], mode="eval").body
    assert isinstance(table, ast.Dict)
    everywhere = ast.unparse(ast.Constant(None))
    return {
        ast.literal_eval(key)
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None
        and (ast.unparse(value) == everywhere or "torch.float32" in ast.unparse(value))
    }


def _is_refused(op: Any) -> bool | None:
    """Return whether the profile lacks an operator; None if no sample runs on the CPU."""
    runs = None
    for sample in itertools.islice(sweeping.samples_of(op, torch.float32), 3):
        try:
            op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # nothing to compare with
            continue
        with torchdevice.simulate("mps", strict=True, float64="error"):
            try:
                moved = sample.transform(
                    lambda value: value.cuda() if isinstance(value, torch.Tensor) else value
                )
                op(moved.input, *moved.args, **moved.kwargs)
                runs = False if runs is None else runs
            except NotImplementedError:
                return True
            except (RuntimeError, TypeError, FidelityError):
                # Float64 or a sparse layout is refused, not the operator.
                continue
    return runs


class TestStrict:
    def test_it_refuses_what_cuda_or_mps_lacks(self) -> None:
        with torchdevice.simulate("strict", count=2, float64="error"):
            assert (torch.ones(2, device="cuda:1") * 2).tolist() == [2.0, 2.0]
            with pytest.raises(NotImplementedError, match="aten::linalg_eig"):
                torch.linalg.eig(torch.randn(2, 2, device="cuda"))
            with pytest.raises(TypeError, match="float64"):
                torch.zeros(1, device="cuda", dtype=torch.float64)
            with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
                torch.zeros(1, device="cuda:2")
