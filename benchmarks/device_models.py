"""Checks ``simulation/gpu_models.py``: ``python -m benchmarks.device_models`` prints its problems.

Every figure must have a source, every name must mean one model, and figures must agree: memory is
less than that of the name and more than nine tenths of it, and memory that no source prints is
derived by the rule of its source.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping

from torchdevice.kernel.devices.device_properties import SETTABLE
from torchdevice.scope.collected_options import declarations
from torchdevice.simulation import gpu_models, model_lookup
from torchdevice.simulation.gpu_models import Gpu

GIB = 1 << 30


def problems(found: Mapping[str, Gpu]) -> Iterator[str]:
    """Yield what is wrong with the GPUs of the file, as sentences."""
    names = [
        model_lookup._spelling(each) for name, gpu in found.items() for each in (name, *gpu.aliases)
    ]
    yield from (
        f"{name!r} is the name of {count} models."
        for name, count in Counter(names).items()
        if count > 1
    )
    used = {source for gpu in found.values() for source in (gpu.of_memory, gpu.of_properties)}
    yield from (
        f"The source {each!r} is not used."
        for each in sorted(gpu_models.SOURCES.keys() - used - {"guide"})
    )
    for name, gpu in found.items():
        yield from (f"{name}: {problem}" for problem in _problems_of_gpu(gpu))


def _problems_of_gpu(gpu: Gpu) -> Iterator[str]:
    if not {gpu.of_memory, gpu.of_properties} <= gpu_models.SOURCES.keys():
        yield "A figure has no source."
    if gpu.capability not in gpu_models.OF_CAPABILITY:
        yield f"The capability {gpu.capability} has no figures."
    unknown = gpu.properties.keys() - SETTABLE.keys()
    if unknown:
        yield f"{sorted(unknown)[0]!r} is no field of torch.cuda.get_device_properties."
    memory = declarations()["memory"].check(gpu.memory)
    said = re.search(r"(\d+) ?GB\b(?! MIG)", gpu.properties["name"])
    if (
        said
        and "GH200" not in gpu.properties["name"]
        and not 0.9 * GIB < memory / int(said[1]) < GIB
    ):
        yield (
            f"Memory of {memory / GIB:.2f} GiB does not go with the name "
            f"{gpu.properties['name']!r}."
        )
    if gpu.nvidia_smi and memory != _derived(gpu.nvidia_smi):
        yield f"Memory of {memory >> 20} MiB is not what the rule derives of {gpu.nvidia_smi}."


def _derived(total: str) -> int:
    """Return the memory that is derived of the total that nvidia-smi prints."""
    size = int(declarations()["memory"].check(total))
    return size - ((640 if size > 32 * GIB else 500) << 20)


def main() -> int:
    """Print the problems, and return 1 if there are any."""
    found = list(problems(gpu_models.GPUS))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
