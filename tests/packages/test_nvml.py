"""What pynvml and nvidia-smi say of a scope's devices."""

from __future__ import annotations

import os
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_program

import torchdevice
from torchdevice.packages import management_command, nvidia_smi

pytestmark = pytest.mark.one_engine


@pytest.mark.parametrize("target", ["cpu", "simulated:mps"])
def test_other_targets_are_machines_without_nvidias_driver(target: str) -> None:
    with torchdevice.portable(target=target):
        import pynvml

        with pytest.raises(
            pynvml.NVMLError_LibraryNotFound, match="NVML Shared Library Not Found"
        ) as caught:
            pynvml.nvmlInit()
        assert caught.value.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetCount()


def test_devices_of_a_cpu_that_are_asked_for() -> None:
    with torchdevice.portable(target="cpu", devices=3):
        import pynvml

        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 3


class TestSimulatedGPUs:
    """The devices of the scope."""

    def test_names_identifiers_and_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # which the library does not look at
        with torchdevice.simulate("a100", count=2):
            import pynvml

            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == 2 and torch.cuda.device_count() == 1
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
            names = [pynvml.nvmlDeviceGetName(each) for each in handles]
            assert names == [torch.cuda.get_device_name(0)] * 2
            assert pynvml.nvmlDeviceGetCudaComputeCapability(handles[0]) == (8, 0)
            uuids = [pynvml.nvmlDeviceGetUUID(each) for each in handles]
            assert (
                uuids[0] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
                and uuids[0] != uuids[1]
            )
            for index, handle in enumerate(handles):
                assert (
                    pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuids[index]))
                    == index
                )
                place = pynvml.nvmlDeviceGetPciInfo(handle).busId
                assert pynvml.nvmlDeviceGetHandleByPciBusId(place).index == index
            major, minor = map(int, str(torch.version.cuda).split("."))
            assert pynvml.nvmlSystemGetCudaDriverVersion() == 1000 * major + 10 * minor
            pynvml.nvmlShutdown()
            with pytest.raises(pynvml.NVMLError_Uninitialized):
                pynvml.nvmlDeviceGetCount()

    def test_memory_follows_the_program(self) -> None:
        with torchdevice.simulate("cuda", memory="1GiB"):
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            before = pynvml.nvmlDeviceGetMemoryInfo(handle)
            kept = torch.ones(100 << 20, dtype=torch.uint8, device="cuda")
            after = pynvml.nvmlDeviceGetMemoryInfo(handle)
            assert (after.free, after.total) == torch.cuda.mem_get_info()
            assert after.used - before.used >= kept.numel() and after.total == 1 << 30

    def test_what_is_not_measured_is_not_supported(self) -> None:
        with torchdevice.simulate("cuda"):
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            for name in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetComputeRunningProcesses"):
                with pytest.raises(pynvml.NVMLError) as caught:
                    getattr(pynvml, name)(handle)
                assert type(caught.value) is pynvml.NVMLError_NotSupported
            with pytest.raises(pynvml.NVMLError_InvalidArgument):
                pynvml.nvmlDeviceGetHandleByIndex(1)
            with pytest.raises(pynvml.NVMLError_NotFound):
                pynvml.nvmlDeviceGetHandleByUUID(b"GPU-0")
            assert isinstance(pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN), pynvml.NVMLError_Unknown)

    def test_an_installed_module_answers_by_its_own_errors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "pynvml.py").write_text(INSTALLED)
        monkeypatch.syspath_prepend(str(tmp_path))
        with torchdevice.simulate("cuda"):
            import pynvml

            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == 1
            with pytest.raises(pynvml.NVMLError) as caught:
                pynvml.nvmlDeviceGetTemperature(pynvml.nvmlDeviceGetHandleByIndex(0), 0)
            assert caught.value.args == (3,)
        with pytest.raises(pynvml.NVMLError):
            pynvml.nvmlInit()
        assert sys.modules.pop("pynvml") is pynvml


INSTALLED = """
class NVMLError(Exception): pass
def nvmlInit(): raise NVMLError(12)
def nvmlDeviceGetCount(): raise NVMLError(12)
def nvmlDeviceGetHandleByIndex(index): raise NVMLError(12)
def nvmlDeviceGetTemperature(handle, sensor): raise NVMLError(12)
"""
"""A module such as nvidia-ml-py where NVML's library is missing."""


