"""Plots of measurements, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.growth import Point
from benchmarks.soak import Sample

_COLOURS = ("#1b6ca8", "#c8553d", "#588b4c", "#7d5ba6", "#b8860b", "#444")


def growth(curves: dict[str, dict[int, Point]]) -> str:
    """Return an SVG of :func:`growth.measure`: microseconds by size, both logarithmic."""
    width, height, margin = 640, 360, 50
    most = max(size for curve in curves.values() for size in curve)
    highest = max(time for curve in curves.values() for time, *_ in curve.values())
    lines = []
    for colour, (name, curve) in zip(_COLOURS, curves.items(), strict=False):
        points = [
            (
                margin + (width - 2 * margin) * math.log10(size) / math.log10(most),
                height
                - margin
                - (height - 2 * margin) * math.log10(1 + time) / math.log10(1 + highest),
            )
            for size, (time, *_) in curve.items()
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        x, y = points[-1]
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(
            f'<text x="{x:.0f}" y="{y - 8:.0f}" fill="{colour}" text-anchor="end">{name}</text>'
        )
    axes = (
        f'<path d="M{margin},{margin} V{height - margin} H{width - margin}" fill="none" '
        'stroke="#444"/>'
    )
    text = f'<text x="{margin}" y="{height - 15}">how many, 1 to {most} (logarithmic)</text>'
    unit = (
        f'<text x="{margin}" y="{margin - 15}">microseconds of one, up to {highest:.0f} '
        "(logarithmic)</text>"
    )
    return _svg(width, height, [axes, text, unit, *lines])


def soak(samples: Sequence[Sample]) -> str:
    """Return an SVG of :func:`soak.run`: a process's figures over time, a panel each, from 0."""
    figures = {
        "MiB resident": [sample.resident / 2**20 for sample in samples],
        "objects": [float(sample.objects) for sample in samples],
        "descriptors": [float(sample.descriptors) for sample in samples],
    }
    width, panel, margin = 640, 120, 50
    minutes = [sample.minutes for sample in samples]
    lines = []
    for number, (colour, (name, values)) in enumerate(zip(_COLOURS, figures.items(), strict=False)):
        bottom, most = (number + 1) * panel, max(*values, 1.0)
        xs = [margin + (width - 2 * margin) * minute / max(minutes[-1], 1e-9) for minute in minutes]
        ys = [bottom - (panel - 30) * value / most for value in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        lines.append(
            f'<path d="M{margin},{bottom - panel + 30} V{bottom} H{width - margin}" fill="none" '
            'stroke="#444"/>'
        )
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        label = f"{name}: {values[0]:,.0f} at first, {values[-1]:,.0f} at last"
        lines.append(f'<text x="{margin}" y="{bottom - panel + 22}" fill="{colour}">{label}</text>')
    height = len(figures) * panel + 40
    lines.append(f'<text x="{margin}" y="{height - 15}">minutes, 0 to {minutes[-1]:.0f}</text>')
    return _svg(width, height, lines)


def _svg(width: int, height: int, body: list[str]) -> str:
    style = "font-family='sans-serif' font-size='12'"
    # Without it the text is dark on the dark ground of a page.
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="white"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f"{style}>{''.join([ground, *body])}</svg>\n"
    )
