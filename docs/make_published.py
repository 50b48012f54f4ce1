"""Write docs/published-memory.md and its picture from benchmarks/published_memory/results.json, or
check them (--check).
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import write_or_check

DOCS = Path(__file__).parent

PAGE = DOCS / "published-memory.md"

PICTURE = DOCS / "images" / "published-memory.svg"

RESULTS = DOCS.parent / "benchmarks" / "published_memory" / "results.json"

HEADER = """# Plans beside published measurements

<!-- Made by python docs/make_published.py from benchmarks/published_memory/results.json; do not edit. -->

What others measured on GPUs by `torch.cuda.max_memory_allocated()`, some by `max_memory_reserved()`, and published
with the program, beside what `torchdevice plan` predicts for it. Nothing is calibrated: a plan knows no measurement.
`python -m benchmarks.published_memory zero` plans the rows of a source again. Other releases of libraries need other
memory, so take those that are named below the rows; `qwen`, `litgpt`, `titan`, `diffusion` and `tune` need a
`--checkout` of the source.
"""

LEFT_OUT = """
## What is not planned

- [torchtitan](https://github.com/pytorch/torchtitan/tree/b5bcd76c/benchmarks) also publishes 18 figures of compiled
  programs, 16 of them with Float8. A plan runs programs without a compiler, and a compiled one needs other memory.
- diffusers' pages give rounded figures for most pipelines. The [exact
  one](https://github.com/huggingface/diffusers/blob/58eb52c0/docs/source/en/using-diffusers/loading.md), 10.47 GiB
  for Stable Diffusion XL in float16, is 9.75 in the plan: the decoder's convolutions take workspaces of cuDNN, whose
  sizes are not published. Of its benchmarks, those with bitsandbytes need weights, and those that offload groups of
  layers keep the whole model in this machine's memory.
- Of [torchtune](https://github.com/pytorch/torchtune/blob/bd2a0fc7/README.md)'s other figures, 16 are of compiled
  programs, and the rest depend on the lengths of a data set's texts, or quantize weights to NF4 by torchao, which
  reads them.
- [FakeGPU](https://github.com/FanBB2333/FakeGPU/blob/7d5cf83c/docs/deepspeed-validation.md) also measured 5 runs of
  DeepSpeed's ZeRO-2 and ZeRO-3: a plan does not run DeepSpeed's engine.
- [AutoGluon](https://github.com/autogluon/autogluon/pull/5757) publishes ratios of its own estimates to the memory of
  776 fits, but no measured figure. NVML measured whole processes, with CUDA's context.
"""

DRAWN = """
![How far each plan is from the measured peak, by its size](images/published-memory.svg)
"""


def difference(row: dict[str, Any]) -> float | None:
    """Return a plan's difference from the measurement in percent; None if one ran out."""
    if row["measured"] is None or row["planned"] is None:
        return None
    return float(100 * (row["planned"] / row["measured"] - 1))


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the sentence on all rows."""
    found = [abs(each) for each in map(difference, rows) if each is not None]
    mean, worst = statistics.mean(found), max(found)
    if len(found) == 1:
        said = f"1 measured peak: the plan differs by {worst:.2f} %."
    else:
        said = (
            f"{len(found)} measured peaks: the plan differs by {mean:.2f} % on average, and by "
            f"{worst:.2f} % at most."
        )
    full = [each for each in rows if each["measured"] is None]
    if full:
        right = sum(each["planned"] is None for each in full)
        said += (
            f" Of {len(full)} runs that ran out of memory, {right} run out of memory in the plan."
        )
    return said


def _size(figure: int | None) -> str:
    return "out of memory" if figure is None else f"{figure / 2**30:.3f} GiB"


def _section(found: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {found['title']}\n\n"
    yield f"Source: {found['source']}. {summary(found['rows'])}\n\n"
    yield "| program | GPU | measured | planned | difference |\n|---|---|---|---|---|\n"
    for each in found["rows"]:
        percent = difference(each)
        shown = "" if percent is None else f"{percent:+.2f} %"
        cells = (each["case"], each["gpu"], _size(each["measured"]), _size(each["planned"]), shown)
        yield f"| {' | '.join(cells)} |\n"
    notes = dict.fromkeys(each["why"] for each in found["rows"] if each["why"])
    yield from (f"\n{note}\n" for note in notes)
    versions = dict.fromkeys(json.dumps(each["versions"], sort_keys=True) for each in found["rows"])
    for each in versions:
        yield f"\nPlanned with {', '.join(f'{name} {version}' for name, version in json.loads(each).items())}.\n"


def page() -> str:
    """Return the page."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [row for found in kept.values() for row in found["rows"]]
    parts = [HEADER, f"\n**{summary(rows)}**\n", DRAWN]
    for found in kept.values():
        parts += _section(found)
    return "".join(parts) + LEFT_OUT


# ---- the picture ---------------------------------------------------------------------------------

WIDTH, HEIGHT, MARGIN = 760, 340, 60

LINE = 18
"""The height of a line of the legend, below the axes."""

MOST = 2.0
"""The largest difference that the picture shows, in percent, on both sides."""

SMALLEST, LARGEST = 0.25, 128.0
"""The peaks at the left and the right end, in GiB."""

COLOURS = ("#3b82c4", "#d0654d", "#5f9e52", "#9673c0", "#b8860b", "#8b949e", "#12a5a7", "#c2557a")


def _x(gibibytes: float) -> float:
    part = math.log(gibibytes / SMALLEST) / math.log(LARGEST / SMALLEST)
    return MARGIN + (WIDTH - 2 * MARGIN) * part


def _y(percent: float) -> float:
    return HEIGHT / 2 - (HEIGHT / 2 - MARGIN) * percent / MOST


STYLE = """<style>
  text { font: 15px sans-serif; fill: #444444; }
  .ground { fill: #ffffff; }
  .line { stroke: #dddddd; }
  .zero { stroke: #888888; }
  @media (prefers-color-scheme: dark) {
    text { fill: #d0d4da; }
    .ground { fill: #161b22; }
    .line { stroke: #30363d; }
    .zero { stroke: #8b949e; }
  }
</style>"""
"""The colours of the picture's two themes, and its text."""


def _axes() -> Iterator[str]:
    for percent in (-2, -1, 0, 1, 2):
        kind = "zero" if percent == 0 else "line"
        y = _y(percent)
        yield f'<path class="{kind}" d="M{MARGIN},{y:.1f} H{WIDTH - MARGIN}"/>'
        yield f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{percent:+d} %</text>'
    for gibibytes in (0.25, 1, 4, 16, 64):
        x = _x(gibibytes)
        yield (
            f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">{gibibytes:g} '
            "GiB</text>"
        )
    yield f'<text x="{MARGIN}" y="{MARGIN - 24}">by how many percent the plan differs</text>'
    yield (
        f'<text x="{WIDTH / 2:g}" y="{HEIGHT - MARGIN + 40}" text-anchor="middle">peak measured on '
        "a GPU</text>"
    )


def picture() -> str:
    """Return an SVG in which each row is a point: the measured peak, and by how many percent the
    plan differs from it.

    Raises:
        ValueError: A row lies outside the picture.
    """
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    body = [*_axes()]
    for number, (colour, found) in enumerate(zip(COLOURS, kept.values(), strict=False)):
        for each in found["rows"]:
            percent = difference(each)
            if percent is None:
                continue
            size = each["measured"] / 2**30
            if abs(percent) > MOST or not SMALLEST <= size <= LARGEST:
                raise ValueError(f"{each['case']} lies outside the picture")
            body.append(
                f'<circle cx="{_x(size):.1f}" cy="{_y(percent):.1f}" r="4" fill="{colour}" '
                'fill-opacity="0.6"/>'
            )
        x, y = MARGIN + 10, HEIGHT + 16 + LINE * number
        body.append(f'<circle cx="{x - 10}" cy="{y - 4}" r="4" fill="{colour}"/>')
        body.append(f'<text x="{x}" y="{y}">{found["title"]}</text>')
    height = HEIGHT + 16 + LINE * len(kept)
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="6"/>'
    view = f'viewBox="0 0 {WIDTH} {height}"'
    lines = "\n".join(body)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n{STYLE}\n{ground}\n{lines}\n</svg>\n'


def main() -> int:
    """Write the page and the picture. With --check, return 1 if a file differs from them."""
    return write_or_check(PAGE, page()) | write_or_check(PICTURE, picture())


if __name__ == "__main__":
    sys.exit(main())
