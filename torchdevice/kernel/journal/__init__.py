"""Counts of a running program's rewritten calls, by the line that made them."""
