"""What scopes cost, measured as ratios within one process: ``python -m benchmarks``."""
