"""``triton.runtime.driver.active`` where there is no GPU: the scope's stand-in device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from torchdevice.kernel.context import Context
from torchdevice.torch_modules.cuda.device_queries import properties_of
from torchdevice.triton_kernels.triton_internals import CudaDriver, knobs

_PROPERTIES = {
    "max_shared_mem": "shared_memory_per_block_optin",
    "max_num_regs": "regs_per_multiprocessor",
    "multiprocessor_count": "multi_processor_count",
    "warpSize": "warp_size",
    "sm_clock_rate": "clock_rate",
    "mem_clock_rate": "memory_clock_rate",
    "mem_bus_width": "memory_bus_width",
}
"""The properties of a device, and those of torch."""


class StandInDriver(CudaDriver):  # type: ignore[misc]
    """The driver for targets that Triton cannot compile for: CUDA's, without CUDA's libraries."""

    set_current_device = staticmethod(torch.cuda.set_device)

    def __init__(self, context: Context):
        self._context = context
        self.utils = SimpleNamespace(
            get_device_properties=self._properties,
            load_binary=self._load,
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher for a kernel that the program has compiled by ``triton.compile``."""

        # The stream, the function, the packed metadata, that of the launch and two hooks come
        # before the arguments.
        def launch(*grid_and_rest: Any) -> None:
            source.fn.run(*grid_and_rest[9:], grid=grid_and_rest[:3], warmup=False)

        return launch

    def get_active_torch_device(self) -> torch.device:
        return self._context.devices.shown(self._context.devices.at(self.get_current_device()))

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        found: tuple[int, int] = self._context.devices.figure("capability", device)
        return found

    def get_current_device(self) -> int:
        return self._context.thread.device_index

    def get_current_stream(self, device: int = 0) -> int:
        # Other stand-ins have no handles of streams; 0 is CUDA's for the default stream.
        if self._context.runtime.supplied.has_handles:
            return torch.cuda.current_stream(device).cuda_stream
        return 0

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        # There is no cache to empty, so a real driver's 256 MiB would only take time.
        return torch.empty(1, dtype=torch.int, device="cuda")

    def _properties(self, device: int | None) -> dict[str, int]:
        # On a CPU target the index of torch.device("cuda") is None.
        found = properties_of(
            self._context, self.get_current_device() if device is None else device
        )
        return {name: getattr(found, place) for name, place in _PROPERTIES.items()}

    def _load(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        """Return two null handles, and a compiled kernel's registers, spills and threads."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel)
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        figures = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", told)}
        threads = properties_of(self._context, device).max_threads_per_block
        return 0, 0, figures.get("REG", 0), figures.get("STACK", 0) // 4, threads
