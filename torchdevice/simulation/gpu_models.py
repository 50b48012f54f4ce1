"""The GPUs of NVIDIA's that can be simulated by name, and the Macs that a plan compares with.

Each figure names its source, and ``python -m benchmarks.device_models`` checks the tables. The
memory is CUDA's total, which torch prints; it is less than the data sheet's, because the driver and
error correction keep a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SOURCES: Mapping[str, str] = {
    "oom": "torch's out-of-memory errors and NVIDIA's deviceQuery, in public issues",
    "guide": "NVIDIA, CUDA C++ Programming Guide, Technical Specifications per Compute Capability",
    "v100": "NVIDIA, Tesla V100 GPU Architecture (white paper, 2017)",
    "t4": "NVIDIA, Turing GPU Architecture (white paper, 2018), Tesla T4",
    "turing": "NVIDIA, Turing GPU Architecture (white paper, 2018), GeForce RTX 2080 Ti",
    "ga102": (
        "NVIDIA, Ampere GA102 GPU Architecture (white paper, 2021), GeForce RTX 30 series, A10, "
        "A40, RTX A6000"
    ),
    "a100": "NVIDIA, A100 Tensor Core GPU Architecture (white paper, 2020)",
    "a30": "NVIDIA, A30 Tensor Core GPU (data sheet, 2021)",
    "a10g": "AWS, EC2 G5 instances: NVIDIA A10G",
    "ada": (
        "NVIDIA, Ada GPU Architecture (white paper, 2023), GeForce RTX 40 series, L4, L40S, RTX "
        "6000 Ada"
    ),
    "h100": "NVIDIA, H100 Tensor Core GPU Architecture (white paper, 2022)",
    "h200": "NVIDIA, H200 Tensor Core GPU (data sheet, 2023)",
    "b200": "NVIDIA, Blackwell Architecture (technical brief, 2024)",
    "gh200": "NVIDIA, GH200 Grace Hopper Superchip (data sheet, 2023)",
    "rtx50": (
        "NVIDIA, RTX Blackwell GPU Architecture (white paper, 2025), GeForce RTX 50 series, RTX "
        "PRO 6000"
    ),
    "orin": "NVIDIA, Jetson AGX Orin Series Technical Brief (2022)",
    "mig": (
        "NVIDIA, Multi-Instance GPU User Guide, and nvidia-smi and CUDA's figures for such "
        "instances, in public logs"
    ),
    "printed": "torch's representation of torch.cuda.get_device_properties(0), in public logs",
    "nvidia-smi": (
        "nvidia-smi's total, less what the driver keeps of it: 500 MiB, of a GPU with more than 32 "
        "GiB 640 MiB. Where both are known, CUDA's total is 224 to 638 MiB less"
    ),
}
"""Name of a source -> the source."""

OF_CAPABILITY: Mapping[tuple[int, int], Mapping[str, int]] = {
    (7, 0): {
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 98304,
        "shared_memory_per_block_optin": 98304,
    },
    (7, 5): {
        "max_threads_per_multi_processor": 1024,
        "shared_memory_per_multiprocessor": 65536,
        "shared_memory_per_block_optin": 65536,
    },
    (8, 0): {
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 167936,
        "shared_memory_per_block_optin": 166912,
    },
    (8, 6): {
        "max_threads_per_multi_processor": 1536,
        "shared_memory_per_multiprocessor": 102400,
        "shared_memory_per_block_optin": 101376,
    },
    (8, 7): {
        "max_threads_per_multi_processor": 1536,
        "shared_memory_per_multiprocessor": 167936,
        "shared_memory_per_block_optin": 166912,
    },
    (8, 9): {
        "max_threads_per_multi_processor": 1536,
        "shared_memory_per_multiprocessor": 102400,
        "shared_memory_per_block_optin": 101376,
    },
    (9, 0): {
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block_optin": 232448,
    },
    (10, 0): {
        "max_threads_per_multi_processor": 2048,
        "shared_memory_per_multiprocessor": 233472,
        "shared_memory_per_block_optin": 232448,
    },
    (12, 0): {
        "max_threads_per_multi_processor": 1536,
        "shared_memory_per_multiprocessor": 102400,
        "shared_memory_per_block_optin": 101376,
    },
}
"""Compute capability -> the figures that all GPUs of it have in common, from the programming guide.
"""


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        capability: The CUDA compute capability.
        memory: CUDA's total, as the option ``memory`` takes it.
        of_memory: The source of the memory.
        properties: The figures of :class:`DeviceProperties` that its sources give. Another one is
            0.
        of_properties: The source of these figures.
        nvidia_smi: The total that nvidia-smi prints, where the memory is derived of it.
        aliases: Other names, besides those that differ in case, spaces and hyphens.
    """

    capability: tuple[int, int]
    memory: int | str
    of_memory: str
    properties: Mapping[str, Any]
    of_properties: str
    nvidia_smi: str = ""
    aliases: tuple[str, ...] = ()


