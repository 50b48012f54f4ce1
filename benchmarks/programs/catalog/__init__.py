"""The programs that are run, by area."""

from __future__ import annotations

from benchmarks.programs.catalog import (
    diffusion,
    distributed,
    gaussian_processes,
    graphs,
    language,
    reinforcement,
    speech,
    vision,
)
from benchmarks.programs.program import Program

PROGRAMS: tuple[Program, ...] = (
    *vision.PROGRAMS,
    *language.PROGRAMS,
    *speech.PROGRAMS,
    *diffusion.PROGRAMS,
    *reinforcement.PROGRAMS,
    *graphs.PROGRAMS,
    *gaussian_processes.PROGRAMS,
    *distributed.PROGRAMS,
)
