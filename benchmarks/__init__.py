"""Measurements of what scopes cost, as ratios within one process: ``python -m benchmarks``."""