GPUS: Mapping[str, Gpu] = {
    "t4": Gpu(
        (7, 5),
        "14.56GiB",
        "oom",
        {
            "name": "Tesla T4",
            "multi_processor_count": 40,
            "L2_cache_size": 4194304,
            "memory_bus_width": 256,
        },
        "t4",
    ),
    "v100": Gpu(
        (7, 0),
        "16160MiB",
        "printed",
        {
            "name": "Tesla V100-SXM2-16GB",
            "multi_processor_count": 80,
            "L2_cache_size": 6291456,
            "memory_bus_width": 4096,
        },
        "v100",
        aliases=("v100-16gb",),
    ),
    "v100-32gb": Gpu(
        (7, 0),
        "31.74GiB",
        "oom",
        {
            "name": "Tesla V100-SXM2-32GB",
            "multi_processor_count": 80,
            "L2_cache_size": 6291456,
            "memory_bus_width": 4096,
        },
        "v100",
    ),
    "rtx2080ti": Gpu(
        (7, 5),
        "11019MiB",
        "printed",
        {
            "name": "NVIDIA GeForce RTX 2080 Ti",
            "multi_processor_count": 68,
            "L2_cache_size": 5767168,
            "memory_bus_width": 352,
        },
        "turing",
    ),
    "rtx3060": Gpu(
        (8, 6),
        "11931MiB",
        "printed",
        {"name": "NVIDIA GeForce RTX 3060", "multi_processor_count": 28, "memory_bus_width": 192},
        "ga102",
    ),
    "rtx3060ti": Gpu(
        (8, 6),
        "7692MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 3060 Ti",
            "multi_processor_count": 38,
            "memory_bus_width": 256,
        },
        "ga102",
        nvidia_smi="8192MiB",
    ),
    "rtx3070": Gpu(
        (8, 6),
        "7.78GiB",
        "oom",
        {
            "name": "NVIDIA GeForce RTX 3070",
            "multi_processor_count": 46,
            "L2_cache_size": 4194304,
            "memory_bus_width": 256,
        },
        "ga102",
    ),
    "rtx3070ti": Gpu(
        (8, 6),
        "7692MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 3070 Ti",
            "multi_processor_count": 48,
            "L2_cache_size": 4194304,
            "memory_bus_width": 256,
        },
        "ga102",
        nvidia_smi="8192MiB",
    ),
    "rtx3080": Gpu(
        (8, 6),
        "9.78GiB",
        "oom",
        {
            "name": "NVIDIA GeForce RTX 3080",
            "multi_processor_count": 68,
            "L2_cache_size": 5242880,
            "memory_bus_width": 320,
        },
        "ga102",
    ),
    "rtx3080ti": Gpu(
        (8, 6),
        "11788MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 3080 Ti",
            "multi_processor_count": 80,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
        nvidia_smi="12288MiB",
    ),
    "rtx3090": Gpu(
        (8, 6),
        "24259MiB",
        "printed",
        {
            "name": "NVIDIA GeForce RTX 3090",
            "multi_processor_count": 82,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
    ),
    "rtx3090ti": Gpu(
        (8, 6),
        "24114MiB",
        "printed",
        {
            "name": "NVIDIA GeForce RTX 3090 Ti",
            "multi_processor_count": 84,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
    ),
    "rtx4060": Gpu(
        (8, 9),
        "7688MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4060",
            "multi_processor_count": 24,
            "L2_cache_size": 25165824,
            "memory_bus_width": 128,
        },
        "ada",
        nvidia_smi="8188MiB",
    ),
    "rtx4060ti": Gpu(
        (8, 9),
        "7688MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4060 Ti",
            "multi_processor_count": 34,
            "L2_cache_size": 33554432,
            "memory_bus_width": 128,
        },
        "ada",
        nvidia_smi="8188MiB",
        aliases=("rtx4060ti-8gb",),
    ),
    "rtx4060ti-16gb": Gpu(
        (8, 9),
        "15.55GiB",
        "oom",
        {
            "name": "NVIDIA GeForce RTX 4060 Ti",
            "multi_processor_count": 34,
            "L2_cache_size": 33554432,
            "memory_bus_width": 128,
        },
        "ada",
    ),
    "rtx4070": Gpu(
        (8, 9),
        "11782MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4070",
            "multi_processor_count": 46,
            "L2_cache_size": 37748736,
            "memory_bus_width": 192,
        },
        "ada",
        nvidia_smi="12282MiB",
    ),
    "rtx4070super": Gpu(
        (8, 9),
        "11782MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4070 SUPER",
            "multi_processor_count": 56,
            "L2_cache_size": 50331648,
            "memory_bus_width": 192,
        },
        "ada",
        nvidia_smi="12282MiB",
        aliases=("rtx4070s",),
    ),
    "rtx4070ti": Gpu(
        (8, 9),
        "11782MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4070 Ti",
            "multi_processor_count": 60,
            "L2_cache_size": 50331648,
            "memory_bus_width": 192,
        },
        "ada",
        nvidia_smi="12282MiB",
    ),
    "rtx4070tisuper": Gpu(
        (8, 9),
        "15876MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4070 Ti SUPER",
            "multi_processor_count": 66,
            "L2_cache_size": 50331648,
            "memory_bus_width": 256,
        },
        "ada",
        nvidia_smi="16376MiB",
        aliases=("rtx4070tis",),
    ),
    "rtx4080": Gpu(
        (8, 9),
        "15876MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4080",
            "multi_processor_count": 76,
            "L2_cache_size": 67108864,
            "memory_bus_width": 256,
        },
        "ada",
        nvidia_smi="16376MiB",
    ),
    "rtx4080super": Gpu(
        (8, 9),
        "15876MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 4080 SUPER",
            "multi_processor_count": 80,
            "L2_cache_size": 67108864,
            "memory_bus_width": 256,
        },
        "ada",
        nvidia_smi="16376MiB",
        aliases=("rtx4080s",),
    ),
    "rtx4090": Gpu(
        (8, 9),
        "23.64GiB",
        "oom",
        {
            "name": "NVIDIA GeForce RTX 4090",
            "multi_processor_count": 128,
            "L2_cache_size": 75497472,
            "memory_bus_width": 384,
        },
        "ada",
    ),
    "rtx5070": Gpu(
        (12, 0),
        "11727MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 5070",
            "multi_processor_count": 48,
            "L2_cache_size": 50331648,
            "memory_bus_width": 192,
        },
        "rtx50",
        nvidia_smi="12227MiB",
    ),
    "rtx5070ti": Gpu(
        (12, 0),
        "15803MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 5070 Ti",
            "multi_processor_count": 70,
            "L2_cache_size": 50331648,
            "memory_bus_width": 256,
        },
        "rtx50",
        nvidia_smi="16303MiB",
    ),
    "rtx5080": Gpu(
        (12, 0),
        "15803MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA GeForce RTX 5080",
            "multi_processor_count": 84,
            "L2_cache_size": 67108864,
            "memory_bus_width": 256,
        },
        "rtx50",
        nvidia_smi="16303MiB",
    ),
    "rtx5090": Gpu(
        (12, 0),
        "31.36GiB",
        "oom",
        {
            "name": "NVIDIA GeForce RTX 5090",
            "multi_processor_count": 170,
            "L2_cache_size": 100663296,
            "memory_bus_width": 512,
        },
        "rtx50",
    ),
    "a10": Gpu(
        (8, 6),
        "21.99GiB",
        "oom",
        {
            "name": "NVIDIA A10",
            "multi_processor_count": 72,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
    ),
    "a10g": Gpu(
        (8, 6),
        "22587MiB",
        "printed",
        {
            "name": "NVIDIA A10G",
            "multi_processor_count": 80,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "a10g",
    ),
    "a30": Gpu(
        (8, 0),
        "23.53GiB",
        "oom",
        {
            "name": "NVIDIA A30",
            "multi_processor_count": 56,
            "L2_cache_size": 25165824,
            "memory_bus_width": 3072,
        },
        "a30",
    ),
    "a40": Gpu(
        (8, 6),
        "45416MiB",
        "printed",
        {
            "name": "NVIDIA A40",
            "multi_processor_count": 84,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
    ),
    "a6000": Gpu(
        (8, 6),
        "48676MiB",
        "printed",
        {
            "name": "NVIDIA RTX A6000",
            "multi_processor_count": 84,
            "L2_cache_size": 6291456,
            "memory_bus_width": 384,
        },
        "ga102",
        aliases=("rtxa6000",),
    ),
    "a100": Gpu(
        (8, 0),
        42298834944,
        "oom",
        {
            "name": "NVIDIA A100-SXM4-40GB",
            "multi_processor_count": 108,
            "L2_cache_size": 41943040,
            "memory_bus_width": 5120,
        },
        "a100",
        aliases=("a100-40gb", "a100-sxm", "a100-sxm-40gb"),
    ),
    "a100-80gb": Gpu(
        (8, 0),
        "79.25GiB",
        "oom",
        {
            "name": "NVIDIA A100-SXM4-80GB",
            "multi_processor_count": 108,
            "L2_cache_size": 41943040,
            "memory_bus_width": 5120,
        },
        "a100",
        aliases=("a100-sxm-80gb",),
    ),
    "a100-pcie": Gpu(
        (8, 0),
        "40326MiB",
        "printed",
        {
            "name": "NVIDIA A100-PCIE-40GB",
            "multi_processor_count": 108,
            "L2_cache_size": 41943040,
            "memory_bus_width": 5120,
        },
        "a100",
        aliases=("a100-pcie-40gb",),
    ),
    "a100-pcie-80gb": Gpu(
        (8, 0),
        "81280MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA A100 80GB PCIe",
            "multi_processor_count": 108,
            "L2_cache_size": 41943040,
            "memory_bus_width": 5120,
        },
        "a100",
        nvidia_smi="81920MiB",
    ),
    "a100-1g.5gb": Gpu(
        (8, 0),
        "4864MiB",
        "mig",
        {"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "multi_processor_count": 14},
        "mig",
    ),
    "a100-2g.20gb": Gpu(
        (8, 0),
        "19968MiB",
        "mig",
        {"name": "NVIDIA A100-SXM4-80GB MIG 2g.20gb", "multi_processor_count": 28},
        "mig",
    ),
    "l4": Gpu(
        (8, 9),
        "22534MiB",
        "nvidia-smi",
        {
            "name": "NVIDIA L4",
            "multi_processor_count": 58,
            "L2_cache_size": 50331648,
            "memory_bus_width": 192,
        },
        "ada",
        nvidia_smi="23034MiB",
    ),
    "l40s": Gpu(
        (8, 9),
        "45589MiB",
        "printed",
        {
            "name": "NVIDIA L40S",
            "multi_processor_count": 142,
            "L2_cache_size": 100663296,
            "memory_bus_width": 384,
        },
        "ada",
    ),
    "rtx6000ada": Gpu(
        (8, 9),
        "48622MiB",
        "printed",
        {
            "name": "NVIDIA RTX 6000 Ada Generation",
            "multi_processor_count": 142,
            "L2_cache_size": 100663296,
            "memory_bus_width": 384,
        },
        "ada",
        aliases=("a6000ada", "rtxa6000ada"),
    ),
    "rtxpro6000": Gpu(
        (12, 0),
        "94.97GiB",
        "oom",
        {
            "name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "multi_processor_count": 188,
            "L2_cache_size": 134217728,
            "memory_bus_width": 512,
        },
        "rtx50",
        aliases=("pro6000",),
    ),
    "h100": Gpu(
        (9, 0),
        "79.11GiB",
        "oom",
        {
            "name": "NVIDIA H100 80GB HBM3",
            "multi_processor_count": 132,
            "L2_cache_size": 52428800,
            "memory_bus_width": 5120,
        },
        "h100",
        aliases=("h100-80gb", "h100-sxm"),
    ),
    "h100-pcie": Gpu(
        (9, 0),
        "81008MiB",
        "printed",
        {
            "name": "NVIDIA H100 PCIe",
            "multi_processor_count": 114,
            "L2_cache_size": 52428800,
            "memory_bus_width": 5120,
        },
        "h100",
    ),
    "h100-nvl": Gpu(
        (9, 0),
        "93.00GiB",
        "oom",
        {"name": "NVIDIA H100 NVL", "multi_processor_count": 132, "L2_cache_size": 52428800},
        "h100",
    ),
    "h200": Gpu(
        (9, 0),
        "143156MiB",
        "printed",
        {
            "name": "NVIDIA H200",
            "multi_processor_count": 132,
            "L2_cache_size": 62914560,
            "memory_bus_width": 6144,
        },
        "h200",
    ),
    "gh200": Gpu(
        (9, 0),
        "97231MiB",
        "nvidia-smi",
        {"name": "NVIDIA GH200 480GB", "multi_processor_count": 132},
        "gh200",
        nvidia_smi="97871MiB",
    ),
    "b200": Gpu(
        (10, 0),
        "182631MiB",
        "printed",
        {
            "name": "NVIDIA B200",
            "multi_processor_count": 148,
            "L2_cache_size": 132120576,
            "memory_bus_width": 8192,
        },
        "b200",
    ),
    "orin": Gpu(
        (8, 7),
        "30622MiB",
        "printed",
        {
            "name": "Orin",
            "multi_processor_count": 14,
            "L2_cache_size": 4194304,
            "memory_bus_width": 256,
        },
        "orin",
        aliases=("jetson-orin", "agx-orin-32gb"),
    ),
}

MAC_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192)
"""Unified memory of Macs in GB."""

MAC_RULE = (
    "Metal's recommendedMaxWorkingSetSize, as ggml's logs show it: two thirds of the unified "
    "memory up to 32 GB, three quarters of more; macOS 15 and later give more"
)
"""How much of it a program has, for the page of the models."""
