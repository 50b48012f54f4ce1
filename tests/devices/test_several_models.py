"""Machines whose devices are of several models: ``simulated:t4,a100:2``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

import torchdevice
from torchdevice.errors import UnknownTargetError
from torchdevice.packages import nvml
from torchdevice.simulation.model_lookup import MODELS, canonical, count_of, listed

pytestmark = pytest.mark.one_engine

NAMES = ("Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB")

ASKS = """
import torch

for index in range(torch.cuda.device_count()):
    print(index, torch.cuda.get_device_properties(index).name, torch.cuda.mem_get_info(index)[1])
"""

SHOWN = [
    f"{index} {name} {torchdevice.scope.collected_options.declarations()['memory'].check(MODELS[model].memory)}"
    for index, (name, model) in enumerate(zip(NAMES, ("t4", "a100", "a100"), strict=True))
]


@pytest.mark.parametrize(
    ("said", "canonically"),
    [
        ("t4,a100:2", "simulated:t4,a100:2"),
        ("simulated:T4, A100-40GB:2", "simulated:t4,a100:2"),
        ("Simulated:Tesla T4,rtx 3090", "simulated:t4,rtx3090"),
        ("t4:2,a101", "t4:2,a101"),
        ("a folder,t4.toml", "a folder,t4.toml"),
    ],
)
def test_a_list_has_one_spelling(said: str, canonically: str) -> None:
    assert canonical(said) == canonical(canonically) == canonically


def test_a_list_names_each_device() -> None:
    assert (
        listed("t4,a100:2") == ("t4", "a100", "a100")
        and listed("t4") is listed("my,own.toml") is None
    )
    assert count_of("simulated:t4,a100:2") == 3 and count_of("simulated:t4:4") == 4
    assert count_of("simulated:t4") is count_of("cuda:2") is None


def test_each_device_has_the_figures_of_its_model() -> None:
    with torchdevice.simulate("t4,a100:2") as scope:
        assert scope.runtime.target == "simulated:t4,a100:2"
        found = [
            torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
        ]
        assert tuple(each.name for each in found) == NAMES
        assert [torch.cuda.get_device_capability(index) for index in range(3)] == [
            (7, 5),
            (8, 0),
            (8, 0),
        ]
        assert [each.multi_processor_count for each in found] == [40, 108, 108]
        assert torch.cuda.get_arch_list() == ["sm_75", "sm_80"]
        sizes = [torch.cuda.mem_get_info(index)[1] for index in range(3)]
        assert (
            sizes == [each.total_memory for each in found]
            and sizes[0] < 15 << 30 < 39 << 30 < sizes[1] == sizes[2]
        )


def test_memory_runs_out_on_each_device_by_its_own_size() -> None:
    with torchdevice.simulate("t4,a100", compute="meta"):
        kept = torch.empty(18 << 30, dtype=torch.uint8, device="cuda:1")
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match=r"GPU 0 has a total capacity of 14\.56 GiB"
        ):
            torch.empty(18 << 30, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match=r"GPU 1 has a total capacity of 39\.39 GiB"
        ):
            torch.empty(22 << 30, dtype=torch.uint8, device="cuda:1")
        assert kept.get_device() == 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about each kernel
def test_each_device_refuses_what_its_model_refuses() -> None:
    flash = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    with torchdevice.simulate("t4,a100"), flash:
        # The current device is the first one in both calls.
        query = torch.ones(1, 1, 8, 64, dtype=torch.float16, device="cuda:1")
        assert (
            torch.nn.functional.scaled_dot_product_attention(query, query, query).get_device() == 1
        )
        query = query.to("cuda:0")
        with pytest.raises(RuntimeError, match="No available kernel"):
            torch.nn.functional.scaled_dot_product_attention(query, query, query)


def drawn(profile: str, index: int) -> list[Any]:
    """Return numbers of a generator of one device, beyond the first wave of a GPU's threads."""
    with torchdevice.simulate(profile, random="cuda"):
        torch.cuda.manual_seed_all(7)
        own = torch.Generator(f"cuda:{index}").manual_seed(7)
        shape, device = (400_000,), f"cuda:{index}"
        return [
            torch.rand(shape, device=device)[-4:].tolist(),
            torch.rand(shape, device=device, generator=own).tolist(),
        ]