class TestCommand:
    """``nvidia-smi``."""

    def devices(self, target: str = "simulated:a100:2") -> list[dict[str, Any]]:
        scope = torchdevice.portable(target=target)
        return management_command.devices(scope.options, scope.runtime)

    def test_queries(self) -> None:
        words = ["--query-gpu=index,name,memory.total,utilization.gpu,compute_cap", "--format=csv"]
        total = f"{self.devices()[0]['total'] >> 20} MiB"
        name = "NVIDIA A100-SXM4-40GB"
        rows = [f"0, {name}, {total}, [N/A], 8.0", f"1, {name}, {total}, [N/A], 8.0"]
        heads = "index, name, memory.total [MiB], utilization.gpu [%], compute_cap"
        assert nvidia_smi.lines_for(words, self.devices()) == [heads, *rows]
        words = ["-i", "1", "--query-gpu", "memory.used", "--format", "csv,noheader,nounits"]
        assert nvidia_smi.lines_for(words, self.devices()) == ["512"]
        assert (
            nvidia_smi.lines_for(
                ["--query-compute-apps=pid,used_memory", "--format=csv,noheader"], []
            )
            == []
        )

    def test_the_memory_of_the_log(self) -> None:
        lines = nvidia_smi.lines_for(["-q", "-d", "Memory"], self.devices())
        assert lines.count("    FB Memory Usage") == 2
        # `nvidia-smi -q -d Memory | grep -A4 GPU | grep Free`, by which programs choose a GPU
        places = [number for number, line in enumerate(lines) if line.startswith("GPU ")]
        free = [lines[number + 4].split() for number in places]
        total = self.devices()[0]["total"] >> 20
        assert free == [["Free", ":", str(total - 512), "MiB"]] * 2

    def test_the_query_of_gputil(self) -> None:
        fields = (
            "index,uuid,utilization.gpu,memory.total,memory.used,memory.free,driver_version,name,gpu_serial,"
            "display_active,display_mode,temperature.gpu"
        )
        lines = nvidia_smi.lines_for(
            [f"--query-gpu={fields}", "--format=csv,noheader,nounits"], self.devices()
        )
        cells = [line.split(", ") for line in lines]
        assert [row[0] for row in cells] == ["0", "1"] and all(len(row) == 12 for row in cells)
        assert all(row[2] == "[N/A]" and row[8:] == ["[N/A]"] * 4 for row in cells)

    def test_lists_and_the_table(self) -> None:
        lines = nvidia_smi.lines_for(["-L"], self.devices())
        assert lines[1].startswith("GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-")
        lines = nvidia_smi.lines_for([], self.devices())
        assert len({len(line) for line in lines}) == 1 and "CUDA Version: " in "".join(lines)

    def test_the_whole_log_has_what_is_known_of_each_device(self) -> None:
        lines = [line.split(":", 1) for line in nvidia_smi.lines_for(["-q"], self.devices())]
        texts = [(line[0].strip(), line[1].strip()) for line in lines if len(line) == 2]
        assert texts.count(("Product Name", "NVIDIA A100-SXM4-40GB")) == 2
        assert ("Used", "512 MiB") in texts and ("Attached GPUs", "2") in texts

    def test_the_log_as_xml(self) -> None:
        text = "\n".join(nvidia_smi.lines_for(["-q", "-x", "-i", "1"], self.devices()))
        root = xml.etree.ElementTree.fromstring(text)
        (gpu,) = root.findall("gpu")
        device = self.devices()[1]
        assert gpu.get("id") == device["bus"] and gpu.findtext("uuid") == device["uuid"]
        assert gpu.findtext("fb_memory_usage/used") == "512 MiB"
        assert gpu.findtext("utilization/gpu_util") == "N/A"
        assert root.findtext("attached_gpus") == "2"

    def test_versions_and_reserved_memory(self) -> None:
        lines = nvidia_smi.lines_for(["--version"], self.devices())
        assert lines[2] == f"DRIVER version      : {self.devices()[0]['driver']}"
        words = ["--query-gpu=memory.reserved", "--format=csv"]
        rows = nvidia_smi.lines_for(words, self.devices())
        assert rows == ["memory.reserved [MiB]", "0 MiB", "0 MiB"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--query-gpu=nothing", "--format=csv"], "no field 'nothing'"),
            (["topo", "-m"], "no 'topo': connections are not simulated"),
            (["nvlink", "-s"], "can_device_access_peer"),
            (["-l", "5"], "no '--loop': its figures do not change. Call it once."),
            (["--query-gpu=name", "--format=csv", "--loop=1"], "Call it once"),
            (["-lms", "100"], "Call it once"),
            (["dmon"], "load is not measured"),
            (["fan"], "does not know 'fan'"),
            (["-q", "-d", "POWER"], "no part 'POWER'. Give -d MEMORY"),
            (["--id=7"], "No devices were found for '7'"),
            (["--query-gpu=name"], "--format=csv"),
        ],
    )
    def test_other_arguments_are_refused(self, words: list[str], message: str) -> None:
        with pytest.raises(nvidia_smi.UsageError, match=message):
            nvidia_smi.lines_for(words, self.devices())

    @pytest.mark.skipif(os.name == "nt", reason="no such command on Windows")
    @pytest.mark.parametrize("packages", ["stand-in", "instead"])
    def test_children_of_run_find_it(self, tmp_path: Path, packages: str) -> None:
        program = """
            import subprocess
            words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            print(subprocess.check_output(words, text=True), end="")
        """
        done = run_program(
            tmp_path, program, options=["--target", "simulated:t4", "--packages", packages]
        )
        assert done.stdout == "Tesla T4\n", done.stderr

    def test_no_other_process_finds_it(self) -> None:
        assert management_command.FOLDER not in os.environ["PATH"]
