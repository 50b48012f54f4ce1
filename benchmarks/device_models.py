"""Check ``torchdevice/kernel/devices/device_models.json``: ``python -m benchmarks.device_models`` prints its problems.

Every figure must have a source, every name must mean one model, and figures must agree: memory is less than that of the
name and more than nine tenths of it, and memory that no source prints is derived by the rule of its source.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchdevice
from torchdevice.kernel.devices import device_models
from torchdevice.kernel.options import declarations

FILE = Path(torchdevice.__file__).parent / "kernel" / "devices" / "device_models.json"

GIB = 1 << 30


def problems(found: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the content of the file, as sentences."""
    names = [device_models._spelling(each) for name, row in found["models"].items() for each in _names(name, row)]
    yield from (f"{name!r} is the name of {count} models." for name, count in Counter(names).items() if count > 1)
    used = {source for row in found["models"].values() for source in row["sources"].values()}
    yield from (f"The source {each!r} is not used." for each in sorted(found["sources"].keys() - used - {"guide"}))
    for name, row in found["models"].items():
        yield from (f"{name}: {problem}" for problem in _problems_of_model(row, found))


def _names(name: str, row: dict[str, Any]) -> list[str]:
    return [name, *row.get("aliases", ())]


def _problems_of_model(row: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    if row["sources"].keys() != {"memory", "properties"} or not set(row["sources"].values()) <= found["sources"].keys():
        yield "A figure has no source."
    if row["capability"] not in found["capabilities"]:
        yield f"The capability {row['capability']} has no figures."
    unknown = row["properties"].keys() - device_models.SETTABLE.keys()
    if unknown:
        yield f"{sorted(unknown)[0]!r} is no field of torch.cuda.get_device_properties."
    memory = declarations()["memory"].check(row["memory"])
    said = re.search(r"(\d+) ?GB\b(?! MIG)", row["properties"]["name"])
    if said and "GH200" not in row["properties"]["name"] and not 0.9 * GIB < memory / int(said[1]) < GIB:
        yield f"Memory of {memory / GIB:.2f} GiB does not go with the name {row['properties']['name']!r}."
    if "nvidia-smi" in row and memory != _derived(row["nvidia-smi"]):
        yield f"Memory of {memory >> 20} MiB is not what the rule derives of {row['nvidia-smi']}."


def _derived(total: str) -> int:
    """Return the memory that is derived of the total that nvidia-smi prints."""
    size = int(declarations()["memory"].check(total))
    return size - ((640 if size > 32 * GIB else 500) << 20)


def main() -> int:
    """Print the problems, and return 1 if there are any."""
    found = list(problems(json.loads(FILE.read_text(encoding="utf-8"))))
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