def test_each_device_draws_the_numbers_of_its_model() -> None:
    alone = {model: drawn(model, 0) for model in ("t4", "a100")}
    assert alone["t4"] != alone["a100"]
    assert [drawn("t4,a100", index) for index in (0, 1)] == [alone["t4"], alone["a100"]]


def test_the_variable_chooses_devices_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    with torchdevice.simulate("t4,a100,h100"):
        assert [
            torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
        ] == [(9, 0), (7, 5)]
        with pytest.raises(
            torch.cuda.OutOfMemoryError, match=r"GPU 1 has a total capacity of 14\.56 GiB"
        ):
            torch.empty(15 << 30, dtype=torch.uint8, device="cuda:1")


def test_an_option_of_the_call_holds_for_all_devices() -> None:
    with torchdevice.simulate("t4,a100", memory="8GiB", capability=(8, 0)):
        assert [torch.cuda.mem_get_info(index)[1] >> 30 for index in (0, 1)] == [8, 8]
        assert [torch.cuda.get_device_capability(index) for index in (0, 1)] == [(8, 0), (8, 0)]
        assert torch.cuda.get_device_name(0) == "Tesla T4"


def test_the_management_library_shows_all_models() -> None:
    with torchdevice.simulate("t4,a100"):
        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        assert [nvml.nvmlDeviceGetName(each) for each in handles] == [*NAMES[:2]]
        assert [nvml.nvmlDeviceGetCudaComputeCapability(each) for each in handles] == [
            (7, 5),
            (8, 0),
        ]
        totals = [nvml.nvmlDeviceGetMemoryInfo(each).total for each in handles]
        assert totals == [torch.cuda.mem_get_info(index)[1] for index in (0, 1)]
        nvml.nvmlShutdown()


def test_a_model_that_is_not_known_is_named() -> None:
    with (
        pytest.raises(UnknownTargetError, match="t4,a101"),
        torchdevice.portable("simulated:t4,a101"),
    ):
        pass


def test_the_number_of_devices_is_said_once() -> None:
    with pytest.raises(ValueError, match="contains the number"):
        torchdevice.simulate("t4,a100", devices=2)
    with pytest.raises(ValueError, match="contradicts target='simulated:t4,a100'"):
        torchdevice.portable("simulated:t4,a100", devices=2).__enter__()


@pytest.mark.parametrize("words", [["run", "--target", "t4,a100:2"], ["run"]])
def test_the_command_and_the_variable_take_a_list(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    variables = {} if len(words) > 1 else {"TORCHDEVICE_TARGET": "T4,A100:2"}
    done = run_python("-m", "torchdevice", *words, "asks.py", cwd=tmp_path, **variables)
    assert done.stdout.splitlines() == SHOWN, done.stderr


def test_pytest_takes_a_list(tmp_path: Path) -> None:
    (tmp_path / "test_asks.py").write_text(
        "import torch\n\ndef test_it():\n    assert [torch.cuda.get_device_name(i) for i in "
        f"range(3)] == {[*NAMES]}\n"
    )
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--torchdevice=simulated:t4,a100:2"]
    done = run_python(*words, cwd=tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_processes_of_the_program_have_the_same_machine(tmp_path: Path) -> None:
    program = tmp_path / "starts.py"
    program.write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'asks.py'], check=True)\n"
    )
    (tmp_path / "asks.py").write_text(ASKS)
    done = run_python(
        "-m", "torchdevice", "run", "--target", "t4,a100:2", "starts.py", cwd=tmp_path
    )
    assert done.stdout.splitlines() == SHOWN, done.stderr
