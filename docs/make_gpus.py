"""Write docs/gpus.md from the models of GPUs, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check

from torchdevice.scope.collected_options import declarations
from torchdevice.simulation.gpu_models import GPUS, MAC_RULE, SOURCES, Gpu
from torchdevice.simulation.model_lookup import MACS, MODELS

PAGE = Path(__file__).with_name("gpus.md")

HEADER = """# GPU models

<!-- Made by python docs/make_gpus.py from torchdevice/simulation/gpu_models.py; do not edit. -->

`--target rtx3090`, `simulate("a100-80gb", devices=8)` and [`torchdevice plan`](plan.md) know these GPUs. Case,
spaces and hyphens do not matter, and torch's name of a GPU is a name too: `simulated:A100-80GB`, `simulated:RTX 3090`.

The memory is CUDA's total, which torch prints and reports in out-of-memory errors. It is less than that of the data
sheet and differs by 1 or 2 % between drivers. On Windows it is larger, but Windows' own use takes a part.

| model | name | capability | memory | multiprocessors | also | source |
|---|---|---|---|---|---|---|
"""


def row(name: str, gpu: Gpu) -> str:
    """Return a row of the table."""
    model = MODELS[name]
    memory = f"{declarations()['memory'].check(model.memory) / 2**30:.2f} GiB"
    also = ", ".join(f"`{each}`" for each in gpu.aliases)
    cells = [f"`{name}`", model.properties["name"], "{}.{}".format(*gpu.capability), memory]
    cells += [
        str(model.properties["multi_processor_count"]),
        also,
        f"{gpu.of_memory}; {gpu.of_properties}",
    ]
    return f"| {' | '.join(cells)} |\n"


def page() -> str:
    """Return the page."""
    rows = [row(*each) for each in GPUS.items()]
    sources = [f"| {name} | {text} |\n" for name, text in SOURCES.items()]
    macs = [f"| {size} GB | {most / 2**30:.2f} GiB |\n" for size, most in MACS.items()]
    return "".join(
        [
            HEADER,
            *rows,
            "\nThe first source is that of the memory, the second that of the other figures. "
            "Threads and shared ",
            "memory are those of the compute capability. A figure that no source gives is 0, as "
            "some L2 caches.\n\n",
            "| source | |\n|---|---|\n",
            *sources,
            "\n## Macs\n\nA plan also compares with Macs, by their unified memory. A program may "
            "use more than Metal ",
            f"recommends, and then slows the machine down. The figure: {MAC_RULE}.\n\n",
            "| unified memory | recommended at most |\n|---|---|\n",
            *macs,
        ]
    )


def main() -> int:
    """Write the page. With --check, return 1 if the file differs from the page."""
    return write_or_check(PAGE, page())


if __name__ == "__main__":
    sys.exit(main())
